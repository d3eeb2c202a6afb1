-- Hugging Face folders: config.json and model.safetensors (or shards with an index), of the
-- families qwen3 and llama. One table says which of their names is which of ours.
local xt = require "xtrain"
local nn = require "xtrain.nn"
local options = require "xtrain.options"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"
local safetensors = require "xtrain.core.safetensors"
local fail = xt.core.fail

local M = {}

-- ---- names -------------------------------------------------------------------------------------

-- Ours within a block (or in the model) = theirs within a layer (or in the model).
local BLOCK_NAMES = {
  ["attn_norm.weight"] = "input_layernorm.weight",
  ["attn.wq"] = "self_attn.q_proj.weight",
  ["attn.wk"] = "self_attn.k_proj.weight",
  ["attn.wv"] = "self_attn.v_proj.weight",
  ["attn.wo"] = "self_attn.o_proj.weight",
  ["attn.q_norm.weight"] = "self_attn.q_norm.weight",
  ["attn.k_norm.weight"] = "self_attn.k_norm.weight",
  ["mlp_norm.weight"] = "post_attention_layernorm.weight",
  ["mlp.gate"] = "mlp.gate_proj.weight",
  ["mlp.up"] = "mlp.up_proj.weight",
  ["mlp.down"] = "mlp.down_proj.weight",
}
local MODEL_NAMES = {
  ["embed.weight"] = "model.embed_tokens.weight",
  ["norm.weight"] = "model.norm.weight",
  ["head.weight"] = "lm_head.weight",
}

-- Our path -> their name. Blocks count from 1 here and from 0 there.
local function their_name(path)
  local index, rest = path:match("^blocks%.(%d+)%.(.+)$")
  if index then
    local name = BLOCK_NAMES[rest]
    return name and ("model.layers.%d.%s"):format(tonumber(index) - 1, name)
  end
  return MODEL_NAMES[path]
end

-- {their name = tensor}: the parameters, or with "grad" their gradients (those that there are).
function M.state(model, what)
  if what ~= nil and what ~= "grad" then
    fail(("hf.state: what is '%s', wanted nothing or \"grad\""):format(tostring(what)))
  end
  local state = {}
  for _, param in ipairs(nn.params(model)) do
    local name = their_name(param.name)
    if not name then
      fail("hf.state: no Hugging Face name for the parameter " .. param.name)
    end
    if what == "grad" then
      state[name] = param.tensor.grad
    else
      state[name] = param.tensor
    end
  end
  return state
end

-- ---- config.json -------------------------------------------------------------------------------

local ARCHITECTURES = { qwen3 = "Qwen3ForCausalLM", llama = "LlamaForCausalLM" }

-- transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters.
local function rope_theta(config)
  local rope = config.rope_parameters or config.rope_scaling
  if type(rope) ~= "table" then rope = {} end
  local kind = rope.rope_type or rope.type or "default"
  if kind ~= "default" then
    return nil, ("config.json: rope_type '%s' is not supported, only 'default'"):format(kind)
  end
  return (rope.rope_theta or config.rope_theta or 10000.0) + 0.0
end

local NEEDED = { "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
  "intermediate_size" }

-- What the model's constructor takes, from a decoded config.json; or nil, message.
local function read_config(config)
  local kind = config.model_type
  if not ARCHITECTURES[kind] then
    return nil, ("config.json: model_type '%s' is not supported; qwen3 and llama are")
      :format(tostring(kind))
  end
  for _, name in ipairs(NEEDED) do
    if math.type(config[name]) ~= "integer" then
      return nil, ("config.json: %s is missing or no integer"):format(name)
    end
  end
  if config.attention_bias == true or config.mlp_bias == true then
    return nil, "config.json: biases in attention or MLP are not supported"
  end
  if config.use_sliding_window == true then
    return nil, "config.json: sliding-window attention is not supported"
  end
  if config.hidden_act and config.hidden_act ~= "silu" then
    return nil, ("config.json: hidden_act '%s' is not supported, only 'silu'")
      :format(tostring(config.hidden_act))
  end
  local theta, message = rope_theta(config)
  if not theta then return nil, message end
  local tied = config.tie_word_embeddings
  if type(tied) ~= "boolean" then tied = false end
  return {
    vocab = config.vocab_size, dim = config.hidden_size, layers = config.num_hidden_layers,
    heads = config.num_attention_heads, ffn = config.intermediate_size,
    kv_heads = config.num_key_value_heads or config.num_attention_heads,
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads,
    rope_theta = theta, eps = (config.rms_norm_eps or 1e-6) + 0.0, tied = tied,
  }
end

