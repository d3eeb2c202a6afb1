-- A trained model of 260 K parameters in llama2.c's .bin layout: a wrong rotation, head order or norm
-- turns its prose into noise. Reads ../shared/data and ../shared/fixtures; pending without them.
local xt = require "xtrain"

local MODEL = "../shared/data/stories260K/stories260K.bin"
local WANTED = "../shared/fixtures/stories260K/greedy.json"

local function read(path)
  local handle = io.open(path, "rb")
  if not handle then return nil end
  local text = handle:read "a"
  handle:close()
  return text
end

-- seven i32: dim, ffn, layers, heads, kv_heads, vocab (positive: tied), seq; then f32 tensors, each
-- kind for all layers in a row.
local function load_bin(text)
  local dim, ffn, layers, heads, kv_heads, vocab, _, at = ("<i4i4i4i4i4i4i4"):unpack(text)
  local model = xt.models.llama { vocab = vocab, dim = dim, layers = layers, heads = heads,
    kv_heads = kv_heads, ffn = ffn, tied = true, eps = 1e-5, rope_layout = "interleaved",
    seed = false }
  local function fill(t)
    local bytes = 4 * t.numel
    t:copy_(xt.from_bytes(text:sub(at, at + bytes - 1), "f32", t.shape))
    at = at + bytes
  end
  local function each(pick)
    for _, block in ipairs(model.blocks) do fill(pick(block)) end
  end
  xt.no_grad(function()
    fill(model.embed.weight)
    each(function(b) return b.attn_norm.weight end)
    for _, name in ipairs { "wq", "wk", "wv", "wo" } do
      each(function(b) return b.attn[name] end)
    end
    each(function(b) return b.mlp_norm.weight end)
    for _, name in ipairs { "gate", "down", "up" } do
      each(function(b) return b.mlp[name] end)
    end
    fill(model.norm.weight)
  end)
  return model
end

describe("stories260K", function()
  local function test(title, key)
    it(title, function()
      local text, wanted = read(MODEL), read(WANTED)
      if not (text and wanted) then
        pending("there is no " .. MODEL .. " or " .. WANTED)
        return
      end
      local ids = xt.json.decode(wanted)[key]
      local model = load_bin(text)
      local prompt = { 1 }
      -- Of a prompted text the first ids are the prompt's; any cut is as good as another.
      if key ~= "from_bos" then table.move(ids, 1, 12, 2, prompt) end
      local rest = table.move(ids, #prompt, #ids, 1, {})
      assert.are.same(rest, xt.generate(model, prompt, { max = #rest, temperature = 0 }))
    end)
  end
  test("continues greedily from the start as llama2.c does", "from_bos")
  test("continues a prompt greedily as llama2.c does", "with_prompt")
end)
