-- Keys and values of the tokens a model has seen, layer by layer, for generation. Room is made in
-- doubling blocks, and new rows are written in place: used under no_grad only.
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

-- Appends k and v (B, S, H, D) to layer `index`; returns all rows so far. The length itself moves
-- by `advance`, once all layers have been extended.
function cache:extend(index, k, v)
  local block = self.blocks[index]
  local last = self.length + k.shape[2]
  if not block or block.rows < last then
    local rows = math.max(last, self.rows, block and 2 * block.rows or 0)
    block = { rows = rows, k = grown(block and block.k, self.length, k, rows),
      v = grown(block and block.v, self.length, v, rows) }
    self.blocks[index] = block
  end
  block.k:slice(2, self.length + 1, last):copy_(k)
  block.v:slice(2, self.length + 1, last):copy_(v)
  return block.k:slice(2, 1, last), block.v:slice(2, 1, last)
end

function cache:advance(rows) self.length = self.length + rows end

return M