-- Both spellings of the rotation, so that transformers 4 and 5 and others read it.
local function write_config(model, dtype)
  local c = model.config
  return {
    architectures = { ARCHITECTURES[model.kind] },
    model_type = model.kind,
    vocab_size = c.vocab, hidden_size = c.dim, num_hidden_layers = c.layers,
    num_attention_heads = c.heads, num_key_value_heads = c.kv_heads, head_dim = c.head_dim,
    intermediate_size = c.ffn, rms_norm_eps = c.eps, tie_word_embeddings = c.tied,
    rope_theta = c.rope_theta,
    rope_parameters = { rope_type = "default", rope_theta = c.rope_theta },
    max_position_embeddings = c.context or 32768,
    hidden_act = "silu", attention_bias = false, mlp_bias = false, attention_dropout = 0.0,
    initializer_range = 0.02, use_cache = true, use_sliding_window = false,
    dtype = dtype, torch_dtype = dtype,
  }
end

-- ---- weights -----------------------------------------------------------------------------------

-- {their name = tensor} of a folder, whole or in shards; or nil, message.
local function read_weights(dir)
  local index_path = dir .. "/model.safetensors.index.json"
  if not file.exists(index_path) then return safetensors.load(dir .. "/model.safetensors") end
  local text, message = file.read(index_path)
  if not text then return nil, message end
  local ok, index = pcall(json.decode, text)
  if not ok or type(index) ~= "table" or type(index.weight_map) ~= "table" then
    return nil, index_path .. ": no weight_map in it"
  end
  local shards, all = {}, {}
  for _, shard in pairs(index.weight_map) do shards[shard] = true end
  for _, shard in ipairs(options.names(shards)) do
    local part
    part, message = safetensors.load(dir .. "/" .. shard)
    if not part then return nil, message end
    for name, tensor in pairs(part) do all[name] = tensor end
  end
  return all
end

local function shape_text(t) return table.concat(t.shape, "x") end

-- Copies named tensors into parameters, all or nothing: what is missing or of another shape is
-- found before anything is written. name_of(path) -> name in `tensors`. Returns true, or nil,
-- message.
function M.copy_into(params, tensors, name_of)
  for _, param in ipairs(params) do
    local name = name_of(param.name)
    local source = name and tensors[name]
    if not source then return nil, "no tensor " .. tostring(name) .. " for " .. param.name end
    if shape_text(source) ~= shape_text(param.tensor) then
      return nil, ("tensor %s is %s, the model wants %s"):format(name, shape_text(source),
        shape_text(param.tensor))
    end
  end
  xt.no_grad(function()
    for _, param in ipairs(params) do
      local t, source = param.tensor, tensors[name_of(param.name)]
      if source.dtype ~= t.dtype then source = xt.cast(source, t.dtype) end
      if source.device ~= t.device then source = source:to(t.device) end
      t:copy_(source)
    end
  end)
  return true
end

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

-- A folder of Hugging Face -> model, config (as in config.json); or nil, message. opts are passed
-- on to the model: dtype, device, attention, recompute, dropout.
function M.load(dir, given)
  local opts = options.read("hf.load", given, { dtype = options.optional,
    device = options.optional, attention = options.optional, recompute = options.optional,
    dropout = options.optional })
  local config, message = read_json(dir .. "/config.json")
  if not config then return nil, message end
  local wanted
  wanted, message = read_config(config)
  if not wanted then return nil, dir .. "/" .. message end
  local tensors
  tensors, message = read_weights(dir)
  if not tensors then return nil, message end
  for name, value in pairs(opts) do wanted[name] = value end
  wanted.seed = false
  local model = require("xtrain.models")[config.model_type](wanted)
  -- Some files that tie the head to the embedding hold it anyway; some that do not say so do not.
  if not wanted.tied and not tensors["lm_head.weight"] then
    return nil, dir .. ": lm_head.weight is missing, and config.json does not tie it"
  end
  local ok
  ok, message = M.copy_into(nn.params(model), tensors, their_name)
  if not ok then return nil, dir .. "/model.safetensors: " .. message end
  return model, config
end

-- Writes config.json, model.safetensors and, with a tokenizer, tokenizer.json. opts.dtype: of the
-- matrices in the file, f32 by default. Returns true, or nil, message.
function M.save(dir, model, tokenizer, given)
  local opts = options.read("hf.save", given, { dtype = "f32" })
  local names = { f32 = "float32", bf16 = "bfloat16", f16 = "float16" }
  if model.config.rope_layout == "interleaved" then
    fail("hf.save: Hugging Face folders want rope_layout 'half', this model has 'interleaved'")
  end
  options.choice("hf.save", "dtype", opts.dtype, { "f32", "bf16", "f16" })
  local torch_dtype = names[opts.dtype]
  local ok, message = file.mkdir(dir)
  if not ok then return nil, message end
  local tensors = xt.no_grad(function()
    local out = {}
    for name, t in pairs(M.state(model)) do
      out[name] = t.dtype == opts.dtype and t:detach() or xt.cast(t:detach(), opts.dtype)
    end
    return out
  end)
  ok, message = safetensors.save(dir .. "/model.safetensors", tensors, { format = "pt" })
  if not ok then return nil, message end
  ok, message = file.write_atomic(dir .. "/config.json",
    json.encode(write_config(model, torch_dtype)) .. "\n")
  if not ok then return nil, message end
  if tokenizer then return tokenizer:save(dir) end
  return true
end

return M
