-- The prompt's parts: entries, their results and errors, completion, history, the names of a
-- program that stands; and the program's prompt, through pipes and through a terminal (tmux).
local xt = require "xtrain"
local complete = require "xtrain.complete"
local inspect = require "xtrain.inspect"
local prompt = require "xtrain.prompt"
local program = os.getenv "XTRAIN"

local function has(wanted, text)
  assert.is_truthy(text and text:find(wanted, 1, true), wanted .. " is not in: " .. tostring(text))
end

local function scope_of(names)
  return {
    env = setmetatable(names, { __index = _G }),
    get = function(name) return names[name] end,
    names = function()
      local set = {}
      for name in pairs(names) do set[name] = true end
      return set
    end,
  }
end

local function session_with(names) return prompt.session { scope = scope_of(names or {}) } end

-- What evaluating the entries gives, the last one's.
local function evaluate(entries, names)
  local session, state, text = session_with(names), nil, nil
  for _, entry in ipairs(entries) do state, text = session:evaluate(entry) end
  return text, state
end

describe("an entry", function()
  it("is an expression, whose results are shown, or a statement", function()
    assert.are.equal("3", evaluate { "1 + 2" })
    assert.are.equal("3", evaluate { "=1 + 2" })
    assert.are.equal("1\tx\tnil", evaluate { "1, 'x', nil" })
    assert.is_nil((evaluate { "x = 4" }))
    assert.are.equal("8", evaluate { "x = 4", "x * 2" })
    assert.is_nil((evaluate { "" }))
    assert.are.equal("5\t6", evaluate { "x = 5; x, x + 1" })
    assert.are.equal("2", evaluate { "local n = 0\nfor i = 1, 2 do n = n + 1 end\nn" })
    has("syntax error near <eof>", (evaluate { "x = 1 y" }))
  end)

  it("keeps its first result in _", function()
    assert.are.equal("12", evaluate { "6, 1", "_ * 2" })
    assert.are.equal("12", evaluate { "6", "x = 1", "_ + 6" }) -- a statement leaves it
  end)

  it("may take several lines", function()
    for _, entry in ipairs { "for i = 1, 2 do", "f(", "x =", "{1,", "function f()", "[[a",
      "1 +" } do
      assert.are.equal("incomplete", (session_with():evaluate(entry)), entry)
    end
    assert.are.equal("a\nb", evaluate { "[[a\nb]]" })
  end)

  it("makes locals that stay", function()
    assert.are.equal("5", evaluate { "local x = 5", "x" })
    assert.are.equal("3", evaluate { "local a, b = 1, 2", "a + b" })
    assert.are.equal("7", evaluate { "local function f() return 7 end", "f()" })
    assert.are.equal("true", evaluate { "local x <const> = 5", "x == nil" })
  end)

  it("that is wrong says where", function()
    local text, state = evaluate { "1 +* 2" }
    assert.are.equal("error", state)
    has("prompt:1: unexpected symbol near '*'", text)
    has("unexpected symbol near '='", (evaluate { "x = = 3" }))
    has("'=' expected", (evaluate { "for in" }):gsub("<name> expected", "'=' expected"))
  end)

  it("that raises names its line, and the lines of files that called", function()
    assert.are.equal("prompt:2: no", evaluate { "x = 1\nerror 'no'" })
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write("local f = {}\nfunction f.inner(x)\n  return x + nil\nend\nfunction f.outer(x)\n"
      .. "  local y = f.inner(x)\n  return y\nend\nreturn f\n")
    file:close()
    local text = evaluate({ "f.outer(1)" }, { f = dofile(path) })
    os.remove(path)
    assert.are.equal(path .. ":3: attempt to perform arithmetic on a nil value\n"
      .. "     3 |   return x + nil\n"
      .. ("  from %s:6\n"):format(path)
      .. "     6 |   local y = f.inner(x)", text)
    text = evaluate { "function deep(n) return deep(n + 1) + 1 end", "deep(1)" }
    has("stack overflow", text)
    assert.is_true(select(2, text:gsub("\n", "")) < 5, text)
    has("prompt:1: matmul: a is 3x4, b is 5x2", evaluate({ "a:matmul(b)" },
      { a = xt.zeros { 3, 4 }, b = xt.zeros { 5, 2 } }))
  end)

  it("that ends in ? asks for help", function()
    local names = { xt = xt, t = xt.ones { 2 } }
    has("softmax(x [, dim = -1])", evaluate({ "xt.softmax?" }, names))
    has("softmax(x [, dim = -1])", evaluate({ "?softmax" }, names))
    has("linear{d_in, d_out", evaluate({ "xt.nn.linear?" }, names))
    has("f32 2 cpu", evaluate({ "t?" }, names))
    has("xt.help", evaluate({ "?" }, names))
    has("there is no help on 'softmx'; did you mean 'softmax'?", evaluate({ "softmx?" }, names))
  end)

  it("stays usable whatever prints badly", function()
    local bad = setmetatable({}, { __tostring = function() error "cannot" end })
    local text, state = evaluate({ "bad" }, { bad = bad })
    assert.are.equal("error", state)
    has("cannot", text)
  end)
end)

