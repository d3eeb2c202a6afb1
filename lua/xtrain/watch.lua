-- xt.debug.watch: a function that is called with activations and gradients as they are made.
local core = require "xtrain.core"
local options = require "xtrain.options"
local observe = require "xtrain.observe"
local xt = require "xtrain"

local M = {}

local watches = {} -- those that are on

-- Ops that hand a weight on and are not what a layer does with it.
local CARRIERS = { cast = true, contiguous = true, transpose = true, reshape = true }

local event_meta = {
  __tostring = function(e)
    local name = e.name and e.name .. " " or ""
    local op = e.op and (e.kind == "gradient" and "through " or "of ") .. e.op .. " " or ""
    return ("%s %s%sat %s: %s"):format(e.kind, name, op, e.where, observe.describe(e.value))
  end,
}

local watch = {}
watch.__index = watch

-- Ends it.
function watch:stop()
  observe.remove(self.observer)
  for i = #watches, 1, -1 do
    if watches[i] == self then table.remove(watches, i) end
  end
end

function watch:__tostring()
  return ("watch '%s': told %d times"):format(self.pattern, self.count)
end

local function tell(self, event)
  if event.value == nil or not event.value.dtype:find "^[fb]" then return end
  self.count = self.count + 1
  self.fn(setmetatable(event, event_meta))
end

local function on_call(self, e)
  if e.rule or not self.activations then return end
  local value = e.outputs[1]
  if self.ops[e.op] then
    tell(self, { kind = "activation", op = e.op, where = e.where, value = value,
      inputs = e.inputs })
  end
  if CARRIERS[e.op] then return end
  -- A composed op comes after its parts: what was told of one is not told again of the whole.
  local told = self.inside[e.op] or {}
  self.inside[e.op] = nil
  for i = 1, e.n_in do
    local name = e.leaves[i] and self.names[e.leaves[i]]
    if name and e.within then
      self.inside[e.within] = self.inside[e.within] or {}
      self.inside[e.within][name] = true
    end
    if name and not told[name] then
      tell(self, { kind = "activation", name = name, op = e.op, where = e.where, value = value,
        inputs = e.inputs })
    end
  end
end

local function on_record(self, e)
  if self.gradients and self.ops[e.op] then
    tell(self, { kind = "gradient", op = e.op, where = e.where, value = e.grads_out[1],
      inputs = e.grads_in })
  end
  for _, from in pairs(e.from) do
    if from.leaf and self.names[from.leaf] then self.touched[from.leaf] = true end
  end
end

-- The gradients of variables, whole, in the order of their names.
local function on_end(self, e)
  local touched = self.touched
  self.touched = {}
  if e.as_values or not self.gradients then return end
  local names = {}
  for leaf in pairs(touched) do names[self.names[leaf]] = leaf end
  for _, name in ipairs(options.names(names)) do
    local grad = self.tensors[name].grad
    if grad then tell(self, { kind = "gradient", name = name, where = e.where, value = grad }) end
  end
end

local on = { call = on_call, record = on_record, ["end"] = on_end }

local function matches(name, pattern) return name:find("^" .. pattern .. "$") ~= nil end

-- Fills in which ops and parameters are meant; an error where it is none.
local function choose(self, model)
  local known, any = {}, false
  for _, op in ipairs(xt.ops()) do
    known[#known + 1] = op.name
    if matches(op.name, self.pattern) then
      self.ops[op.name], any = true, true
    end
  end
  for leaf, param in pairs(observe.parameters(model)) do
    known[#known + 1] = param.name
    if matches(param.name, self.pattern) then
      self.names[leaf], self.tensors[param.name], any = param.name, param.tensor, true
    end
  end
  if any then return end
  local nearest = options.nearest(self.pattern, known)
  core.fail(("watch: no op and no parameter is called '%s'%s%s"):format(self.pattern,
    nearest and (" (did you mean '%s'?)"):format(nearest) or "",
    next(observe.parameters(model)) and "" or "; outside a run, name the model: {model = m}"))
end

-- watch(pattern [, fn] [, {model, activations = true, gradients = true}]): from now on fn(e) for
-- the ops, and for the parameters of the model (by default, of the run in progress), whose whole
-- name the Lua pattern matches: "softmax", "blocks.2.*", ".*wq". e has
--   kind   "activation": what the op made, or what was computed with the parameter, in forward;
--          "gradient": the one that arrives at the op's result, or the parameter's when a backward
--          has ended
--   value, op, name (of the parameter), where (the line); inputs: the op's, or their gradients
-- Printed, an event is a line with statistics, which is what happens without fn. What fn raises
-- makes the op fail. Returns the watch: w:stop() ends it, xt.debug.unwatch() ends all. Replays of
-- segments and graphs are not told.
function M.watch(pattern, fn, given)
  if type(fn) == "table" and given == nil then fn, given = nil, fn end
  if type(pattern) ~= "string" then
    core.fail("watch: pattern is a " .. type(pattern) .. ", wanted the name of an op or parameter")
  end
  if fn ~= nil and type(fn) ~= "function" then
    core.fail("watch: fn is a " .. type(fn) .. ", wanted a function")
  end
  local o = options.read("watch", given, { model = options.optional, activations = true,
    gradients = true })
  local self = setmetatable({ pattern = pattern, fn = fn or print, ops = {}, names = {},
    tensors = {}, touched = {}, inside = {}, count = 0, activations = o.activations,
    gradients = o.gradients }, watch)
  choose(self, o.model)
  self.observer = function(event) on[event.kind](self, event) end
  watches[#watches + 1] = self
  observe.add(self.observer)
  return self
end

-- unwatch(): ends all watches.
function M.unwatch()
  for _, each in ipairs(table.move(watches, 1, #watches, 1, {})) do each:stop() end
end

return M
