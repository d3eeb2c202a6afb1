-- Minimum, maximum, mean, standard deviation, NaNs and infinities of a tensor, at a bounded cost:
-- exact up to MOST_EXACT elements in memory, of a fixed sample beyond. An expanded dimension
-- repeats the same elements and is counted without being read. Only finite elements enter the
-- first four.
--
-- Everything on the tensor's device goes through ops, in pieces of CHUNK elements, so that a GPU
-- does it too and little memory is taken; few elements are read one by one.
local xt = require "xtrain"
local core = require "xtrain.core"

local FEW = 256 -- elements that are read one by one
local CHUNK = 65536
local MOST_EXACT = 1 << 22
local SAMPLE, BLOCK, MOST_BLOCKS = 4096, 64, 1024 -- elements, of them side by side, pieces

local M = {}

-- ---- adding up ---------------------------------------------------------------------------------

local function new_sums()
  return { n = 0, nan = 0, inf = 0, sum = 0.0, square = 0.0, min = math.huge, max = -math.huge }
end

-- Chan, Golub, LeVeque: sums of squares about their own means add up about the joint mean.
local function add(s, n, sum, square, min, max)
  if n == 0 then return end
  if s.n > 0 then
    local off = sum / n - s.sum / s.n
    square = square + off * off * s.n * n / (s.n + n)
  end
  s.n, s.sum, s.square = s.n + n, s.sum + sum, s.square + square
  s.min, s.max = math.min(s.min, min), math.max(s.max, max)
end

local function add_values(s, values)
  local n, sum, min, max = 0, 0.0, math.huge, -math.huge
  for _, x in ipairs(values) do
    if x ~= x then
      s.nan = s.nan + 1
    elseif x == math.huge or x == -math.huge then
      s.inf = s.inf + 1
    else
      n, sum, min, max = n + 1, sum + x, math.min(min, x), math.max(max, x)
    end
  end
  local square = 0.0
  for _, x in ipairs(values) do
    if x - x == 0 then square = square + (x - sum / n) ^ 2 end
  end
  add(s, n, sum, square, min, max)
end

-- A one-dimensional piece. Its finite elements alone are summed, when others are among them.
local function add_piece(s, piece)
  local x = piece:to "f64"
  local n = x.numel
  local sum = x:sum():item()
  if sum - sum == 0 then
    local off = x - sum / n
    return add(s, n, sum, (off * off):sum():item(), piece:amin():item(), piece:amax():item())
  end
  local count = function(mask) return mask:to "f64":sum():item() end
  local finite = xt.lt(x:abs(), math.huge)
  local nan = n - count(xt.eq(x, x))
  local whole = count(finite)
  s.nan, s.inf = s.nan + math.tointeger(nan), s.inf + math.tointeger(n - whole - nan)
  if whole == 0 then return end
  local fill = function(value) return xt.where(finite, x, value) end
  sum = fill(0):sum():item()
  local off = xt.where(finite, x - sum / whole, 0)
  add(s, math.tointeger(whole), sum, (off * off):sum():item(), fill(math.huge):amin():item(),
    fill(-math.huge):amax():item())
end

-- ---- reading -----------------------------------------------------------------------------------

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

local function each_value(t, fn)
  local shape, at = t.shape, {}
  local function walk(d)
    if d > #shape then return fn(core.at(t, table.unpack(at, 1, #shape))) end
    for i = 1, shape[d] do
      at[d] = i
      walk(d + 1)
    end
  end
  walk(1)
end

local function each_piece(t, fn)
  if t.numel <= CHUNK then return fn(t:reshape { -1 }) end
  local rows = t.shape[1]
  local inner = t.numel // rows
  if inner > CHUNK then
    for i = 1, rows do each_piece(t:select(1, i), fn) end
  else
    local step = CHUNK // inner
    for first = 1, rows, step do
      fn(t:slice(1, first, math.min(first + step - 1, rows)):reshape { -1 })
    end
  end
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
-- not. std divides by the number of elements. Called quietly (core.quietly).
function M.of(t)
  if t.numel == 0 then return nil end
  local s, sampled = new_sums(), nil
  local times
  t, times = distinct(t)
  if t.numel <= FEW then
    local values = {}
    each_value(t, function(x) values[#values + 1] = x end)
    add_values(s, values)
  elseif t.numel <= MOST_EXACT then
    each_piece(t, function(piece) add_piece(s, piece) end)
  else
    local piece = sample(t)
    sampled, times = piece.numel, 1
    add_piece(s, piece)
  end
  local out = { nan = s.nan * times, inf = s.inf * times, sampled = sampled }
  if s.n > 0 then
    out.min, out.max, out.mean = s.min, s.max, s.sum / s.n
    out.std = math.sqrt(s.square / s.n)
  end
  return out
end

return M
