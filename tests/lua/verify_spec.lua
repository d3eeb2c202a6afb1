-- xtrain verify, diff and replay: a good run passes; what was changed is named by step and tensor.
local xt = require "xtrain"
local active = require "xtrain.active"
local file = require "xtrain.core.file"
local files = require "files"
local save = require "xtrain.save"
local training = require "training"

-- 14 steps, a save every 5: the last interval is 11 to 14. Options spoil a run on purpose.
local RECIPE = [[
local xt = require "xtrain"
local run = xt.recipe { name = "small", files = "", seq = 8, batch = 4, dropout = 0.1, steps = 14,
  save_every = 5, log_every = 4, flip = 0, salt = "", bad = 0 }
local data = assert(xt.data.tokens { files = run.files, seq = run.seq, batch = run.batch,
  accum = run.accum, seed = run.seed })
local model = xt.models.qwen3 { vocab = 13, dim = 16, layers = 2, heads = 2, ffn = 32,
  dropout = run.dropout, dtype = run.dtype, seed = run.seed }
model:train()
local opt = xt.optim.adamw(xt.nn.params(model), {})
local lr = xt.schedule.cosine { peak = 1e-2, min = 0, warmup = 3, total = run.options.steps }
local salt = 0
if run.salt ~= "" then
  local handle = io.open(run.salt)
  if handle then
    salt = handle:read "n"
    handle:close()
  end
end
for step in run:steps() do
  for micro, ids, labels in run:micros(step, data) do
    if step == run.flip then -- one label, by one
      labels = labels:clone()
      local one = labels:select(1, 2):select(1, 3)
      one:fill_((one:item() + 1) % 13)
    end
    local sum, count = model:loss(ids, labels,
      { seed = xt.seed(run.seed, step, micro, salt), reduction = "sum" })
    if step == run.bad then sum = sum + xt.log(sum - sum) end
    run:backward(sum, count)
  end
  local norm = opt:step(lr(step), { clip = 1.0 })
  run:log(step, { lr = lr(step), grad_norm = norm })
  if run:due(step, run.save_every) then
    run:log(step, { held_out = xt.data.evaluate(model, data, 2) })
    run:save(step)
  end
end
print "the end"
]]

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("files=tokens.bin", function(place)
      files.shard(place.dir .. "/tokens.bin", 600, 13)
      local script = place:write("small.lua", RECIPE)
      -- A run of the recipe; a verb of the program: status, and what it says.
      local function train(words) place:must(words, script) end
      local function verb(words)
        local _, _, code = os.execute(("cd '%s' && '%s' %s >said 2>&1"):format(place.dir,
          training.program, words))
        return code, place:read "said"
      end
      fn(place, train, verb)
    end)
  end)
end

-- Flips one bit of a file, `back` bytes before its end.
local function flip_bit(path, back)
  local text = assert(file.read(path))
  local at = #text - back
  assert(file.write_atomic(path,
    text:sub(1, at - 1) .. string.char(text:byte(at) ~ 1) .. text:sub(at + 1)))
end

-- Writes a tensor of a save anew, with digests that agree: a save that is whole and wrong.
local function forge(dir, name)
  local tensors = assert(xt.safetensors.load(dir .. "/model.safetensors"))
  tensors[name] = tensors[name] * 1.0001
  assert(xt.safetensors.save(dir .. "/model.safetensors", tensors, { format = "xtrain" }))
  local state = xt.json.decode(assert(file.read(dir .. "/state.json")))
  state.digests.model[name] = save.hex(tensors[name]:digest())
  assert(file.write_atomic(dir .. "/state.json", xt.json.encode(state)))
end

