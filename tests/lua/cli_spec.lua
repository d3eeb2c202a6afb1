-- The verbs that work on models and texts: tokenize, generate, eval, export.
local xt = require "xtrain"
local files = require "files"
local program = os.getenv "XTRAIN"

if not program then
  pending("XTRAIN names no program to test")
  return
end

local read = files.read
local dir -- of this file's own, with a tokenizer and a model in it

local function write(name, text) return files.write(dir .. "/" .. name, text) end

-- Standard output, standard error, exit status. input: a shell command that goes before the pipe.
local function run(words, input)
  local line = ("%s%s %s %s > DIR/out 2> DIR/err"):format(input and input .. " | " or "", program,
    words, input and "" or "< /dev/null")
  local _, _, status = os.execute((line:gsub("DIR", dir)))
  return read(dir .. "/out"), read(dir .. "/err"), status
end

-- As run, for what must go well: standard output.
local function works(words, input)
  local out, err, status = run(words, input)
  assert.are.equal("", err)
  assert.are.equal(0, status)
  return out
end

local function fails(words, status, message)
  local out, err, code = run(words)
  assert.is_truthy(err:find(message, 1, true), "got: " .. err .. out)
  assert.are.equal(status, code)
end

-- The ids of a shard, after checking its header.
local function shard(name)
  local text = read(dir .. "/" .. name)
  local magic, version, count = ("<i4i4i4"):unpack(text)
  assert.are.equal(20240520, magic)
  local width = 2 * version
  assert.are.equal(1024 + count * width, #text)
  local ids, format = {}, "<I" .. width
  for i = 1, count do ids[i] = format:unpack(text, 1025 + (i - 1) * width) end
  return ids
end

local TEXT = "the cat sat on the mat.\nthe dog sat on the log, and the cat saw it.\n"

setup(function()
  dir = os.tmpname()
  os.remove(dir)
  assert(os.execute("mkdir '" .. dir .. "'"))
  local text = write("corpus.txt", TEXT:rep(40))
  local tok = assert(xt.tokenizer.train { files = { text }, vocab = 300,
    special = { "<|endoftext|>" } })
  assert(tok:save(dir .. "/tok"))
  local model = xt.models.qwen3 { vocab = tok.vocab_size, dim = 16, layers = 1, heads = 2,
    ffn = 24, seed = 1 }
  assert(xt.hf.save(dir .. "/model", model, tok))
  write("a.txt", TEXT)
end)

teardown(function() os.execute("rm -rf '" .. dir .. "'") end)

describe("xtrain tokenize", function()
  local TOKENIZE = "tokenize --tokenizer DIR/tok --out DIR/s "

  local function documents(...)
    local tok, ids = assert(xt.tokenizer.load(dir .. "/tok")), {}
    for _, document in ipairs { ... } do
      ids[#ids + 1] = tok:id("<|endoftext|>")
      for _, id in ipairs(tok:encode(document)) do ids[#ids + 1] = id end
    end
    return ids
  end

  it("turns text into a shard, unpacked or not", function()
    os.execute(("cd '%s' && gzip -c a.txt > b.txt.gz"):format(dir))
    local out = works(TOKENIZE .. "DIR/a.txt DIR/b.txt.gz")
    local want = documents(TEXT)
    assert.are.same(want, shard "s/a.bin")
    assert.are.same(want, shard "s/b.bin")
    assert.is_truthy(out:find(("s/a.bin: %d tokens, %.3f bytes a token"):format(#want,
      #TEXT / #want), 1, true), out)
    if os.execute "command -v zstd > /dev/null" then
      os.execute(("cd '%s' && zstd -q -c a.txt > c.txt.zst"):format(dir))
      works(TOKENIZE .. "DIR/c.txt.zst")
      assert.are.same(want, shard "s/c.bin")
    end
  end)

  it("turns each line of JSONL into a document", function()
    write("d.jsonl", '{"text": "the cat", "id": 1}\n\n{"text": "\\u00e9\\n<|endoftext|>"}')
    os.execute(("cd '%s' && gzip -c d.jsonl > e.jsonl.gz"):format(dir))
    works(TOKENIZE .. "DIR/d.jsonl DIR/e.jsonl.gz")
    -- What spells a control token inside a document is text.
    local want = documents("the cat", "é\n<|endoftext|>")
    assert.are.same(want, shard "s/d.bin")
    assert.are.same(want, shard "s/e.bin")
  end)

  it("reads standard input and pipes, packed or not", function()
    local want = documents(TEXT)
    for _, command in ipairs { "cat DIR/a.txt", "gzip -c DIR/a.txt" } do
      os.remove(dir .. "/s/stdin.bin")
      works(TOKENIZE .. "-", command)
      assert.are.same(want, shard "s/stdin.bin")
    end
    write("rows", '{"text": "the"}\n{"text": "dog"}\n')
    works(TOKENIZE .. "--format jsonl -", "cat DIR/rows")
    assert.are.same(documents("the", "dog"), shard "s/stdin.bin")
    works(TOKENIZE .. "/dev/stdin", "cat DIR/a.txt")
    assert.are.same(want, shard "s/stdin.bin")
  end)

  it("makes shards that training reads", function()
    works(TOKENIZE .. "DIR/corpus.txt")
    local d = assert(xt.data.tokens { files = dir .. "/s/corpus.bin", seq = 8, batch = 2,
      seed = 1 })
    assert.are.equal(#shard "s/corpus.bin", d.count)
    assert.are.same({ 2, 8 }, (d:batch(1)).shape)
  end)

  it("says what is wrong: status 2 for words, 1 for files", function()
    write("bad.jsonl", '{"text": "the"}\n\n{"txt": "dog"}\n')
    fails("tokenize --tokenizer DIR/tok --out DIR/s", 2, "usage: xtrain tokenize")
    fails("tokenize --out DIR/s DIR/a.txt", 2, "--tokenizer is missing")
    fails("tokenize --tokeniser DIR/tok --out DIR/s DIR/a.txt", 2, "did you mean --tokenizer?")
    fails(TOKENIZE .. "--format csv DIR/a.txt", 2, "text or jsonl")
    fails(TOKENIZE .. "DIR/a.txt DIR/x/a.txt", 2, "would both go to")
    fails(TOKENIZE .. "DIR/none.txt", 1, "none.txt: No such file")
    fails("tokenize --tokenizer DIR/none --out DIR/s DIR/a.txt", 1, "none")
    fails(TOKENIZE .. "DIR/bad.jsonl", 1, "bad.jsonl: line 3")
    fails("tokenize --tokenizer DIR/tok --out DIR/a.txt/s DIR/a.txt", 1, "a.txt")
  end)
end)

describe("xtrain generate", function()
  it("continues a text, the same for the same seed", function()
    local words = "generate DIR/model --prompt 'the cat' --max 12 --temperature 0.9 --seed "
    local one = works(words .. "3")
    assert.are.equal("the cat", one:sub(1, 7))
    assert.are.equal("\n", one:sub(-1))
    assert.are.equal(one, works(words .. "3"))
    assert.are_not.equal(one, works(words .. "4"))
  end)

  it("at temperature 0 prints what xt.generate gives", function()
    local model = assert(xt.hf.load(dir .. "/model"))
    local tok = assert(xt.tokenizer.load(dir .. "/model"))
    local ids = xt.generate(model, tok:encode("the dog"), { max = 9, temperature = 0 })
    assert.are.equal("the dog" .. tok:decode(ids) .. "\n",
      works "generate DIR/model --prompt 'the dog' --max 9 --temperature 0")
  end)

  it("says what is wrong", function()
    fails("generate DIR/model", 2, "--prompt is missing")
    fails("generate DIR/model --prompt ''", 2, "--prompt is empty")
    fails("generate DIR/model --prompt a --max x", 2, "--max is 'x', wanted a number")
    fails("generate DIR/none --prompt a", 1, "there is no such folder")
    fails("generate DIR/tok --prompt a", 1, "config.json")
  end)
end)

describe("xtrain eval", function()
  it("prints mean loss, perplexity and bits a byte", function()
    local out = works "eval DIR/model DIR/a.txt DIR/a.txt --seq 16"
    local loss, perplexity, bits, tokens, bytes = out:match("a.txt: loss ([%d.]+), "
      .. "perplexity ([%d.]+), ([%d.]+) bits/byte, (%d+) tokens, (%d+) bytes")
    assert.is_truthy(loss, out)
    local tok = assert(xt.tokenizer.load(dir .. "/tok"))
    local model = assert(xt.hf.load(dir .. "/model"))
    local ids = tok:encode(TEXT)
    local function part(a, b)
      return xt.tensor({ { table.unpack(ids, a, b) } }, { dtype = "i32" })
    end
    local sum = 0
    for first = 1, #ids - 1, 16 do
      local last = math.min(first + 15, #ids - 1)
      sum = sum + model:loss(part(first, last), part(first + 1, last + 1),
        { reduction = "sum" }):item()
    end
    local mean = sum / (#ids - 1)
    assert.is_near(mean, tonumber(loss), 1e-4)
    assert.is_near(math.exp(mean), tonumber(perplexity), 0.01)
    assert.is_near(mean * #ids / #TEXT / math.log(2), tonumber(bits), 1e-4)
    assert.are.equal(#ids, tonumber(tokens))
    assert.are.equal(#TEXT, tonumber(bytes))
    assert.are.equal(2, select(2, out:gsub("a%.txt: loss", "")))
  end)

  it("says what is wrong", function()
    fails("eval DIR/model", 2, "usage: xtrain eval")
    fails("eval DIR/model DIR/none.txt", 1, "none.txt")
    write("empty.txt", "")
    fails("eval DIR/model DIR/empty.txt", 1, "fewer than two tokens")
  end)
end)

describe("xtrain export", function()
  it("writes a Hugging Face folder, bf16 unless asked, the same each time", function()
    works "export DIR/model DIR/half"
    for _, name in ipairs { "config.json", "model.safetensors", "tokenizer.json" } do
      assert.is_true(#read(dir .. "/half/" .. name) > 0)
    end
    for _, tensor in pairs((assert(xt.safetensors.load(dir .. "/half/model.safetensors")))) do
      assert.are.equal("bf16", tensor.dtype)
    end
    works "export DIR/model DIR/again"
    assert.are.equal(read(dir .. "/half/model.safetensors"),
      read(dir .. "/again/model.safetensors"))
    works "export DIR/model DIR/whole --dtype f32"
    local a = assert(xt.safetensors.load(dir .. "/model/model.safetensors"))
    local b = assert(xt.safetensors.load(dir .. "/whole/model.safetensors"))
    for name, tensor in pairs(a) do
      assert.are.equal(tensor:to("f32"):digest(), b[name]:digest(), name)
    end
    assert.matches("^the", works "generate DIR/half --prompt the --max 3")
  end)

  it("says what is wrong", function()
    fails("export DIR/model", 2, "usage: xtrain export")
    fails("export DIR/none DIR/out", 1, "there is no such folder")
    fails("export DIR/model DIR/half --dtype f31", 1, "f31")
  end)
end)
