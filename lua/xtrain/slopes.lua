-- Gradients against differences of values, in f64: along directions, and down to the element that
-- is wrong. What xt.gradcheck (gradcheck.lua) is made of.
local xt = require "xtrain"
local core = require "xtrain.core"
local observe = require "xtrain.observe"

local NAMED = 8 -- kinks that a report describes

local check = {}
check.__index = check

function check.is_float(t)
  return type(t) == "userdata" and t.dtype:find("^[fb]") ~= nil
end

-- One number of whatever fn returns: itself where it is one, else the sum of all elements, each
-- with its own fixed weight.
local function project(seed, ...)
  local total
  for i, out in ipairs { ... } do
    if check.is_float(out) then
      if out.dtype ~= "f64" then out = out:to "f64" end
      if out.ndim == 0 and not check.is_float(select(2, ...)) then return out end
      local weight = xt.randn(out.shape, { seed = xt.seed(seed, "weight", i), dtype = "f64" })
      local part = (out * weight):sum()
      total = total and total + part or part
    end
  end
  if not total then core.fail("gradcheck: fn returned no float tensor") end
  return total
end

-- ---- what is tried: inputs, and parameters in place --------------------------------------------

-- A check has
--   fn, args       what is called, with what; args[i] of an entry change
--   entries        {name, input = i or places = {{table, key}, ...}, x = f64 value, grad}
--   values         the entries' values now
--   h, tol, seed, most, value = at the point itself

-- Puts values[e] where entry e is read.
local function put(self, values)
  for e, entry in ipairs(self.entries) do
    if entry.input then
      self.args[entry.input] = values[e]
    else
      for _, place in ipairs(entry.places) do rawset(place[1], place[2], values[e]) end
    end
  end
end

-- fn's projected value with these values.
function check:value_of(values)
  put(self, values)
  return project(self.seed, self.fn(table.unpack(self.args, 1, self.n_args)))
end

