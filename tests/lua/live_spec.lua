-- Live recipes: what is edited or set while a run goes on is recorded, and resumed and verified at
-- the same steps. The recipe edits its own live file, so each edit comes at a known step.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local training = require "training"
local edits = require "xtrain.edits"

-- A small network; `script` is a piece of Lua that every step runs, with step and put(text), which
-- writes the live file. before=N, after=...: the recipe that has the change written in it.
local RECIPE = [[
local xt = require "xtrain"
local file = require "xtrain.core.file"
local run = xt.recipe { name = "small", steps = 14, save_every = 5, log_every = 4, script = "",
  written = 0, weight = 1.0, eval_every = 0, die = 0 }
local live = run.written == 0 and xt.live "live.lua"
local data = {}
function data:batch(step, micro)
  local x = xt.randn({ 8, 3 }, { seed = xt.seed(run.seed, step, micro) })
  return x, xt.sum(x, 2, { keepdim = true })
end
local model = { w = xt.nn.linear { d_in = 3, d_out = 1, bias = true, seed = 1 } }
run:attach { model = model }
local opt = xt.optim.adamw(xt.nn.params(model), {})
local function put(text) assert(file.write_atomic("live.lua", text)) end
local act = assert(load("local step, put, run, live, file = ... " .. run.script))
for step in run:steps() do
  local lr, clip, aux = 1e-2, 1.0, 0.1
  if live then
    lr, clip, aux = live.lr, live.clip, live.weights.aux
  elseif step >= run.written then
    lr, clip, aux = 1e-3, 0.5, 0.3
  end
  for _, x, y in run:micros(step, data) do
    local off = model.w(x) - y
    local loss = xt.sum(off * off) * run.weight + aux * xt.sum(xt.abs(off))
    run:backward(loss, 8)
  end
  local norm = opt:step(lr, { clip = clip })
  run:log(step, { lr = lr, grad_norm = norm })
  if run:due(step, run.eval_every) then run:log(step, { held_out = 1 / step }) end
  if run:due(step, run.save_every) then run:save(step) end
  act(step, put, run, live, file)
  if step == run.die then os.execute("kill -9 " .. file.pid()) end
end
]]

local FIRST = "return { lr = 1e-2, clip = 1.0, weights = { aux = 0.1 } }\n"
local SECOND = "return { lr = 1e-3, clip = 0.5, weights = { aux = 0.3 } }\n"

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("", function(place)
      local script = place:write("small.lua", RECIPE)
      place:write("live.lua", FIRST)
      local function train(words)
        place:write("live.lua", FIRST)
        return select(2, place:must(words, script))
      end
      local function verb(words)
        local _, _, code = os.execute(("cd '%s' && '%s' %s >said 2>&1"):format(place.dir,
          training.program, words))
        return code, place:read "said"
      end
      fn(place, train, verb, script)
    end)
  end)
end

-- The option script=... as a shell word.
local function acts(text) return (" 'script=%s'"):format(text) end

local EDIT = acts(("if step == 6 then put %q end"):format(SECOND:gsub("\n", " ")))

