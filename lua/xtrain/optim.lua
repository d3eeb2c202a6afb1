-- Optimizers. One call of a fused op updates all parameters of a group; the ops are the definition.
-- State is a plain table by parameter path, so that a model put together in another order still
-- finds its own moments.
local xt = require "xtrain"
local options = require "xtrain.options"
local active = require "xtrain.active"
local finite = require "xtrain.finite"
local fail = xt.core.fail
local is_finite = finite.is_finite

local call = xt.call -- any op by name, the internal ones too

local M = {}

-- ---- gradients ---------------------------------------------------------------------------------

-- The gradients of the parameters that have one.
local function gradients(params)
  local grads = {}
  for _, param in ipairs(params) do
    local grad = param.tensor.grad
    if grad then grads[#grads + 1] = grad end
  end
  return grads
end

-- Scales the gradients so that their joint norm is at most max; returns the norm before, 0-dim.
-- Gradients with a norm that is not finite stay as they are.
function M.clip_grad_norm(params, max)
  local grads = gradients(params)
  if #grads == 0 then return xt.tensor(0.0) end
  return xt.no_grad(function()
    local norm = call("grad_norm", grads)
    call("scale_list_", norm, grads, max)
    return norm
  end)
end

local NO_LABEL, MOST_NAMES = "no label in the batch counts", 8

-- That the gradient norm `value` is not finite, or what else is wrong, and of which parameters: of
-- some of those whose norm_of(param), a number or nil, is not finite.
local function not_finite(value, fault, params, norm_of)
  local names = {}
  for _, param in ipairs(params) do
    local norm = norm_of(param)
    if norm and not is_finite(norm) then
      names[#names + 1] = param.name
      if #names == MOST_NAMES then break end
    end
  end
  local text = is_finite(value) and fault or "the gradient norm is " .. finite.shown(value)
  return #names > 0 and text .. "; not finite: " .. table.concat(names, ", ") or text
end

-- The norm of a parameter's gradient, or nil when it has none.
local function norm_of_gradient(param)
  local grad = param.tensor.grad
  return grad and call("grad_norm", { grad }):item()
end

-- What is wrong with the loss of the run in progress, or nil.
local function loss_fault() return active.run and active.run:loss_fault() end

-- ---- what optimizers share ---------------------------------------------------------------------

local methods = {}
methods.__index = methods

local function check_params(what, params)
  if type(params) ~= "table" or (#params == 0 and next(params) ~= nil) then
    fail(what .. ": the first argument is a list of parameters: xt.nn.params(model)")
  end
  for i, param in ipairs(params) do
    if type(param) ~= "table" or type(param.name) ~= "string" or not param.tensor then
      fail(("%s: parameter %d is no {name = ..., tensor = ...}"):format(what, i))
    end
  end
  return params
end

-- ---- groups: parameters that are updated alike -------------------------------------------------

-- What one parameter's update goes by: the optimizer's options, what `group` says of it, and
-- whether it decays. Numbers and lists of numbers alone, so that equal settings have equal keys.
local function settings_of(kind, rule, o, param)
  local own = {}
  for _, name in ipairs(rule.settings) do own[name] = o[name] end
  own.lr = o.lr or 1.0
  local given = o.group and o.group(param.name, param.tensor)
  if given ~= nil then
    own = options.read(kind .. ": group of '" .. param.name .. "'", given, own)
  end
  if given == nil or given.weight_decay == nil then
    local decays = param.tensor.ndim >= 2
    if o.decay then decays = o.decay(param.name, param.tensor) end
    if not decays then own.weight_decay = 0.0 end
  end
  if rule.check then rule.check(kind, own) end
  return own
end

local function shown(value)
  if type(value) ~= "table" then
    local text = tostring(value)
    if type(value) == "number" and tonumber(text) ~= value then return ("%.17g"):format(value) end
    return text
  end
  local parts = {}
  for i, each in ipairs(value) do parts[i] = shown(each) end
  return "{" .. table.concat(parts, ", ") .. "}"
end

-- "betas = {0.9, 0.95}, eps = 1e-08, ..."
local function describe(settings)
  local parts = {}
  for _, name in ipairs(options.names(settings)) do
    parts[#parts + 1] = name .. " = " .. shown(settings[name])
  end
  return table.concat(parts, ", ")
end

-- rule_of(param) -> rule, options of that rule. A rule has
--   name, states (the suffixes of its state tensors), settings (its options), check(kind, settings)
--   update(opt, group, step), which updates the parameters of a group that have a gradient
local function new(kind, params, o, rule_of)
  local self = setmetatable({ kind = kind, params = params, options = o, steps = 0, moments = {},
    skipped = 0, groups = {} }, methods)
  local by_key = {}
  for _, param in ipairs(params) do
    local rule, its_options = rule_of(param)
    local settings = settings_of(kind, rule, its_options, param)
    local key = rule.name .. ": " .. describe(settings)
    local group = by_key[key]
    if not group then
      group = { rule = rule, settings = settings, states = rule.states(settings), key = key }
      by_key[key] = group
      self.groups[#self.groups + 1] = group
    end
    group[#group + 1] = param
    local own, t = {}, param.tensor
    if self.moments[param.name] then fail(kind .. ": two parameters are named " .. param.name) end
    local opts = { dtype = t.dtype == "f64" and "f64" or "f32", device = t.device }
    for _, suffix in ipairs(group.states) do own[suffix] = xt.zeros(t.shape, opts) end
    self.moments[param.name] = own
  end
  if active.run then active.run:enter_optimizer(self) end
  return self
end

-- One line a group: its rule and settings, how many parameters and elements.
function methods:__tostring()
  local lines = { ("%s, %d steps taken"):format(self.kind, self.steps) }
  for _, group in ipairs(self.groups) do
    local elements = 0
    for _, param in ipairs(group) do elements = elements + param.tensor.numel end
    lines[#lines + 1] = ("  %d parameters, %d elements: %s"):format(#group, elements, group.key)
  end
  return table.concat(lines, "\n")
end

-- The list a fused op takes: parameter, gradient, the states of these suffixes, compute copy, for
-- each that has a gradient. A state that the group does not have is false.
local function list_of(self, group, suffixes)
  local list, n = {}, 0
  for _, param in ipairs(group) do
    local t = param.tensor
    local grad = t.grad
    if grad then
      list[n + 1], list[n + 2] = t, grad
      n = n + 2
      for i, suffix in ipairs(suffixes) do
        list[n + i] = self.moments[param.name][suffix] or false
      end
      n = n + #suffixes + 1
      list[n] = xt.compute_copy_peek(t) or false
    end
  end
  return list
end

-- Runs update(list), a fused op, over a group.
local function fused(self, group, suffixes, update)
  local list = list_of(self, group, suffixes)
  if #list == 0 then return end
  update(list)
  for _, param in ipairs(group) do
    if param.tensor.grad then xt.compute_copy_fresh(param.tensor) end
  end
end

-- What a rule's update goes by: {lr, step, norm, scale, clip, factor, tensors, choose}
--   norm      of the gradients as they are, 0-dim
--   scale     1 / divisor;  factor: what a gradient is multiplied by, divisor and clipping together
--   tensors   lr_tensor, step_tensor and divisor of the fused ops; lr, step and scale are 1 beside
--             them. Nothing outside a graph
--   factor, rate: numbers, in a graph 0-dim f64 tensors; rate is the learning rate
--   choose(updated, old) -> what a tensor shall become: old when nothing may change

-- A number, or a 0-dim tensor, as what multiplies a tensor of `dtype`.
local function factor_of(value, dtype)
  return type(value) == "userdata" and xt.cast(value, dtype) or value
end

local function take_first(first) return first end

-- Which gradients there are and what was written into them last, as one number.
local function stamp_of(grads)
  local stamp = #grads
  for _, grad in ipairs(grads) do
    local number, version = xt.core.storage(grad)
    stamp = (stamp ~ number) * 0x9E3779B97F4A7C15 + version
  end
  return stamp
end

-- The joint norm of the gradients as they are: {norm, 0-dim; value; count of gradients}. Measured
-- once for the same gradients.
function methods:measure()
  return xt.no_grad(function()
    local grads = gradients(self.params)
    local stamp = stamp_of(grads)
    if not self.measured or self.measured.stamp ~= stamp then
      local norm = #grads > 0 and call("grad_norm", grads) or xt.tensor(0.0)
      self.measured = { stamp = stamp, norm = norm, count = #grads }
    end
    local measured = self.measured
    measured.value = measured.value or measured.norm:item()
    return measured
  end)
end

-- Says why a step changed nothing.
local function skip(self, reason)
  self.skipped = self.skipped + 1
  if active.run then
    active.run:note_skip(reason)
  else
    io.stderr:write(self.kind, ": step skipped: ", reason, "\n")
  end
end

-- min(1, clip / norm), as the fused ops have it.
local function clip_factor(norm, clip)
  if clip == 0 then return 1 end
  return math.min(1, clip / (norm + 1e-6))
end

-- ---- updates that bf16 loses -------------------------------------------------------------------

-- The parameters that compute in bf16, as they are now.
local function before_update(params)
  local kept = {}
  for _, param in ipairs(params) do
    local copy = param.tensor.grad and xt.compute_copy_peek(param.tensor)
    if copy and copy.dtype == "bf16" then
      kept[#kept + 1] = { now = param.tensor, before = param.tensor:detach():clone() }
    end
  end
  return kept
end

local function count_equal(a, b) return xt.sum(xt.eq(a, b)):item() end

-- Of the weights that the update changed, the share whose bf16 copy it did not change; nil when
-- none computes in bf16.
local function lost_share(kept)
  local changed, lost = 0, 0
  for _, each in ipairs(kept) do
    local now, before = each.now:detach(), each.before
    local same = count_equal(now, before)
    changed = changed + now.numel - same
    lost = lost + count_equal(xt.cast(now, "bf16"), xt.cast(before, "bf16")) - same
  end
  if #kept > 0 then return changed > 0 and lost / changed or 0.0 end
end

-- ---- a step ------------------------------------------------------------------------------------

local step_options = { clip = 0.0, divisor = options.optional, step = options.optional,
  guard = options.optional }

-- Calls fn(name, tensor) for every state tensor.
local function each_state(self, fn)
  for _, group in ipairs(self.groups) do
    for _, param in ipairs(group) do
      for _, suffix in ipairs(group.states) do
        local message = fn(param.name .. "." .. suffix, self.moments[param.name][suffix])
        if message then return message end
      end
    end
  end
end

-- Without a tensor this would be the same number at every run of the graph.
local function want_tensor(kind, what, value)
  if type(value) == "userdata" then return value end
  fail(("%s:step: %s is a plain number inside a graph and would repeat at every run: make it an "
    .. "input, b:input(\"%s\", %s)"):format(kind, what, what, what == "step" and "1" or "1e-3"))
end

-- The update with nothing read on the host: lr and step are 0-dim tensors, and the caller counts
-- the steps. What is written is what was there when the norm is not finite.
local function update_unread(self, lr, o)
  local at, divisor = o.step, o.divisor
  if type(divisor) == "number" then
    divisor = xt.tensor(divisor, { dtype = "f64", device = lr.device })
  end
  return xt.no_grad(function()
    local grads = gradients(self.params)
    local raw = call("grad_norm", grads)
    self.measured = { stamp = stamp_of(grads), norm = raw, count = #grads }
    local wide = divisor and xt.cast(divisor, "f64")
    local norm = divisor and raw * xt.cast(xt.div(1, wide), raw.dtype) or raw
    local factor = 1
    if o.clip ~= 0 then
      factor = xt.minimum(xt.div(o.clip, xt.cast(norm, "f64") + 1e-6), 1)
    end
    if divisor then factor = xt.div(factor, wide) end
    local rate = xt.cast(lr, "f64")
    -- What is not finite makes the norm that the fused ops look at a NaN; else it adds 0.
    local seen = o.guard and raw + xt.cast(o.guard - o.guard, raw.dtype) or raw
    local all_finite = xt.eq(xt.cast(seen - seen, "f64") + (rate - rate), 0)
    local now = { lr = 1.0, step = 1, norm = seen, scale = 1, clip = o.clip, factor = factor,
      rate = rate,
      tensors = { lr_tensor = lr, step_tensor = at, divisor = divisor },
      choose = function(updated, old) return xt.where(all_finite, updated, old) end }
    for _, group in ipairs(self.groups) do group.rule.update(self, group, now) end
    return norm
  end)
end

-- Where the gradients are; nil when there is none.
local function device_of(self)
  for _, param in ipairs(self.params) do
    if param.tensor.grad then return param.tensor.device end
  end
end

-- The update as part of a graph.
local function step_in_graph(self, lr, o)
  lr = want_tensor(self.kind, "lr", lr)
  want_tensor(self.kind, "step", o.step)
  if not device_of(self) then
    fail(self.kind .. ":step: no parameter has a gradient in this graph")
  end
  local name = require("xtrain.graph").name
  for _, param in ipairs(self.params) do name(param.name, param.tensor) end
  each_state(self, name)
  local norm = update_unread(self, lr, o)
  self.measured = nil -- of values that have no bytes
  return norm
end

local function want_finite(self, lr)
  if type(lr) == "number" and is_finite(lr) then return end
  fail(("%s:step: lr is %s, wanted a finite number"):format(self.kind,
    lr ~= lr and "NaN" or type(lr) == "number" and tostring(lr) or "a " .. type(lr)))
end

local function queue(self, lr, o)
  want_finite(self, lr)
  local device = device_of(self)
  if not device then return nil end
  return update_unread(self, xt.tensor(lr, { dtype = "f64", device = device }), { clip = o.clip,
    divisor = o.divisor, guard = o.guard,
    step = xt.tensor(self.steps + 1, { dtype = "i64", device = device }) })
end

-- For run:train: the device's part of a step, {clip, divisor, guard} as step has them; nothing is
-- read, so that a GPU has work until the caller looks. `replayed` is the host's part. Returns the
-- norm, 0-dim, or nil where no parameter has a gradient.
function methods:queue(lr, o) return xt.core.shielded(queue, self, lr, o) end

-- methods.step, which Ctrl-C may not stop half-way.
local function step(self, lr, given)
  local o = options.read(self.kind .. ":step", given, step_options)
  if xt.core.graph_recording() then return step_in_graph(self, lr, o) end
  if type(lr) == "userdata" then lr = lr:item() end
  want_finite(self, lr)
  if type(o.divisor) == "userdata" then o.divisor = o.divisor:item() end
  if type(o.step) == "userdata" then o.step = o.step:item() end
  if o.step then self.steps = o.step - 1 end
  local divisor = o.divisor or (active.run and active.run:divisor()) or 1
  return xt.no_grad(function()
    local measured = self:measure()
    local norm
    if measured.count == 0 then
      norm = xt.tensor(0.0)
    elseif divisor == 0 then
      norm = xt.tensor(0.0)
      skip(self, NO_LABEL)
    else
      local raw, fault = measured.norm, loss_fault()
      norm = raw * (1 / divisor)
      local value = norm:item()
      if is_finite(value) and not fault then
        self.steps = self.steps + 1
        local now = { lr = lr, rate = lr, step = self.steps, norm = raw, scale = 1 / divisor,
          clip = o.clip, factor = clip_factor(value, o.clip) / divisor, tensors = {},
          choose = take_first }
        local kept = active.run and active.run:wants_lost_updates() and before_update(self.params)
        for _, group in ipairs(self.groups) do group.rule.update(self, group, now) end
        if kept then active.run:note_lost_updates(lost_share(kept)) end
      else
        skip(self, not_finite(value, fault, self.params, norm_of_gradient))
      end
    end
    if active.run then active.run:note_step(lr, norm) end
    return norm
  end)
end

-- One update. lr: a number or a 0-dim tensor. clip: the largest joint norm of the gradients, 0 for
-- none. divisor: the gradients count divided by it; by default the labels that the run in progress
-- has counted, or 1. step: the number of this update, from 1; by default one more than the last.
-- Returns the norm after dividing and before clipping, 0-dim. A norm that is not finite, or no
-- label at all, changes nothing, is counted in `skipped` and reported. Parameters without a
-- gradient stay. In a graph lr and step are 0-dim tensors, divisor one too, a number or nothing,
-- and guard, a 0-dim tensor, must be finite as well for the step to change anything.
function methods:step(lr, given) return xt.core.shielded(step, self, lr, given) end

-- For run:train: the host's part of a step whose update a graph or queue has made, with its norm.
-- norms() -> {path = norm of that gradient}, asked for when nothing was changed; without it, those
-- of the parameters' own gradients.
function methods:replayed(lr, norm, divisor, norms)
  local value, fault = norm:item(), loss_fault()
  if divisor == 0 then
    norm = xt.tensor(0.0)
    skip(self, NO_LABEL)
  elseif is_finite(value) and not fault then
    self.steps = self.steps + 1
  else
    local by_name = norms and norms()
    skip(self, not_finite(value, fault, self.params, by_name and function(param)
      return by_name[param.name]
    end or norm_of_gradient))
  end
  if active.run then active.run:note_step(lr, norm) end
  return norm
end

-- Forgets the gradients.
function methods:zero_grad()
  for _, param in ipairs(self.params) do param.tensor:zero_grad() end
end

-- {"<path>.m" = tensor, "<path>.v" = tensor, step = 0-dim i64}. The tensors are the optimizer's
-- own.
function methods:state()
  local state = { step = xt.tensor(self.steps, { dtype = "i64" }) }
  each_state(self, function(name, tensor) state[name] = tensor end)
  return state
end

-- Takes over a state by name, all or nothing. Returns true, or nil, message.
function methods:load(state)
  if not state.step then return nil, self.kind .. ": the state has no 'step'" end
  local found = {}
  local message = each_state(self, function(name, target)
    local source = state[name]
    if not source then return ("%s: the state has no '%s'"):format(self.kind, name) end
    local got, want = table.concat(source.shape, "x"), table.concat(target.shape, "x")
    if got ~= want then return ("%s: '%s' is %s, wanted %s"):format(self.kind, name, got, want) end
    found[#found + 1] = { target, source }
  end)
  if message then return nil, message end
  xt.no_grad(function()
    for _, pair in ipairs(found) do pair[1]:copy_(pair[2]:to(pair[1].device)) end
  end)
  self.steps = state.step:item()
  return true
end

-- ---- the optimizers ----------------------------------------------------------------------------

-- Options that every optimizer has:
--   weight_decay, decay(name, tensor) -> whether it applies; by default to two or more dimensions
--   group(name, tensor) -> nil, or a table of what is different for this parameter: any number
--       among the optimizer's options, and lr, a factor on the step's learning rate (default 1).
--       A weight_decay that it names applies whatever decay says.

local adamw = { name = "adamw", settings = { "betas", "eps", "weight_decay" } }

local MOMENTS = { "m", "v" }
function adamw.states() return MOMENTS end

function adamw.check(kind, settings)
  local betas = settings.betas
  for i = 1, 2 do
    if type(betas[i]) ~= "number" or not (betas[i] >= 0 and betas[i] < 1) then
      fail(("%s: betas are {%s}, wanted two numbers in [0, 1)"):format(kind, shown(betas)))
    end
  end
end

-- m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
-- w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
function adamw.update(opt, group, now)
  local s = group.settings
  fused(opt, group, MOMENTS, function(list)
    call("adamw", now.norm, list, now.lr * s.lr, s.betas[1], s.betas[2], s.eps, s.weight_decay,
      now.step, now.scale, now.clip, now.tensors)
  end)
end

-- adamw(params, {betas = {0.9, 0.999}, eps = 1e-8, weight_decay = 0.01, decay, group}): Loshchilov
-- and Hutter, 2019. The moments are "<path>.m" and "<path>.v".
function M.adamw(params, given)
  check_params("optim.adamw", params)
  local o = options.read("optim.adamw", given, { betas = { 0.9, 0.999 }, eps = 1e-8,
    weight_decay = 0.01, decay = options.optional, group = options.optional })
  return new("adamw", params, o, function() return adamw, o end)
end

local sgd = { name = "sgd",
  settings = { "momentum", "dampening", "nesterov", "weight_decay" } }

local BUFFER, NOTHING = { "momentum" }, {}
function sgd.states(settings) return settings.momentum == 0 and NOTHING or BUFFER end

function sgd.check(kind, settings)
  if settings.nesterov and (settings.momentum == 0 or settings.dampening ~= 0) then
    fail(kind .. ": nesterov wants a momentum and no dampening")
  end
end

-- g = g + wd w;  m = momentum m + (1 - dampening) g, at first m = g
-- w = w - lr m, or w - lr (g + momentum m) with nesterov
function sgd.update(opt, group, now)
  local s = group.settings
  fused(opt, group, BUFFER, function(list)
    call("sgd", now.norm, list, now.lr * s.lr, s.momentum, s.dampening, s.nesterov, s.weight_decay,
      now.step, now.scale, now.clip, now.tensors)
  end)
end

-- sgd(params, {momentum = 0, dampening = 0, nesterov = false, weight_decay = 0, decay, group}): as
-- torch.optim.SGD; the decay is added to the gradient. The buffer is "<path>.momentum".
function M.sgd(params, given)
  check_params("optim.sgd", params)
  local o = options.read("optim.sgd", given, { momentum = 0.0, dampening = 0.0, nesterov = false,
    weight_decay = 0.0, decay = options.optional, group = options.optional })
  return new("sgd", params, o, function() return sgd, o end)
end

-- ---- muon --------------------------------------------------------------------------------------

-- The coefficients of the quintic iteration X <- a X + (b A + c A^2) X with A = X X^T that Jordan
-- and others tuned for a steep slope at 0 ("Muon: an optimizer for hidden layers in neural
-- networks", 2024): singular values above 0.001 of the norm are in [0.5, 1.21] after 5 iterations,
-- those above 0.00003 after 8.
local QUINTIC = { 3.4445, -4.7750, 2.0315 }

-- The nearest matrix of orthonormal rows (or columns, of a tall one) to g (m, n), roughly: U f(S)
-- V^T of its singular values S, f near 1. The norm that g is first divided by is (sum s^4)^(1/4):
-- not below the largest singular value, and tighter than Frobenius'. Zero stays zero.
function M.orthogonalize(g, steps)
  if g.ndim ~= 2 then
    fail("optim.orthogonalize: g has " .. g.ndim .. " dimensions, wanted 2")
  end
  local a, b, c = table.unpack(QUINTIC)
  local tall = g.shape[1] > g.shape[2]
  local x = tall and g:transpose(1, 2) or g
  -- First to a Frobenius norm of 1, so that squares neither overflow nor vanish.
  x = x / (xt.norm(x) + 1e-30)
  local gram = x:matmul(x:transpose(1, 2)) -- the Frobenius norm of it is (sum s^4)^(1/2)
  x = x / (xt.sqrt(xt.norm(gram)) + 1e-30)
  for _ = 1, steps or 8 do
    gram = x:matmul(x:transpose(1, 2))
    x = x * a + (gram * b + gram:matmul(gram) * c):matmul(x)
  end
  return tall and x:transpose(1, 2) or x
end

local muon = { name = "muon",
  settings = { "momentum", "nesterov", "steps", "weight_decay", "scale" } }

local MOMENTUM = { "m" }
function muon.states() return MOMENTUM end

-- What the orthogonal update of an (out, in) weight is multiplied by.
local SCALES = {
  none = function() return 1 end,
  -- Jordan and others, 2024
  original = function(out, d_in) return math.sqrt(math.max(1, out / d_in)) end,
  -- The root mean square of AdamW's updates, so that one learning rate does for both: Liu and
  -- others, "Muon is scalable for LLM training", 2025.
  adamw = function(out, d_in) return 0.2 * math.sqrt(math.max(out, d_in)) end,
}

function muon.check(kind, settings)
  options.choice(kind, "scale", settings.scale, { "none", "original", "adamw" })
end

-- m = momentum m + (1 - momentum) g;  u = m, or (1 - momentum) g + momentum m with nesterov
-- w = w (1 - lr wd) - lr scale orthogonalize(u)
function muon.update(opt, group, now)
  local s = group.settings
  local lr, keep = now.rate * s.lr, s.momentum
  for _, param in ipairs(group) do
    local w, m = param.tensor, opt.moments[param.name].m
    if w.grad then
      local g = w.grad:to(m.dtype) * factor_of(now.factor * (1 - keep), m.dtype)
      local next_m = m * keep + g
      local u = s.nesterov and next_m * keep + g or next_m
      local by = SCALES[s.scale](table.unpack(w.shape))
      local next_w = w * factor_of(1 - lr * s.weight_decay, w.dtype)
        - M.orthogonalize(u, s.steps) * factor_of(lr * by, m.dtype)
      m:copy_(now.choose(next_m, m))
      w:copy_(now.choose(next_w, w))
    end
  end
end

-- Words of a path that say that a matrix is no map from one layer's width to another's.
local NOT_HIDDEN = { embed = true, embedding = true, positions = true, head = true,
  lm_head = true, wte = true, wpe = true }

local function is_hidden(name, tensor)
  if tensor.ndim ~= 2 then return false end
  for word in name:gmatch("[^.]+") do
    if NOT_HIDDEN[word] then return false end
  end
  return true
end

-- muon(params, {momentum = 0.95, nesterov = true, steps = 8, weight_decay = 0, scale =
-- "none"|"original"|"adamw", matrices, decay, group, adamw = {lr = 1, betas, eps, weight_decay}}):
-- matrices by orthogonalised momentum, everything else by adamw. matrices(name, tensor) says which
-- are which; by default every one of two dimensions but those whose path has a word such as embed,
-- positions or head. adamw.lr is a factor on the step's learning rate. The update of a matrix has
-- singular values near 1, times the scale: so either its learning rate is some 0.02 and adamw.lr is
-- small, or scale is "adamw" and one learning rate does for all.
function M.muon(params, given)
  check_params("optim.muon", params)
  local o = options.read("optim.muon", given, { momentum = 0.95, nesterov = true, steps = 8,
    weight_decay = 0.0, scale = "none", matrices = options.optional, decay = options.optional,
    group = options.optional, adamw = options.optional })
  local rest = options.read("optim.muon: adamw", o.adamw, { lr = 1.0, betas = { 0.9, 0.999 },
    eps = 1e-8, weight_decay = 0.0 })
  rest.decay, rest.group = o.decay, o.group
  local matrices = o.matrices or is_hidden
  return new("muon", params, o, function(param)
    if not matrices(param.name, param.tensor) then return adamw, rest end
    if param.tensor.ndim ~= 2 then
      fail(("optim.muon: '%s' has %d dimensions, a matrix has 2"):format(param.name,
        param.tensor.ndim))
    end
    return muon, o
  end)
end

return M
