-- Files as a broken disk, a cut connection or a careless edit leaves them: every reader returns
-- what it read, or nil and a message. It never raises, and never crashes.
-- tests/long/fuzz_spec.lua runs this file with more rounds.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local save = require "xtrain.save"
local log = require "xtrain.log"

local given = ...
local ROUNDS = math.type(given) == "integer" and given or 100 -- a reader
local dir

-- Numbers from 0 to n - 1, the same in every run.
local function drawing(base)
  local count = 0
  return function(n)
    count = count + 1
    return (xt.seed(base, count) >> 1) % n
  end
end

local changes = {
  function(text, draw) return text:sub(1, draw(#text + 1)) end, -- cut off
  function(text, draw) -- some bytes changed
    local out = text
    for _ = 0, draw(8) do
      local at = 1 + draw(#out)
      out = out:sub(1, at - 1) .. string.char(draw(256)) .. out:sub(at + 1)
    end
    return out
  end,
  function(text, draw) -- one bit
    local at = 1 + draw(#text)
    return text:sub(1, at - 1) .. string.char(text:byte(at) ~ (1 << draw(8))) .. text:sub(at + 1)
  end,
  function(text, draw) -- a stretch taken out
    local at = 1 + draw(#text)
    return text:sub(1, at - 1) .. text:sub(at + 1 + draw(64))
  end,
  function(text, draw) -- a stretch repeated
    local at, n = 1 + draw(#text), 1 + draw(64)
    return text:sub(1, at + n) .. text:sub(at)
  end,
  function(text, draw) -- a number or a word of a text in place of another
    local words = { "0", "-1", "null", "{}", "[]", '""', "true", "1e999", "99999999999999999999",
      "9223372036854775807", "0.5", '"x"', "4294967296" }
    local from, to = text:find("[%w%-%.]+", 1 + draw(#text))
    if not from then return text .. "0" end
    return text:sub(1, from - 1) .. words[1 + draw(#words)] .. text:sub(to + 1)
  end,
}

-- Reads `text` changed in ROUNDS ways. read(path) -> value, or nil, message.
local function fuzz(name, text, read)
  local path, draw = dir .. "/" .. name, drawing(name)
  local refused = 0
  for round = 1, ROUNDS do
    local changed = text
    for _ = 0, draw(2) do
      if #changed > 0 then changed = changes[1 + draw(#changes)](changed, draw) end
    end
    local handle = assert(io.open(path, "wb"))
    handle:write(changed)
    handle:close()
    local ok, value, message = pcall(read, path)
    if not ok then
      error(("%s, round %d, raised: %s"):format(name, round, tostring(value)), 0)
    end
    if value == nil then
      refused = refused + 1
      assert.are.equal("string", type(message), ("%s, round %d"):format(name, round))
    end
    if round % 64 == 0 then xt.collect() end
  end
  if ROUNDS > 1000 then print(("%s: %d of %d refused"):format(name, refused, ROUNDS)) end
  assert.is_true(refused > ROUNDS // 20)
end

local function read_all(path)
  local handle = assert(io.open(path, "rb"))
  local text = handle:read "a"
  handle:close()
  return text
end

describe("broken files never break the reader of", function()
  setup(function()
    dir = os.tmpname()
    os.remove(dir)
    assert(file.mkdir(dir))
  end)
  teardown(function() file.remove_tree(dir) end)

  it("safetensors", function()
    local path = dir .. "/whole"
    assert(xt.safetensors.save(path, { a = xt.randn({ 3, 4 }, { seed = 1 }), b = xt.ones {},
      c = xt.zeros { 0, 3 }, ["d.e"] = xt.arange(5) }, { note = "x" }))
    fuzz("model.safetensors", read_all(path), function(at)
      local tensors, metadata = xt.safetensors.load(at)
      if not tensors then return nil, metadata end
      for _, t in pairs(tensors) do t:digest() end
      return tensors
    end)
  end)

  it("token shards", function()
    local ids = {}
    for i = 1, 200 do ids[i] = i end
    assert(xt.data.write_shard(dir .. "/whole", ids))
    local text = read_all(dir .. "/whole")
    fuzz("tokens.bin", text, function(at)
      local d, message = xt.data.tokens { files = at, seq = 16, batch = 2 }
      if not d then return nil, message end
      return (d:batch(1))
    end)
  end)

  it("tokenizer.json", function()
    local text = dir .. "/text"
    assert(file.write_atomic(text, require("training").text(3000)))
    local tokenizer = assert(xt.tokenizer.train { files = { text }, vocab = 300 })
    assert(tokenizer:save(dir))
    local whole = read_all(dir .. "/tokenizer.json")
    fuzz("changed.json", whole, function(at)
      local loaded, message = xt.tokenizer.load(at)
      if not loaded then return nil, message end
      local ok, ids = pcall(loaded.encode, loaded, "the lord said, \xF0\x9F\xA6\x99 12\xFF")
      if ok then return loaded:decode(ids) end
      assert(ids:find "no token for byte", ids) -- a vocabulary may lack some: that is misuse
      return true
    end)
  end)

  it("a save's state.json and tensors", function()
    local model = xt.models.qwen3 { vocab = 11, dim = 8, layers = 1, heads = 2, ffn = 8, seed = 1 }
    local params = xt.nn.params(model)
    local opt = xt.optim.adamw(params, {})
    local path = assert(save.write(dir, 1, params, opt:state(), { step = 1, seed = 1, tokens = 5,
      skips = 0, digest = save.hex(77), digest_bits = 77, options = { steps = 3 }, name = "x",
      model = { kind = "qwen3", config = model.config } }))
    local before = {}
    for i, param in ipairs(params) do before[i] = param.tensor:digest() end
    local function read()
      local info, message = save.read(path, params, { opt })
      if not info then return nil, message end
      assert(math.type(info.step) == "integer")
      return info
    end
    for _, name in ipairs { "state.json", "model.safetensors", "optim.safetensors" } do
      local whole = read_all(path .. "/" .. name)
      fuzz(name, whole, function(at)
        assert(os.rename(at, path .. "/" .. name))
        local info, message = read()
        save.load_model(path)
        return info, message
      end)
      assert(file.write_atomic(path .. "/" .. name, whole))
    end
    assert(read())
    for i, param in ipairs(params) do assert.are.equal(before[i], param.tensor:digest()) end
  end)

  it("metrics.jsonl", function()
    local rows = {}
    for step = 1, 20 do rows[step] = xt.json.encode { step = step, loss = step / 7 } .. "\n" end
    fuzz("metrics.jsonl", table.concat(rows), function(at)
      local ok, message = log.cut(at, 10)
      if not ok then return nil, message end
      local text = read_all(at)
      for line in text:gmatch "[^\n]+" do assert(xt.json.decode(line).step <= 10) end
      if text == table.concat(rows, "", 1, 10) then return text end
      return nil, "rows were lost"
    end)
  end)

  for _, kind in ipairs { "qwen3", "gpt2" } do
    it("a Hugging Face folder's config.json, of " .. kind, function()
      local model = xt.models[kind] { vocab = 11, dim = 8, layers = 1, heads = 2, ffn = 32,
        context = 16, seed = 1 }
      local path = dir .. "/" .. kind
      assert(xt.hf.save(path, model))
      fuzz(kind .. ".json", read_all(path .. "/config.json"), function(at)
        assert(os.rename(at, path .. "/config.json"))
        return xt.hf.load(path)
      end)
    end)
  end
end)
