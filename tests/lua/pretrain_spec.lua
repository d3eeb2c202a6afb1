-- Pretraining on token shards, and the recipes that are made of it: their sizes and schedules are
-- those they say, shards are held out at their end, and each runs small on any machine.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local files = require "files"
local training = require "training"

local ROOT = training.tests:match "^(.*)/tests$"

-- dim, layers, heads, head_dim, ffn; steps, global batch, seq; millions of parameters in the blocks
-- and in all; millions of tokens seen. Counts to the digits that are written.
local TABLE = {
  v0 = { 32, 4, 2, 16, 64, 700, 8, 128, "0.041", "3.26", "0.72" },
  v1 = { 256, 8, 8, 32, 1024, 5000, 8, 128, "8.4", "34", "5.1" },
  v2 = { 384, 12, 12, 32, 1536, 4500, 32, 256, "28", "67", "37" },
  v3 = { 512, 16, 16, 32, 2048, 30000, 32, 256, "67", "119", "246" },
  v4 = { 768, 18, 24, 32, 2048, 22000, 128, 256, "127", "205", "721" },
  v5 = { 768, 18, 24, 32, 2048, 38000, 256, 256, "127", "205", "2490" },
  v6 = { 768, 18, 24, 32, 2048, 35000, 256, 256, "127", "205", "2290" },
  v7 = { 768, 18, 24, 32, 2048, 50000, 256, 256, "127", "205", "3280" },
  v8 = { 1024, 18, 32, 32, 2730, 36000, 256, 256, "226", "329", "2360" },
}
local BF16 = { v5 = true, v6 = true, v7 = true, v8 = true }

-- The options that a recipe gives to xt.recipe.
local function options_of(name)
  local make, given = xt.recipe, nil
  xt.recipe = function(o)
    given = o
    error("enough", 0)
  end
  local ok, message = pcall(dofile, ("%s/recipes/%s.lua"):format(ROOT, name))
  xt.recipe = make
  assert(not ok and message == "enough", message)
  return given
end

-- A stand-in for a run: these options and nothing else.
local function run_of(name)
  local o = options_of(name)
  o.seed, o.dtype, o.options = 1, o.dtype or "f32", o
  return o
end

-- What `wanted` says of a number of millions: as many digits.
local function to_digits_of(wanted, millions)
  local digits = #wanted:gsub("%.", ""):gsub("^0+", "")
  if not wanted:find("%.") then digits = #wanted:gsub("0$", "") end
  local size = 10 ^ (math.floor(math.log(millions, 10)) - digits + 1)
  return math.floor(millions / size + 0.5) * size
end

local function numbers_of(model)
  local count = 0
  for _, param in ipairs(xt.nn.params(model)) do count = count + param.tensor.numel end
  return count
end

-- Parameters of a recipe's model, blocks and all, without making all of it: a model of one block
-- and one token, and what a second of each adds.
local function parameters(run)
  run.seed = false
  local function count(layers, vocab)
    run.layers = layers
    return numbers_of(xt.pretrain.model(run, vocab))
  end
  local layers, vocab = run.layers, run.vocab
  local one = count(1, 1)
  local block, token = count(2, 1) - one, count(1, 2) - one
  return one - token + block * (layers - 1), one + block * (layers - 1) + token * (vocab - 1)
end

