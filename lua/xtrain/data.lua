-- Training data: token shards, memory-mapped by C, cut into windows of seq tokens. Which windows a
-- batch holds is a pure function of (seed, step, micro, rank), so any step can be made at any time
-- and a resumed run needs no position.
local xt = require "xtrain"
local options = require "xtrain.options"
local core = require "xtrain.core.data"
local fail = xt.core.fail

local M = {}

-- ---- a permutation without a table -------------------------------------------------------------

local ROUNDS = 4

-- A bijection of 0..n-1 for each key: a Feistel network on the next even number of bits, walked on
-- until it lands below n (at most four steps on average).
local function permutation(n)
  local half = 1
  while (1 << (2 * half)) < n do half = half + 1 end
  local mask = (1 << half) - 1
  local seed = xt.seed
  return function(key, i)
    repeat
      local left, right = i >> half, i & mask
      for round = 1, ROUNDS do
        left, right = right, left ~ (seed(key, round, right) & mask)
      end
      i = left << half | right
    until i < n
    return i
  end
end

-- ---- token shards ------------------------------------------------------------------------------

local tokens = {}
tokens.__index = tokens
tokens.__name = "data.tokens"

-- tokens{files, seq, batch = 1, seed = 0, accum = 1, rank = 0, world = 1}: files is a path or a
-- list of paths of token shards, batch the rows of one call. A window is seq tokens and the one
-- that follows; each epoch visits every window once, in an order of its own.
-- A file that cannot be read: nil, message.
function M.tokens(given)
  local o = options.read("data.tokens", given, { files = options.required,
    seq = options.size, batch = 1, seed = 0, accum = 1, rank = 0, world = 1 })
  local files = type(o.files) == "string" and { o.files } or o.files
  local handle, message = core.open(files)
  if not handle then return nil, message end
  local self = setmetatable({ handle = handle, seq = o.seq, rows = o.batch, seed = o.seed,
    accum = o.accum, rank = o.rank, world = o.world, starts = {} }, tokens)
  self.count = handle:count() -- of tokens
  self.windows = (self.count - 1) // o.seq
  if self.windows < 1 then
    return nil, ("data.tokens: %d tokens in %s, too few for one window of %d + 1"):format(
      self.count, table.concat(files, ", "), o.seq)
  end
  self.permute = permutation(self.windows)
  return self
end

-- The place of window number `number` (from 0, over all epochs) in the files, counted in windows.
function tokens:place(number)
  local epoch = number // self.windows
  return self.permute(xt.seed(self.seed, "epoch", epoch), number % self.windows)
end

-- The micro-batch `micro` (0..accum-1) of step (from 1): ids, labels (batch, seq) i32.
function tokens:batch(step, micro)
  micro = micro or 0
  if step < 1 then fail("data: steps count from 1, not " .. tostring(step)) end
  if micro < 0 or micro >= self.accum then
    fail(("data: micro-batch %s of %d, counted from 0"):format(micro, self.accum))
  end
  local first = (((step - 1) * self.world + self.rank) * self.accum + micro) * self.rows
  local starts = self.starts
  for row = 1, self.rows do starts[row] = self:place(first + row - 1) * self.seq end
  return self.handle:windows(starts, self.seq)
end

-- All windows once, in order: for ids, labels in d:in_order() do. The last batch may have fewer
-- rows; tokens after the last whole window are left out. most: of batches.
function tokens:in_order(most)
  local number, batches = 0, 0
  return function()
    if number >= self.windows or (most and batches >= most) then return nil end
    local starts = {}
    for row = 1, math.min(self.rows, self.windows - number) do
      starts[row] = (number + row - 1) * self.seq
    end
    number, batches = number + #starts, batches + 1
    return self.handle:windows(starts, self.seq)
  end
end

-- ---- held-out data -----------------------------------------------------------------------------

-- Cuts a text in two at the line end nearest after (1 - share) of it: training text, held-out text.
function M.split(text, share)
  local cut = math.floor(#text * (1 - share))
  cut = text:find("\n", math.max(cut, 1), true) or #text
  return text:sub(1, cut), text:sub(cut + 1)
end

-- The mean loss of a model over data in order, in nats a token, in eval mode: loss, count of
-- labels. most: of batches.
function M.evaluate(model, data, most)
  return xt.evaluating(model, function()
    local sum, count = 0.0, 0
    for ids, labels in data:in_order(most) do
      local loss, valid = model:loss(ids, labels, { reduction = "sum" })
      if type(valid) ~= "number" then valid = valid:item() end
      sum, count = sum + loss:item(), count + valid
      xt.collect()
    end
    return sum / count, count
  end)
end

-- nats a token -> bits a byte.
function M.bits_per_byte(nats, bytes_per_token) return nats / math.log(2) / bytes_per_token end

-- prepare{...}: from a text file to shards; see prepare.lua.
function M.prepare(given) return require("xtrain.prepare")(given) end

-- ---- shards ------------------------------------------------------------------------------------

local CHUNK = 512 -- ids packed at once

-- Writes token ids (a Lua array) as one shard: u16 when all are below 65536, else u32. Written
-- beside and renamed. Returns true, or nil, message.
function M.write_shard(path, ids)
  local largest = 0
  for _, id in ipairs(ids) do largest = math.max(largest, id) end
  local format, width = "I2", 2
  if largest > 0xFFFF then
    format, width = "I4", 4
  end
  local parts = {}
  for first = 1, #ids, CHUNK do
    local n = math.min(CHUNK, #ids - first + 1)
    parts[#parts + 1] = ("<" .. format:rep(n)):pack(table.unpack(ids, first, first + n - 1))
  end
  return core.write(path, table.concat(parts), width)
end

return M
