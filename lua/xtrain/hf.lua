-- Hugging Face folders: config.json and model.safetensors (or shards with an index), of the
-- families in hf_family.lua, which says which of their names is which of ours.
local xt = require "xtrain"
local nn = require "xtrain.nn"
local options = require "xtrain.options"
local family = require "xtrain.hf_family"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"
local safetensors = require "xtrain.core.safetensors"
local fail = xt.core.fail

local M = {}

-- {their name = tensor in their layout}: the parameters, or with "grad" their gradients (those
-- that there are). Tensors share their bytes with the model.
function M.state(model, what)
  if what ~= nil and what ~= "grad" then
    fail(("hf.state: what is '%s', wanted nothing or \"grad\""):format(tostring(what)))
  end
  local state = {}
  for _, param in ipairs(nn.params(model)) do
    local name, transposed = family.their_name(model.kind, param.name)
    if not name then
      fail("hf.state: no Hugging Face name for the parameter " .. param.name)
    end
    local t = param.tensor
    if what == "grad" then t = t.grad end
    if t and transposed then t = t:detach():transpose(1, 2) end
    state[name] = t
  end
  return state
end

-- ---- reading -----------------------------------------------------------------------------------

local function read_json(path)
  local text, message = file.read(path)
  if not text then return nil, message end
  local ok, value, why = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then
    return nil, ("%s: not JSON: %s"):format(path, tostring(ok and why or value))
  end
  return value
end
M.read_json = read_json

-- {their name = tensor} of a folder, whole or in shards; or nil, message.
local function read_weights(dir)
  local index_path = dir .. "/model.safetensors.index.json"
  if not file.exists(index_path) then return safetensors.load(dir .. "/model.safetensors") end
  local index, message = read_json(index_path)
  if not index then return nil, message end
  if type(index.weight_map) ~= "table" then return nil, index_path .. ": no weight_map in it" end
  local shards, all = {}, {}
  for name, shard in pairs(index.weight_map) do
    if type(shard) ~= "string" or shard:find("/", 1, true) then
      return nil, ("%s: tensor %s lies in %s, which is no name of a file"):format(index_path, name,
        tostring(shard))
    end
    shards[shard] = true
  end
  for _, shard in ipairs(options.names(shards)) do
    local part
    part, message = safetensors.load(dir .. "/" .. shard)
    if not part then return nil, message end
    for name, tensor in pairs(part) do
      if index.weight_map[name] ~= shard then
        return nil, ("%s: tensor %s is in %s, which the index does not say"):format(index_path,
          name, shard)
      end
      all[name] = tensor
    end
  end
  for name, shard in pairs(index.weight_map) do
    if not all[name] then
      return nil, ("%s: tensor %s is not in %s"):format(index_path, name, shard)
    end
  end
  return all
end

local function shape_text(t) return table.concat(t.shape, "x") end

-- Copies named tensors into parameters, all or nothing: what is missing or of another shape is
-- found before anything is written. name_of(path) -> name in `tensors`, whether it is transposed
-- there. Returns true, or nil, message.
function M.copy_into(params, tensors, name_of)
  local sources = {}
  for i, param in ipairs(params) do
    local name, transposed = name_of(param.name)
    local source = name and tensors[name]
    if not source then return nil, "no tensor " .. tostring(name) .. " for " .. param.name end
    if transposed and source.ndim == 2 then source = source:transpose(1, 2) end
    if shape_text(source) ~= shape_text(param.tensor) then
      return nil, ("tensor %s is %s, the model wants %s%s"):format(name, shape_text(source),
        shape_text(param.tensor), transposed and " (both transposed)" or "")
    end
    sources[i] = source
  end
  xt.no_grad(function()
    for i, param in ipairs(params) do
      local t, source = param.tensor, sources[i]
      if source.dtype ~= t.dtype then source = xt.cast(source, t.dtype) end
      if source.device ~= t.device then source = source:to(t.device) end
      t:copy_(source)
    end
  end)
  return true
end

