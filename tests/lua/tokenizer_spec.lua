-- The tokenizer as a user sees it. Parity with the Hugging Face library runs on files outside the
-- project, where they are there.
local xt = require "xtrain"
local files = require "files"

local SHARED = "../shared/"
local read, write = files.read, files.write

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

-- A vocabulary of its own: bytes, merges, one control token.
local function small(dir, pattern)
  local path = write(dir .. "/text.txt", ("the cat sat on the mat, the rat ran. "):rep(20))
  return assert(xt.tokenizer.train { files = { path }, vocab = 290, pattern = pattern or "gpt2",
    special = { "<|end|>" } })
end

local function parity(name, source, special)
  local fixture, data = SHARED .. "fixtures/tokenizer/" .. name .. ".json", SHARED .. source
  if not (exists(fixture) and exists(data)) then
    pending("no " .. fixture .. " or no " .. data)
    return
  end
  local tok = assert(xt.tokenizer.load(data))
  local rows = xt.json.decode(read(fixture))
  assert.are.equal(412, #rows)
  for i, row in ipairs(rows) do
    local ids = tok:encode(row.text, { special = special })
    assert.are.same(row.ids, ids, "row " .. i)
  end
  return tok, rows
end

describe("tokenizer", function()
  it("gives GPT-2's ids, from the pair of files and from the ranks, and the text back", function()
    for _, source in ipairs { "data/gpt2/vocab.bpe", "data/gpt2/gpt2.tiktoken" } do
      local tok, rows = parity("gpt2", source, false)
      if not tok then return end
      for _, row in ipairs(rows) do
        assert.are.equal(row.text, tok:decode(tok:encode(row.text)))
      end
    end
  end)

  it("gives Qwen's ids with control tokens, and the text back in NFC", function()
    local tok, rows = parity("qwen3", "data/qwen/tokenizer.json", true)
    if not tok then return end
    assert.are.equal(151669, tok.vocab_size)
    local same = 0
    for _, row in ipairs(rows) do
      -- NFC is the fixed point: text that is in it comes back as it was, the rest settles there.
      local text = tok:decode(tok:encode(row.text))
      assert.are.equal(text, tok:decode(tok:encode(text)))
      if text == row.text then same = same + 1 end
    end
    assert.is_true(same > 350)
  end)

  it("takes the spelling of a control token for text unless asked", function()
    local tok = small(files.temporary(finally))
    local id = tok:id("<|end|>")
    assert.are.equal(tok.vocab_size - 1, id)
    local text = "a<|end|>b<|en"
    local plain, special = tok:encode(text), tok:encode(text, { special = true })
    local function count(ids)
      local n = 0
      for _, each in ipairs(ids) do n = n + (each == id and 1 or 0) end
      return n
    end
    assert.are.equal(0, count(plain))
    assert.are.equal(1, count(special))
    assert.are.equal(text, tok:decode(plain))
    assert.are.equal(text, tok:decode(special))
  end)

  it("the same for Qwen's own control tokens", function()
    if not exists(SHARED .. "data/qwen/tokenizer.json") then
      pending("no " .. SHARED .. "data/qwen")
      return
    end
    local tok = assert(xt.tokenizer.load(SHARED .. "data/qwen"))
    local id = tok:id("<|im_end|>")
    local plain = tok:encode("a<|im_end|>b")
    local special = tok:encode("a<|im_end|>b", { special = true })
    assert.are.equal(151645, id)
    for _, each in ipairs(plain) do assert.are_not.equal(id, each) end
    assert.are.same({ 64, id, 65 }, special)
    assert.are.equal("a<|im_end|>b", tok:decode(plain))
    assert.are.equal("a<|im_end|>b", tok:decode(special))
  end)

  it("brings back any bytes, valid UTF-8 or not", function()
    local tok = small(files.temporary(finally))
    local all = {}
    for i = 0, 255 do all[i + 1] = string.char(i) end
    for _, text in ipairs { "", "\0", table.concat(all), table.concat(all):reverse(),
      "\xff\xfe the \xe2\x82 cat \xf0\x9f\xa6", "\xed\xa0\x80", (" "):rep(1000),
      ("the"):rep(2000) } do
      assert.are.equal(text, tok:decode(tok:encode(text)))
    end
  end)

  it("has a vocabulary of bytes alone", function()
    local tok = xt.tokenizer.bytes()
    assert.are.equal(256, tok.vocab_size)
    assert.are.same({ 104, 195, 169, 0, 255 }, tok:encode("hé\0\xff"))
    assert.are.equal("hé\0\xff", tok:decode { 104, 195, 169, 0, 255 })
  end)

  it("streams whole characters only", function()
    local tok = xt.tokenizer.bytes()
    local stream, seen = tok:stream(), {}
    for _, id in ipairs(tok:encode("a🦙é")) do seen[#seen + 1] = stream:add(id) end
    assert.are.same({ "a", "", "", "", "🦙", "", "é" }, seen)
    assert.are.equal("", stream:add(0xe2))
    assert.are.equal("\xe2x", stream:add(("x"):byte())) -- no character begins so: out it goes
    assert.are.equal("", stream { 0xf0, 0x9f })
    assert.are.equal("\xf0\x9f", stream:finish())
    assert.are.equal("", stream:finish())
  end)

  it("packs ids for a shard without a Lua value each", function()
    local tok = small(files.temporary(finally))
    local text = "the cat sat on the \0\xff mat"
    local packed, width = tok:encode_bytes(text)
    local ids = tok:encode(text)
    assert.are.equal(2, width)
    assert.are.equal(("<" .. ("I2"):rep(#ids)):pack(table.unpack(ids)), packed)
  end)

  it("saves what it loads again, byte for byte the same", function()
    for _, pattern in ipairs { "gpt2", "qwen" } do
      local dir = files.temporary(finally)
      local tok = small(dir, pattern)
      assert(tok:save(dir .. "/a"))
      local again = assert(xt.tokenizer.load(dir .. "/a"))
      assert(again:save(dir .. "/b"))
      assert.are.equal(read(dir .. "/a/tokenizer.json"), read(dir .. "/b/tokenizer.json"))
      assert.are.equal(tok.vocab_size, again.vocab_size)
      local text = "the  cat's 12345 <|end|> Å日本"
      assert.are.same(tok:encode(text, { special = true }), again:encode(text, { special = true }))
    end
  end)

  it("trains the same vocabulary from the same text", function()
    local dir = files.temporary(finally)
    assert(small(dir):save(dir .. "/a"))
    assert(small(dir):save(dir .. "/b"))
    assert.are.equal(read(dir .. "/a/tokenizer.json"), read(dir .. "/b/tokenizer.json"))
  end)

  it("stops early when no pair is left that is seen twice", function()
    local dir = files.temporary(finally)
    local path = write(dir .. "/text", "aaaa aaaa")
    local tok = assert(xt.tokenizer.train { files = path, vocab = 1000, pattern = "gpt2" })
    assert.is_true(tok.vocab_size < 262)
  end)

  it("returns nil and a sentence that names the file when one cannot be used", function()
    local dir = files.temporary(finally)
    local tok, message = xt.tokenizer.load(dir .. "/none.json")
    assert.is_nil(tok)
    assert.has_match("none.json: No such file", message)
    tok, message = xt.tokenizer.load(dir)
    assert.is_nil(tok)
    assert.has_match("holds no tokenizer.json", message)
    tok, message = xt.tokenizer.load(write(dir .. "/x.json", '{"model": '))
    assert.is_nil(tok)
    assert.has_match("x.json: line 1, column", message)
    tok, message = xt.tokenizer.train { files = { dir .. "/none" }, vocab = 300, pattern = "gpt2" }
    assert.is_nil(tok)
    assert.has_match("none", message)
    tok, message = small(dir):save(dir .. "/text.txt/deep")
    assert.is_nil(tok)
    assert.has_match("text.txt", message)
  end)

  it("raises at misuse, naming argument and value", function()
    local tok = xt.tokenizer.bytes()
    local function says(pattern, fn, ...)
      local ok, message = pcall(fn, ...)
      assert.is_false(ok)
      assert.has_match(pattern, message)
    end
    says("tokenizer.encode: argument 1 is", tok.encode, tok, {})
    says("unknown option 'specal'; the options are special", tok.encode, tok, "a",
      { specal = true })
    says("special is", tok.encode, tok, "a", { special = 1 })
    says("id 256 at position 2: the vocabulary has 0 to 255", tok.decode, tok, { 1, 256 })
    says("id %-1 at position 1", tok.decode, tok, -1)
    says("id 1 is .*wanted an integer", tok.decode, tok, { "x" })
    says("wanted one of gpt2, qwen", xt.tokenizer.train,
      { files = "x", vocab = 300, pattern = "y" })
    says("vocab is 100, wanted 256", xt.tokenizer.train, { files = "x", vocab = 100 })
    says("'vocab' is missing", xt.tokenizer.train, { files = "x" })
    says("unknown option 'patern'", xt.tokenizer.load, "x", { patern = "gpt2" })
  end)

  it("keeps its vocabulary out of the Lua heap", function()
    if not exists(SHARED .. "data/gpt2/vocab.bpe") then
      pending("no " .. SHARED .. "data/gpt2")
      return
    end
    assert(xt.tokenizer.bytes())
    collectgarbage()
    local before = collectgarbage("count")
    local tok = assert(xt.tokenizer.load(SHARED .. "data/gpt2"))
    collectgarbage()
    assert.is_true(collectgarbage("count") - before < 16) -- KiB
    assert.are.equal("tokenizer: 50257 ids", tostring(tok))
  end)
end)
