-- Checking gradients, looking at the tape and at memory, and the switches that tests throw.
local xt = require "xtrain"
local core = require "xtrain.core"
local options = require "xtrain.options"

local M = {
  -- tape(t): the records behind t, newest first: {number, op, where, kept_bytes, outputs}
  tape = core.tape,
  -- holders([most [, device]]): the lines that hold the most bytes: {where, bytes, storages}
  holders = core.memory_holders,
  here = core.here, -- "FILE:LINE" of the caller, as records name it
  trap = core.trap, -- on: the first op whose result holds a NaN or an infinity raises
  live_count = core.live_count, -- objects and storages alive in the runtime
  fail_allocation = core.fail_allocation, -- the n-th allocation from now fails; 0: none
  poison = core.poison, -- on: new and freed blocks are filled with NaNs
  cache = core.cache, -- off: every block goes back to the system at once
  memory_limit = core.memory_limit, -- bytes the allocator may take; 0: no limit
  memory_trim = core.memory_trim, -- gives cached blocks back to the system
}

-- ---- gradcheck ---------------------------------------------------------------------------------

local function is_float(t)
  return t.dtype:find("^[fb]") ~= nil
end

-- One number of whatever fn returns: the sum of all elements, each with its own fixed weight.
local function project(seed, first, ...)
  local total
  for i, out in ipairs { first, ... } do
    if type(out) == "userdata" and is_float(out) then
      if out.dtype ~= "f64" then out = out:to "f64" end
      local weight = xt.randn(out.shape, { seed = xt.seed(seed, "weight", i), dtype = "f64" })
      local part = (out * weight):sum()
      total = total and total + part or part
    end
  end
  if not total then core.fail("gradcheck: fn returned no float tensor") end
  return total
end

local check = {}
check.__index = check

-- The projected value at x + h d, as a number; d[i] is nil for what does not move.
function check:at(direction, h)
  return xt.no_grad(function()
    local moved = {}
    for i, x in ipairs(self.inputs) do
      moved[i] = direction[i] and x + direction[i] * h or x
    end
    return project(self.seed, self.fn(table.unpack(moved, 1, #self.inputs))):item()
  end)
end

-- Slopes along a direction: the central one, from the left, from the right, and whether those part
-- in a way that does not shrink with the step: a kink. On a curve they part in proportion to it.
function check:slopes(direction)
  local h, here = self.h, self.value
  local up, down = self:at(direction, h), self:at(direction, -h)
  local left, right = (here - down) / h, (up - here) / h
  local gap, size = math.abs(right - left), math.abs(left) + math.abs(right)
  local kink = false
  if gap > 1e-4 * size + 1e-7 then
    local near = h / 8
    local nearer = math.abs(self:at(direction, near) - 2 * here + self:at(direction, -near)) / near
    kink = nearer > gap / 2
  end
  return (up - down) / (2 * h), left, right, kink
end

local function agrees(analytic, numeric, tol, floor)
  return math.abs(analytic - numeric) <= tol * math.max(math.abs(analytic), math.abs(numeric),
    floor)
end

-- Each element by itself, for directions that cross a kink: there any slope between the one from
-- the left and the one from the right is a right answer.
function check:elements(lines)
  local ok, kinks = true, 0
  for i, x in ipairs(self.inputs) do
    if self.grads[i] then
      local flat = self.grads[i]:reshape { -1 }
      for k = 1, math.min(x.numel, self.most) do
        local unit = xt.zeros({ x.numel }, { dtype = "f64" })
        unit[k] = 1
        local numeric, left, right, kink = self:slopes({ [i] = unit:reshape(x.shape) })
        local analytic = flat[k]:item()
        local slack = self.tol * math.max(math.abs(left), math.abs(right), 1e-3)
        local good
        if kink then
          kinks = kinks + 1
          good = analytic >= math.min(left, right) - slack
            and analytic <= math.max(left, right) + slack
        else
          good = agrees(analytic, numeric, self.tol, 1e-3)
        end
        if not good then
          ok = false
          lines[#lines + 1] = ("input %d, element %d: gradient %.9g, slope %.9g (left %.9g, "
            .. "right %.9g)"):format(i, k, analytic, numeric, left, right)
        elseif kink and kinks <= 8 then
          lines[#lines + 1] = ("input %d, element %d: kink, left %.9g, right %.9g, gradient %.9g")
            :format(i, k, left, right, analytic)
        end
      end
    end
  end
  return ok, kinks
end

-- The report: fields for programs, and a text when printed.
local report_meta = {
  __tostring = function(r) return table.concat(r.lines, "\n") end,
}

-- xt.gradcheck(fn, {inputs} [, opts]): compares the gradient of fn, in f64 and along one random
-- direction, with differences of fn's values; returns true or false, and a report {ok, kinks,
-- analytic, numeric, lines}. Inputs of integer dtypes are passed on as they are. Where fn has a
-- kink (relu at 0), any slope between left and right passes, and the report says "kink".
-- opts: h = 1e-5 (the step), tol = 1e-5 (relative), seed = 1, elements = 1000 (checked one by one
-- when there is a kink, a input).
function M.gradcheck(fn, inputs, given)
  local o = options.read("gradcheck", given, { h = 1e-5, tol = 1e-5, seed = 1, elements = 1000 })
  if type(inputs) ~= "table" then
    core.fail("gradcheck: inputs is a " .. type(inputs) .. ", wanted a table of tensors")
  end
  local self = setmetatable({ fn = fn, h = o.h, tol = o.tol, seed = o.seed, most = o.elements,
    inputs = {}, grads = {} }, check)
  local vars, place = {}, {}
  for i, x in ipairs(inputs) do
    self.inputs[i] = x
    if type(x) == "userdata" and is_float(x) then
      self.inputs[i] = xt.var(x:detach():to "f64":clone())
      vars[#vars + 1] = self.inputs[i]
      place[#place + 1] = i
    end
  end
  local y = project(o.seed, fn(table.unpack(self.inputs, 1, #self.inputs)))
  self.value = y:item()
  local grads = y.requires_grad and xt.grad(y, vars) or {}
  local direction, analytic, size = {}, 0.0, 0.0
  for n, i in ipairs(place) do
    local x = self.inputs[i]
    self.inputs[i] = x:detach()
    self.grads[i] = grads[n] or xt.zeros(x.shape, { dtype = "f64" })
    direction[i] = xt.randn(x.shape, { seed = xt.seed(o.seed, "direction", i), dtype = "f64" })
    local terms = self.grads[i] * direction[i]
    analytic = analytic + terms:sum():item()
    size = size + terms:abs():sum():item()
  end
  local numeric, left, right, kink = self:slopes(direction)
  local lines = { ("gradient along the direction %.9g, slope %.9g"):format(analytic, numeric) }
  -- A sum whose terms cancel is compared by the size of the terms, within reason.
  local ok, kinks = agrees(analytic, numeric, o.tol, math.max(1e-3 * size, 1e-6)), 0
  if kink then
    lines[1] = lines[1] .. (" (left %.9g, right %.9g): kink"):format(left, right)
    ok, kinks = self:elements(lines)
  end
  lines[#lines + 1] = ok and "the gradient is right" or "the gradient is WRONG"
  return ok, setmetatable({ ok = ok, kinks = kinks, analytic = analytic, numeric = numeric,
    lines = lines }, report_meta)
end

return M
