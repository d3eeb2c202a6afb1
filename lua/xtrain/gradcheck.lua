-- Gradients against differences, in f64: of a function of tensors, or of a whole model, whose
-- parameters are tried as well. First everything along one random direction; what is wrong is then
-- looked for, down to input or parameter and element, and in a model down to the layer.
local xt = require "xtrain"
local core = require "xtrain.core"
local nn = require "xtrain.nn"
local observe = require "xtrain.observe"
local options = require "xtrain.options"

local M = {}

local NAMED = 8 -- wrong inputs and parameters that a report describes

local function is_float(t)
  return type(t) == "userdata" and t.dtype:find("^[fb]") ~= nil
end

-- One number of whatever fn returns: itself where it is one, else the sum of all elements, each
-- with its own fixed weight.
local function project(seed, ...)
  local total
  for i, out in ipairs { ... } do
    if is_float(out) then
      if out.dtype ~= "f64" then out = out:to "f64" end
      if out.ndim == 0 and not is_float(select(2, ...)) then return out end
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
local check = {}
check.__index = check

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
local function value_of(self, values)
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
    return value_of(self, moved):item()
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

-- 7 of shape {2, 3, 4} -> "[1][2][3]"
local function index_text(element, shape)
  local rest, parts = element - 1, {}
  for d = #shape, 1, -1 do
    parts[d] = ("[%d]"):format(rest % shape[d] + 1)
    rest = rest // shape[d]
  end
  return table.concat(parts)
end

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
    index = index_text(element, entry.x.shape), slope = slope, left = left, right = right,
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
  local y = value_of(self, vars)
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

local function describe(found)
  local text = ("%s, element %s: gradient %.9g, slope %.9g"):format(found.name, found.index,
    found.gradient, found.slope)
  if not found.kink then return text end
  return ("%s (left %.9g, right %.9g)"):format(text, found.left, found.right)
end

-- ---- models ------------------------------------------------------------------------------------

