-- The program: scripts, code, standard input, usage, exit statuses, errors with lines.
local program = os.getenv "XTRAIN"

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Runs a command line; returns standard output, standard error and the exit status.
local function run(command, input)
  local out, err = os.tmpname(), os.tmpname()
  local from = "/dev/null"
  if input then
    from = os.tmpname()
    local file = assert(io.open(from, "wb"))
    file:write(input)
    file:close()
  end
  local line = ("%s %s < %s > %s 2> %s"):format(program, command, from, out, err)
  local _, _, status = os.execute(line)
  local texts = {}
  for i, path in ipairs { out, err } do
    local file = assert(io.open(path, "rb"))
    texts[i] = file:read("a")
    file:close()
    os.remove(path)
  end
  if input then os.remove(from) end
  return texts[1], texts[2], status
end

local function with_script(text, fn)
  local path = os.tmpname() .. ".lua"
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  local ok, message = pcall(fn, path)
  os.remove(path)
  if not ok then error(message, 0) end
end

if not program then
  pending("XTRAIN names no program to test")
  return
end

describe("xtrain", function()
  it("runs a script with its arguments as they were typed", function()
    with_script("local xt = require 'xtrain' print(xt.version, arg[0] ~= nil, arg[1], ...)",
      function(path)
        local out, err, status = run(path .. " lr=3e-4 x='a b'")
        assert.are.equal("", err)
        assert.are.equal(0, status)
        assert.are.equal("0.1.0\ttrue\tlr=3e-4\tlr=3e-4\tx=a b\n", out)
      end)
  end)

  it("gives scripts no global xt", function()
    with_script("print(xt)", function(path)
      assert.are.equal("nil\n", (run(path)))
    end)
  end)

  it("runs a piece of code, with xt", function()
    local out, err, status = run("-e " .. quote("print(xt.tensor{1, 2} + 1)"))
    assert.are.equal("f32 2 cpu, 8 bytes\n[2  3]\n", out)
    assert.are.equal("", err)
    assert.are.equal(0, status)
  end)

  it("reads a script from standard input when that is no terminal", function()
    local out, _, status = run("", "for i = 1, 2 do\n  print(i)\nend\n")
    assert.are.equal("1\n2\n", out)
    assert.are.equal(0, status)
  end)

  it("says the script's file and line on standard error, and fails", function()
    with_script("local xt = require 'xtrain'\nlocal x = xt.ones{2} + xt.ones{3}\nprint(x)",
      function(path)
        local out, err, status = run(path)
        assert.are.equal("", out)
        local sentence = ":2: add: a is f32 2, b is f32 3: sizes 2 and 3 do not broadcast\n"
        assert.are.equal(path .. sentence, err)
        assert.are.equal(1, status)
      end)
    with_script("local x = \nlocal", function(path)
      local _, err, status = run(path)
      assert.is_truthy(err:find(path .. ":2:", 1, true), err)
      assert.are.equal(1, status)
    end)
  end)

  it("adds a traceback when asked", function()
    local code = "-e " .. quote("local function f() error('no') end f()")
    local _, err = run(code)
    assert.are.equal("(command line):1: no\n", err)
    local saved = program
    program = "XT_TRACEBACK=1 " .. program
    _, err = run(code)
    program = saved
    assert.is_truthy(err:find("stack traceback", 1, true))
  end)

  it("names the user's line for what the library's Lua does", function()
    with_script("local xt = require 'xtrain'\nlocal l = xt.nn.linear{d_in = 2, d_out = 3}\n"
      .. "local y = l(xt.ones{4, 5})\nprint(y)", function(path)
      local _, err, status = run(path)
      assert.are.equal(1, status)
      assert.is_truthy(err:find(path .. ":3: ", 1, true), err)
    end)
  end)

  it("ends with status 2 and the usage when it does not understand", function()
    for _, words in ipairs { "no-such-verb", "/no/such/file.lua", "-e" } do
      local out, err, status = run(words)
      assert.are.equal("", out)
      assert.is_truthy(err:find("usage: xtrain", 1, true), err)
      assert.are.equal(2, status)
    end
  end)

  it("tells what it is and what it found", function()
    local out, err, status = run("info")
    assert.are.equal("", err)
    assert.are.equal(0, status)
    for _, word in ipairs { "xtrain", "devices", "cpu", "kernels", "softmax" } do
      assert.is_truthy(out:find(word, 1, true), word)
    end
    local usage, _, code = run("help")
    assert.is_truthy(usage:find("usage: xtrain", 1, true))
    assert.are.equal(0, code)
  end)

  it("passes on the status that a script ends with", function()
    local _, _, status = run("-e " .. quote("os.exit(7)"))
    assert.are.equal(7, status)
  end)

  it("closes with tensors of every age, in any order", function()
    local code = [[
      keep = xt.var(xt.ones{100})
      local y = keep
      for i = 1, 100 do y = y * 2 end
      local t = xt.full({}, 6)
      held = setmetatable({}, {__gc = function() print(t:item()) end})
      co = coroutine.create(function() local z = xt.ones{3} coroutine.yield(z) end)
      coroutine.resume(co)
    ]]
    local out, err, status = run("-e " .. quote(code))
    assert.are.equal("", err)
    assert.are.equal("6.0\n", out)
    assert.are.equal(0, status)
  end)

  it("works inside coroutines", function()
    local code = [[
      local co = coroutine.wrap(function()
        for i = 1, 3 do coroutine.yield((xt.ones{2} * i):sum():item()) end
      end)
      print(co(), co(), co())
    ]]
    assert.are.equal("2.0\t4.0\t6.0\n", (run("-e " .. quote(code))))
  end)

  -- A terminal for the prompt comes from script(1), where the system lends it one.
  if not os.execute "LD_PRELOAD= script -qec true /dev/null > /dev/null 2>&1" then
    pending "prompts: script(1) gets no terminal here"
  else
    it("prompts, goes on while input is incomplete, prints results, keeps the last", function()
      local saved = program
      local lines = "1 + 2\n_ * 2\nfor i = 7, 7 do\nprint(i * 11)\nend\nerror 'x'\n=5\n"
        .. "xt.tensor{1}\n"
      program = "HOME=/nonexistent TERM=dumb script -qec " .. quote(saved) .. " /dev/null"
      local out = run("", lines)
      program = saved
      local all = { "\n3\r", "\n6\r", "\n77\r", "prompt:1: x", "\n5\r", "f32 1 cpu" }
      for _, wanted in ipairs(all) do
        assert.is_truthy(out:find(wanted, 1, true), wanted .. " is not in: " .. out)
      end
    end)
  end
end)