-- The same tensors, all under the names of the whole model: files of the bare model leave the
-- prefix out.
local function with_prefix(tensors, names)
  for name in pairs(tensors) do
    if name:sub(1, #names.prefix) == names.prefix then return tensors end
  end
  local out = {}
  for name, t in pairs(tensors) do
    out[name == "lm_head.weight" and name or names.prefix .. name] = t
  end
  return out
end

-- The name of a tensor that the model has no place for, or nil. A head in the file of a model that
-- ties it is a copy of the embedding, and buffers are no weights.
local function without_place(tensors, params, kind)
  local known = { ["lm_head.weight"] = true }
  for _, param in ipairs(params) do known[family.their_name(kind, param.name)] = true end
  for _, name in ipairs(options.names(tensors)) do
    local fine = known[name]
    for _, pattern in ipairs(family.names(kind).buffers) do fine = fine or name:find(pattern) end
    if not fine then return name end
  end
end

-- Makes a model of these options for the tensors of a file: model; or nil, message. A file that is
-- damaged may ask for any size: each matrix must be in the file before memory is asked for.
function M.model_for(kind, o, tensors)
  local elements, count = 0, 0
  for _, t in pairs(tensors) do
    elements, count = elements + t.numel, count + 1
  end
  local function size(name) return math.type(o[name]) == "integer" and o[name] + 0.0 or 0.0 end
  local head_dim = math.max(size "head_dim", 1)
  for name, least in pairs { vocab = size "vocab" * size "dim", ffn = size "ffn" * size "dim",
    heads = size "heads" * head_dim * size "dim", kv_heads = size "kv_heads" * head_dim,
    head_dim = size "head_dim",
    context = kind == "gpt2" and size "context" * size "dim" or 0 } do
    if least > elements then
      return nil, ("%s is %s, for which the file's %d elements are too few"):format(name,
        tostring(o[name]), elements)
    end
  end
  if size "layers" > count then
    return nil, ("layers is %d, for which the file's %d tensors are too few"):format(o.layers,
      count)
  end
  local ok, model = pcall(require("xtrain.models")[kind], o)
  if not ok then return nil, tostring(model) end
  return model
end

-- A folder of Hugging Face -> model, config (as in config.json); or nil, message. opts are passed
-- on to the model: dtype, device, attention, recompute, dropout. Weights of f32, bf16 or f16 become
-- f32 masters.
function M.load(dir, given)
  local opts = options.read("hf.load", given, { dtype = options.optional,
    device = options.optional, attention = options.optional, recompute = options.optional,
    dropout = options.optional })
  local config, message = read_json(dir .. "/config.json")
  if not config then return nil, message end
  local wanted
  wanted, message = family.read(config)
  if not wanted then return nil, dir .. "/" .. message end
  local tensors
  tensors, message = read_weights(dir)
  if not tensors then return nil, message end
  local kind = config.model_type
  tensors = with_prefix(tensors, family.names(kind))
  if wanted.tied == nil then
    wanted.tied = tensors["lm_head.weight"] == nil
  elseif not wanted.tied and not tensors["lm_head.weight"] then
    return nil, dir .. ": lm_head.weight is missing, and config.json does not tie it"
  end
  for name, value in pairs(opts) do wanted[name] = value end
  wanted.seed = false
  local model
  model, message = M.model_for(kind, wanted, tensors)
  if not model then return nil, dir .. "/config.json: " .. message end
  local params = nn.params(model)
  local extra = without_place(tensors, params, kind)
  if extra then
    return nil, ("%s: the file's tensor %s has no place in a model of type %s"):format(dir, extra,
      kind)
  end
  local ok
  ok, message = M.copy_into(params, tensors, function(path)
    return family.their_name(kind, path)
  end)
  if not ok then return nil, dir .. "/model.safetensors: " .. message end
  return model, config
end

-- ---- writing -----------------------------------------------------------------------------------

local TORCH_NAMES = { f32 = "float32", bf16 = "bfloat16", f16 = "float16" }

-- Writes config.json, model.safetensors and, with a tokenizer, tokenizer.json. opts.dtype: of the
-- tensors in the file, f32 by default. Returns true, or nil, message.
function M.save(dir, model, tokenizer, given)
  local opts = options.read("hf.save", given, { dtype = "f32" })
  options.choice("hf.save", "dtype", opts.dtype, { "f32", "bf16", "f16" })
  if not family.names(model.kind) then
    fail("hf.save: this is no model of xt.models: a model of your own has no Hugging Face names")
  end
  if model.config.rope_layout == "interleaved" then
    fail("hf.save: Hugging Face folders want rope_layout 'half', this model has 'interleaved'")
  end
  if tokenizer ~= nil and not (type(tokenizer) == "userdata" and tokenizer.save) then
    fail(("hf.save: the tokenizer is a %s, wanted one of xt.tokenizer or nothing"):format(
      type(tokenizer)))
  end
  local ok, message = file.mkdir(dir)
  if not ok then return nil, message end
  local tensors = xt.no_grad(function()
    local out = {}
    for name, t in pairs(M.state(model)) do
      out[name] = xt.contiguous(t.dtype == opts.dtype and t:detach()
        or xt.cast(t:detach(), opts.dtype))
    end
    return out
  end)
  ok, message = safetensors.save(dir .. "/model.safetensors", tensors, { format = "pt" })
  if not ok then return nil, message end
  ok, message = file.write_atomic(dir .. "/config.json",
    json.encode(family.write(model.kind, model.config, TORCH_NAMES[opts.dtype])) .. "\n")
  if not ok then return nil, message end
  if tokenizer then return tokenizer:save(dir) end
  return true
end

return M