describe("the recipes", function()
  for name, row in pairs(TABLE) do
    it(name .. " has the size, the batch and the steps that it says", function()
      local run = run_of(name)
      local head_dim = run.head_dim > 0 and run.head_dim or run.dim // run.heads
      assert.are.same({ table.unpack(row, 1, 8) }, { run.dim, run.layers, run.heads, head_dim,
        run.ffn, run.steps, run.global_batch, run.seq })
      assert.are.equal(0, run.global_batch % run.batch)
      assert.are.equal(BF16[name] and "bf16" or "f32", run.dtype)
      assert.are.equal(name == "v8" and "block" or "none", run.recompute)
      assert.are.equal(name < "v6" and "tinystories" or "fineweb-edu", run.corpus)
      local blocks, all = parameters(run)
      local tokens = run.steps * run.global_batch * run.seq
      for i, count in ipairs { blocks, all, tokens } do
        local wanted = row[8 + i]
        assert.is_near(tonumber(wanted), to_digits_of(wanted, count / 1e6), 1e-9)
      end
    end)
  end

  it("share vocabulary, optimizer and held-out tokens", function()
    for name in pairs(TABLE) do
      local o = options_of(name)
      assert.are.same({ 50257, false, true, 10000.0, 1e-5, { 0.9, 0.95 }, 0.1, 1.0, 6e-4, 6e-5,
        1000000, 0.0 }, { o.vocab, o.tied, o.qk_norm, o.rope_theta, o.eps, o.betas,
        o.weight_decay, o.clip, o.lr, o.min_lr, o.held_out, o.dropout })
    end
  end)

  it("v8 warms up over 1800 steps and falls by a cosine to the last", function()
    local lr = xt.pretrain.schedule(run_of "v8")
    assert.is_near(6e-4 / 1800, lr(1), 1e-18)
    assert.is_near(3e-4, lr(900), 1e-18)
    assert.is_near(6e-4, lr(1800), 1e-18)
    assert.is_near(3.3e-4, lr((1800 + 36000) // 2), 1e-18)
    assert.are.equal(6e-5, lr(36000))
  end)

  it("gpt2 is GPT-2 small", function()
    local run = run_of "gpt2"
    local _, all = parameters(run)
    assert.are.equal(124439808, all)
  end)
end)

-- ---- parts -------------------------------------------------------------------------------------

describe("data.tokens", function()
  local path

  setup(function()
    path = os.tmpname()
    files.shard(path, 100)
  end)
  teardown(function() os.remove(path) end)

  -- The first and last token of the windows of a part, labels included.
  local function span(part, held_out)
    local d = assert(xt.data.tokens { files = path, seq = 5, held_out = held_out, part = part })
    local low, high, windows = math.huge, -1, 0
    for step = 1, d.windows do
      local ids, labels = d:batch(step)
      low, high = math.min(low, ids:totable()[1][1]), math.max(high, labels:totable()[1][5])
      windows = windows + 1
    end
    local first, last
    for ids, labels in d:in_order() do
      first, last = first or ids:totable()[1][1], labels:totable()[1][5]
    end
    assert.are.same({ low, high }, { first, last })
    return low, high, windows
  end

  it("holds out the last tokens, and trains on none of them", function()
    assert.are.same({ 0, 75, 15 }, { span("train", 22) }) -- 78 tokens: 15 windows of 5 and one more
    assert.are.same({ 78, 98, 4 }, { span("held_out", 22) })
    assert.are.same({ 0, 95, 19 }, { span("train", 0) })
  end)

  it("says so when there are not as many", function()
    local d, message = xt.data.tokens { files = path, seq = 5, held_out = 101, part = "train" }
    assert.is_nil(d)
    assert.matches("held_out is 101, and there are 100 tokens", message)
    d, message = xt.data.tokens { files = path, seq = 5, held_out = 97 }
    assert.is_nil(d)
    assert.matches("3 tokens to train on .* too few for one window", message)
  end)
end)

describe("data.split", function()
  local function both(text, share)
    local train, held = xt.data.split(text, share)
    assert.are.equal(text, train .. held)
    return train, held
  end

  it("cuts at a line end, else at a blank, else between two characters", function()
    assert.are.same({ "one\ntwo two\n", "three" }, { both("one\ntwo two\nthree", .5) })
    assert.are.same({ "one two ", "three\n" }, { both("one two three\n", .5) })
    assert.are.same({ "éé", "é" }, { both("ééé", .5) })
    assert.are.same({ "x", "" }, { both("x", .5) })
  end)
end)

describe("options for a smoke run", function()
  after_each(function() require("xtrain.active").run = nil end)

  local function run(words)
    return xt.recipe({ name = "t", dim = 512, layers = 8, smoke = { dim = 16 } }, words)
  end

  it("are its defaults, which can be overridden as any", function()
    assert.are.same({ 512, 16, 32 }, { run({}).dim, run({ "smoke=true" }).dim,
      run({ "smoke=true", "dim=32" }).dim })
    assert.are.equal(8, run({ "smoke=true" }).layers)
    assert.is_true(run({ "smoke=true" }).options.smoke)
  end)

  it("must be options, and of their kind", function()
    local ok, message = pcall(xt.recipe, { name = "t", dim = 1, smoke = { din = 2 } },
      { "smoke=true" })
    assert.is_false(ok)
    assert.matches("smoke sets 'din' to a number, and as an option it is a nil", message)
  end)
end)

-- ---- runs --------------------------------------------------------------------------------------

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("", fn)
  end)
end

local function recipe(name) return ("%s/recipes/%s.lua"):format(ROOT, name) end

local function rows(place, out)
  local list = {}
  for line in place:read(out .. "/metrics.jsonl"):gmatch "[^\n]+" do
    list[#list + 1] = xt.json.decode(line)
  end
  return list
end

local function digest(place, out) return place:digests(out, 3) end

describe("a recipe of pretraining", function()
  for _, path in ipairs { "v0", "v8", "gpt2" } do
    test(path .. " runs with smoke=true where there is nothing else", function(place)
      local out, errors = place:must("smoke=true", recipe(path))
      assert.matches("held%-out loss %d+%.%d+ nats a token", out)
      assert.matches("learns to count", errors)
      local list = rows(place, "runs/" .. path .. "-smoke")
      assert.is_true(list[#list].held_out < list[1].loss)
      assert.is_string(list[#list].sample)
    end)
  end

  test("runs with smoke=true on any text: one short line, or no UTF-8", function(place)
    place:write("text.txt", "one line without an end, \xff\xfe\x80")
    place:must("smoke=true text=text.txt", recipe "v3")
    place:write("text.txt", "")
    local _, _, errors = place:run("smoke=true text=text.txt", nil, recipe "v3")
    assert.matches("there is nothing in text.txt", errors)
    place:write("text.txt", training.text(20000))
    local out = place:must("smoke=true text=text.txt", recipe "v6")
    assert.matches("bits a byte", out)
  end)

  test("says how shards are made when there are none, and trains on them then", function(place)
    place:write("stories.txt", training.text(20000))
    local tokenizer = assert(xt.tokenizer.train { files = { place.dir .. "/stories.txt" },
      vocab = 300 })
    assert(file.mkdir(place.dir .. "/gpt2"))
    assert(tokenizer:save(place.dir .. "/gpt2"))
    local words = "vocab=300 dim=32 layers=1 heads=2 ffn=48 steps=3 batch=4 seq=16 held_out=500"
    local code, _, errors = place:run(words, nil, recipe "v0")
    assert.are.equal(1, code)
    assert.matches("v0.lua:%d+: v0: there are no token shards %(%*%.bin%) in data/tinystories",
      errors)
    local command = errors:match "\n +xtrain ([^\n]+)"
    assert(os.execute(("cd '%s' && '%s' %s >stdout"):format(place.dir, training.program,
      command:gsub("FILE%.%.%.", "stories.txt"))))
    local out = place:must(words, recipe "v0")
    assert.matches("\nOnce upon a time", out)
    local config = xt.json.decode(place:read "runs/v0/config.json")
    assert.are.equal(2, config.options.accum)
    -- The tokenizer came along: from beside the shards to the run folder.
    assert(os.execute(("cd '%s' && '%s' generate runs/v0 --prompt the --max 3 >stdout"):format(
      place.dir, training.program)))
  end)

  test("sees one global batch in any micro-batches, and says when it cannot", function(place)
    local losses = {}
    for _, words in ipairs { "batch=4", "batch=2", "batch=1", "batch=2 accum=2" } do
      place:must("smoke=true out=run " .. words, recipe "v1")
      losses[#losses + 1] = rows(place, "run")[1].loss
      file.remove_tree(place.dir .. "/run")
    end
    for _, loss in ipairs(losses) do assert.is_near(losses[1], loss, 1e-5) end
    local code, _, errors = place:run("smoke=true batch=3", nil, recipe "v1")
    assert.are.equal(1, code)
    assert.matches("global_batch 4 is no multiple of 1 ranks x batch 3", errors)
  end)

  test("has the same bits with recompute as without, and as a graph", function(place)
    place:must("smoke=true out=a", recipe "v8")
    place:must("smoke=true out=b recompute=none", recipe "v8")
    place:must("smoke=true out=c graph=true", recipe "v8")
    assert.are.same(digest(place, "a"), digest(place, "b"))
    assert.are.same(digest(place, "a"), digest(place, "c"))
  end)

  test("measures any size by bench=N, without data", function(place)
    local out = place:must("bench=1 batch=2 seq=32 dim=32 layers=2 heads=4 kv_heads=2 head_dim=16 "
      .. "ffn=48 vocab=320 tied=true recompute=none", recipe "v8")
    local row = xt.json.decode(out)
    assert.are.same({ "v8", "bf16", 2, 32 }, { row.recipe, row.dtype, row.batch, row.seq })
    assert.is_true(row.step_ms > 0)
    assert.is_nil(file.exists(place.dir .. "/runs"))
  end)

  test("refuses two sources of data, and a tokenizer that is too large", function(place)
    place:write("text.txt", training.text(2000))
    local _, _, errors = place:run("text=text.txt data=data", nil, recipe "v0")
    assert.matches("text= and data= are two sources", errors)
    assert(file.mkdir(place.dir .. "/bytes"))
    assert(xt.tokenizer.bytes():save(place.dir .. "/bytes"))
    _, _, errors = place:run("text=text.txt tokenizer=bytes vocab=200", nil, recipe "v0")
    assert.matches("bytes has 256 ids, and vocab=200 is less", errors)
  end)
end)
