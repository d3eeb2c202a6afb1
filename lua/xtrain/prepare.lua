-- From one text file to what a recipe trains on: a vocabulary, token shards, a held-out end of the
-- text. Made once: a second call with the same settings finds everything there.
local xt = require "xtrain"
local options = require "xtrain.options"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"
local fail = xt.core.fail

local FACTS = "facts.json" -- written last: what it describes is whole

-- The text's path, once the file is there: made by a shell command where it is missing.
local function need_text(o)
  if file.exists(o.text) then return o.text end
  if o.make == "" then fail("data.prepare: there is no file " .. o.text) end
  file.mkdir(o.text:match("^(.*)/[^/]*$") or ".")
  io.stderr:write(("writing %s: %s\n"):format(o.text, o.make))
  local part = o.text .. ".part"
  os.execute(("%s </dev/null >'%s'"):format(o.make, part))
  local size = file.size(part)
  if not size or size == 0 then
    os.remove(part)
    fail(("data.prepare: there is no file %s, and '%s' did not make it%s"):format(o.text, o.make,
      o.hint ~= "" and "; " .. o.hint or ""))
  end
  assert(os.rename(part, o.text))
  return o.text
end

-- What the results depend on. Equal settings: nothing to do.
local function settings_of(o)
  local size, changed = file.size(o.text)
  return { text = o.text, bytes = size, changed = changed, vocab = o.vocab,
    held_out = o.held_out, pattern = o.pattern, tokenizer = o.tokenizer }
end

local function same(a, b)
  for name, value in pairs(a) do
    if b[name] ~= value then return false end
  end
  return true
end

local function known_facts(path, settings)
  if not file.exists(path) then return nil end
  local ok, facts = pcall(json.decode, file.read(path))
  if ok and type(facts) == "table" and same(settings, facts.settings or {}) then return facts end
end

local function must(ok, message)
  if not ok then fail("data.prepare: " .. tostring(message)) end
  return ok
end

-- Returns the count of tokens.
local function write_shard(tokenizer, text, path)
  local ids, width = tokenizer:encode_bytes(text)
  must(require("xtrain.core.data").write(path, ids, width))
  return #ids // width
end

-- prepare{text, dir, vocab = 2048, held_out = 0.05, pattern = "gpt2", tokenizer = "", make = "",
-- hint = ""}: text is the path of a text file, which the shell command `make` writes where it is
-- missing; dir is where the results go; tokenizer is the path of one to use, instead of a new one
-- with vocab ids. Returns {tokenizer = path, vocab (its number of ids: fewer than were wanted of a
-- short text), train = path, held_out = path, held_out_text = path, train_tokens, held_out_tokens,
-- bytes_per_token (of the held-out text)}.
local function prepare(given)
  local o = options.read("data.prepare", given, { text = options.required,
    dir = options.required, vocab = 2048, held_out = 0.05, pattern = "gpt2", tokenizer = "",
    make = "", hint = "" })
  need_text(o)
  local settings, path = settings_of(o), o.dir .. "/" .. FACTS
  local facts = known_facts(path, settings)
  if facts then return facts.made end
  must(file.mkdir(o.dir))
  io.stderr:write(("preparing %s: %s, then token shards\n"):format(o.text, o.tokenizer ~= ""
    and "the tokenizer " .. o.tokenizer or "a vocabulary of " .. o.vocab))
  local made = { tokenizer = o.dir .. "/tokenizer.json", train = o.dir .. "/train.bin",
    held_out = o.dir .. "/held-out.bin", train_text = o.dir .. "/train.txt",
    held_out_text = o.dir .. "/held-out.txt" }
  local data = require "xtrain.data"
  local train, held = data.split(must(file.read(o.text)), o.held_out)
  -- The vocabulary never sees the held-out text.
  must(file.write_atomic(made.train_text, train))
  must(file.write_atomic(made.held_out_text, held))
  local tokenizer
  if o.tokenizer ~= "" then
    tokenizer = must(xt.tokenizer.load(o.tokenizer))
  else
    tokenizer = must(xt.tokenizer.train { files = { made.train_text }, vocab = o.vocab,
      pattern = o.pattern })
  end
  must(tokenizer:save(o.dir))
  made.vocab = tokenizer.vocab_size
  made.train_tokens = write_shard(tokenizer, train, made.train)
  made.held_out_tokens = write_shard(tokenizer, held, made.held_out)
  made.bytes_per_token = #held / made.held_out_tokens
  must(file.write_atomic(path, json.encode { settings = settings, made = made } .. "\n"))
  return made
end

return prepare
