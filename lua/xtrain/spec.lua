-- xt.spec: what tests of recipes need beside the words of busted, under `xtrain test` and under
-- busted alike. Asking for it gives assert four more assertions:
--
--   assert.tensor_near(expected, actual [, tol])      elements, one by one
--   assert.gradient(fn or model, {inputs} [, opts])   by xt.gradcheck
--   assert.same_digest(a, b)                          tensors, models, trials: the same bits
--   assert.learns(recipe, {steps, below, ...})        the loss of a trial
--
-- and xt.spec.trial(recipe, {steps, ...}) makes some steps of a recipe, in this process, and writes
-- nothing.
local xt = require "xtrain"
local again = require "xtrain.again"
local options = require "xtrain.options"
local file = require "xtrain.core.file"
local fail = xt.core.fail

local M = {}

-- ---- trials ------------------------------------------------------------------------------------

local trial_meta = { __name = "trial" }

local function chunk_of(recipe)
  if type(recipe) == "function" then return recipe, "a recipe" end
  if type(recipe) ~= "string" then
    fail("spec.trial: a recipe is a path or a function, not a " .. type(recipe))
  end
  local text, message = file.read(recipe)
  if not text then fail("spec.trial: " .. message) end
  local chunk
  chunk, message = load(text, "@" .. recipe, "t")
  if not chunk then fail("spec.trial: " .. message) end
  return chunk, recipe
end

