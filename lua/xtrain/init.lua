-- The library's entry: completes `xt`, which the binding made and passes here. Parts of the library
-- are loaded when they are first asked for, so that starting costs nothing.
local xt = ...
local core = xt.core
package.preload["xtrain.core"] = function() return core end

local op = xt.op

-- ---- constructors that are ops with options ----------------------------------------------------

local function options_of(name, given, known)
  return require("xtrain.options").read(name, given, known, 3)
end

-- xt.arange(n [, {dtype = "i64", device}]): 0, 1, ..., n - 1.
function xt.arange(n, given)
  local options = require "xtrain.options"
  local o = options_of("arange", given, { dtype = "i64", device = options.optional })
  return xt.call("arange", n, o.dtype)
end

-- The same numbers whatever the dtype: drawn in f32, then cast.
local function random(name)
  return function(shape, given)
    local options = require "xtrain.options"
    local o = options_of(name, given,
      { seed = options.optional, dtype = "f32", device = options.optional })
    if o.seed == nil then
      core.fail(name .. ": seed is missing; nothing is random unless a seed says so: xt." .. name
        .. "(shape, {seed = 1})")
    end
    local t = op[name](shape, { seed = o.seed })
    return o.dtype == "f32" and t or t:to(o.dtype)
  end
end

xt.rand = random "rand" -- uniform in [0, 1)
xt.randn = random "randn" -- normal, mean 0, deviation 1
xt.init = { dropout = core.dropout_stream }

-- ---- methods that are not ops ------------------------------------------------------------------

local names = core.tensor_names

-- A copy with its own bytes; the gradient passes through.
if not names.clone then
  function names.clone(t) return op.cast(t, t.dtype) end
end

-- ---- parts, loaded when asked for --------------------------------------------------------------

-- name = module, or {module, field}
local parts = {
  nn = "xtrain.nn",
  models = "xtrain.models",
  optim = "xtrain.optim",
  schedule = "xtrain.schedule",
  data = "xtrain.data",
  tokenizer = "xtrain.tokenizer",
  json = "xtrain.core.json",
  safetensors = "xtrain.core.safetensors",
  hf = "xtrain.hf",
  save = "xtrain.save",
  plot = "xtrain.plot",
  debug = "xtrain.debug",
  spec = "xtrain.spec",
  recipe = { "xtrain.recipe", "recipe" },
  live = { "xtrain.live", "live" },
  graph = { "xtrain.graph", "graph" },
  graph_load = { "xtrain.graph", "load" },
  generate = { "xtrain.generate", "generate" },
  evaluating = { "xtrain.nn", "evaluating" },
  clip_grad_norm = { "xtrain.optim", "clip_grad_norm" },
  gradcheck = { "xtrain.gradcheck", "gradcheck" },
  help = { "xtrain.help", "help" },
}
local embedded = {}
for _, name in ipairs(core.modules()) do embedded[name] = true end

-- A file of the library named like a part takes the part's place: xtrain/json.lua before the C.
for name, part in pairs(parts) do
  if type(part) == "string" and embedded["xtrain." .. name] then parts[name] = "xtrain." .. name end
end

-- A misspelt name is an error at the user's line, which names the nearest known one.
local function unknown(name)
  if type(name) ~= "string" or name:find "^_" then return nil end
  local options = require "xtrain.options"
  local known = options.names(xt)
  for _, other in ipairs(options.names(parts)) do known[#known + 1] = other end
  core.fail(options.no_field("xtrain", name, known))
end

-- A module that is one function serves as the field of that name itself.
local function load_part(part)
  if type(part) == "string" then return require(part) end
  local module = require(part[1])
  if type(module) == "table" then return module[part[2]] end
  return module
end

-- Parts that are tables of functions: a name they do not have is an error that says so.
local strict = { nn = true, models = true, optim = true, schedule = true, data = true,
  tokenizer = true, safetensors = true, hf = true }

setmetatable(xt, {
  __names = parts, -- for completion
  __index = function(_, name)
    local part = parts[name]
    if part == nil then return unknown(name) end
    local module = type(part) == "table" and part[1] or part
    if not embedded[module] and not package.preload[module] then return nil end
    local value = load_part(part)
    if strict[name] then require("xtrain.options").strict(value, "xt." .. name) end
    rawset(xt, name, value)
    return value
  end,
})