describe("a live file", function()
  test("edited at step 100 gives the digest of a recipe that has the change written in it",
    function(place, train, verb)
      train("out=live steps=120 save_every=40" .. acts(("if step == 100 then put %q end"):format(
        SECOND:gsub("\n", " "))))
      train "out=written written=101 steps=120 save_every=40"
      train "out=plain written=1000 steps=120 save_every=40"
      assert.are.same(place:digests("written", 120), place:digests("live", 120))
      assert.are.same(place:digests("plain", 80), place:digests("live", 80))
      assert.are_not.same(place:digests("plain", 120), place:digests("live", 120))
      local code, said = verb "verify live"
      assert.are.equal(0, code, said)
      assert.matches("steps 81 to 120 made again", said)
    end)

  test("is recorded: step, hash, difference and text", function(place, train)
    local errors = train("out=a" .. EDIT)
    assert.matches("live.lua: taken from step 7 on\n@ 1\n%-return { lr = 1e%-2", errors)
    local rows = edits.read(place.dir .. "/a")
    assert.are.equal(2, #rows)
    assert.are.same({ step = 1, path = "live.lua", hash = edits.hash(FIRST), diff = "",
      text = FIRST }, rows[1])
    local text = place:read "live.lua"
    assert.are.same({ step = 7, path = "live.lua", hash = edits.hash(text),
      diff = "@ 1\n-" .. FIRST:sub(1, -2) .. "\n+" .. text, text = text }, rows[2])
  end)

  for _, broken in ipairs {
    { "does not load", "return { lr = ", "live.lua:1: unexpected symbol near <eof>" },
    { "raises", "error [[no]]", "live.lua:1: no" },
    { "lacks a value", "return { lr = 1e-3, clip = 0.5, weights = {} }", "weights.aux is missing" },
    { "changes a type", "return { lr = [[x]], clip = 0.5, weights = { aux = 1 } }",
      "lr is a string, it was a number" },
    { "holds NaN", "return { lr = 0 / 0, clip = 0.5, weights = { aux = 1 } }", "lr is NaN" },
    { "is empty", "", "live.lua returned nothing, wanted a table" },
  } do
    test("that " .. broken[1] .. " changes nothing and is told of once", function(place, train,
        verb)
      local errors = train("out=a" .. acts(("if step >= 6 then put %q end"):format(broken[2])))
      train "out=b"
      assert.are.same(place:digests("b", 14), place:digests("a", 14))
      local _, count = errors:gsub("live.lua is not taken, step 7 goes on with the values it had: ",
        "")
      assert.are.equal(1, count, errors)
      assert.is_truthy(errors:find(broken[3], 1, true), errors)
      assert.are.equal(1, #edits.read(place.dir .. "/a"))
      assert.are.equal(0, (verb "verify a"))
    end)
  end

  test("is told of again when it is broken again, and taken when it is mended", function(place,
      train)
    local errors = train("out=a" .. acts(("if step == 3 or step == 6 then put %q end "
      .. "if step == 4 then put %q end if step == 8 then put %q end"):format("oops",
      FIRST:gsub("\n", " "), SECOND:gsub("\n", " "))))
    local _, count = errors:gsub("is not taken", "")
    assert.are.equal(2, count, errors)
    local steps = {}
    for i, row in ipairs(edits.read(place.dir .. "/a")) do steps[i] = row.step end
    assert.are.same({ 1, 5, 9 }, steps)
  end)

  test("that disappears changes nothing", function(place, train)
    train("out=a" .. acts "if step == 3 then os.remove [[live.lua]] end")
    train "out=b"
    assert.are.same(place:digests("b", 14), place:digests("a", 14))
  end)

  test("cannot be used before it is right", function(place, _, _, script)
    place:write("live.lua", "return 3")
    local code, _, errors = place:run("out=a", nil, script)
    assert.are.equal(1, code)
    assert.matches("small.lua:5: live: live.lua returned a number, wanted a table", errors)
    os.remove(place.dir .. "/live.lua")
    code, _, errors = place:run("out=a", nil, script)
    assert.are.equal(1, code)
    assert.matches("small.lua:5: live: .*live.lua", errors)
  end)

  test("has no values but its own, and they are not assigned", function(place, _, _, script)
    local code, _, errors = place:run("out=a" .. acts "print(live.cilp)", nil, script)
    assert.are.equal(1, code)
    assert.matches("live.lua has no 'cilp' %(did you mean 'clip'%?%)", errors)
    code, _, errors = place:run("out=b" .. acts "live.lr = 3", nil, script)
    assert.are.equal(1, code)
    assert.matches("live.lua holds the live values: edit it", errors)
  end)
end)

describe("the changes of a run", function()
  test("are made again by verify, whatever the file says now", function(place, train, verb)
    train("out=a" .. acts(("if step == 12 then put %q end"):format(SECOND:gsub("\n", " "))))
    place:write("live.lua", "oops")
    local code, said = verb "verify a"
    assert.are.equal(0, code, said)
    assert.matches("steps 11 to 14 made again", said)
    -- A record that was changed is found.
    local text = place:read "a/edits.jsonl"
    assert(file.write_atomic(place.dir .. "/a/edits.jsonl", (text:gsub("lr = 1e%-3", "lr = 2e-3"))))
    code, said = verb "verify a"
    assert.are.equal(1, code)
    assert.matches("step 13: the replay has digest", said)
  end)

  test("are made at their steps by a run that was killed and resumed", function(place, train, verb,
      script)
    train("out=a" .. EDIT)
    train("out=b steps=14" .. EDIT)
    for _, die in ipairs { 7, 9, 12 } do -- right after the change; later; after the next save
      place:write("live.lua", FIRST)
      local out = "c" .. die
      assert.are_not.equal(0, (place:run(("out=%s die=%d"):format(out, die) .. EDIT, nil, script)))
      place:must("resume=auto out=" .. out .. EDIT, script)
      assert.are.same(place:digests("a", 14), place:digests(out, 14))
      local code, said = verb("verify " .. out)
      assert.are.equal(0, code, said)
    end
    -- Into another folder, from a save before the change; the file has the new text already.
    place:must("resume=b/step-00000010 out=d", script)
    assert.are.same(place:digests("a", 14), place:digests("d", 14))
    assert.are.same(edits.read(place.dir .. "/a"), edits.read(place.dir .. "/d"))
  end)

  test("that were still to come are dropped when the file is edited before them", function(place,
      train, verb, script)
    train("out=a keep=9" .. acts(("if step == 8 then put %q end"):format(SECOND:gsub("\n", " "))))
    place:write("live.lua", (FIRST:gsub("1e%-2", "5e-3"))) -- while it does not run
    local _, errors = place:must("resume=a/step-00000005 out=a", script)
    assert.matches("recorded for steps 9 to 9 are dropped", errors)
    local rows = edits.read(place.dir .. "/a")
    assert.are.equal(2, #rows)
    assert.are.equal(6, rows[2].step)
    assert.are.equal(0, (verb "verify a"))
  end)
end)

-- ---- with graph=true ---------------------------------------------------------------------------

-- The same through run:train; what the loss reads and the clip are in the graph as they were.
local TRAINED = RECIPE:gsub("for step in run:steps.*", [[
for step in run:steps() do
  local norm = run:train(step, { data = data, optimizer = opt, lr = live.lr, clip = live.clip,
    loss = function(x, y)
      local off = model.w(x) - y
      return xt.sum(off * off) + live.weights.aux * xt.sum(xt.abs(off)), 8
    end })
  run:log(step, { lr = live.lr, grad_norm = norm })
  if run:due(step, run.save_every) then run:save(step) end
  act(step, put, run, live, file)
end
]])

describe("a graph", function()
  test("is recorded again when something is changed", function(place, _, verb)
    local script = place:write("trained.lua", TRAINED)
    for _, graph in ipairs { "false", "true" } do
      place:write("live.lua", FIRST)
      place:must(("out=%s graph=%s"):format(graph, graph) .. acts(("if step == 7 then put %q end"
        .. " if step == 11 then put %q end"):format(FIRST:gsub("0%.1", "0.7"):gsub("\n", " "),
          SECOND:gsub("\n", " "))), script)
      local code, said = verb("verify " .. graph)
      assert.are.equal(0, code, said)
    end
    assert.are.same(place:digests("false", 14), place:digests("true", 14))
    assert.are.equal(3, #edits.read(place.dir .. "/true"))
  end)
end)

describe("the difference of two texts", function()
  it("names lines that went and came", function()
    assert.are.equal("", edits.diff("a\nb\n", "a\nb\n"))
    assert.are.equal("@ 2\n-b\n+B", edits.diff("a\nb\nc\n", "a\nB\nc\n"))
    assert.are.equal("@ 1\n+x\n@ 4\n-c", edits.diff("a\nb\nc\n", "x\na\nb\n"))
    assert.are.equal("@ 1\n+a", edits.diff("", "a"))
    assert.are.equal("@ 1\n-a\n-b", edits.diff("a\nb", ""))
    local long = ("a\n"):rep(600)
    assert.matches("^@ 1\n%-a", edits.diff(long, ("b\n"):rep(600)))
  end)
end)

-- ---- xtrain ctl --------------------------------------------------------------------------------

-- A request, as the other terminal writes it; it is answered at the boundary after the step.
local function asks(step, command, key, value)
  return (" if step == %d then file.write_atomic(run.out .. [[/.ctl/1-%d.request]], [[%s]]) end")
    :format(step, step, xt.json.encode { command = command, key = key, value = value })
end

describe("xtrain ctl", function()
  test("sets live values and options, which resume and verify set again", function(place, train,
      verb, script)
    local words = acts(asks(6, "set", "lr", "1e-3") .. asks(7, "set", "weights.aux", "0.3")
      .. asks(11, "set", "weight", "2"))
    local errors = train("out=a" .. words)
    assert.matches("ctl set: lr was 0.01 and is 0.001 from step 7 on", errors)
    assert.matches("ctl set: weight was 1.0 and is 2.0 from step 12 on", errors)
    local rows = edits.read(place.dir .. "/a")
    assert.are.same({ step = 7, set = "lr", value = 1e-3 }, rows[2])
    local code, said = verb "verify a"
    assert.are.equal(0, code, said)
    train "out=plain"
    assert.are_not.same(place:digests("plain", 14), place:digests("a", 14))
    place:run("out=b die=13" .. words, nil, script)
    place:must("resume=auto out=b", script)
    assert.are.same(place:digests("a", 14), place:digests("b", 14))
  end)

  test("sets nothing that is wrong", function(place, train)
    local errors = train("out=a" .. acts(asks(1, "set", "lrr", "1") .. asks(2, "set", "lr", "fast")
      .. asks(3, "set", "weights", "1") .. asks(4, "set", "accum", "2")
      .. asks(5, "set", "eval_every", "1.5") .. asks(6, "set", "lr", "1e999") .. asks(7, "dance")))
    for _, message in ipairs { "no live value and no option 'lrr'; did you mean 'lr'?",
      "lr is 'fast', wanted a number", "weights is a table: edit live.lua",
      "option 'accum' holds for the whole run", "eval_every is '1.5', wanted an integer",
      "lr is '1e999', wanted a finite number", "the run knows no 'dance'" } do
      assert.is_truthy(errors:find(message, 1, true), message .. " in " .. errors)
    end
    train "out=b"
    assert.are.same(place:digests("b", 14), place:digests("a", 14))
  end)

  test("makes a run evaluate once, save, and stop", function(place, _, verb, script)
    place:write("live.lua", FIRST)
    local code, _, errors = place:run("out=a" .. acts(asks(3, "eval") .. asks(6, "save")
      .. asks(8, "stop")), nil, script)
    assert.are.equal(130, code)
    local _, count = place:read "a/metrics.jsonl":gsub('"held_out"', "")
    assert.are.equal(1, count)
    assert.matches("ctl save: saved a/step%-00000006", errors)
    assert.matches("ctl stop: stopped after step 8, saved in a", errors)
    assert.are.same({ 6, 8 }, require "xtrain.save".list(place.dir .. "/a"))
    assert.is_nil(file.exists(place.dir .. "/a/.ctl/running"))
    code, errors = verb "ctl a save"
    assert.are.equal(1, code)
    assert.matches("a: this run is not going on", errors)
  end)

  test("asks from another process, and has the answer", function(place, _, verb, script)
    place:start("out=a steps=100000000 save_every=0 log_every=1000", script)
    place:wait(function() return file.exists(place.dir .. "/a/.ctl/running") end)
    local code, said = verb "ctl a set lr 1e-4"
    assert.are.equal(0, code, said)
    assert.matches("^lr was 0.01 and is 0.0001 from step %d+ on\n$", said)
    code, said = verb "ctl a eval"
    assert.are.equal(0, code, said)
    assert.matches("^step %d+: held%-out loss %d", said)
    code, said = verb "ctl a/ set weights x"
    assert.are.equal(1, code)
    assert.matches("^xtrain ctl: weights is a table: edit live.lua", said)
    code, said = verb "ctl a stop"
    assert.are.equal(0, code, said)
    assert.matches("^stopped after step %d+, saved in a\n", said)
    place:wait(function() return place:status() end)
    assert.are.equal(130, place:status())
    assert.is_nil(file.exists(place.dir .. "/a/.ctl"))
  end)

  test("says so where no run goes on", function(place, _, verb, script)
    local code, said = verb "ctl nothing save"
    assert.are.equal(1, code)
    assert.matches("nothing: there is no such folder", said)
    code, said = verb "ctl . save"
    assert.are.equal(1, code)
    assert.matches("%.: no run folder", said)
    assert.are_not.equal(0, (place:run("out=a die=3", nil, script)))
    code, said = verb "ctl a save"
    assert.are.equal(1, code)
    assert.matches("a: this run is not going on: its process %d+ is gone", said)
    for words, message in pairs { ["ctl a"] = "a word is missing", ["ctl a stpo"] = "mean stop%?",
      ["ctl a set lr"] = "set wants a key and a value", ["ctl a save 3"] = "no more words" } do
      code, said = verb(words)
      assert.are.equal(2, code)
      assert.matches(message, said)
    end
  end)
end)