describe("xtrain verify", function()
  test("passes on a good run, leaves it as it is, and runs nothing after it", function(place, train,
      verb)
    train "out=a dtype=bf16 accum=2"
    local before = place:digests("a", 14)
    local log = place:read "a/metrics.jsonl"
    local code, said = verb "verify a"
    assert.are.equal(0, code, said)
    assert.matches("%d saves are whole; steps 11 to 14 made again: digest 0x%x+ and all %d+ tens",
      said)
    assert.is_nil(said:find "the end")
    assert.are.same(before, place:digests("a", 14))
    assert.are.equal(log, place:read "a/metrics.jsonl")
  end)

  test("goes from the start where there is one save, at other numbers of threads too",
    function(_, train, verb)
      train "out=a keep=1 steps=4 threads=1"
      local code, said = verb "verify a"
      assert.are.equal(0, code, said)
      assert.matches("steps 1 to 4 made again", said)
    end)

  test("names step and tensor where one bit of a save is flipped", function(place, train, verb)
    train "out=a"
    for _, step in ipairs { 10, 14 } do
      for _, part in ipairs { "model", "optim" } do
        local path = ("%s/a/%s/%s.safetensors"):format(place.dir, save.name(step), part)
        local good = assert(file.read(path))
        local before = assert(xt.safetensors.load(path))
        flip_bit(path, 1000)
        local changed
        for name, t in pairs(assert(xt.safetensors.load(path))) do
          if t:digest() ~= before[name]:digest() then changed = name end
        end
        local code, said = verb "verify a"
        assert.are.equal(1, code)
        local wanted = ("step %d: a/%s/%s.safetensors: not what was saved: %s\n"):format(step,
          save.name(step), part, changed)
        assert.is_truthy(said:find(wanted, 1, true), said)
        assert(file.write_atomic(path, good))
      end
    end
    assert.are.equal(0, (verb "verify a"))
  end)

  test("names step and tensor where a save is whole and not what training makes",
    function(place, train, verb)
      train "out=a"
      forge(place.dir .. "/a/" .. save.name(14), "blocks.2.mlp.down")
      local code, said = verb "verify a"
      assert.are.equal(1, code)
      assert.matches("step 14: the replay has other values of model blocks.2.mlp.down\n", said)
      assert.is_nil(said:find "digest") -- the steps themselves agree
      train "out=b" -- the same in the save that the replay starts from
      forge(place.dir .. "/b/" .. save.name(10), "blocks.2.mlp.down")
      code, said = verb "verify b"
      assert.are.equal(1, code)
      assert.matches("step 11: the replay has digest 0x%x+, the run 0x%x+\n", said)
      assert.matches("step 14: the replay has other values of model .* and %d+ more", said)
    end)

  test("finds a run that depends on something besides its recipe", function(place, train, verb)
    place:write("salt", "1")
    train "out=a salt=salt"
    assert.are.equal(0, (verb "verify a"))
    place:write("salt", "2")
    local code, said = verb "verify a"
    assert.are.equal(1, code)
    assert.matches("step 11: the replay has digest", said)
  end)

  test("says 'not comparable' under another fingerprint", function(place, train, verb)
    train "out=a"
    local path = ("%s/a/%s/state.json"):format(place.dir, save.name(14))
    local state = xt.json.decode(assert(file.read(path)))
    state.fingerprint.isa = "v9"
    assert(file.write_atomic(path, xt.json.encode(state)))
    local code, said = verb "verify a"
    assert.are.equal(1, code)
    assert.matches("not comparable: isa is v9 for a/step%-00000014 and %S+ for this program", said)
  end)

  test("goes by the algorithms that saves keep, not by the program's table", function(place, train,
    verb)
    train "out=a"
    local row = 'PRODUCT("A GPU", 1, f32, f32, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 64, 64, '
      .. "64, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
    local function both(change)
      for _, step in ipairs { 10, 14 } do
        local path = ("%s/a/%s/state.json"):format(place.dir, save.name(step))
        local state = xt.json.decode(assert(file.read(path)))
        change(state)
        assert(file.write_atomic(path, xt.json.encode(state)))
      end
      return verb "verify a"
    end
    local code, said = both(function(state)
      state.fingerprint.products, state.products = "0x1", { row }
    end)
    assert.are.equal(0, code, said)
    code, said = both(function(state) state.products = { row, row:gsub("64", "x") .. "" } end)
    assert.are.equal(1, code)
    assert.matches("the save of step 14, products:2: a_align, 1 to 64, is wanted", said, 1, true)
    code, said = both(function(state) state.products = nil end)
    assert.are.equal(1, code)
    assert.matches("not comparable: products is 0x1 for a/step-00000010 and ", said, 1, true)
  end)

  test("says what is missing", function(place, train, verb)
    local code, said = verb "verify nothing"
    assert.are.equal(1, code)
    assert.matches("nothing: there is no such folder", said)
    train "out=a save_every=0"
    code, said = verb "verify a"
    assert.are.equal(1, code)
    assert.matches("a: no save here", said)
    assert.are.equal(2, (verb "verify"))
    assert.are.equal(2, (verb "diff a"))
    assert.is_truthy(place:read "a/recipe.lua")
  end)
end)

