-- Keys and values of the tokens a model has seen, layer by layer, for generation. Room is made in
-- doubling blocks, and new rows are written in place: used under no_grad only. In a graph the
-- blocks go in and come out, and where the next row stands is an input.
local xt = require "xtrain"

local M = {}

local cache = {}
cache.__index = cache

-- rows: how many tokens to make room for at first.
function M.new(rows)
  return setmetatable({ length = 0, rows = rows or 64, blocks = {} }, cache)
end

-- A (B, rows, H, D) tensor that begins with the first `length` rows of `old`.
local function grown(old, length, like, rows)
  local shape = like.shape
  local new = xt.zeros({ shape[1], rows, shape[3], shape[4] },
    { dtype = like.dtype, device = like.device })
  if old and length > 0 then new:slice(2, 1, length):copy_(old:slice(2, 1, length)) end
  return new
end

-- The block of layer `index`, with room for `last` rows like k and v.
local function with_room(self, index, k, v, last)
  local block = self.blocks[index]
  if block and block.rows >= last then return block end
  local rows = math.max(last, self.rows, block and 2 * block.rows or 0)
  block = { rows = rows, k = grown(block and block.k, self.length, k, rows),
    v = grown(block and block.v, self.length, v, rows) }
  self.blocks[index] = block
  return block
end

-- Appends k and v (B, S, H, D) to layer `index`; returns all rows so far. The length itself moves
-- by `advance`, once all layers have been extended.
function cache:extend(index, k, v)
  local last = self.length + k.shape[2]
  local block = with_room(self, index, k, v, last)
  block.k:slice(2, self.length + 1, last):copy_(k)
  block.v:slice(2, self.length + 1, last):copy_(v)
  return block.k:slice(2, 1, last), block.v:slice(2, 1, last)
end

function cache:advance(rows) self.length = self.length + rows end

-- Makes room for one row more; whether blocks were replaced.
function cache:reserve()
  local before = self.blocks[1]
  for i, block in ipairs(self.blocks) do
    with_room(self, i, block.k, block.v, self.length + 1)
  end
  return self.blocks[1] ~= before
end

-- ---- in a graph --------------------------------------------------------------------------------

local fed = {}
fed.__index = fed

-- For a graph that decodes one token: layer i's blocks are the lent inputs k.i and v.i, the number
-- of rows before the token is the input `at`. `out` gathers what the export gives back.
function M.fed(b, from)
  local at = b:input("at", 0)
  local batch = from.blocks[1].k.shape[1]
  return setmetatable({ b = b, from = from, out = {}, positions = at:reshape { 1 },
    lengths = (at + 1):reshape { 1 }:expand { batch } }, fed)
end

-- k and v (B, 1, H, D). Returns whole blocks, whose rows from `lengths` on do not count.
function fed:extend(index, k, v)
  local block = self.from.blocks[index]
  local names = { "k." .. index, "v." .. index }
  local keys = self.b:input(names[1], block.k, { lent = true })
  local values = self.b:input(names[2], block.v, { lent = true })
  xt.index_copy_(keys, 2, self.positions, k)
  xt.index_copy_(values, 2, self.positions, v)
  self.out[names[1]], self.out[names[2]] = keys, values
  return keys, values
end

function fed:advance() end -- the caller counts

return M
