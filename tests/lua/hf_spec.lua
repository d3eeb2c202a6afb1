-- Hugging Face folders: both spellings of config.json, round trips, refusals.
local xt = require "xtrain"
local file = require "xtrain.core.file"

local dir

local function model_of(more)
  local o = { vocab = 19, dim = 16, layers = 2, heads = 4, kv_heads = 2, head_dim = 8, ffn = 24,
    rope_theta = 5e5, eps = 1e-5, seed = 3 }
  for name, value in pairs(more or {}) do o[name] = value end
  return xt.models.qwen3(o)
end

local function gpt2_of(more)
  local o = { vocab = 19, dim = 16, layers = 2, heads = 4, context = 12, seed = 3 }
  for name, value in pairs(more or {}) do o[name] = value end
  return xt.models.gpt2(o)
end

local function read(path) return assert(file.read(path)) end

local function edit_config(path, change)
  local config = xt.json.decode(read(path .. "/config.json"))
  change(config)
  assert(file.write_atomic(path .. "/config.json", xt.json.encode(config)))
end

describe("hf", function()
  before_each(function()
    dir = os.tmpname()
    os.remove(dir)
  end)
  after_each(function() file.remove_tree(dir) end)

  it("what is saved is loaded: the same logits, bit for bit, tied or not", function()
    local ids = xt.tensor({ { 1, 2, 3, 18 } }, { dtype = "i32" })
    for _, tied in ipairs { false, true } do
      local model = model_of { tied = tied }
      assert(xt.hf.save(dir, model))
      local again, config = assert(xt.hf.load(dir))
      assert.are.equal("qwen3", config.model_type)
      assert.are.equal(model(ids):digest(), again(ids):digest())
      assert.are.equal(5e5, again.config.rope_theta)
      local tensors = xt.safetensors.load(dir .. "/model.safetensors")
      assert.are.equal(not tied, tensors["lm_head.weight"] ~= nil)
      assert.is_truthy(tensors["model.layers.0.self_attn.q_norm.weight"])
    end
  end)

  it("a field of config.json that is null is as good as absent", function()
    assert(xt.hf.save(dir, model_of()))
    edit_config(dir, function(config)
      for _, name in ipairs { "rope_scaling", "sliding_window", "quantization_config" } do
        config[name] = xt.json.null
      end
    end)
    assert(xt.hf.load(dir))
  end)

  it("every family and file dtype: loading and saving again gives the same bytes", function()
    local models = {
      model_of(), model_of { tied = true }, xt.models.llama { vocab = 19, dim = 16, layers = 2,
        heads = 4, kv_heads = 2, ffn = 24, eps = 1e-5, seed = 3, context = 77 },
      gpt2_of(), gpt2_of { tied = false, ffn = 40, gelu = "none" },
    }
    for _, model in ipairs(models) do
      for _, dtype in ipairs { "f32", "bf16", "f16" } do
        assert(xt.hf.save(dir, model, nil, { dtype = dtype }))
        local weights, config = read(dir .. "/model.safetensors"), read(dir .. "/config.json")
        local again = assert(xt.hf.load(dir))
        for name, value in pairs(model.config) do
          if name ~= "seed" then assert.are.equal(value, again.config[name], name) end
        end
        assert(xt.hf.save(dir, again, nil, { dtype = dtype }))
        assert.are.equal(weights, read(dir .. "/model.safetensors"))
        assert.are.equal(config, read(dir .. "/config.json"))
        if dtype == "f32" then
          local ids = xt.tensor({ { 1, 2, 3, 18 } }, { dtype = "i32" })
          assert.are.equal(model(ids):digest(), again(ids):digest())
        end
      end
    end
  end)

  it("gpt2: weights of projections lie [in, out] in the file and in state", function()
    local model = gpt2_of()
    assert(xt.hf.save(dir, model))
    local tensors = xt.safetensors.load(dir .. "/model.safetensors")
    local name = "transformer.h.0.attn.c_attn.weight"
    assert.are.same({ 48, 16 }, model.blocks[1].attn.qkv.weight.shape)
    assert.are.same({ 16, 48 }, tensors[name].shape)
    local state = xt.hf.state(model)
    for their_name, t in pairs(state) do
      assert.are.equal(t:digest(), tensors[their_name]:digest(), their_name)
    end
    local ids = xt.tensor({ { 1, 2, 3 } }, { dtype = "i32" })
    model:loss(ids, ids):backward()
    assert.are.equal(model.blocks[1].attn.qkv.weight.grad:transpose(1, 2):digest(),
      xt.hf.state(model, "grad")[name]:digest())
  end)

  it("gpt2: files without the prefix, with mask buffers and with a tied head load too", function()
    local model = gpt2_of()
    assert(xt.hf.save(dir, model))
    local tensors, bare = xt.safetensors.load(dir .. "/model.safetensors"), {}
    for name, t in pairs(tensors) do bare[name:gsub("^transformer%.", "")] = t end
    bare["h.0.attn.bias"] = xt.ones { 1, 1, 4, 4 }
    bare["h.1.attn.masked_bias"] = xt.ones {}
    bare["lm_head.weight"] = tensors["transformer.wte.weight"]
    assert(xt.safetensors.save(dir .. "/model.safetensors", bare))
    local again = assert(xt.hf.load(dir))
    local ids = xt.tensor({ { 1, 2, 3, 18 } }, { dtype = "i32" })
    assert.are.equal(model(ids):digest(), again(ids):digest())
  end)

  it("gpt2: what changes the computation is refused by name", function()
    for name, value in pairs { scale_attn_weights = false, scale_attn_by_inverse_layer_idx = true,
      add_cross_attention = true, activation_function = "relu", n_head = 3 } do
      assert(xt.hf.save(dir, gpt2_of()))
      edit_config(dir, function(config) config[name] = value end)
      local model, message = xt.hf.load(dir)
      assert.is_nil(model)
      assert.matches("config.json: .*" .. name, message)
    end
  end)

  it("reads shards by their index, and says what is wrong with them", function()
    local model = model_of()
    assert(xt.hf.save(dir, model))
    local tensors = xt.safetensors.load(dir .. "/model.safetensors")
    local parts, map = { {}, {}, {} }, {}
    local names = {}
    for name in pairs(tensors) do names[#names + 1] = name end
    table.sort(names)
    for i, name in ipairs(names) do
      local part = i % 3 + 1
      parts[part][name] = tensors[name]
      map[name] = ("model-%05d-of-00003.safetensors"):format(part)
    end
    for i, part in ipairs(parts) do
      assert(xt.safetensors.save(("%s/model-%05d-of-00003.safetensors"):format(dir, i), part))
    end
    os.remove(dir .. "/model.safetensors")
    local function index(weight_map)
      assert(file.write_atomic(dir .. "/model.safetensors.index.json",
        xt.json.encode { metadata = { total_size = 1 }, weight_map = weight_map }))
    end
    index(map)
    local ids = xt.tensor({ { 1, 2, 3, 18 } }, { dtype = "i32" })
    assert.are.equal(model(ids):digest(), assert(xt.hf.load(dir))(ids):digest())

    local function refuse(pattern, name, where)
      local before = map[name]
      map[name] = where
      index(map)
      map[name] = before
      local loaded, message = xt.hf.load(dir)
      assert.is_nil(loaded)
      assert.matches(pattern, message)
    end
    refuse("norm.weight lies in ../elsewhere", "model.norm.weight", "../elsewhere")
    refuse("none%.safetensors", "extra", "none.safetensors")
    refuse("extra is not in", "extra", map["model.norm.weight"])
    refuse("which the index does not say", "model.norm.weight", nil)
  end)

  it("a head that config.json does not mention is tied when the file has none", function()
    for _, tied in ipairs { true, false } do
      assert(xt.hf.save(dir, model_of { tied = tied }))
      edit_config(dir, function(config) config.tie_word_embeddings = nil end)
      assert.are.equal(tied, assert(xt.hf.load(dir)).config.tied)
    end
    assert(xt.hf.save(dir, model_of { tied = true }))
    edit_config(dir, function(config) config.tie_word_embeddings = false end)
    assert.matches("lm_head.weight is missing", select(2, xt.hf.load(dir)))
  end)

  it("saving twice gives the same files", function()
    local model = model_of()
    assert(xt.hf.save(dir, model))
    local first, config = read(dir .. "/model.safetensors"), read(dir .. "/config.json")
    assert(xt.hf.save(dir, model))
    assert.are.equal(first, read(dir .. "/model.safetensors"))
    assert.are.equal(config, read(dir .. "/config.json"))
  end)

  it("names a third argument that is no tokenizer, such as the config that load returns", function()
    assert(xt.hf.save(dir, model_of()))
    for _, wrong in ipairs { select(2, xt.hf.load(dir)), "tokenizer.json", 1, true } do
      local ok, message = pcall(xt.hf.save, dir, model_of(), wrong)
      assert.is_false(ok)
      assert.matches("hf.save: the tokenizer is a %w+, wanted one of xt.tokenizer", message)
    end
  end)

  it("saves in bf16, half the bytes, and loads masters of f32", function()
    local model = model_of()
    assert(xt.hf.save(dir, model, nil, { dtype = "bf16" }))
    local tensors = xt.safetensors.load(dir .. "/model.safetensors")
    assert.are.equal("bf16", tensors["lm_head.weight"].dtype)
    local again = assert(xt.hf.load(dir))
    assert.are.equal("f32", again.head.weight.dtype)
  end)

  it("reads the rotation as transformers 4 and as 5 spell it", function()
    assert(xt.hf.save(dir, model_of()))
    edit_config(dir, function(config)
      config.rope_parameters = nil
      config.rope_theta = 123456
    end)
    assert.are.equal(123456.0, assert(xt.hf.load(dir)).config.rope_theta)
    edit_config(dir, function(config)
      config.rope_theta = nil
      config.rope_parameters = { rope_type = "default", rope_theta = 777 }
    end)
    assert.are.equal(777.0, assert(xt.hf.load(dir)).config.rope_theta)
  end)

  it("reads and writes scaled rotations in both spellings", function()
    local kinds = {
      { rope_type = "linear", factor = 4.0 },
      { rope_type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0,
        original_max_position_embeddings = 16 },
    }
    local ids = xt.tensor({ { 1, 2, 3, 18 } }, { dtype = "i32" })
    for _, scaling in ipairs(kinds) do
      local model = model_of { rope_scaling = scaling }
      assert(xt.hf.save(dir, model))
      local first = read(dir .. "/config.json")
      local function same(change)
        if change then edit_config(dir, change) end
        local again = assert(xt.hf.load(dir))
        assert.are.same(scaling, again.config.rope_scaling)
        assert.are.equal(5e5, again.config.rope_theta)
        assert.are.equal(model(ids):digest(), again(ids):digest())
        assert(xt.hf.save(dir, again))
        assert.are.equal(first, read(dir .. "/config.json"))
      end
      same()
      same(function(c) c.rope_scaling, c.rope_theta = nil, nil end)
      same(function(c) c.rope_parameters = nil end)
      same(function(c)
        c.rope_parameters = nil
        c.rope_scaling.type, c.rope_scaling.rope_type = c.rope_scaling.rope_type, nil
      end)
    end
  end)

  it("says what it cannot load, and raises nothing", function()
    local function refuse(pattern, change)
      assert(xt.hf.save(dir, model_of()))
      edit_config(dir, change)
      local model, message = xt.hf.load(dir)
      assert.is_nil(model)
      assert.matches(pattern, message)
    end
    refuse("model_type 'mamba'", function(c) c.model_type = "mamba" end)
    for _, kind in ipairs { "dynamic", "yarn", "longrope", "proportional" } do
      local message = ("rope_type is '%s', wanted linear or llama3"):format(kind)
      refuse("rope_parameters: " .. message, function(c)
        c.rope_parameters = { rope_type = kind, rope_theta = 1e4, factor = 2.0 }
      end)
      for _, spelling in ipairs { "type", "rope_type" } do
        refuse("rope_scaling: " .. message, function(c)
          c.rope_parameters = nil
          c.rope_scaling = { [spelling] = kind, factor = 2.0 }
        end)
      end
    end
    refuse("factor is nil, wanted a number above 0 for the rope_type linear", function(c)
      c.rope_scaling = { type = "linear" }
    end)
    refuse("low_freq_factor is 4, wanted less than high_freq_factor, which is 4", function(c)
      c.rope_scaling = { rope_type = "llama3", factor = 8, low_freq_factor = 4,
        high_freq_factor = 4, original_max_position_embeddings = 64 }
    end)
    refuse("attention_bias is true, which is not supported; wanted false", function(c)
      c.attention_bias = true
    end)
    refuse("mlp_bias is true", function(c) c.mlp_bias = true end)
    refuse("use_sliding_window is true", function(c) c.use_sliding_window = true end)
    refuse("layer_types has 'sliding_attention'", function(c)
      c.layer_types = { "full_attention", "sliding_attention" }
    end)
    refuse("hidden_act is 'gelu'", function(c) c.hidden_act = "gelu" end)
    refuse("partial_rotary_factor is 0.5", function(c)
      c.rope_parameters.partial_rotary_factor = 0.5
    end)
    refuse("rope_theta is 0", function(c) c.rope_parameters.rope_theta = 0 end)
    refuse("quantization_config is a table", function(c)
      c.quantization_config = { bits = 4 }
    end)
    refuse("num_attention_heads is 4, no multiple of num_key_value_heads 3", function(c)
      c.num_key_value_heads = 3
    end)
    refuse("tie_word_embeddings is 'yes'", function(c) c.tie_word_embeddings = "yes" end)
    refuse("rms_norm_eps is 'small'", function(c) c.rms_norm_eps = "small" end)
    refuse("vocab_size is %-1, wanted a whole number above 0", function(c) c.vocab_size = -1 end)
    refuse("model.layers.1%.[%w_.]+ has no place in a model of type qwen3", function(c)
      c.num_hidden_layers = 1
    end)
    refuse("k_norm.weight has no place in a model of type llama", function(c)
      c.model_type = "llama"
    end)
    refuse("hidden_size is missing", function(c) c.hidden_size = nil end)
    refuse("is 16x24, the model wants 16x20", function(c) c.intermediate_size = 20 end)
    refuse("no tensor model.layers.2", function(c) c.num_hidden_layers = 3 end)
    local model, message = xt.hf.load(dir .. "-none")
    assert.is_nil(model)
    assert.matches("none", message)
  end)

  it("keeps the ids that begin and end a text, through a load and a save", function()
    local function ids_after(model, change)
      assert(xt.hf.save(dir, model))
      if change then
        edit_config(dir, change)
        local again = assert(xt.hf.load(dir))
        assert(xt.hf.save(dir, again))
      end
      local config = xt.json.decode(read(dir .. "/config.json"))
      return { config.bos_token_id, config.eos_token_id, config.pad_token_id }
    end
    local null = xt.json.null
    for _, model in ipairs { model_of(), gpt2_of(), xt.models.llama { vocab = 19, dim = 16,
      layers = 1, heads = 2, ffn = 24 } } do
      -- Absent, transformers would take the family's: 1 and 2 for Llama, 50256 for GPT-2.
      assert.are.same({ null, null, null }, ids_after(model))
      assert.are.same({ null, null, null }, ids_after(model, function(c)
        c.bos_token_id, c.eos_token_id, c.pad_token_id = null, null, null
      end))
      assert.are.same({ 3, { 5, 7 }, 0 }, ids_after(model, function(c)
        c.bos_token_id, c.eos_token_id, c.pad_token_id = 3, { 5, 7 }, 0
      end))
      assert.are.same({ null, 4, null }, ids_after(model, function(c)
        c.bos_token_id, c.eos_token_id, c.pad_token_id = nil, 4, nil
      end))
    end
    assert.are.same({ 50256, 50256, null }, ids_after(gpt2_of { vocab = 50257, dim = 4 }))
    assert.are.same({ null, null, null }, ids_after(gpt2_of { vocab = 50257, dim = 4 },
      function(c) c.bos_token_id, c.eos_token_id = null, null end))
    for _, wrong in ipairs { "two", -1, 1.5, {}, { 1, "b" } } do
      assert(xt.hf.save(dir, model_of()))
      edit_config(dir, function(c) c.eos_token_id = wrong end)
      local model, message = xt.hf.load(dir)
      assert.is_nil(model)
      assert.matches("config.json: eos_token_id is", message)
    end
  end)

  it("state gives parameters or gradients by their names", function()
    local model = model_of { tied = true }
    local ids = xt.tensor({ { 1, 2, 3 } }, { dtype = "i32" })
    model:loss(ids, ids):backward()
    local state, grads = xt.hf.state(model), xt.hf.state(model, "grad")
    assert.are.equal(model.blocks[1].mlp.up, state["model.layers.0.mlp.up_proj.weight"])
    assert.are.equal(model.blocks[2].attn.wk.grad:digest(),
      grads["model.layers.1.self_attn.k_proj.weight"]:digest())
    assert.is_nil(state["lm_head.weight"])
  end)
end)