describe("xtrain replay", function()
  test("makes any step again, from the save before it, and compares it", function(place, train,
      verb)
    train "out=a"
    local before = place:digests("a", 14)
    for step, from in pairs { [1] = "the start", [5] = "the start", [11] = "the save of step 10",
      [14] = "the save of step 10" } do
      local code, said = verb("replay a --step " .. step)
      assert.are.equal(0, code, said)
      assert.matches(("^a, from %s: step %d: loss %%d%%S+, grad_norm %%S+, lr %%S+, digest 0x%%x+, "
        .. "as logged\n$"):format(from, step), said)
    end
    assert.are.same(before, place:digests("a", 14))
  end)

  test("says so where the step comes out differently", function(place, train, verb)
    place:write("salt", "1")
    train "out=a salt=salt"
    place:write("salt", "2")
    local code, said = verb "replay a --step 12"
    assert.are.equal(1, code)
    assert.matches("digest 0x%x+, but 0x%x+ in the log: the replay is not what the run was", said)
  end)

  test("names the first value that is not finite", function(_, train, verb)
    train "out=a bad=12"
    local code, said = verb "replay a --step 12"
    assert.are.equal(0, code, said)
    assert.matches("^step 12: the loss is .*not finite:\n  log at %S+small.lua:%d+, in forward: "
      .. "the result f32 scalar: 1 %-inf.*\na, from the save of step 10: step 12: loss %-inf, "
      .. "grad_norm NaN, .* as logged\n$", said)
  end)

  test("stands right before a step, with what the run had then", function(place, train)
    train("out=a files=" .. place.dir .. "/tokens.bin")
    local replay = require "xtrain.replay"
    local said = {}
    local ok, message = replay.step(place.dir .. "/a", 11, function(reason)
      said[#said + 1] = reason
      local run = active.run
      assert.are.equal(9 + #said, run.own.step)
      if #said > 1 then return end
      local kept = assert(xt.safetensors.load(("%s/a/%s/model.safetensors"):format(place.dir,
        save.name(10))))
      for _, param in ipairs(xt.nn.params(run.own.models[1])) do
        assert.are.equal(kept[param.name]:digest(), param.tensor:digest())
      end
      local seen = {} -- the recipe's locals are on the stack
      for level = 1, 20 do
        local info = debug.getinfo(level, "S")
        if info and info.source:find "small.lua" then
          for i = 1, 100 do
            local name, value = debug.getlocal(level, i)
            if not name then break end
            seen[name] = value
          end
        end
      end
      assert.are.equal(run, seen.run)
      assert.are.equal(run.own.models[1], seen.model)
      assert.are.equal(run.own.optimizers[1], seen.opt)
    end)
    assert.is_true(ok, message)
    assert.are.equal(5, #said) -- before each of the steps 11 to 14, and at the end
    assert.matches("from the save of step 10: right before step 11; step 10: digest 0x%x+, as "
      .. "logged$", said[1])
    assert.matches("right before step 14; step 13: digest 0x%x+, as logged$", said[4])
    assert.is_nil(active.run)
  end)

  test("opens the prompt there, with the names of the recipe, and goes on step by step",
    function(place, train)
      train "out=a"
      local before = place:digests("a", 14)
      place:write("typed",
        "run.own.step + 100\nopt.steps + 200\ncontinue\nopt.steps + 300\nquit\n")
      local _, _, code = os.execute(("cd '%s' && '%s' replay a --step 12 --prompt <typed >said "
        .. "2>&1"):format(place.dir, training.program))
      local said = place:read "said"
      assert.are.equal(0, code, said)
      assert.matches("right before step 12; step 11: digest 0x%x+, as logged\n.*\n111\n211\n.*"
        .. "right before step 13; step 12: digest 0x%x+, as logged\n.*\n312\n", said)
      assert.is_nil(said:find "the last save") -- nothing was broken off
      assert.are.same(before, place:digests("a", 14))
    end)

  test("says what is missing", function(_, train, verb)
    train "out=a"
    for words, wanted in pairs { ["replay nothing --step 3"] = "nothing: there is no such folder",
      ["replay a --step 15"] = "a: has steps 1 to 14, not 15",
      ["replay a"] = "%-%-step N is missing" } do
      local code, said = verb(words)
      assert.are.equal(wanted:find "missing" and 2 or 1, code)
      assert.matches(wanted, said)
    end
  end)
end)

describe("xtrain diff", function()
  test("finds the same run the same, and the longer one longer", function(_, train, verb)
    train "out=a"
    train "out=b threads=1"
    local code, said = verb "diff a b"
    assert.are.equal(0, code, said)
    assert.matches("the same up to step 14, digest 0x%x+\n$", said)
    train "out=c steps=15" -- another schedule
    assert.are.equal(1, (verb "diff a c"))
  end)

  test("finds the first step of runs that differ in one label, logged or not", function(_, train,
      verb)
    train "out=a"
    for _, step in ipairs { 1, 8, 14 } do
      train(("flip=%d out=b%d"):format(step, step))
      local code, said = verb(("diff a b%d"):format(step))
      assert.are.equal(1, code)
      assert.is_truthy(said:find("the runs part at step " .. step .. "%f[%D]"), said)
      assert.matches(("options: flip 0 / %d"):format(step), said)
      assert.matches("the saves of step %d+ differ in .* and %d+ more", said)
    end
    local _, said = verb "diff a b8" -- a step that is logged
    assert.matches("part at step 8: loss %S+ / %S+, grad_norm %S+ / %S+, the same lr", said)
  end)

  test("finds it after a resume in between log lines as well", function(_, train, verb)
    train "out=a"
    train "out=b flip=11"
    train "resume=b/step-00000010 out=c flip=11" -- c has no lines of its own before step 10
    local code, said = verb "diff a b"
    assert.are.equal(1, code)
    assert.matches("part at step 11", said)
    code, said = verb "diff b c"
    assert.are.equal(0, code, said)
    code, said = verb "diff a c"
    assert.are.equal(1, code)
    assert.matches("part at step 11", said)
  end)

  test("says 'not comparable' under different fingerprints", function(place, train, verb)
    train "out=a"
    train "out=b flip=3"
    local path = place.dir .. "/b/config.json"
    local config = xt.json.decode(assert(file.read(path)))
    config.fingerprint.isa = "v9"
    assert(file.write_atomic(path, xt.json.encode(config)))
    local code, said = verb "diff a b"
    assert.are.equal(1, code)
    assert.matches("not comparable: isa is %S+ for a and v9 for b", said)
    assert.is_nil(said:find "part at")
  end)
end)

-- ---- what a save must bring back ---------------------------------------------------------------

describe("a resumed run", function()
  test("is the straight one where the save lies at the end of an epoch, with the rate of its step",
    function(place, train)
      files.shard(place.dir .. "/short.bin", 97, 13, 2) -- 12 windows: an epoch is 3 steps of 4
      local words = " files=short.bin steps=6 save_every=3 log_every=1 out="
      train(words .. "a")
      train("resume=a/step-00000003" .. words .. "b")
      assert.are.same(place:digests("a", 6), place:digests("b", 6))
      local function rows(out)
        local list = {}
        for line in place:read(out .. "/metrics.jsonl"):gmatch "[^\n]+" do
          local row = xt.json.decode(line)
          if row.loss and row.step > 3 then
            list[#list + 1] = { row.step, row.loss, row.lr, row.grad_norm, row.digest }
          end
        end
        return list
      end
      assert.are.equal(3, #rows "b")
      assert.are.same(rows "a", rows "b")
    end)

  test("has files that do not depend on the order of Lua's tables", function(place)
    local script = place:write("order.lua", [[
      local xt = require "xtrain"
      local model = {}
      for _, name in ipairs { "b", "a", "gain", "wq", "wk", "wv", "down", "up" } do
        model[name] = xt.nn.linear { d_in = 3, d_out = 3, seed = false }
      end
      xt.nn.init(model, 5, 1.0)
      local list = {}
      for name, layer in pairs(model) do -- another order in every process
        list[#list + 1] = { name = name, tensor = layer.weight }
      end
      local opt = xt.optim.adamw(list, {})
      for _, p in ipairs(list) do (p.tensor * p.tensor):sum():backward() end
      opt:step(0.1)
      local tensors = {}
      for _, p in ipairs(xt.nn.params(model)) do tensors[p.name] = p.tensor:detach() end
      assert(xt.safetensors.save(arg[1] .. "/model", tensors))
      assert(xt.safetensors.save(arg[1] .. "/state", opt:state()))
    ]])
    local first
    for _ = 1, 5 do
      assert(os.execute(("'%s' '%s' '%s'"):format(training.program, script, place.dir)))
      local bytes = place:read "model" .. place:read "state"
      first = first or bytes
      assert.is_true(first == bytes)
    end
  end)
end)
