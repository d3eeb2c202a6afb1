-- Text to token ids and back: byte-level BPE, as GPT-2, Qwen and many others use it. The vocabulary
-- and the work are in C (runtime/io/tokenizer.h); here are the options and the stream.
--
-- A tokenizer has
--   tok:encode(s [, {special = false}]) -> list of ids. s may be any bytes. Text that spells a
--       control token ("<|im_end|>") stays text unless special is true. No token is ever added.
--   tok:encode_bytes(s [, {special = false}]) -> string, width: the same ids packed little-endian
--       in width bytes each, 2 when vocab_size is at most 65536 and else 4: what a token shard
--       holds, without a Lua value for each id
--   tok:decode(ids) -> string; ids is a list or one id. An id the vocabulary lacks is an error.
--   tok:stream() -> incremental decoder, below
--   tok:id(s) -> the id of the token that is exactly s, control tokens first, or nil
--   tok:save(dir) -> true, or nil, message: dir/tokenizer.json, for the Hugging Face library too
--   tok.vocab_size: the largest id + 1
-- decode(encode(s)) == s for every s, but where the tokenizer brings text to NFC first ("qwen").
local options = require "xtrain.options"
local core = require "xtrain.core.tokenizer"
local choice = options.choice

local M = {}

local PATTERNS = { "gpt2", "qwen" }

-- load(path [, {pattern = "gpt2"|"qwen"}]) -> tokenizer, or nil, message. path: a tokenizer.json,
-- a folder with one or with vocab.bpe and encoder.json (or merges.txt and vocab.json), or a
-- .tiktoken rank file. pattern: how text is cut before merging, for files that do not say it:
-- "gpt2" unless the ranks show that digits stand alone, as in "qwen", which also means NFC.
function M.load(path, given)
  local o = options.read("tokenizer.load", given, { pattern = options.optional })
  if type(path) ~= "string" then
    error(("tokenizer.load: path is a %s, wanted a string"):format(type(path)), 2)
  end
  if o.pattern then choice("tokenizer.load", "pattern", o.pattern, PATTERNS) end
  return core.load(path, o.pattern)
end

-- train{files, vocab, pattern = "gpt2"|"qwen", special = {}} -> tokenizer, or nil, message. files:
-- a path or a list of paths of text (.gz and .zst too); vocab: how many ids: 256 bytes, merges,
-- then the special tokens. Fewer when no pair of tokens is left that is seen twice. The same text
-- gives the same vocabulary: of pairs seen equally often the one with the lowest ids is merged.
function M.train(given)
  local o = options.read("tokenizer.train", given, { files = options.required,
    vocab = options.size, pattern = "gpt2", special = {} })
  choice("tokenizer.train", "pattern", o.pattern, PATTERNS)
  local files = type(o.files) == "string" and { o.files } or o.files
  if type(files) ~= "table" or #files == 0 then
    error("tokenizer.train: option 'files' wants a path or a list of paths", 2)
  end
  if math.type(o.vocab) ~= "integer" then
    error("tokenizer.train: option 'vocab' wants an integer, not " .. tostring(o.vocab), 2)
  end
  return core.train(files, o.vocab, o.pattern, o.special)
end

-- bytes() -> the tokenizer whose 256 ids are the bytes themselves.
function M.bytes() return core.bytes() end

-- ---- the stream --------------------------------------------------------------------------------

local stream = {}
stream.__index = stream
stream.__name = "tokenizer.stream"

-- Takes an id or a list of ids, returns the text that is complete now, perhaps "": the first bytes
-- of a character whose last ones are still to come are held back. A stream is also callable.
function stream:add(ids)
  local text = self.held .. self.tokenizer:decode(ids)
  local whole = core.whole(text)
  self.held = text:sub(whole + 1)
  return text:sub(1, whole)
end
stream.__call = stream.add

-- What is still held back, and begins anew.
function stream:finish()
  local text = self.held
  self.held = ""
  return text
end

function core.methods:stream()
  return setmetatable({ tokenizer = self, held = "" }, stream)
end

return M
