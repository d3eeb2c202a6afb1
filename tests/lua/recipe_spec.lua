-- Recipes as they are run: options, digest, saves, resume, Ctrl-C. Each run is its own process.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local files = require "files"
local save = require "xtrain.save"
local active = require "xtrain.active"
local training = require "training"

local PROGRAM = os.getenv "XTRAIN"
local dir

local RECIPE = [[
local xt = require "xtrain"
local file = require "xtrain.core.file"
local run = xt.recipe {
  name = "small", files = "", seq = 8, batch = 4, dropout = 0.1, steps = 6, save_every = 2,
  log_every = 1, lr = 1e-2, die = 0, interrupt = 0, poison = 0, ignore = false, vocab = 13,
}
local data
if run.bench == 0 then
  data = assert(xt.data.tokens { files = run.files, seq = run.seq, batch = run.batch,
    accum = run.accum, seed = run.seed })
end
local model = xt.models.qwen3 { vocab = run.vocab, dim = 16, layers = 2, heads = 2, ffn = 32,
  dropout = run.dropout, seed = run.seed }
model:train()
local opt = xt.optim.adamw(xt.nn.params(model), {})
local allocs
for step in run:steps() do
  for micro, ids, labels in run:micros(step, data) do
    if run.ignore then labels = xt.full(labels.shape, -100, { dtype = "i32" }) end
    local sum, count = model:loss(ids, labels,
      { seed = xt.seed(run.seed, step, micro), reduction = "sum" })
    if step == run.poison then sum = sum * (0 / 0) end
    run:backward(sum, count)
  end
  local norm = opt:step(run.lr, { clip = 1.0 })
  run:log(step, { lr = run.lr, grad_norm = norm })
  if run:due(step, run.save_every) then
    run:log(step, { held_out = 10 - (step == 4 and 5 or step / 10) })
    run:save(step)
  end
  if step == 3 then allocs = xt.memory().system_allocs end
  if step == run.die then os.execute("kill -9 " .. file.pid()) end
  if step == run.interrupt then io.popen("kill -INT " .. file.pid()):close() end
end
print("allocs", xt.memory().system_allocs - (allocs or 0), "kib", collectgarbage "count" // 1)
]]

local function run_recipe(words, prefix)
  local command = ("%s '%s' '%s/small.lua' files='%s/tokens.bin' %s >'%s/stdout' 2>'%s/stderr'")
    :format(prefix or "", PROGRAM, dir, dir, words, dir, dir)
  local _, _, code = os.execute(command)
  return code, (file.read(dir .. "/stdout")), (file.read(dir .. "/stderr"))
end

local function bytes(path) return assert(file.read(path)) end

local function same_run(a, b, step)
  assert.are.same(training.rows(a), training.rows(b))
  for _, name in ipairs { "model.safetensors", "optim.safetensors" } do
    assert.are.equal(bytes(("%s/%s/%s"):format(a, save.name(step), name)),
      bytes(("%s/%s/%s"):format(b, save.name(step), name)))
  end
end

local function test(title, fn)
  it(title, function()
    if not PROGRAM then
      pending "XTRAIN does not name the program"
      return
    end
    dir = os.tmpname()
    os.remove(dir)
    assert(file.mkdir(dir))
    assert(file.write_atomic(dir .. "/small.lua", RECIPE))
    files.shard(dir .. "/tokens.bin", 600, 13)
    local ok, message = pcall(fn)
    file.remove_tree(dir)
    if not ok then error(message, 0) end
  end)
end

describe("recipe options", function()
  after_each(function() active.run = nil end)

  local function options(words)
    local given = { name = "t", dim = 8, lr = 3e-4, flag = false, text = "a", list = { 1, 2 } }
    return xt.recipe(given, words)
  end

  it("are typed after their defaults", function()
    local run = options { "dim=16", "lr=1", "flag=true", "text=b=c", "list=4,5,6", "steps=1e3" }
    assert.are.equal(16, run.dim)
    assert.are.equal("float", math.type(run.lr))
    assert.is_true(run.flag)
    assert.are.equal("b=c", run.text)
    assert.are.same({ 4, 5, 6 }, run.list)
    assert.are.equal("integer", math.type(run.options.steps))
    assert.are.equal(1000, run.options.steps)
  end)

  local function refused(word, pattern)
    local ok, message = pcall(options, { word })
    assert.is_false(ok)
    assert.matches(pattern, message)
  end

  it("unknown keys name the nearest and list the known ones", function()
    refused("dmi=3", "unknown option 'dmi' %(did you mean 'dim'%?%); the options are .*steps")
    refused("warmup", "is no key=value")
  end)

  it("a value of the wrong kind names key, value and what was wanted", function()
    refused("dim=big", "option 'dim' is 'big', wanted an integer")
    refused("dim=1.5", "wanted an integer")
    refused("lr=fast", "wanted a number")
    refused("flag=maybe", "wanted true or false")
    refused("list=1,x", "a list of an integer")
  end)

  it("smoke=true makes three steps of any number", function()
    assert.are.equal(3, options({ "smoke=true" }).options.steps)
  end)
end)

describe("a run", function()
  test("twice is the same run: metrics, digests and saves, byte for byte", function()
    assert.are.equal(0, (run_recipe("out=" .. dir .. "/a")))
    assert.are.equal(0, (run_recipe("out=" .. dir .. "/b")))
    same_run(dir .. "/a", dir .. "/b", 6)
    local last = training.rows(dir .. "/a")
    assert.are.equal(6, last[#last].step)
    assert.are.equal(0, (run_recipe("seed=2 out=" .. dir .. "/c")))
    assert.are_not.same(training.rows(dir .. "/a"), training.rows(dir .. "/c"))
  end)

  test("killed and resumed is the run that was never killed", function()
    run_recipe("accum=2 out=" .. dir .. "/a")
    for _, step in ipairs { 4, 5 } do -- right after a save, and a step later
      local out = dir .. "/b" .. step
      local code = run_recipe(("accum=2 die=%d out=%s"):format(step, out))
      assert.are_not.equal(0, code)
      local again, _, errors = run_recipe("accum=2 resume=auto out=" .. out)
      assert.are.equal(0, again)
      assert.matches("resumed from .*step%-00000004", errors)
      same_run(dir .. "/a", out, 6)
    end
  end)

  test("resume takes a path to a save, and refuses a save that was changed", function()
    run_recipe("out=" .. dir .. "/a")
    local path = dir .. "/a/step-00000004"
    local code, _, errors = run_recipe(("resume=%s out=%s/b steps=5"):format(path, dir))
    assert.are.equal(0, code)
    assert.matches("resumed from", errors)
    local text = bytes(path .. "/model.safetensors")
    assert(file.write_atomic(path .. "/model.safetensors", text:sub(1, -2) .. "\1"))
    code, _, errors = run_recipe(("resume=%s out=%s/c"):format(path, dir))
    assert.are.equal(1, code)
    assert.matches("is not what was saved", errors)
  end)

  test("keeps two saves, and the best one; latest and best point at them", function()
    run_recipe("steps=10 out=" .. dir .. "/a")
    assert.are.same({ 4, 8, 10 }, save.list(dir .. "/a"))
    assert.are.equal("step-00000010\n", bytes(dir .. "/a/latest"))
    assert.are.equal("step-00000004\n", bytes(dir .. "/a/best"))
  end)

  test("Ctrl-C ends at the step boundary with a save, from which it goes on", function()
    run_recipe("out=" .. dir .. "/a")
    local out = dir .. "/b"
    local code, _, errors = run_recipe("interrupt=3 out=" .. out)
    assert.are.equal(130, code)
    assert.matches("stopped after step 3", errors)
    assert.are.same({ 2, 3 }, save.list(out))
    assert.are.equal(0, (run_recipe("resume=auto out=" .. out)))
    same_run(dir .. "/a", out, 6)
  end)

  test("goes on when a save fails, and leaves the older save whole", function()
    local code, _, errors = run_recipe("out=" .. dir .. "/a", "trap '' XFSZ; ulimit -f 8;")
    assert.are.equal(0, code)
    assert.matches("save of step 2 failed, training goes on", errors)
    assert.are.same({}, save.list(dir .. "/a"))
    for _, name in ipairs(file.list(dir .. "/a")) do assert.is_nil(name:find "part") end
    assert.are.equal(6, training.rows(dir .. "/a")[#training.rows(dir .. "/a")].step)
  end)

  test("does not write over another run", function()
    run_recipe("out=" .. dir .. "/a")
    local code, _, errors = run_recipe("out=" .. dir .. "/a")
    assert.are.equal(1, code)
    assert.matches("small.lua:%d+: .*holds a run already: resume=auto", errors)
  end)

  test("skips a step whose gradients are not finite and one without labels, and says so", function()
    local code, _, errors = run_recipe("poison=2 out=" .. dir .. "/a")
    assert.are.equal(0, code)
    assert.matches("step 2 skipped, nothing changed: .*not finite: blocks.1.attn", errors)
    assert.are.equal(1, training.rows(dir .. "/a")[4].skipped)
    code, _, errors = run_recipe("ignore=true steps=2 out=" .. dir .. "/b")
    assert.are.equal(0, code)
    assert.matches("step 1 skipped, nothing changed: no label", errors)
  end)

  test("sees the same batches as 1x4, 2x2 and 4x1", function()
    local first
    for _, shape in ipairs { "batch=4 accum=1", "batch=2 accum=2", "batch=1 accum=4" } do
      local out = dir .. "/" .. shape:gsub("%W", "")
      assert.are.equal(0, (run_recipe(shape .. " dropout=0.0 out=" .. out)))
      local loss = training.rows(out)[1].loss
      first = first or loss
      assert.is_near(first, loss, 1e-5)
    end
  end)

  test("asks the system for no memory after step 3, and keeps the Lua heap small", function()
    local _, output = run_recipe("steps=30 save_every=0 out=" .. dir .. "/a")
    local allocs, kib = output:match "allocs%s+(%S+)%s+kib%s+(%S+)"
    assert.are.equal(0, tonumber(allocs))
    assert.is_true(tonumber(kib) < 3000, kib .. " KiB")
  end)

  test("bench=N saves nothing and ends with one JSON line", function()
    local code, output = run_recipe("bench=2 out=" .. dir .. "/a")
    assert.are.equal(0, code)
    local row = xt.json.decode(output)
    for _, name in ipairs { "recipe", "device", "dtype", "batch", "seq", "step_ms", "tokens_per_s",
      "model_tflops", "matmul_tflops", "share", "peak_bytes", "allocs_per_step" } do
      assert.is_truthy(row[name], name)
    end
    assert.is_nil(file.exists(dir .. "/a"))
  end)
end)

describe("data.tokens", function()
  local path

  setup(function()
    path = os.tmpname()
    files.shard(path, 101)
  end)
  teardown(function() os.remove(path) end)

  local function order(d, epoch)
    local list = {}
    for i = 0, d.windows - 1 do list[i + 1] = d:place(epoch * d.windows + i) end
    return list
  end

  it("visits each window once an epoch, in another order each epoch and for each seed", function()
    local d = assert(xt.data.tokens { files = path, seq = 10, batch = 2, seed = 1 })
    assert.are.equal(10, d.windows)
    local first, second = order(d, 0), order(d, 1)
    assert.are_not.same(first, second)
    local other = assert(xt.data.tokens { files = path, seq = 10, seed = 2 })
    assert.are_not.same(first, order(other, 0))
    for _, list in ipairs { first, second } do
      table.sort(list)
      assert.are.same({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }, list)
    end
  end)

  it("a batch is a pure function of step and micro; labels follow ids", function()
    local d = assert(xt.data.tokens { files = path, seq = 10, batch = 2, seed = 1 })
    local ids, labels = d:batch(3)
    d:batch(1)
    local again = d:batch(3)
    assert.are.equal(ids:digest(), again:digest())
    assert.are.same({ 2, 10 }, ids.shape)
    assert.are.equal("i32", ids.dtype)
    for _, row in ipairs((labels - ids):totable()) do
      for _, difference in ipairs(row) do assert.are.equal(1, difference) end
    end
  end)

  it("ranks and micro-batches share the windows of a step", function()
    local function starts(o, step)
      local set = {}
      o.files, o.seq, o.seed = path, 10, 5
      for rank = 0, (o.world or 1) - 1 do
        o.rank = rank
        local d = assert(xt.data.tokens(o))
        for micro = 0, d.accum - 1 do
          for _, row in ipairs(d:batch(step, micro):totable()) do set[#set + 1] = row[1] end
        end
      end
      return set
    end
    local whole = starts({ batch = 4 }, 2)
    assert.are.same(whole, starts({ batch = 2, accum = 2 }, 2))
    assert.are.same(whole, starts({ batch = 1, accum = 4 }, 2))
    assert.are.same(whole, starts({ batch = 2, world = 2 }, 2))
  end)

  it("goes through all windows in order", function()
    local d = assert(xt.data.tokens { files = path, seq = 10, batch = 3 })
    local seen = 0
    for ids in d:in_order() do
      assert.are.equal(seen * 10, ids:totable()[1][1])
      seen = seen + ids.shape[1]
    end
    assert.are.equal(10, seen)
  end)

  it("says what is wrong with its files", function()
    local d, message = xt.data.tokens { files = path .. "-none", seq = 10 }
    assert.is_nil(d)
    assert.matches("none", message)
    d, message = xt.data.tokens { files = path, seq = 1000 }
    assert.is_nil(d)
    assert.matches("too few for one window", message)
  end)
end)
