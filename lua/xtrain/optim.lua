-- Optimizers. One call of a fused op updates all parameters of a group; the ops are the definition.
-- State is a plain table by parameter path, so that a model put together in another order still
-- finds its own moments.
local xt = require "xtrain"
local options = require "xtrain.options"
local active = require "xtrain.active"
local fail = xt.core.fail

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

local function is_finite(x) return x == x and x ~= math.huge and x ~= -math.huge end

-- The names of the parameters whose gradient holds a NaN or an infinity, at most `most`.
local function not_finite(params, most)
  local names = {}
  for _, param in ipairs(params) do
    local grad = param.tensor.grad
    if grad and not is_finite(call("grad_norm", { grad }):item()) then
      names[#names + 1] = param.name
      if #names == most then break end
    end
  end
  return names
end

-- ---- what optimizers share ---------------------------------------------------------------------

local methods = {}

local function check_params(what, params)
  if type(params) ~= "table" or (params[1] ~= nil and type(params[1]) ~= "table") then
    fail(what .. ": the first argument is a list of parameters: xt.nn.params(model)")
  end
  for i, param in ipairs(params) do
    if type(param.name) ~= "string" or not param.tensor then
      fail(("%s: parameter %d is no {name = ..., tensor = ...}"):format(what, i))
    end
  end
  return params
end

local function decays(o, param)
  if o.weight_decay == 0 then return false end
  if o.decay then return o.decay(param.name, param.tensor) and true or false end
  return param.tensor.ndim >= 2
end

-- states: the suffixes of the state tensors of each parameter.
local function new(kind, params, o, states, update)
  local self = setmetatable({ kind = kind, params = params, options = o, steps = 0,
    states = states, update = update, moments = {}, skipped = 0 }, { __index = methods })
  self.groups = { { decay = o.weight_decay }, { decay = 0.0 } }
  for _, param in ipairs(params) do
    local group = self.groups[decays(o, param) and 1 or 2]
    group[#group + 1] = param
    local own, t = {}, param.tensor
    local opts = { dtype = t.dtype == "f64" and "f64" or "f32", device = t.device }
    for i in ipairs(states) do own[i] = xt.zeros(t.shape, opts) end
    self.moments[param.name] = own
  end
  if active.run then active.run:enter_optimizer(self) end
  return self
end

-- The list a fused op takes: parameter, gradient, states, compute copy, for each that has a
-- gradient.
local function list_of(self, group)
  local list, n = {}, 0
  for _, param in ipairs(group) do
    local t = param.tensor
    local grad = t.grad
    if grad then
      list[n + 1], list[n + 2] = t, grad
      n = n + 2
      for i in ipairs(self.states) do
        list[n + i] = self.moments[param.name][i]
      end
      n = n + #self.states + 1
      list[n] = xt.compute_copy_peek(t) or false
    end
  end
  return list
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

local no_tensors = {}
local step_options = { clip = 0.0, divisor = options.optional, step = options.optional }

-- Without a tensor this would be the same number at every run of the graph.
local function want_tensor(kind, what, value)
  if type(value) == "userdata" then return value end
  fail(("%s:step: %s is a plain number inside a graph and would repeat at every run: make it an "
    .. "input, b:input(\"%s\", %s)"):format(kind, what, what, what == "step" and "1" or "1e-3"))
end

-- The update as part of a graph: nothing is read on the host, and the caller counts the steps. The
-- ops themselves change nothing when the norm is not finite.
local function step_in_graph(self, lr, o)
  lr = want_tensor(self.kind, "lr", lr)
  local at = want_tensor(self.kind, "step", o.step)
  local divisor = o.divisor
  if type(divisor) == "number" then divisor = xt.tensor(divisor, { dtype = "f64" }) end
  return xt.no_grad(function()
    local grads = gradients(self.params)
    if #grads == 0 then fail(self.kind .. ":step: no parameter has a gradient in this graph") end
    local name = require("xtrain.graph").name
    for _, param in ipairs(self.params) do
      name(param.name, param.tensor)
      for i, suffix in ipairs(self.states) do
        name(param.name .. "." .. suffix, self.moments[param.name][i])
      end
    end
    local raw = call("grad_norm", grads)
    local norm = raw
    if divisor then
      norm = raw * xt.cast(xt.div(1, xt.cast(divisor, "f64")), raw.dtype)
    end
    local tensors = { lr_tensor = lr, step_tensor = at, divisor = divisor }
    for _, group in ipairs(self.groups) do
      local list = list_of(self, group)
      if #list > 0 then
        self.update(self, raw, list, 0.0, group.decay, 1, o.clip, tensors)
        for _, param in ipairs(group) do xt.compute_copy_fresh(param.tensor) end
      end
    end
    return norm
  end)
end

-- One update. lr: a number or a 0-dim tensor. clip:
-- the largest joint norm of the gradients, 0 for none. divisor: the
-- gradients count divided by it; by default the labels that the run in progress has counted, or 1.
-- Returns the norm after dividing and before clipping, 0-dim. A norm that is not finite, or no
-- label at all, changes nothing, is counted in `skipped` and reported. Parameters without a
-- gradient stay. In a graph lr and `step` (the number of this update, from 1) are 0-dim tensors,
-- divisor a 0-dim tensor, a number or nothing.
function methods:step(lr, given)
  local o = options.read(self.kind .. ":step", given, step_options)
  if xt.core.graph_recording() then return step_in_graph(self, lr, o) end
  if type(lr) == "userdata" then lr = lr:item() end
  if type(lr) ~= "number" then
    fail(("%s:step: lr is a %s, wanted a number"):format(self.kind, type(lr)))
  end
  if type(o.divisor) == "userdata" then o.divisor = o.divisor:item() end
  if type(o.step) == "userdata" then o.step = o.step:item() end
  if o.step then self.steps = o.step - 1 end
  local divisor = o.divisor or (active.run and active.run:divisor()) or 1
  return xt.no_grad(function()
    local grads = gradients(self.params)
    local norm
    if #grads == 0 then
      norm = xt.tensor(0.0)
    elseif divisor == 0 then
      norm = xt.tensor(0.0)
      skip(self, "no label in the batch counts")
    else
      local raw = call("grad_norm", grads)
      norm = raw * (1 / divisor)
      local value = norm:item()
      if is_finite(value) then
        self.steps = self.steps + 1
        for _, group in ipairs(self.groups) do
          local list = list_of(self, group)
          if #list > 0 then
            self.update(self, raw, list, lr, group.decay, 1 / divisor, o.clip, no_tensors)
            for _, param in ipairs(group) do xt.compute_copy_fresh(param.tensor) end
          end
        end
      else
        skip(self, ("the gradient norm is %s; not finite: %s"):format(value,
          table.concat(not_finite(self.params, 8), ", ")))
      end
    end
    if active.run then active.run:note_step(lr, norm) end
    return norm
  end)
end

-- Forgets the gradients; their buffers are kept for the next backward.
function methods:zero_grad()
  for _, param in ipairs(self.params) do param.tensor:zero_grad() end
end

-- {"<path>.m" = tensor, "<path>.v" = tensor, step = 0-dim i64}. The tensors are the optimizer's
-- own.
function methods:state()
  local state = { step = xt.tensor(self.steps, { dtype = "i64" }) }
  for _, param in ipairs(self.params) do
    for i, suffix in ipairs(self.states) do
      state[param.name .. "." .. suffix] = self.moments[param.name][i]
    end
  end
  return state
end

-- Takes over a state by name, all or nothing. Returns true, or nil, message.
function methods:load(state)
  if not state.step then return nil, self.kind .. ": the state has no 'step'" end
  local pairs_of = {}
  for _, param in ipairs(self.params) do
    for i, suffix in ipairs(self.states) do
      local name = param.name .. "." .. suffix
      local source, target = state[name], self.moments[param.name][i]
      if not source then return nil, ("%s: the state has no '%s'"):format(self.kind, name) end
      local got, want = table.concat(source.shape, "x"), table.concat(target.shape, "x")
      if got ~= want then
        return nil, ("%s: '%s' is %s, wanted %s"):format(self.kind, name, got, want)
      end
      pairs_of[#pairs_of + 1] = { target, source }
    end
  end
  xt.no_grad(function()
    for _, pair in ipairs(pairs_of) do
      pair[1]:copy_(pair[2]:to(pair[1].device))
    end
  end)
  self.steps = state.step:item()
  return true
end

-- ---- the optimizers ----------------------------------------------------------------------------

-- adamw(params, {betas = {0.9, 0.999}, eps = 1e-8, weight_decay = 0.01, decay}): Loshchilov and
-- Hutter, 2019. decay(name, tensor) says which parameters decay; by default those of two or more
-- dimensions.
function M.adamw(params, given)
  check_params("optim.adamw", params)
  local o = options.read("optim.adamw", given, { betas = { 0.9, 0.999 }, eps = 1e-8,
    weight_decay = 0.01, decay = options.optional })
  local b1, b2, eps = o.betas[1], o.betas[2], o.eps
  local function update(self, norm, list, lr, decay, scale, clip, tensors)
    call("adamw", norm, list, lr, b1, b2, eps, decay, math.max(self.steps, 1), scale, clip, tensors)
  end
  return new("adamw", params, o, { "m", "v" }, update)
end

-- sgd(params, {momentum = 0, dampening = 0, nesterov = false, weight_decay = 0, decay}): decay as
-- in adamw, added to the gradient.
function M.sgd(params, given)
  check_params("optim.sgd", params)
  local o = options.read("optim.sgd", given, { momentum = 0.0, dampening = 0.0, nesterov = false,
    weight_decay = 0.0, decay = options.optional })
  local function update(self, norm, list, lr, decay, scale, clip, tensors)
    call("sgd", norm, list, lr, o.momentum, o.dampening, o.nesterov, decay,
      math.max(self.steps, 1), scale, clip, tensors)
  end
  return new("sgd", params, o, { "momentum" }, update)
end

return M