describe("a value at the prompt", function()
  it("that is a table is sorted, nested, and short", function()
    assert.are.equal("{}", inspect.text {})
    assert.are.equal('{ 1, "two", [10] = 3, a = { b = 3 }, ["x y"] = true }',
      inspect.text { 1, "two", [10] = 3, a = { b = 3 }, ["x y"] = true })
    local long = {}
    for i = 1, 1000 do long[i] = i end
    has("... 976 more", inspect.text(long))
    local deep = { { { { { { {} } } } } } }
    has("{ ... }", inspect.text(deep))
    local ring = { name = "ring" }
    ring.self = ring
    assert.are.equal('{ name = "ring", self = { the table above } }', inspect.text(ring))
  end)

  it("shows tensors inside of tables on one line", function()
    local t = { w = xt.var(xt.ones { 2, 3 }), n = xt.tensor(2.5) }
    assert.are.equal("{ n = f32 scalar cpu: 2.5, w = f32 2x3 cpu, variable }", inspect.text(t))
    has("linear (6 parameters) { weight = f32 3x2 cpu, variable }",
      inspect.text(xt.nn.linear { d_in = 2, d_out = 3 }))
  end)

  it("takes at most 60 lines, a whole model too", function()
    local model = xt.models.qwen3 { vocab = 64, dim = 16, layers = 40, heads = 2, ffn = 16,
      seed = 1 }
    local wide = {}
    for i = 1, 500 do wide["key" .. i] = { ("long "):rep(20), i } end
    for _, value in ipairs { model, wide, { wide, wide, wide } } do
      local lines = select(2, inspect.text(value):gsub("\n", "\n")) + 1
      assert.is_true(lines < 60, lines)
    end
  end)

  it("that is a function says where it was written, an op its signature", function()
    has("function at ", inspect.text(has))
    has("prompt_spec.lua:", inspect.text(has))
    assert.are.equal("{ op exp(x), function of C }", inspect.text { xt.exp, string.format })
    assert.are.equal(tostring(xt.exp), inspect.text(xt.exp))
    assert.are.equal("constant{peak = 2, warmup = 0}", inspect.text(xt.schedule.constant(2)))
  end)
end)

