-- Functions that are told of every call and every record that a backward passes; what
-- xtrain/watch.lua, trace.lua and compare.lua are made of. The events are those of
-- lua/bind/observe.c.
local core = require "xtrain.core"
local nn = require "xtrain.nn"
local active = require "xtrain.active"

local M = {}

local observers = {} -- in the order in which they came

local function tell(event)
  for _, fn in ipairs(table.move(observers, 1, #observers, 1, {})) do fn(event) end
end

-- fn(event) for what happens from now on, until remove(fn).
function M.add(fn)
  observers[#observers + 1] = fn
  core.observe(tell)
end

function M.remove(fn)
  for i = #observers, 1, -1 do
    if observers[i] == fn then table.remove(observers, i) end
  end
  if #observers == 0 then core.observe(nil) end
end

-- Runs fn() with an observer: what fn returns. Raises what fn raises.
function M.during(observer, fn)
  M.add(observer)
  local results = table.pack(pcall(fn))
  M.remove(observer)
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- ---- names of variables ------------------------------------------------------------------------

-- {[leaf] = {name, tensor}} of the parameters of a model; without one, of the run in progress.
function M.parameters(model)
  local by_leaf = {}
  local function add(params)
    for _, param in ipairs(params) do
      local leaf = core.leaf(param.tensor)
      if leaf and not by_leaf[leaf] then by_leaf[leaf] = param end
    end
  end
  if model then
    add(nn.params(model))
  elseif active.run then
    for _, each in ipairs(active.run.own.models) do add(nn.params(each)) end
    for _, each in ipairs(active.run.own.optimizers) do add(each.params) end
  end
  return by_leaf
end

-- ---- texts -------------------------------------------------------------------------------------

-- "f32 2x3"
function M.shape_text(t)
  local shape = t.shape
  return t.dtype .. " " .. (#shape == 0 and "scalar" or table.concat(shape, "x"))
end

-- "f32 2x3: min 0, max 1, mean .5, std .1"
function M.describe(t) return M.shape_text(t) .. ": " .. core.stats(t).text end

-- The place of an element that is counted in row-major order from 1: 7 of {2, 3, 4} ->
-- "[1][2][3]".
function M.index_text(element, shape)
  local rest, parts = element - 1, {}
  for d = #shape, 1, -1 do
    parts[d] = ("[%d]"):format(rest % shape[d] + 1)
    rest = rest // shape[d]
  end
  return #parts > 0 and table.concat(parts) or "the only one"
end

return M
