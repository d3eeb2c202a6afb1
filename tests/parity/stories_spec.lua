-- A trained model of 260 K parameters in llama2.c's .bin layout: a wrong rotation, head order or
-- norm turns its prose into noise. Reads ../shared/data and ../shared/fixtures; else pending.
local xt = require "xtrain"

local MODEL = "../shared/data/stories260K/stories260K.bin"
local TOKENIZER = "../shared/data/stories260K/tok512.bin"
local WANTED = "../shared/fixtures/stories260K/greedy.json"

local BOS = 1

local function read(path)
  local handle = io.open(path, "rb")
  if not handle then return nil end
  local text = handle:read "a"
  handle:close()
  return text
end

-- seven i32: dim, ffn, layers, heads, kv_heads, vocab (positive: tied), seq; then f32 tensors, each
-- kind for all layers in a row.
local function load_bin(text, more)
  local dim, ffn, layers, heads, kv_heads, vocab, _, at = ("<i4i4i4i4i4i4i4"):unpack(text)
  local model = xt.models.llama { vocab = vocab, dim = dim, layers = layers, heads = heads,
    kv_heads = kv_heads, ffn = ffn, tied = true, eps = 1e-5, rope_layout = "interleaved",
    seed = false, attention = more and more.attention }
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

-- tok512.bin: i32 longest, then for each id f32 score, i32 length, bytes. Characters are merged
-- pair by pair, the pair of the highest score first; ids 3 .. 258 stand for the 256 bytes.
local function load_tokenizer(text)
  local pieces, scores, ids, at = {}, {}, {}, 5
  while at <= #text do
    local score, piece, next_at = ("<fs4"):unpack(text, at)
    pieces[#pieces + 1], scores[piece], at = piece, score, next_at
    ids[piece] = ids[piece] or #pieces - 1
  end
  local tok = {}
  function tok.encode(words)
    local parts = { " " }
    for char in words:gmatch(utf8.charpattern) do parts[#parts + 1] = char end
    while true do
      local best, where = -math.huge, nil
      for i = 1, #parts - 1 do
        local score = scores[parts[i] .. parts[i + 1]]
        if score and score > best then
          best, where = score, i
        end
      end
      if not where then break end
      parts[where] = parts[where] .. table.remove(parts, where + 1)
    end
    local out = {}
    for _, part in ipairs(parts) do
      if ids[part] then
        out[#out + 1] = ids[part]
      else
        for _, byte in ipairs { part:byte(1, -1) } do out[#out + 1] = byte + 3 end
      end
    end
    return out
  end
  function tok.decode(list)
    local out = {}
    for i, id in ipairs(list) do
      local piece = pieces[id + 1]
      local byte = piece:match "^<0x(%x%x)>$"
      out[i] = byte and string.char(tonumber(byte, 16)) or piece
    end
    return (table.concat(out):gsub("^ ", "")) -- the space that every text is given in front
  end
  return tok
end

describe("stories260K", function()
  local function test(title, fn)
    it(title, function()
      local bin, vocabulary, wanted = read(MODEL), read(TOKENIZER), read(WANTED)
      if not (bin and vocabulary and wanted) then
        pending("there is no " .. MODEL .. " or " .. WANTED)
        return
      end
      fn(load_bin(bin), load_tokenizer(vocabulary), xt.json.decode(wanted))
    end)
  end

  for _, attention in ipairs { "composed", "flash" } do
    test("continues greedily from BOS as llama2.c does: " .. attention .. " attention",
      function(_, tok, wanted)
        local model = load_bin(read(MODEL), { attention = attention })
        local ids = xt.generate(model, { BOS }, { max = #wanted.from_bos, temperature = 0 })
        assert.are.same(wanted.from_bos, ids)
        assert.are.equal(wanted.text, tok.decode(ids))
      end)
  end

  test("continues a prompt greedily as llama2.c does", function(model, tok, wanted)
    local prompt = tok.encode(wanted.prompt_text)
    assert.are.same(table.move(wanted.with_prompt, 1, #prompt, 1, {}), prompt)
    local given = table.move(prompt, 1, #prompt, 2, { BOS })
    local rest = xt.generate(model, given, { max = #wanted.with_prompt - #prompt,
      temperature = 0 })
    local ids = table.move(rest, 1, #rest, #prompt + 1, prompt)
    assert.are.same(wanted.with_prompt, ids)
    assert.are.equal(wanted.prompt_result_text, tok.decode(ids))
  end)

  test("one pass over all 200 ids picks the same ones as token by token", function(model, _, wanted)
    local given = table.move(wanted.from_bos, 1, #wanted.from_bos - 1, 2, { BOS })
    local logits = model(xt.tensor({ given }, { dtype = "i32" }))
    assert.are.same({ wanted.from_bos }, xt.argmax(logits, -1):totable())
  end)
end)
