-- What Hugging Face calls the parts of each family of models: the names and layouts of tensors, and
-- config.json in both directions. A family is one row of the table at the end.
--
-- config.json says more than a model here can do. An option that changes what is computed and is
-- not supported is refused by its name; options that only matter elsewhere are passed over.
local json = require "xtrain.core.json"
local rope = require "xtrain.rope"

local M = {}

-- ---- config.json: reading ----------------------------------------------------------------------

local function text_of(value)
  if type(value) == "table" then return "a table" end
  return type(value) == "string" and "'" .. value .. "'" or tostring(value)
end

-- A field of config.json; null is as good as absent.
local function get(config, name)
  local value = config[name]
  if value ~= json.null then return value end
end

-- Options of config.json that must be absent or one of these values.
local function refused(config, allowed)
  local names = {}
  for name in pairs(allowed) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local value = get(config, name)
    if value ~= nil then
      local fine = false
      for _, each in ipairs(allowed[name]) do fine = fine or value == each end
      if not fine then
        local wanted = {}
        for i, each in ipairs(allowed[name]) do wanted[i] = text_of(each) end
        return ("config.json: %s is %s, which is not supported; wanted %s"):format(name,
          text_of(value), #wanted > 0 and table.concat(wanted, " or ") or "none")
      end
    end
  end
end

-- Refused in every family.
local EVERYWHERE = { quantization_config = {}, is_encoder_decoder = { false },
  add_cross_attention = { false }, tie_encoder_decoder = { false } }

-- The fields of `want` = {ours = {theirs, default}} as whole numbers; no default: must be there.
local function integers(config, want, into)
  for ours, row in pairs(want) do
    local value = get(config, row[1])
    if value == nil then value = row[2] end
    if math.type(value) == "float" and value == math.floor(value) then
      value = math.tointeger(value)
    end
    if math.type(value) ~= "integer" or value < 1 then
      if value == nil then return ("config.json: %s is missing"):format(row[1]) end
      return ("config.json: %s is %s, wanted a whole number above 0"):format(row[1],
        text_of(value))
    end
    into[ours] = value
  end
end

-- The base of the rotation and its scaling (nil: none), or nil, message. transformers 4 writes
-- rope_theta and rope_scaling, 5 writes rope_parameters; some write several.
local function rotation(config)
  local theta, scaling = get(config, "rope_theta"), nil
  for _, name in ipairs { "rope_scaling", "rope_parameters" } do
    local given = get(config, name)
    if given ~= nil then
      if type(given) ~= "table" then
        return nil, ("config.json: %s is %s, wanted a table"):format(name, text_of(given))
      end
      local message = refused(given, { partial_rotary_factor = { 1.0 } })
      if message then return nil, message end
      local kind = get(given, "rope_type") or get(given, "type") or "default"
      if kind ~= "default" then
        local numbers = { rope_type = kind }
        for key, value in pairs(given) do numbers[key] = numbers[key] or value end
        if numbers.original_max_position_embeddings == nil then
          numbers.original_max_position_embeddings = get(config, "max_position_embeddings")
        end
        scaling, message = rope.scaling(numbers)
        if not scaling then return nil, ("config.json: %s: %s"):format(name, message) end
      end
      theta = get(given, "rope_theta") or theta
    end
  end
  if theta == nil then theta = 10000.0 end
  if type(theta) ~= "number" or theta <= 0 then
    return nil, ("config.json: rope_theta is %s, wanted a number above 0"):format(text_of(theta))
  end
  return theta + 0.0, scaling
end

local function epsilon(config, name, default)
  local eps = get(config, name)
  if eps == nil then eps = default end
  if type(eps) ~= "number" or eps < 0 then
    return nil, ("config.json: %s is %s, wanted a number"):format(name, text_of(eps))
  end
  return eps + 0.0
end

-- The ids that begin and end a text and fill up a batch, for those who generate; eos may be a list.
-- nil: config.json does not speak of any. Computation does not depend on them.
local SPECIAL = { bos = "bos_token_id", eos = "eos_token_id", pad = "pad_token_id" }

local function is_id(value) return math.type(value) == "integer" and value >= 0 end

local function special_ids(config)
  local ids
  for ours, name in pairs(SPECIAL) do
    if config[name] ~= nil then
      ids = ids or {}
      local value = get(config, name)
      local fine = value == nil or is_id(value)
      if type(value) == "table" then
        fine = #value > 0
        for _, each in ipairs(value) do fine = fine and is_id(each) end
      end
      if not fine then
        return nil, ("config.json: %s is %s, wanted an id, a list of them or null"):format(name,
          text_of(value))
      end
      ids[ours] = value
    end
  end
  return ids
end

-- What config.json of Qwen3 or Llama means for models.qwen3 and models.llama; or nil, message.
-- Options of the result that are nil follow from the weights (tied).
local function read_decoder(config, head_dim)
  local o = {}
  local message = refused(config, { hidden_act = { "silu", "swish" }, attention_bias = { false },
    mlp_bias = { false }, use_sliding_window = { false }, partial_rotary_factor = { 1.0 } })
  if message then return nil, message end
  for _, kind in ipairs(get(config, "layer_types") or {}) do
    if kind ~= "full_attention" then
      return nil, ("config.json: layer_types has %s, only 'full_attention' is supported"):format(
        text_of(kind))
    end
  end
  message = integers(config, { vocab = { "vocab_size" }, dim = { "hidden_size" },
    layers = { "num_hidden_layers" }, heads = { "num_attention_heads" },
    ffn = { "intermediate_size" }, context = { "max_position_embeddings", 2048 } }, o)
  message = message or integers(config, { kv_heads = { "num_key_value_heads", o.heads },
    head_dim = { "head_dim", head_dim or o.dim // o.heads } }, o)
  if message then return nil, message end
  if o.heads % o.kv_heads ~= 0 then
    return nil, ("config.json: num_attention_heads is %d, no multiple of num_key_value_heads %d")
      :format(o.heads, o.kv_heads)
  end
  o.eps, message = epsilon(config, "rms_norm_eps", 1e-6)
  if not o.eps then return nil, message end
  local scaling
  o.rope_theta, scaling = rotation(config)
  if not o.rope_theta then return nil, scaling end
  o.rope_scaling = scaling
  o.tied = get(config, "tie_word_embeddings")
  return o
end

local GELU = { gelu_new = "tanh", gelu_pytorch_tanh = "tanh", gelu = "none" }

local function read_gpt2(config)
  local o = {}
  local message = refused(config, { scale_attn_weights = { true },
    scale_attn_by_inverse_layer_idx = { false }, reorder_and_upcast_attn = { false } })
  if message then return nil, message end
  message = integers(config, { vocab = { "vocab_size" }, dim = { "n_embd" },
    layers = { "n_layer" }, heads = { "n_head" }, context = { "n_positions", 1024 } }, o)
  message = message or integers(config, { ffn = { "n_inner", 4 * (o.dim or 0) } }, o)
  if message then return nil, message end
  if o.dim % o.heads ~= 0 then
    return nil, ("config.json: n_embd is %d, no multiple of n_head %d"):format(o.dim, o.heads)
  end
  local activation = get(config, "activation_function") or "gelu_new"
  o.gelu = GELU[activation]
  if not o.gelu then
    return nil, ("config.json: activation_function is %s, which is not supported; wanted "
      .. "'gelu_new', 'gelu_pytorch_tanh' or 'gelu'"):format(text_of(activation))
  end
  o.eps, message = epsilon(config, "layer_norm_epsilon", 1e-5)
  if not o.eps then return nil, message end
  o.tied = get(config, "tie_word_embeddings")
  if o.tied == nil then o.tied = true end
  return o
end

-- ---- config.json: writing ----------------------------------------------------------------------

-- Both spellings of the rotation, so that transformers 4 and 5 and others read it.
local function write_decoder(c)
  local parameters = { rope_type = "default", rope_theta = c.rope_theta }
  for key, value in pairs(c.rope_scaling or {}) do parameters[key] = value end
  return {
    vocab_size = c.vocab, hidden_size = c.dim, num_hidden_layers = c.layers,
    num_attention_heads = c.heads, num_key_value_heads = c.kv_heads, head_dim = c.head_dim,
    intermediate_size = c.ffn, rms_norm_eps = c.eps,
    rope_theta = c.rope_theta, rope_scaling = c.rope_scaling, rope_parameters = parameters,
    max_position_embeddings = c.context or 32768,
    hidden_act = "silu", attention_bias = false, mlp_bias = false, attention_dropout = 0.0,
    use_sliding_window = false,
  }
end

local function write_gpt2(c)
  return {
    vocab_size = c.vocab, n_embd = c.dim, n_layer = c.layers, n_head = c.heads, n_inner = c.ffn,
    n_positions = c.context, layer_norm_epsilon = c.eps,
    activation_function = c.gelu == "tanh" and "gelu_new" or "gelu",
    attn_pdrop = 0.0, embd_pdrop = 0.0, resid_pdrop = 0.0,
    scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false,
    reorder_and_upcast_attn = false,
  }
end

-- ---- the families ------------------------------------------------------------------------------

-- Ours within a block (or in the model) = theirs within a layer (or in the model).
local DECODER = {
  prefix = "model.", layer = "layers.%d.",
  block = {
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
  },
  model = { ["embed.weight"] = "embed_tokens.weight", ["norm.weight"] = "norm.weight" },
  transposed = {},
  buffers = { "%.rotary_emb%.inv_freq$" },
}

local GPT2 = {
  prefix = "transformer.", layer = "h.%d.",
  block = {
    ["attn_norm.weight"] = "ln_1.weight", ["attn_norm.bias"] = "ln_1.bias",
    ["attn.qkv.weight"] = "attn.c_attn.weight", ["attn.qkv.bias"] = "attn.c_attn.bias",
    ["attn.out.weight"] = "attn.c_proj.weight", ["attn.out.bias"] = "attn.c_proj.bias",
    ["mlp_norm.weight"] = "ln_2.weight", ["mlp_norm.bias"] = "ln_2.bias",
    ["mlp.up.weight"] = "mlp.c_fc.weight", ["mlp.up.bias"] = "mlp.c_fc.bias",
    ["mlp.down.weight"] = "mlp.c_proj.weight", ["mlp.down.bias"] = "mlp.c_proj.bias",
  },
  model = { ["embed.weight"] = "wte.weight", ["positions.weight"] = "wpe.weight",
    ["norm.weight"] = "ln_f.weight", ["norm.bias"] = "ln_f.bias" },
  -- Conv1D keeps its weights [in, out].
  transposed = { ["attn.qkv.weight"] = true, ["attn.out.weight"] = true,
    ["mlp.up.weight"] = true, ["mlp.down.weight"] = true },
  buffers = { "%.attn%.bias$", "%.attn%.masked_bias$" },
}

-- By model_type. head_dim: what is meant where config.json leaves it out; nil: dim / heads.
-- ends: the id that begins and ends texts of a full vocabulary of this family, of models that were
-- not told theirs.
local FAMILIES = {
  qwen3 = { architecture = "Qwen3ForCausalLM", names = DECODER, read = read_decoder,
    write = write_decoder, head_dim = 128 },
  llama = { architecture = "LlamaForCausalLM", names = DECODER, read = read_decoder,
    write = write_decoder },
  gpt2 = { architecture = "GPT2LMHeadModel", names = GPT2, read = read_gpt2, write = write_gpt2,
    ends = 50256 },
}

-- The names of a model_type, or nil. `prefix` begins every name but the head's; files of the bare
-- model leave it out. `buffers` are tensors of some files that hold no weights.
function M.names(kind)
  local family = FAMILIES[kind]
  return family and family.names
end

-- Our path -> their name, and whether their layout is transposed; nil for a path that has none.
function M.their_name(kind, path)
  if path == "head.weight" then return "lm_head.weight", false end
  local names = M.names(kind)
  if not names then return nil end
  local index, rest = path:match("^blocks%.(%d+)%.(.+)$")
  local name
  if index then -- blocks count from 1 here and from 0 there
    name = names.block[rest] and names.layer:format(tonumber(index) - 1) .. names.block[rest]
  else
    rest, name = path, names.model[path]
  end
  return name and names.prefix .. name, names.transposed[rest] or false
end

-- A decoded config.json -> the options of xt.models[model_type], with `tied` nil where the file
-- does not say; or nil, message.
function M.read(config)
  local family = FAMILIES[config.model_type]
  if not family then
    return nil, ("config.json: model_type %s is not supported; gpt2, llama and qwen3 are"):format(
      text_of(config.model_type))
  end
  local message = refused(config, EVERYWHERE)
  if message then return nil, message end
  local o
  o, message = family.read(config, family.head_dim)
  if not o then return nil, message end
  if o.tied ~= nil and type(o.tied) ~= "boolean" then
    return nil, ("config.json: tie_word_embeddings is %s, wanted true or false"):format(
      text_of(o.tied))
  end
  o.special_ids, message = special_ids(config)
  if message then return nil, message end
  return o
end

-- The table to write as config.json; dtype as PyTorch names it.
function M.write(kind, c, dtype)
  local family = FAMILIES[kind]
  local config = family.write(c)
  config.architectures, config.model_type = { family.architecture }, kind
  config.tie_word_embeddings = c.tied
  config.initializer_range, config.use_cache = 0.02, true
  -- Left out, they would be the family's, which may be any token here: null says there is none.
  local ids = c.special_ids
  if not ids then
    local ends = family.ends and c.vocab > family.ends and family.ends or nil
    ids = { bos = ends, eos = ends }
  end
  for ours, name in pairs(SPECIAL) do config[name] = ids[ours] or json.null end
  config.dtype, config.torch_dtype = dtype, dtype
  return config
end

return M