describe("completion", function()
  local names = { xt = xt, xs = 1, t = xt.ones { 2, 2 }, s = "text",
    model = { layers = { xt.nn.linear { d_in = 2, d_out = 2 } }, run = function() end, _own = 1 } }
  local scope = scope_of(names)

  local function items(text, words)
    local found = complete.at(text, scope, words)
    return found and found.items or {}
  end

  local function among(name, list)
    for _, item in ipairs(list) do
      if item == name then return true end
    end
    return false
  end

  it("knows names, keywords and fields", function()
    assert.are.same({ "xs", "xt" }, items "x")
    assert.are.same({ "while" }, items "whi")
    assert.are.same({ "layers", "run" }, items "model.")
    assert.are.same({ "_own" }, items "model._")
    assert.are.same({ "run" }, items "print(model:")
    assert.are.same({ "softmax" }, items "y = xt.softm")
    assert.are.same({ "linear" }, items "xt.nn.lin") -- a part that is loaded when asked for
    assert.is_true(among("rep", items "s:"))
    assert.are.same({}, items "nothing.")
    assert.are.same({}, items "1.")
    assert.are.same({ "xs", "xt" }, items "s .. x")
  end)

  it("knows what hangs on indices and calls", function()
    assert.are.same({ "weight" }, items "model.layers[1].wei")
    assert.are.same({ "weight" }, items "model['layers'][1].wei")
    assert.are.same({ "softmax" }, items "t[1]:softm")
    assert.are.same({ "softmax" }, items "xt.exp(t * 2):softm")
    assert.are.same({ "softmax" }, items "xt.zeros{2, {3}}:exp():softm")
    assert.are.same({ "softmax" }, items "xt.rand({2}, {seed = 1}):softm")
    assert.are.same({}, items "unknown(3):softm")
  end)

  it("tells properties of a tensor from its methods", function()
    assert.are.same({ "shape" }, items "t.sha")
    assert.are.same({}, items "t:shap")
    assert.are.same({ "reshape" }, items "t:resh")
    assert.are.same({}, items "t.resh")
  end)

  it("knows the options of ops and functions, and leaves out those given", function()
    assert.are.same({ "approx" }, items "xt.gelu(t, {")
    assert.are.same({ "approx" }, items "t:gelu({ap")
    assert.are.same({ "bias", "d_in", "d_out", "device", "seed" }, items "xt.nn.linear{")
    assert.are.same({ "bias", "device", "seed" }, items "xt.nn.linear{d_in = 2, d_out = 3, ")
    assert.are.same({ "warmup" }, items "xt.schedule.cosine { peak = 1, total = 5, w")
    assert.is_true(among("vocab", items "xt.models.qwen3{"))
    local _, show = complete.complete("xt.gelu(", scope, 80)
    has("gelu(x", show)
    assert.are.equal("approx = ", (complete.complete("xt.gelu(t, {", scope, 80)))
  end)

  it("knows the options that a run and an optimizer take", function()
    assert.is_true(among("betas", items "xt.optim.adamw(params, {"))
    assert.is_true(among("seed", items "xt.rand({2}, {"))
    assert.is_true(among("files", items "xt.data.tokens{"))
    assert.is_true(among("temperature", items "xt.generate(model, ids, {"))
  end)

  it("knows choices, dtypes and names of help in strings", function()
    assert.are.same({ "none", "tanh" }, items 'xt.gelu(t, {approx = "')
    assert.are.same({ "bf16" }, items 't:to("b')
    assert.are.same({ "f16", "f32", "f64" }, items "xt.zeros({2}, {dtype = 'f")
    assert.are.same({ "cpu" }, items 'xt.device("c')
    assert.are.same({ "softmax" }, items 'xt.help "softm')
  end)

  it("knows files in other strings", function()
    assert.are.same({ "tests/lua/prompt_spec.lua" }, items 'dofile "tests/lua/prompt')
    assert.are.same({ "recipes/" }, items 'x = "reci')
    local insert = complete.complete('dofile "recipes/tin', scope, 80)
    assert.are.equal('y.lua"', insert)
    insert = complete.complete('dofile "reci', scope, 80)
    assert.are.equal("pes/", insert)
  end)

  it("says nothing in comments and numbers, and indents blank lines", function()
    assert.is_nil(complete.at("x = 1 -- xt.", scope))
    assert.is_nil(complete.at("12", scope))
    assert.are.equal("  ", (complete.complete("for i = 1, 2 do\n  ", scope, 80)))
  end)

  it("offers commands only where an entry begins", function()
    assert.are.same({ "where" }, items("whe", { "where" }))
    assert.are.same({}, items("x = whe", { "where" }))
  end)

  it("inserts what is common, and shows columns when that is nothing", function()
    assert.are.equal("ax", (complete.complete("xt.softm", scope, 80)))
    local insert, show = complete.complete("t.", scope, 40)
    assert.is_nil(insert)
    has("shape", show)
    for line in show:gmatch "[^\n]+" do assert.is_true(#line <= 40) end
    assert.are.equal("a    ccc\nbb", complete.columns({ "a", "bb", "ccc" }, 9))
  end)

  it("never raises", function()
    for _, text in ipairs { "", "(", ")", "]", "a[", "a[[", "x.:y", "..", ":", "a.b.c:", '"', "f{",
      "({", "function(", "--", "xt.nope.", "t[", "t[1", "('x'):", "a:b()", "{{", "%(", "xt.op.",
      "x]", "t:view{", "xt.zeros{1}[" } do
      assert.is_true(pcall(complete.complete, text, scope, 80), text)
    end
  end)
end)

describe("the history", function()
  it("keeps entries of several lines, in order, from one session to the next", function()
    local path = os.tmpname()
    for _, entry in ipairs { "one", "for i = 1, 2 do\n  print(i)\nend", "a = '\\n'" } do
      prompt.append_history(path, entry)
    end
    assert.are.same({ "one", "for i = 1, 2 do\n  print(i)\nend", "a = '\\n'" },
      prompt.history(path))
    for i = 1, 4100 do prompt.append_history(path, "x" .. i) end
    local entries = prompt.history(path)
    assert.are.equal(2000, #entries)
    assert.are.equal("x4100", entries[2000])
    assert.are.same(entries, prompt.history(path)) -- rewritten, and the same
    os.remove(path)
  end)
end)

-- ---- the program -------------------------------------------------------------------------------

if not program then
  pending("XTRAIN names no program to test")
  return
end

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "a"
  if file then file:close() end
  return text or ""
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- fn(dir): a folder that is gone afterwards.
local function in_folder(fn)
  local file = require "xtrain.core.file"
  local dir = os.tmpname()
  os.remove(dir)
  assert(file.mkdir(dir))
  local ok, message = pcall(fn, dir)
  file.remove_tree(dir)
  if not ok then error(message, 0) end
end

local recipe = [[
local xt = require "xtrain"
local run = xt.recipe { name = "small", steps = 6, lr = 0.1 }
local model = { out = xt.nn.linear { d_in = 2, d_out = 1, seed = 1 } }
local opt = xt.optim.sgd(xt.nn.params(model), {})
local scale = 1
local function loss_of(x)
  local y = model.out(x)
  return (y * y):mean() * scale
end
for step in run:steps() do
  local loss = loss_of(xt.ones { 4, 2 })
  run:backward(loss, 1)
  opt:step(run.lr)
  print("step", step, scale)
  if step == 5 then error "five" end
end
]]

describe("xtrain FILE --prompt", function()
  -- Runs the recipe with entries on standard input: standard output, standard error, status.
  local function run(text, entries, words)
    local out, err, status
    in_folder(function(dir)
      write(dir .. "/r.lua", text)
      write(dir .. "/in", table.concat(entries, "\n") .. "\n")
      local command = "cd %s && LD_PRELOAD= XT_HISTORY= %s r.lua out=run %s --prompt <in >out 2>err"
      local _, _, code = os.execute(command:format(dir, program, words or ""))
      out, err, status = read(dir .. "/out"), read(dir .. "/err"), code
    end)
    return out, err, status
  end

  it("opens before the first step, where locals can be read and changed", function()
    local out, _, status = run(recipe, { "run.name, scale", "scale = 3", "continue 2", "quit" })
    has("small, before step 1 of 6", out)
    has("    10 | for step in run:steps() do", out)
    has("small\t1", out)
    has("step\t2\t3", out)
    has("small, before step 3 of 6", out)
    assert.is_nil(out:find "step\t3")
    assert.are.equal(130, status)
  end)

  it("changes nothing of a run that only goes on", function()
    local digests = {}
    for i, entries in ipairs { { "continue" }, { "continue 1", "xt.ones{2}:sum()", "locals",
      "continue 1", "model", "continue" } } do
      local out = run(recipe:gsub("error \"five\"", "run:save(5) print('digest', model.out.weight"
        .. ":digest())"), entries)
      digests[i] = out:match "digest\t(%x+)"
    end
    assert.is_truthy(digests[1])
    assert.are.equal(digests[1], digests[2])
  end)

  it("opens where an error is raised, with the frames that led there", function()
    local text = recipe:gsub("local y = model.out%(x%)", "local y = model.out(x):reshape { 3 }")
    local out, err, status = run(text, { "continue", "x", "up", "step", "down", "where", "locals",
      "frame 99", "continue", "quit" })
    has("r.lua:7: reshape:", out)
    has("     7 |   local y = model.out(x):reshape { 3 }", out)
    has("f32 4x2 cpu, 32 bytes", out)
    has("\n1\n", out) -- step
    has("  x = f32 4x2 cpu", out)
    has("  scale = 1", out)
    has("frame '99': wanted a number", out)
    has("after an error there is no way on", out)
    has("r.lua:7: reshape:", err)
    assert.are.equal(1, status)
  end)

  it("shows the library's functions, too, when asked", function()
    local out = run("local xt = require 'xtrain'\nlocal l = xt.nn.linear { d_in = 2, d_out = 3 }\n"
      .. "l(xt.ones { 4, 5 })", { "where", "where all", "frame 2", "locals", "quit" })
    has("-> ", out)
    has("r.lua:3 the file", (out:gsub("  ", " ")))
    has("xtrain.nn:", out)
    has("x = f32 4x5 cpu", out)
  end)

  it("opens at the end of the file, with its locals", function()
    local out, _, status = run("#!/bin/xtrain\nlocal answer = 41 -- the end", { "answer + 1" })
    has("the end of r.lua", out)
    has("42", out)
    assert.are.equal(0, status)
  end)

  it("takes files that end in return as they are", function()
    local out, err, status = run("print 'here' return 1", {})
    assert.are.same({ "here\n", "", 0 }, { out, err, status })
    out, err, status = run("x = = 1", {})
    has("r.lua:1: unexpected symbol near '='", err)
    assert.are.same({ "", 1 }, { out, status })
  end)
end)

describe("Ctrl-C", function()
  -- A program that sends it to itself; popen, since system() would ignore it meanwhile.
  local function run(code)
    local out = os.tmpname()
    os.execute(("LD_PRELOAD= %s -e %s > %s 2>&1"):format(program, quote([[
      local function press() io.popen("kill -INT $PPID"):close() end
      local function attempt(fn) print(pcall(fn)) end
    ]] .. code), out))
    local text = read(out)
    os.remove(out)
    return text
  end

  it("raises where Lua is, once", function()
    local text = run [[
      attempt(function() press() while true do end end)
      attempt(function() return "goes on" end)
    ]]
    assert.is_truthy(text:find "^false\t%(command line%):%d+: interrupted\ntrue\tgoes on\n$", text)
  end)

  it("waits for what must be whole", function()
    local text = run [[
      local steps = 0
      attempt(function()
        xt.core.shielded(function()
          press()
          for i = 1, 1000 do steps = steps + xt.ones { 2 }:sum():item() / 2 end
        end)
        while true do end
      end)
      print(steps)
    ]]
    assert.is_truthy(text:find "^false\t%(command line%):%d+: interrupted\n1000.0\n$", text)
  end)

  it("lets a backward add all of its gradients", function()
    local text = run [[
      local x = xt.var(xt.randn({ 4, 4 }, { seed = 1 }))
      local y = (x:matmul(x):exp() + x):sum()
      y:backward { retain = true }
      y:backward { retain = true }
      local twice = x.grad:digest()
      x:zero_grad()
      y:backward { retain = true }
      local pressed = 0
      xt.debug.watch("exp", function() -- in the middle of the backward
        if pressed == 0 then press() end
        pressed = pressed + 1
        for i = 1, 1000 do local _ = i end
      end, { activations = false })
      attempt(function() y:backward { retain = true } while true do end end)
      print(pressed > 0, x.grad:digest() == twice)
    ]]
    assert.is_truthy(text:find "^false\t%(command line%):%d+: interrupted\ntrue\ttrue\n$", text)
  end)

  it("in an update of parameters changes all of them or none", function()
    local text = run [[
      local params = {}
      for i = 1, 3 do params[i] = { name = "p" .. i, tensor = xt.var(xt.ones { 2, 2 }) } end
      local opt = xt.optim.muon(params, { steps = 4 })
      for _, p in ipairs(params) do (p.tensor * 3):sum():backward() end
      local updates, orthogonalize = 0, xt.optim.orthogonalize
      xt.optim.orthogonalize = function(...) -- in the middle of the update of each
        updates = updates + 1
        if updates == 1 then press() end
        return orthogonalize(...)
      end
      attempt(function() opt:step(0.1) while true do end end)
      local moved = 0
      for _, p in ipairs(params) do moved = moved + (p.tensor[1][1]:item() ~= 1 and 1 or 0) end
      print(updates, moved)
    ]]
    assert.is_truthy(text:find "interrupted\n3\t3\n$", text)
  end)
end)

-- ---- a terminal --------------------------------------------------------------------------------

-- A server of its own for each session: one that is about to end would be taken for a new one.
local function server(socket) return ("LD_PRELOAD= tmux -S '%s' -f /dev/null"):format(socket) end

local probe = os.tmpname()
os.remove(probe)
local there = os.execute(server(probe) .. " new-session -d true >/dev/null 2>&1") -- ends at once
os.remove(probe)
if not there then
  pending "the prompt in a terminal: there is no tmux, or no terminal, here"
  return
end

describe("the prompt in a terminal", function()
  -- Starts the program in a terminal of 100 columns; fn(send, screen, dir).
  local function in_terminal(words, fn, files)
    in_folder(function(dir)
      for name, text in pairs(files or {}) do write(dir .. "/" .. name, text) end
      local name, tmux = "spec", server(dir .. "/tmux")
      local command = ("trap : INT; cd %s; %s %s; echo ended with $?; sleep 100"):format(dir,
        program, words)
      assert(os.execute(("XT_HISTORY=%s/history %s new-session -d -s %s -x 100 -y 50 %s"):format(
        dir, tmux, name, quote(command))))
      local function screen()
        local pipe = io.popen(("%s capture-pane -p -S -200 -t %s"):format(tmux, name))
        local text = pipe:read "a"
        pipe:close()
        return (text:gsub("%s+$", ""):gsub(" +", " "))
      end
      local function wait(wanted)
        for _ = 1, 500 do
          local text = screen()
          if text:find(wanted, 1, true) then return text end
          os.execute "sleep 0.02"
        end
        error(("%s is not on the screen:\n%s"):format(wanted, screen()), 0)
      end
      -- send(keys, wanted): types, and waits until the screen shows what is wanted.
      local function send(keys, wanted)
        for _, key in ipairs(type(keys) == "table" and keys or { keys }) do
          local literal = #key > 1 and not key:find "^[CM]%-.$"
            and not ({ Tab = 1, Enter = 1, Up = 1, Down = 1, Left = 1, Right = 1 })[key]
          os.execute(("%s send-keys -t %s %s %s"):format(tmux, name, literal and "-l" or "",
            quote(key)))
        end
        return wanted and wait(wanted)
      end
      local ok, message = pcall(fn, send, wait, dir)
      os.execute(("%s kill-session -t %s 2>/dev/null"):format(tmux, name))
      if not ok then error(message, 0) end
    end)
  end

  it("edits, completes, goes on over lines, and remembers across sessions", function()
    in_terminal("", function(send, wait, dir)
      wait "\n>"
      send({ "xt.softm", "Tab" }, "> xt.softmax")
      send({ "Enter" }, "exp(x - max)")
      send({ "xt.nn.linear{d_i", "Tab", "2, d_out = 3}", "Enter" }, "linear (6 parameters)")
      send({ "t = xt.ons{41}", "Left", "Left", "Left", "Left", "Left", "e", "Enter", "1 + #t",
        "Enter" }, "\n42")
      send({ "for i = 7, 7 do", "Enter" }, ">>")
      send({ "Tab", "print(i * 11)", "Enter", "en", "d", "Enter" }, "\n77\n")
      send({ "Up" }, ">> print(i * 11)")
      send({ "C-c", "print(1", "C-c", "'still ' .. 'here'", "Enter" }, "still here")
      assert.is_truthy(read(dir .. "/history"):find("for i = 7, 7 do\\n  print(i * 11)\\nend\n", 1,
        true))
      send({ "C-d" }, "ended with 0")
      send({ "C-c" })
    end)
    in_terminal("", function(send, wait)
      wait "\n>"
      send({ "xt.ver", "Up" }, "> xt.version")
      send({ "Enter" }, xt.version)
    end, { history = "x = 1\nxt.version\ny = 2\n" })
  end)

  it("is stopped by Ctrl-C in Lua, between ops and backwards, and leaves all whole", function()
    in_terminal("", function(send, wait)
      wait "\n>"
      send({ "print('g' .. 'o') while true do end", "Enter" }, "\ngo")
      send({ "C-c" }, "prompt:1: interrupted")
      send({ "x = xt.var(xt.ones{64, 64}) y = x for i = 1, 2000 do y = y:matmul(x) * 1e-2 end",
        "Enter", "y = y:sum()", "Enter", "y", "Enter" }, "by sum at prompt:1")
      send({ "n = 0 while true do n = n + 1 z = x:matmul(x) if n == 9 then print('n' .. 9) end end",
        "Enter" }, "\nn9")
      send({ "C-c", "'n > 0: ' .. tostring(n > 0)", "Enter" }, "\nn > 0: true")
      send({ "print('b' .. 'w') repeat x:zero_grad() y:backward{retain = true} until false",
        "Enter" }, "\nbw")
      send({ "C-c" }, "interrupted")
      send({ "x:zero_grad() y:backward{retain = true} d = x.grad:digest()", "Enter",
        "x:zero_grad() y:backward()", "Enter" })
      send({ "x.grad:digest() == d", "Enter" }, "\ntrue")
      send({ "'live', x:sum():item()", "Enter" }, "live 4096.0")
    end)
  end)

  it("opens in a recipe at the second Ctrl-C, and the run goes on from there", function()
    local slow = recipe:gsub("local y = model.out%(x%)",
      "print('g' .. 'o') while scale == 1 do local _ = x end\n  local y = model.out(x)")
    in_terminal("r.lua out=run", function(send, wait)
      wait "go"
      send({ "C-c" }, "stopping after this step")
      send({ "C-c" }, "continue goes on")
      send({ "x", "Enter" }, "f32 4x2 cpu")
      send({ "up", "Enter" }, "12 | local loss = loss_of")
      send({ "step, scale", "Enter" }, "\n1 1\n")
      send({ "scale = 5", "Enter", "continue", "Enter" }, "r.lua:16: five")
      wait "step 4 5"
      wait "ended with 1"
    end, { ["r.lua"] = slow })
  end)
end)
