-- xt.debug.compare: the first op whose results part between two ways to run a function.
local xt = require "xtrain"
local core = require "xtrain.core"
local options = require "xtrain.options"
local observe = require "xtrain.observe"

local M = {}

-- By how much, of the largest element, results of a dtype may differ by rounding alone.
local TOLERANCE = { f64 = 1e-10, f32 = 1e-4, f16 = 4e-3, bf16 = 3e-2 }

-- ---- running one way ---------------------------------------------------------------------------

-- "cpu" or {device = "cpu", threads, dtype, ...} -> the table.
local function side_of(given, which)
  if type(given) == "string" then given = { device = given } end
  if type(given) ~= "table" then
    core.fail(("compare: %s is a %s, wanted a device, or a table such as {device = \"cpu\", "
      .. "threads = 1}"):format(which, type(given)))
  end
  local side = {}
  for name, value in pairs(given) do side[name] = value end
  side.device = side.device or xt.device()
  return side
end

local function side_text(side)
  local parts = {}
  for _, name in ipairs(options.names(side)) do
    parts[#parts + 1] = name == "device" and side[name] or name .. "=" .. tostring(side[name])
  end
  return table.concat(parts, " ")
end

-- Calls fn(device, side) with that default device and number of threads, and seen(event) for each
-- call of an op that computes something: whether a gradient is copied depends on how it lies and
-- on who else holds it.
local function run(fn, side, seen)
  local device, threads = xt.device(), xt.threads()
  xt.device(side.device)
  if side.threads then xt.threads(side.threads) end
  local ok, message = pcall(observe.during, function(e)
    if e.kind == "call" and e.op ~= "contiguous" then seen(e) end
  end, function() fn(side.device, side) end)
  xt.device(device)
  xt.threads(threads)
  if not ok then error(message, 0) end
end

-- Calls are paired by op, line, direction and the composed op that they are part of, the n-th with
-- the n-th: two devices may compose an op of different parts.
local function numbered(counts, e)
  local key = ("%s at %s%s%s"):format(e.op, e.where,
    e.rule and ", in the backward of " .. e.rule or ", in forward",
    e.within and " of " .. e.within or "")
  counts[key] = (counts[key] or 0) + 1
  return key .. " #" .. counts[key], key
end

-- ---- one result --------------------------------------------------------------------------------

local function on_host(t) return t.device == "cpu" and t or t:to "cpu" end

-- The largest difference of two results, as a share of the largest element; and where it is: flat
-- element, both values. NaNs in the same places and equal infinities are equal.
local function difference(a, b)
  if table.concat(a.shape, "x") ~= table.concat(b.shape, "x") then return math.huge, 1 end
  if a.numel == 0 then return 0, 1 end
  a, b = a:reshape { -1 }, on_host(b):to "f64":reshape { -1 }
  local off = xt.abs(a - b) -- NaN where either is, or both are the same infinity
  local same = xt.maximum(xt.cast(xt.eq(a, b), "f64"),
    (1 - xt.cast(xt.eq(a, a), "f64")) * (1 - xt.cast(xt.eq(b, b), "f64")))
  local odd = 1 - xt.cast(xt.eq(off, off), "f64")
  off = xt.masked_fill(xt.masked_fill(off, xt.cast(odd, "u8"), math.huge),
    xt.cast(same, "u8"), 0)
  local element = xt.argmax(off):item() + 1
  local worst = off[element]:item()
  local finite = xt.masked_fill(a, xt.cast(1 - xt.cast(xt.eq(a - a, 0), "f64"), "u8"), 0)
  local size = xt.amax(xt.abs(finite)):item()
  if worst == 0 then return 0, element end
  return size > 0 and worst / size or math.huge, element, a[element]:item(), b[element]:item()
end

-- What a call has made: its results, and the inputs that it wrote. A view makes nothing.
local function results_of(e)
  local list, given = {}, {}
  for i = 1, e.n_in do
    local t = e.inputs[i]
    if t then given[core.storage(t)] = true end
    if t and i <= 64 and e.written >> (i - 1) & 1 == 1 then list[#list + 1] = t end
  end
  for k = 1, e.n_out do
    local t = e.outputs[k]
    if t and not given[core.storage(t)] then list[#list + 1] = t end
  end
  return list
end

-- ---- the function ------------------------------------------------------------------------------

local report_meta = {
  __tostring = function(r) return table.concat(r.lines, "\n") end,
}

-- What the first run made: values on the host as f64, and dtypes.
local function first_run(fn, side)
  local made, counts, n = {}, {}, 0
  run(fn, side, function(e)
    local key, name = numbered(counts, e)
    local values = {}
    for k, t in ipairs(results_of(e)) do
      values[k] = { value = on_host(t):to("f64"):clone(), dtype = t.dtype }
    end
    made[key] = { values = values, name = name, seen = false }
    n = n + 1
  end)
  return made, n
end

-- compare(fn, a, b [, {tol}]): runs fn(device, side) twice, and names the first op in the order of
-- the second run, forward or backward, whose results are not the same. a and b are devices, or
-- tables {device, threads, ...}, whose other fields are fn's to read: {device = "cpu", dtype =
-- "bf16"}. fn makes what it computes with on that device, which is the default one meanwhile. tol
-- is the largest difference, as a share of the largest element of a result; by default what
-- rounding may do in the coarsest dtype so far (f64 1e-10, f32 1e-4, f16 4e-3, bf16 3e-2), and 0
-- asks for the same bits. Copies (contiguous) are left out. Returns true or false, and a report
-- {op, where, rule, element, index, a, b, difference, inputs (how far they were apart already),
-- calls, unpaired, lines}.
function M.compare(fn, a, b, given)
  local o = options.read("compare", given, { tol = options.optional })
  if type(fn) ~= "function" then
    core.fail("compare: fn is a " .. type(fn) .. ", wanted a function (device, side)")
  end
  a, b = side_of(a, "a"), side_of(b, "b")
  local made, n = first_run(fn, a)
  local report = setmetatable({ calls = 0, unpaired = 0, lines = {} }, report_meta)
  local counts, farthest, by_storage, coarsest = {}, 0.0, {}, 0.0
  run(fn, b, function(e)
    if report.op then return end
    local key, name = numbered(counts, e)
    local other = made[key]
    if not other then
      report.unpaired = report.unpaired + 1
      report.alone = report.alone or name
      return
    end
    other.seen = true
    report.calls = report.calls + 1
    for k, mine in ipairs(results_of(e)) do
      local theirs = other.values[k]
      local off, element, left, right = difference(theirs.value, mine)
      by_storage[core.storage(mine)] = off
      coarsest = math.max(coarsest, TOLERANCE[theirs.dtype] or 0, TOLERANCE[mine.dtype] or 0)
      if off > (o.tol or coarsest) then
        local before = 0.0
        for i = 1, e.n_in do
          local t = e.inputs[i]
          if t then before = math.max(before, by_storage[core.storage(t)] or 0.0) end
        end
        report.op, report.where, report.rule, report.element = e.op, e.where, e.rule, element
        report.a, report.b, report.difference, report.inputs = left, right, off, before
        report.index, report.name = left and observe.index_text(element, mine.shape), name
        report.shapes = { #theirs.value.shape > 0 and table.concat(theirs.value.shape, "x")
          or "scalar", observe.shape_text(mine) }
        return
      end
      farthest = math.max(farthest, off)
    end
  end)
  report.ok = report.op == nil
  for _, each in pairs(made) do
    if report.ok and not each.seen then report.unpaired = report.unpaired + 1 end
  end
  local lines = report.lines
  if report.ok then
    lines[1] = ("%s and %s agree in %d calls; the largest difference is %.2g of the largest "
      .. "element"):format(side_text(a), side_text(b), report.calls, farthest)
  elseif not report.a then
    lines[1] = ("%s: the result is %s with %s and %s with %s"):format(report.name,
      report.shapes[1], side_text(a), report.shapes[2], side_text(b))
  else
    lines[1] = ("%s: element %s is %.9g with %s and %.9g with %s"):format(report.name,
      report.index, report.a, side_text(a), report.b, side_text(b))
    lines[2] = ("  %.2g of the largest element of %s; what it was given differed by %.2g, and the "
      .. "%d calls before by %.2g at most"):format(report.difference, report.shapes[2],
      report.inputs, report.calls - 1, farthest)
  end
  if report.unpaired > 0 then
    lines[#lines + 1] = ("  %d calls of %d have no partner%s"):format(report.unpaired, n,
      report.alone and ", such as " .. report.alone or "")
  end
  return report.ok, report
end

return M
