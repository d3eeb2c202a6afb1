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

  it("saving twice gives the same files", function()
    local model = model_of()
    assert(xt.hf.save(dir, model))
    local first, config = read(dir .. "/model.safetensors"), read(dir .. "/config.json")
    assert(xt.hf.save(dir, model))
    assert.are.equal(first, read(dir .. "/model.safetensors"))
    assert.are.equal(config, read(dir .. "/config.json"))
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

  it("says what it cannot load, and raises nothing", function()
    local function refuse(pattern, change)
      assert(xt.hf.save(dir, model_of()))
      edit_config(dir, change)
      local model, message = xt.hf.load(dir)
      assert.is_nil(model)
      assert.matches(pattern, message)
    end
    refuse("model_type 'mamba'", function(c) c.model_type = "mamba" end)
    refuse("rope_type 'llama3'", function(c) c.rope_parameters.rope_type = "llama3" end)
    refuse("biases", function(c) c.attention_bias = true end)
    refuse("hidden_size is missing", function(c) c.hidden_size = nil end)
    refuse("is 16x24, the model wants 16x20", function(c) c.intermediate_size = 20 end)
    refuse("no tensor model.layers.2", function(c) c.num_hidden_layers = 3 end)
    local model, message = xt.hf.load(dir .. "-none")
    assert.is_nil(model)
    assert.matches("none", message)
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