-- {dim = 16} -> {"dim=16"}, as they are typed.
local function words_of(given)
  local words = {}
  for _, name in ipairs(options.names(given)) do
    local value = given[name]
    if type(value) == "table" then
      local parts = {}
      for i, each in ipairs(value) do parts[i] = tostring(each) end
      value = table.concat(parts, ",")
    end
    words[#words + 1] = name .. "=" .. tostring(value)
  end
  return words
end

local TRIAL = { steps = options.size, options = options.optional, fit = options.optional,
  made_up = false }

-- trial(recipe, {steps, options, fit, made_up}): the first `steps` steps of a recipe, a path or a
-- function that calls xt.recipe. options: overrides, as on the command line; steps is among them.
-- fit: overrides of those options that the recipe has. made_up: tokens out of nothing, as bench=N
-- makes them, so that no data is needed. What comes after the loop is not run.
-- Returns {steps = {{loss, lr, grad_norm}, ...}, loss = mean of the last tenth, digest, chain =
-- {digest of each step}, digests = {model, optim}, options, name, model}.
function M.trial(recipe, given)
  local o = options.read("spec.trial", given, TRIAL)
  if o.steps < 1 then fail("spec.trial: option 'steps' is 0, wanted at least one") end
  local chunk, name = chunk_of(recipe)
  local overrides = { steps = o.steps }
  for key, value in pairs(o.options or {}) do overrides[key] = value end
  if o.made_up then overrides.bench = 1 end
  local out = os.tmpname()
  os.remove(out)
  local wanted = { out = out, last = o.steps, chain = {}, steps = {}, options = o.fit or {},
    words = words_of(overrides) }
  local made, message = again(chunk, name, wanted)
  if not made then fail(("spec.trial: %s: %s"):format(name, message)) end
  local count = math.max(1, o.steps // 10)
  local sum = 0.0
  for step = o.steps - count + 1, o.steps do sum = sum + (wanted.steps[step].loss or 0.0) end
  return setmetatable({ steps = wanted.steps, loss = sum / count, chain = wanted.chain,
    digest = wanted.chain[o.steps], digests = wanted.digests, options = wanted.of.options,
    name = wanted.of.name, model = wanted.of.own.models[1] }, trial_meta)
end

-- The options of a recipe with their values, the overrides in `given` included.
function M.options_of(recipe, given)
  local chunk, name = chunk_of(recipe)
  local made, message = again(chunk, name,
    { out = "", last = 0, chain = {}, options = {}, words = words_of(given or {}) })
  if not made then fail(("spec.options_of: %s: %s"):format(name, message)) end
  return made.of.options
end

-- ---- values ------------------------------------------------------------------------------------

local function is_tensor(value)
  return type(value) == "userdata" and value.dtype ~= nil
end

-- 7 of shape {2, 3, 4} -> "[1][2][3]"
local function place(element, shape)
  local rest, parts = element - 1, {}
  for d = #shape, 1, -1 do
    parts[d] = ("[%d]"):format(rest % shape[d] + 1)
    rest = rest // shape[d]
  end
  return #parts > 0 and table.concat(parts) or "the only element"
end

-- All numbers of a tensor, in row-major order.
local function flat(t)
  local whole = t:detach():reshape { -1 }
  return (whole.dtype:find "^[iu]" and whole or whole:to "f64"):totable()
end

local function shape_text(t) return "{" .. table.concat(t.shape, ", ") .. "}" end

local function same_shape(a, b) return shape_text(a) == shape_text(b) end

-- How many of two lists of numbers differ by more than their tolerance, and the worst of them.
local function differing(a, b, tolerance)
  local count, worst, most = 0, nil, -1
  for i = 1, #a do
    local off = a[i] == b[i] and 0 or math.abs(a[i] - b[i])
    if a[i] ~= a[i] and b[i] ~= b[i] then off = 0 end
    local over = off / math.max(tolerance(a[i]), 5e-324)
    if off ~= off then over = math.huge end
    if off ~= off or off > tolerance(a[i]) then
      count = count + 1
      if over > most then most, worst = over, i end
    end
  end
  return count, worst
end

-- ---- assertions --------------------------------------------------------------------------------

local NEAR = { atol = 1e-6, rtol = 1e-5 } -- of f32 numbers around 1, some roundings apart

-- Whether all elements are near, and a sentence.
local function tensor_near(expected, actual, tol)
  if not is_tensor(actual) then
    return false, "the actual value is a " .. type(actual) .. ", wanted a tensor"
  end
  if not is_tensor(expected) then expected = xt.tensor(expected, { dtype = "f64" }) end
  if not same_shape(expected, actual) then
    return false, ("the shape is %s, expected %s"):format(shape_text(actual), shape_text(expected))
  end
  if type(tol) == "number" then tol = { atol = tol, rtol = 0 } end
  tol = options.read("tensor_near", tol, NEAR)
  local a, b = flat(expected), flat(actual)
  local count, worst = differing(a, b, function(x) return tol.atol + tol.rtol * math.abs(x) end)
  if count == 0 then return true, "all elements are near" end
  return false, ("%d of %d elements differ, %s the most: it is %.9g, expected %.9g (atol %g, "
    .. "rtol %g)"):format(count, #a, place(worst, actual.shape), b[worst], a[worst], tol.atol,
    tol.rtol)
end

-- name = tensor of all tensors in a table and the tables in it.
local function tensors_of(value, prefix, into, seen)
  if is_tensor(value) then
    into[prefix] = value
  elseif type(value) == "table" and not seen[value] then
    seen[value] = true
    for key, each in pairs(value) do
      local name = tostring(key)
      tensors_of(each, prefix == "" and name or prefix .. "." .. name, into, seen)
    end
  end
  return into
end

-- What differs between two tensors that should be the same bits.
local function unlike_tensor(a, b)
  if a.dtype ~= b.dtype then return ("%s and %s"):format(a.dtype, b.dtype) end
  if not same_shape(a, b) then return ("shapes %s and %s"):format(shape_text(a), shape_text(b)) end
  local x, y = flat(a), flat(b)
  local count, worst = differing(x, y, function() return 0 end)
  if count == 0 then return "the bits of NaNs or of zeros" end
  return ("%d of %d elements, %s the most: %.9g and %.9g"):format(count, #x, place(worst, a.shape),
    x[worst], y[worst])
end

local function unlike_trials(a, b)
  for step = 1, math.max(#a.chain, #b.chain) do
    if a.chain[step] ~= b.chain[step] then
      local x, y = a.steps[step] or {}, b.steps[step] or {}
      local parts = {}
      for _, name in ipairs { "loss", "grad_norm", "lr" } do
        parts[#parts + 1] = ("%s %s and %s"):format(name, x[name], y[name])
      end
      return ("the trials part at step %d: %s"):format(step, table.concat(parts, ", "))
    end
  end
  for _, part in ipairs { "model", "optim" } do
    for _, name in ipairs(options.names(a.digests[part])) do
      if a.digests[part][name] ~= b.digests[part][name] then
        return ("the trials end with other values of %s %s"):format(part, name)
      end
    end
  end
end

local function is_trial(value) return getmetatable(value) == trial_meta end

local function same_digest(a, b)
  if is_trial(a) and is_trial(b) then
    local message = unlike_trials(a, b)
    return message == nil, message or ("the trials are the same: digest " .. a.digest)
  end
  local left, right = tensors_of(a, "", {}, {}), tensors_of(b, "", {}, {})
  if next(left) == nil and next(right) == nil then
    return false, ("same_digest: wanted tensors, tables of them or trials, not a %s and a %s")
      :format(type(a), type(b))
  end
  local all = {}
  for name in pairs(left) do all[name] = true end
  for name in pairs(right) do all[name] = true end
  for _, name in ipairs(options.names(all)) do
    local x, y = left[name], right[name]
    local title = name == "" and "the tensors" or name
    if not x or not y then
      return false, ("%s is only in the %s value"):format(title, x and "first" or "second")
    end
    if x:digest() ~= y:digest() then
      return false, ("%s differ%s: %s"):format(title, name == "" and "" or "s", unlike_tensor(x, y))
    end
  end
  return true, "the digests are the same"
end

local function gradient(fn, inputs, given)
  local ok, report = xt.gradcheck(fn, inputs or {}, given)
  return ok, tostring(report)
end

local LEARNS = { steps = options.size, below = options.number, options = options.optional,
  fit = options.optional, made_up = false }

local function learns(recipe, given)
  local o = options.read("learns", given, LEARNS)
  local trial = M.trial(recipe, { steps = o.steps, options = o.options, fit = o.fit,
    made_up = o.made_up })
  local first = trial.steps[1].loss
  return trial.loss < o.below, ("%s: loss %s after %d steps, wanted below %g; at step 1 it was %s")
    :format(type(recipe) == "string" and recipe or trial.name, trial.loss, o.steps, o.below, first)
end

-- ---- giving them to assert ---------------------------------------------------------------------

local function install()
  local own = package.loaded["xtrain.spec_assert"]
  local luassert = not own and package.loaded["luassert"]
  local target = own and own.assert or luassert
  if not target then
    error("xt.spec belongs into a spec: run it with xtrain test, or with busted", 0)
  end
  for name, check in pairs { tensor_near = tensor_near, gradient = gradient,
    same_digest = same_digest, learns = learns } do
    local key = "assertion." .. name
    if luassert then require("say"):set(key, "%s") end
    target:register("assertion", name, function(state, arguments)
      local ok, text = check(table.unpack(arguments, 1, arguments.n))
      if not luassert then
        state.failure_message = text
        return ok
      end
      for i = 1, arguments.n do arguments[i] = nil end
      arguments[1], arguments.n, arguments.nofmt = text, 1, { true }
      return ok
    end, key, key)
  end
end

install()
return M
