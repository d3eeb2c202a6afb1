-- What a person wants to know of a tensor, at a bounded cost: the counts and moments of core.stats,
-- exact up to MOST_EXACT elements in memory, of a fixed sample beyond. An expanded dimension
-- repeats the same elements and is counted without being read.
local xt = require "xtrain"
local core = require "xtrain.core"

local MOST_EXACT = 1 << 22
local SAMPLE, BLOCK, MOST_BLOCKS = 4096, 64, 1024 -- elements, of them side by side, pieces

local M = {}

-- t without its repetitions, dimensions of larger strides first, and how often each element counts.
local function distinct(t)
  local shape, strides, times, order = t.shape, t:strides(), 1, {}
  for d = #shape, 1, -1 do
    if strides[d] == 0 or shape[d] == 1 then
      times = times * shape[d]
      t = t:select(d, 1)
      table.remove(strides, d)
    end
  end
  for d = 1, #strides do order[d] = d end
  table.sort(order, function(a, b)
    if strides[a] ~= strides[b] then return strides[a] > strides[b] end
    return a < b
  end)
  return t.ndim > 1 and t:permute(order) or t, times
end

-- Blocks of neighbours, one somewhere in each of as many equal parts of t in row-major order.
local function sample(t)
  if t:is_contiguous() then t = t:reshape { -1 } end
  local shape, blocks = t.shape, {}
  local last = shape[#shape]
  local length = math.min(BLOCK, last)
  local n = math.min(SAMPLE // length, MOST_BLOCKS)
  local part = t.numel // n
  for b = 0, n - 1 do
    local at = b * part + math.abs(xt.seed(0, b) >> 1) % (part - length + 1)
    local row, column = at // last, at % last
    local view = t
    for d = #shape - 1, 1, -1 do
      view = view:select(d, row % shape[d] + 1)
      row = row // shape[d]
    end
    column = math.min(column, last - length)
    blocks[#blocks + 1] = view:slice(1, column + 1, column + length)
  end
  return xt.concat(blocks)
end

-- of(t) -> {min, max, mean, std, nan, inf, sampled}, or nil for what has no elements. Counts are of
-- the whole tensor when it was read whole. sampled: the number of elements looked at, when it was
-- not. std divides by the number of elements; only finite ones enter the first four, which are nil
-- where there is none. Called quietly (core.quietly).
function M.of(t)
  if t.numel == 0 then return nil end
  local sampled, times
  t, times = distinct(t)
  if t.numel > MOST_EXACT then
    t = sample(t)
    sampled, times = t.numel, 1
  end
  local s = core.stats(t)
  local out = { nan = s.nans * times, inf = (s.infs + s.minus_infs) * times, sampled = sampled }
  if s.finite > 0 then out.min, out.max, out.mean, out.std = s.min, s.max, s.mean, s.std end
  return out
end

return M