-- The projected value at x + h d, as a number; d[e] is nil for what does not move.
function check:at(direction, h)
  return xt.no_grad(function()
    local moved = {}
    for e, entry in ipairs(self.entries) do
      moved[e] = direction[e] and entry.x + direction[e] * h or entry.x
    end
    return self:value_of(moved):item()
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
  if gap > 1e-4 * size + 1e-7 + 10 * self.noise then
    local near = h / 8
    local nearer = math.abs(self:at(direction, near) - 2 * here + self:at(direction, -near)) / near
    kink = nearer > gap / 2
  end
  return (up - down) / (2 * h), left, right, kink
end

-- floor: the size below which a difference is compared as if the numbers were that large.
local function agrees(self, analytic, numeric, floor)
  local size = math.max(math.abs(analytic), math.abs(numeric), floor)
  return math.abs(analytic - numeric) <= self.tol * size + self.noise
end

-- Whether a gradient and a slope agree, and the slope: where they do not, extrapolated from two
-- steps (Richardson), which takes away what the third derivative does to it.
function check:compare(analytic, slope, floor, direction)
  if agrees(self, analytic, slope, floor) then return true, slope end
  local h = self.h / 2
  local half = (self:at(direction, h) - self:at(direction, -h)) / (2 * h)
  local better = (4 * half - slope) / 3
  return agrees(self, analytic, better, floor), better
end

-- The gradient along a direction: the sum, and the sum of the sizes of its terms.
function check:along(direction)
  local sum, size = 0.0, 0.0
  for e, d in pairs(direction) do
    local terms = self.entries[e].grad * d
    sum = sum + terms:sum():item()
    size = size + terms:abs():sum():item()
  end
  return sum, size
end

-- A sum whose terms cancel is compared by the size of the terms, within reason.
local function floor_of(size) return math.max(1e-3 * size, 1e-6) end

-- ---- down to an element ------------------------------------------------------------------------

-- The numbers first .. last of a flat f64 tensor, 0 elsewhere, in its own shape.
local function only(flat, first, last, shape)
  local n = flat.numel
  local function zeros(count) return xt.zeros({ count }, { dtype = "f64" }) end
  return xt.concat({ zeros(first - 1), flat:slice(1, first, last), zeros(n - last) }, 1)
    :reshape(shape)
end

-- One element by itself: whether it is right, and what it is. At a kink any slope between the one
-- from the left and the one from the right is a right answer.
function check:element(e, element)
  local entry = self.entries[e]
  local ones = xt.ones({ entry.x.numel }, { dtype = "f64" })
  local d = { [e] = only(ones, element, element, entry.x.shape) }
  local slope, left, right, kink = self:slopes(d)
  local found = { name = entry.name, input = entry.input, path = entry.path, element = element,
    index = observe.index_text(element, entry.x.shape), slope = slope, left = left, right = right,
    kink = kink, gradient = self:along(d) }
  local good
  if kink then
    local slack = self.tol * math.max(math.abs(left), math.abs(right), 1e-3)
    good = found.gradient >= math.min(left, right) - slack
      and found.gradient <= math.max(left, right) + slack
  else
    good, found.slope = self:compare(found.gradient, slope, 1e-3, d)
  end
  return good, found
end

-- The element with the most to answer for: always the half with the larger difference.
function check:bisect(e, direction)
  local entry = self.entries[e]
  local flat = direction:reshape { -1 }
  local first, last = 1, entry.x.numel
  local function off(from, to)
    local d = { [e] = only(flat, from, to, entry.x.shape) }
    local by = math.abs(self:along(d) - self:slopes(d))
    return by == by and by or math.huge
  end
  while first < last do
    local middle = (first + last) // 2
    if off(first, middle) >= off(middle + 1, last) then
      last = middle
    else
      first = middle + 1
    end
  end
  return self:element(e, first)
end

-- Element by element, spread over the entry: whether all are right, how many lie at a kink.
function check:elements(e, report)
  local n = self.entries[e].x.numel
  local step, ok, kinks = math.max(1, n // self.most), true, 0
  for element = 1, n, step do
    local good, found = self:element(e, element)
    if found.kink then kinks = kinks + 1 end
    if not good then
      if ok then report.wrong[#report.wrong + 1] = found end
      ok = false
    elseif found.kink and report.kinks + kinks <= NAMED then
      report.lines[#report.lines + 1] = ("%s, element %s: kink, left %.9g, right %.9g, gradient "
        .. "%.9g"):format(found.name, found.index, found.left, found.right, found.gradient)
    end
  end
  report.kinks = report.kinks + kinks
  return ok
end

-- Every entry by itself. Returns whether all are right.
function check:each(directions, report)
  local ok = true
  for e in ipairs(self.entries) do
    local d = { [e] = directions[e] }
    local slope, _, _, kink = self:slopes(d)
    local along, size = self:along(d)
    local good = true
    if kink then
      good = self:elements(e, report)
    elseif not self:compare(along, slope, floor_of(size), d) then
      good = false
      local right, found = self:bisect(e, directions[e])
      if right then -- what the halves hid is found by looking everywhere
        local before = #report.wrong
        self:elements(e, report)
        found = table.remove(report.wrong, before + 1) or found
      end
      report.wrong[#report.wrong + 1] = found
    end
    if good then report.right[#report.right + 1] = self.entries[e].name end
    ok = ok and good
  end
  return ok
end

-- ---- a check, from end to end ------------------------------------------------------------------

-- Runs the check; fills in the report and returns whether all is right.
function check:run(report)
  local vars = {}
  for e, entry in ipairs(self.entries) do vars[e] = xt.var(entry.x) end
  local y = self:value_of(vars)
  self.value = y:item()
  self.noise = 4e-15 * math.max(1, math.abs(self.value)) / self.h -- of rounding, in a slope
  local grads = y.requires_grad and xt.grad(y, vars) or {}
  local directions = {}
  for e, entry in ipairs(self.entries) do
    entry.grad = grads[e] or xt.zeros(entry.x.shape, { dtype = "f64" })
    directions[e] = xt.randn(entry.x.shape,
      { seed = xt.seed(self.seed, "direction", e), dtype = "f64" })
  end
  local size, left, right, kink
  report.analytic, size = self:along(directions)
  report.numeric, left, right, kink = self:slopes(directions)
  local text = "gradient along the direction %.9g, slope %.9g"
  if kink then
    report.lines[1] = (text .. " (left %.9g, right %.9g): kink"):format(report.analytic,
      report.numeric, left, right)
    return self:each(directions, report)
  end
  local ok, slope = self:compare(report.analytic, report.numeric, floor_of(size), directions)
  report.numeric = slope
  report.lines[1] = text:format(report.analytic, report.numeric)
  if not ok then self:each(directions, report) end
  return ok
end

return check