-- Sets every `dtype` of the model's tables to f64; returns what undoes it.
local function widen(model)
  local undo = {}
  nn.walk(model, function(_, value)
    local dtype = type(value) == "table" and rawget(value, "dtype")
    if type(dtype) == "string" and dtype:find "^[fb]%d*f?%d" then
      undo[#undo + 1] = { value, dtype }
      rawset(value, "dtype", "f64")
    end
  end)
  return function()
    for _, pair in ipairs(undo) do rawset(pair[1], "dtype", pair[2]) end
  end
end

-- The parameters of a model as entries, and what puts them back (inputs may join the list).
local function parameters(model)
  local entries, by_tensor = {}, {}
  nn.walk(model, function(path, value, owner, key)
    if type(value) ~= "userdata" or not value.is_var then return end
    local entry = by_tensor[value]
    if not entry then
      entry = { name = "parameter " .. path, path = path, places = {}, was = value,
        x = value:detach():to "f64":clone() }
      by_tensor[value] = entry
      entries[#entries + 1] = entry
    end
    table.insert(entry.places, { owner, key })
  end)
  return entries, function()
    for _, entry in ipairs(entries) do
      for _, place in ipairs(entry.places or {}) do rawset(place[1], place[2], entry.was) end
    end
  end
end

-- Adds the float tensors among n arguments as entries.
local function add_inputs(entries, args, n)
  for i = 1, n do
    if is_float(args[i]) then
      entries[#entries + 1] = { name = "input " .. i, input = i,
        x = args[i]:detach():to "f64":clone() }
    end
  end
end

local function copy(list, n) return table.move(list, 1, n, 1, {}) end

-- The layers of a model with what they were called with first, the innermost first: {path, layer,
-- args, n}. call() runs the model.
local function layer_calls(model, call)
  local calls, undo = {}, {}
  nn.walk(model, function(path, layer)
    if type(layer) ~= "table" then return end
    local forward = layer.forward
    if type(forward) ~= "function" or rawget(layer, "forward") then return end
    undo[#undo + 1] = layer
    rawset(layer, "forward", function(self, ...)
      local made = not undo[layer] and { path = path, layer = layer, n = select("#", ...), ... }
      undo[layer] = true
      local results = table.pack(forward(self, ...))
      if made then calls[#calls + 1] = made end -- after what it called itself
      return table.unpack(results, 1, results.n)
    end)
  end)
  local ok, message = pcall(xt.no_grad, call)
  for _, layer in ipairs(undo) do rawset(layer, "forward", nil) end
  if not ok then error(message, 0) end
  return calls
end

-- Names the innermost layers that are wrong by themselves.
local function blame(self, model, report)
  local calls = layer_calls(model, function()
    local values = {}
    for e, entry in ipairs(self.entries) do values[e] = xt.var(entry.x) end
    value_of(self, values)
  end)
  for _, made in ipairs(calls) do
    local inside = false
    for _, path in ipairs(report.layers) do
      inside = inside or path:sub(1, #made.path + 1) == made.path .. "."
    end
    if not inside then
      local entries, restore = parameters(made.layer) -- f64 already
      add_inputs(entries, made, made.n)
      local one = setmetatable({ fn = function(...) return made.layer:forward(...) end,
        args = copy(made, made.n), n_args = made.n, entries = entries }, { __index = self })
      local part = { lines = {}, wrong = {}, right = {}, kinks = 0 }
      local ok = #entries == 0 or check.run(one, part)
      restore()
      if not ok then
        report.layers[#report.layers + 1] = made.path
        report.lines[#report.lines + 1] = ("layer %s is wrong by itself: %s"):format(made.path,
          part.wrong[1] and describe(part.wrong[1]) or part.lines[1])
      end
    end
  end
end

-- ---- where a gradient is cut --------------------------------------------------------------------

-- Names the calls that read what depends on an entry and yet carries no gradient, though their
-- results do: behind them lies a detach or a no_grad. Storages tell what depends on what.
local function find_cuts(self, report)
  local vars, from, seen = {}, {}, {}
  for e, entry in ipairs(self.entries) do
    vars[e] = xt.var(entry.x)
    from[core.storage(vars[e])] = entry.name
  end
  observe.during(function(e)
    if e.kind ~= "call" or e.rule or not e.differentiable then return end
    local depends
    for i = 1, math.min(e.n_in, 64) do
      local t = e.inputs[i]
      local source = is_float(t) and from[core.storage(t)]
      depends = depends or source
      local text = source and e.number > 0 and e.wants >> (i - 1) & 1 == 0
        and ("%s at %s: its %s depends on %s and carries no gradient: a detach or no_grad before "
        .. "it"):format(e.op, e.where, e.names[i], source)
      if text and not seen[text] and #report.cuts < NAMED then
        seen[text] = true
        report.cuts[#report.cuts + 1] = { op = e.op, where = e.where, input = e.names[i],
          name = source }
        report.lines[#report.lines + 1] = text
      end
    end
    for k = 1, depends and e.n_out or 0 do
      local t = e.outputs[k]
      if is_float(t) then from[core.storage(t)] = depends end
    end
  end, function() value_of(self, vars) end)
end

-- ---- the function ------------------------------------------------------------------------------

-- The report: fields for programs, and a text when printed.
local report_meta = {
  __tostring = function(r) return table.concat(r.lines, "\n") end,
}

local function tell(ok, report)
  for i, found in ipairs(report.wrong) do
    if i > NAMED then
      table.insert(report.lines, ("and %d more"):format(#report.wrong - NAMED))
      break
    end
    table.insert(report.lines, describe(found))
  end
  if #report.wrong > 0 and #report.right > 0 then
    local names = table.concat(report.right, ", ", 1, math.min(#report.right, NAMED))
    if #report.right > NAMED then names = names .. ", ..." end
    table.insert(report.lines, ("right are %d: %s"):format(#report.right, names))
  end
  return ok
end

-- gradcheck(fn, {inputs} [, opts]): compares the gradient of fn, in f64 and along one random
-- direction, with differences of fn's values; returns true or false, and a report {ok, kinks,
-- analytic, numeric, lines, wrong, right, cuts, layers}. Inputs of integer dtypes are passed on as they
-- are. fn may be a model: its parameters are checked as well, in place and put back; it is called
-- as model:loss(...) where it has a loss and there are two inputs or more, else as model(...).
-- Where something is wrong, `wrong` lists for each input or parameter one element: {name, path or
-- input, element, index, gradient, slope}, `cuts` the calls {op, where, input, name} that read what
-- depends on an input or parameter and carries no gradient, as after a detach, and `layers` the
-- innermost layers that are wrong by themselves. Where fn has a kink (relu at 0), any slope between left and right passes.
-- Both values are those of fn's result where that is a scalar, else of a fixed sum of its elements.
-- opts: model (whose parameters fn uses), h = 1e-5 (the step), tol = 1e-5 (relative), seed = 1,
-- elements = 1000 (checked one by one where there is a kink, of each input).
local function gradcheck(fn, inputs, given)
  local o = options.read("gradcheck", given, { h = 1e-5, tol = 1e-5, seed = 1, elements = 1000,
    model = options.optional })
  if type(inputs) ~= "table" then
    core.fail("gradcheck: inputs is a " .. type(inputs) .. ", wanted a table of tensors")
  end
  local model, n = o.model, #inputs
  if type(fn) == "table" then
    model = model or fn
    local callee = fn
    if type(callee.loss) == "function" and n >= 2 then
      fn = function(...) return callee:loss(...) end
    end
  end
  local self = setmetatable({ fn = fn, args = copy(inputs, n), n_args = n, h = o.h, tol = o.tol,
    seed = o.seed, most = o.elements, entries = {} }, check)
  local restore, narrow = function() end, function() end
  if model then
    self.entries, restore = parameters(model)
    narrow = widen(model)
  end
  add_inputs(self.entries, inputs, n)
  local report = setmetatable({ kinks = 0, lines = {}, wrong = {}, right = {}, cuts = {},
    layers = {} },
    report_meta)
  local done, message = pcall(function()
    report.ok = self:run(report)
    tell(report.ok, report)
    if not report.ok then find_cuts(self, report) end
    if not report.ok and model then blame(self, model, report) end
  end)
  restore()
  narrow()
  if not done then error(message, 0) end
  table.insert(report.lines, report.ok and "the gradient is right" or "the gradient is WRONG")
  return report.ok, report
end

M.gradcheck = gradcheck
return M
