-- Gradients against differences, in f64: of a function of tensors, or of a whole model, whose
-- parameters are tried as well. First everything along one random direction; what is wrong is then
-- looked for, down to input or parameter and element, and in a model down to layer and line.
local xt = require "xtrain"
local check = require "xtrain.slopes"
local core = require "xtrain.core"
local nn = require "xtrain.nn"
local observe = require "xtrain.observe"
local options = require "xtrain.options"

local M = {}

local NAMED = 8 -- wrong inputs and parameters that a report describes

local is_float = check.is_float

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
    self:value_of(values)
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
      local ok = #entries == 0 or one:run(part)
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
  end, function() self:value_of(vars) end)
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
-- analytic, numeric, lines, wrong, right, cuts, layers}. Inputs of integer dtypes are passed on as
-- they are. fn may be a model: its parameters are checked as well, in place and put back; it is
-- called as model:loss(...) where it has a loss and there are two inputs or more, else as
-- model(...) or, where it cannot be called, model:forward(...). Where something is wrong, `wrong`
-- lists for each input or parameter one element:
-- {name, path or input, element, index, gradient, slope}, `cuts` the calls {op, where, input, name}
-- that read what depends on an input or parameter and carries no gradient, as after a detach, and
-- `layers` the innermost layers that are wrong by themselves. Where fn has a kink (relu at 0), any
-- slope between left and right passes. Both values are those of fn's result where that is a scalar,
-- else of a fixed sum of its elements.
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
    elseif not (debug.getmetatable(fn) or {}).__call then
      if type(callee.forward) ~= "function" then
        core.fail("gradcheck: fn is a table that cannot be called and has no forward: pass "
          .. "function(...) ... end, and the table as option model")
      end
      fn = function(...) return callee:forward(...) end
    end
  elseif type(fn) ~= "function" and not (debug.getmetatable(fn) or {}).__call then
    core.fail("gradcheck: fn is a " .. type(fn) .. ", wanted a function or a model")
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
