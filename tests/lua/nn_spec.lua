-- Layers, models as plain tables, modes, recompute and dropout.
local xt = require "xtrain"
local nn = xt.nn

local function small(more)
  local o = { vocab = 11, dim = 16, layers = 2, heads = 4, kv_heads = 2, head_dim = 4, ffn = 24,
    seed = 7 }
  for name, value in pairs(more or {}) do o[name] = value end
  return xt.models.qwen3(o)
end

local function batch(rows, seq, vocab, seed)
  local function draw(name)
    local x = xt.rand({ rows, seq }, { seed = xt.seed(seed, name) }) * vocab
    return xt.cast(xt.clamp(x, 0, vocab - 1), "i32")
  end
  return draw "ids", draw "labels"
end

-- path -> digest of the gradient.
local function grad_digests(model)
  local out = {}
  for _, param in ipairs(nn.params(model)) do
    out[param.name] = param.tensor.grad and param.tensor.grad:digest()
  end
  return out
end

local function names_of(model)
  local names = {}
  for i, param in ipairs(nn.params(model)) do names[i] = param.name end
  return names
end

describe("nn.params", function()
  it("lists integer keys ascending, then string keys by byte, each tensor once", function()
    local a, b, c = xt.var { 1 }, xt.var { 2 }, xt.var { 3 }
    local model = { z = a, B = b, [10] = c, [2] = { w = xt.var { 4 } }, tied = { again = a },
      no_variable = xt.zeros { 3 }, number = 3 }
    assert.are.same({ "2.w", "10", "B", "tied.again" }, names_of(model))
  end)

  it("survives a model that points back at itself", function()
    local model = { w = xt.var { 1 } }
    model.self = model
    assert.are.same({ "w" }, names_of(model))
  end)

  it("counts blocks from 1 and holds a tied head once", function()
    local names = names_of(small { tied = true })
    assert.are.equal("blocks.1.attn.k_norm.weight", names[1])
    local set = {}
    for _, name in ipairs(names) do set[name] = true end
    assert.is_true(set["blocks.2.attn.wq"] and set["embed.weight"] and set["norm.weight"])
    assert.is_nil(set["head.weight"])
    assert.is_nil(set["blocks.0.attn.wq"])
  end)
end)

describe("initial values", function()
  it("depend on seed and path alone, not on the order of construction", function()
    local one, two = {}, {}
    one.a, one.b = nn.linear { d_in = 3, d_out = 4, seed = false },
      nn.linear { d_in = 3, d_out = 4, seed = false }
    two.b = nn.linear { d_in = 3, d_out = 4, seed = false }
    two.a = nn.linear { d_in = 3, d_out = 4, seed = false }
    nn.init(one, 5, 0.02)
    nn.init(two, 5, 0.02)
    assert.are.equal(one.a.weight:digest(), two.a.weight:digest())
    assert.are_not.equal(one.a.weight:digest(), one.b.weight:digest())
  end)

  it("have gains of one and smaller residual projections", function()
    local model = small { dim = 64, head_dim = 16, ffn = 128, layers = 8 }
    local gain = model.blocks[1].attn_norm.weight
    assert.are.equal(xt.ones { 64 }:digest(), gain:digest())
    local function deviation(w) return math.sqrt(xt.mean(w * w):item()) end
    assert.is_near(0.02, deviation(model.blocks[1].attn.wq), 0.001)
    assert.is_near(0.02 / 4, deviation(model.blocks[1].attn.wo), 0.0003)
    assert.is_near(0.02 / 4, deviation(model.blocks[1].mlp.down), 0.0003)
  end)
end)

describe("layers", function()
  it("linear is x W^T + b with weights [out, in], and takes a batch of no rows", function()
    local layer = nn.linear { d_in = 2, d_out = 3, bias = true }
    xt.no_grad(function()
      layer.weight:copy_(xt.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } })
      layer.bias:copy_(xt.tensor { .5, 0, -1 })
    end)
    assert.are.same({ { 3.5, 7, 10 } }, layer(xt.tensor { { 1, 1 } }):totable())
    local y = layer(xt.zeros { 0, 2 })
    assert.are.same({ 0, 3 }, y.shape)
    xt.sum(y):backward()
    assert.are.same({ 3, 2 }, layer.weight.grad.shape)
  end)

  it("GQA with one query head a group is plain attention, bit for bit", function()
    local a = nn.attention { dim = 16, heads = 4, seed = 3 }
    local b = nn.attention { dim = 16, heads = 4, kv_heads = 4, seed = 3 }
    local x = xt.randn({ 2, 5, 16 }, { seed = 1 })
    assert.are.equal(a(x):digest(), b(x):digest())
  end)

  it("attention takes any norm that can be called, as it was made or put in its place", function()
    local x = xt.randn({ 1, 3, 16 }, { seed = 1 })
    local a = nn.attention { dim = 16, heads = 2, qk_norm = true, seed = 3 }
    local fused = a(x):digest()
    local q_norm, k_norm = a.q_norm, a.k_norm
    a.q_norm = function(q) return q_norm(q) end
    assert.are.equal(fused, a(x):digest())
    a.q_norm, a.k_norm = function(q) return q end, function(k) return k end
    local plain = nn.attention { dim = 16, heads = 2, seed = 3 }
    assert.are.equal(plain(x):digest(), a(x):digest())
    a.k_norm = k_norm
    assert.are_not.equal(fused, a(x):digest())
  end)

  it("attention turns by scaled frequencies: transformers' for linear and llama3", function()
    local rope = require "xtrain.rope"
    local function near(wanted, got)
      assert.are.equal(#wanted, #got)
      for i, value in ipairs(wanted) do assert.is_near(1, got[i] / value, 1e-6) end
    end
    near({ 1, 0.19392276, 0.037606031, 0.0072926651, 0.00052484602, 3.4281024e-05, 6.6478697e-06,
      1.2891732e-06 }, rope.frequencies(5e5, 16, { rope_type = "llama3", factor = 8,
      low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 8192 }))
    near({ 0.25, 0.079056941, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05 },
      rope.frequencies(1e4, 16, { rope_type = "linear", factor = 4 }))
    -- A factor of 1 is xt.rope: angles of at most 40, each rounded to f32 in both.
    local x = xt.randn({ 2, 9, 3, 16 }, { seed = 1 })
    local frequencies = xt.tensor(rope.frequencies(1e4, 16, { rope_type = "linear", factor = 1 }),
      { dtype = "f64" })
    for dtype, bound in pairs { f32 = 2e-5, f64 = 1e-12, bf16 = 2 ^ -6 } do
      for _, layout in ipairs { "half", "interleaved" } do
        local own = rope.turn(x:to(dtype), frequencies, xt.arange(9) + 31, layout)
        local op = xt.rope(x:to(dtype), { theta = 1e4, layout = layout, offset = 31 })
        assert.are.equal(dtype, own.dtype)
        local apart = xt.amax(xt.abs(own:to "f64" - op:to "f64")):item()
        assert.is_true(apart <= bound, ("%s %s: %g"):format(dtype, layout, apart))
      end
    end
    local ok, message = pcall(nn.attention, { dim = 16, heads = 4,
      rope_scaling = { rope_type = "yarn", factor = 2 } })
    assert.is_false(ok)
    assert.matches("option 'rope_scaling': rope_type is 'yarn', wanted linear or llama3", message)
  end)

  it("attention with scaled frequencies: gradients, and a cache that goes on", function()
    local llama = xt.models.llama { vocab = 11, dim = 16, layers = 2, heads = 4, kv_heads = 2,
      ffn = 24, seed = 7, rope_scaling = { rope_type = "llama3", factor = 4, low_freq_factor = 1,
        high_freq_factor = 4, original_max_position_embeddings = 8 } }
    local plain = xt.models.llama { vocab = 11, dim = 16, layers = 2, heads = 4, kv_heads = 2,
      ffn = 24, seed = 7 }
    local ids = batch(1, 12, 11, 1)
    assert.are_not.equal(plain(ids):digest(), llama(ids):digest())
    local prompt = { 1, 2, 3 }
    local out = xt.generate(llama, prompt, { max = 9, temperature = 0 })
    for i, id in ipairs(out) do -- the same without a cache
      local logits = llama(xt.tensor({ prompt }, { dtype = "i32" }), { last = true })
      assert.are.equal(xt.argmax(logits:reshape { 11 }):item(), id, "token " .. i)
      prompt[#prompt + 1] = id
    end
    local attention = nn.attention { dim = 8, heads = 2, rope_scaling = { rope_type = "linear",
      factor = 3 } }
    for _, name in ipairs { "wq", "wk", "wv", "wo" } do
      attention[name] = xt.randn(attention[name].shape, { seed = 2, dtype = "f64" })
    end
    assert.is_true((xt.gradcheck(function(x) return attention(x) end,
      { xt.randn({ 2, 5, 8 }, { seed = 1, dtype = "f64" }) })))
  end)

  it("name a wrong number of kv_heads", function()
    local ok, message = pcall(nn.attention, { dim = 16, heads = 4, kv_heads = 3 })
    assert.is_false(ok)
    assert.matches("4 heads cannot share 3 kv_heads", message)
  end)

  it("name an unknown option at the user's line", function()
    local ok, message = pcall(function() return nn.linear { d_in = 2, d_ot = 3 } end)
    assert.is_false(ok)
    assert.matches("nn_spec.lua:%d+: nn.linear: unknown option 'd_ot'", message)
    assert.matches("d_out", message)
  end)
end)

describe("modes", function()
  it("are eval by default, and reach every part", function()
    local model = nn.class "m"
    model = setmetatable({ inner = { nn.dropout { p = .5 } }, training = false }, model)
    assert.is_false(model.inner[1].training)
    model:train()
    assert.is_true(model.inner[1].training)
    model:eval()
    assert.is_false(model.inner[1].training)
  end)

  it("dropout drops in training alone and then wants a seed", function()
    local layer = nn.dropout { p = .5 }
    local x = xt.ones { 100 }
    assert.are.equal(x:digest(), layer(x):digest())
    layer.training = true
    assert.are.equal(xt.dropout(x, .5, 3):digest(), layer(x, 3):digest())
    local ok, message = pcall(layer, x)
    assert.is_false(ok)
    assert.matches("needs a seed", message)
  end)

  it("evaluating restores the modes, and recording, even after an error", function()
    local model = small { dropout = .5 }
    model:train()
    local ok, message = pcall(xt.evaluating, model, function(m)
      assert(not m.training)
      error "inside"
    end)
    assert.is_false(ok)
    assert.matches("inside", message)
    assert.is_true(model.training)
    local a, b = xt.evaluating(model, function() return 1, nil end)
    assert.are.equal(1, a)
    assert.is_nil(b)
    local ids, labels = batch(2, 5, 11, 1)
    local loss = model:loss(ids, labels, { seed = 1 })
    loss:backward()
    assert.is_truthy(model.embed.weight.grad)
  end)

  it("eval between steps changes nothing: dropout is active afterwards", function()
    local ids, labels = batch(2, 6, 11, 4)
    local function run(with_eval)
      local model = small { dropout = .3 }
      model:train()
      if with_eval then
        xt.evaluating(model, function() model(ids) end)
        pcall(xt.evaluating, model, function() error "x" end)
      end
      local loss = model:loss(ids, labels, { seed = 9 })
      loss:backward()
      return loss:item(), grad_digests(model)
    end
    local loss_a, grads_a = run(false)
    local loss_b, grads_b = run(true)
    assert.are.equal(loss_a, loss_b)
    assert.are.same(grads_a, grads_b)
  end)
end)

describe("models.qwen3", function()
  it("gives logits (B, S, V), a loss and the count of labels", function()
    local model = small()
    local ids, labels = batch(2, 5, 11, 2)
    assert.are.same({ 2, 5, 11 }, model(ids).shape)
    local loss, count = model:loss(ids, labels)
    assert.are.equal(10, count)
    assert.is_near(math.log(11), loss:item(), 0.3)
    local reference = xt.cross_entropy(model(ids), labels)
    assert.is_near(reference:item(), loss:item(), 1e-5)
    labels = xt.full({ 2, 5 }, -100, { dtype = "i32" })
    loss, count = model:loss(ids, labels)
    assert.are.equal(0, count)
    assert.are.equal(0, loss:item())
  end)

  it("recompute changes no bit, with dropout too", function()
    local ids, labels = batch(3, 7, 11, 3)
    local function run(recompute)
      local model = small { dropout = .2, recompute = recompute }
      model:train()
      local loss = model:loss(ids, labels, { seed = 5 })
      local value = loss:item()
      loss:backward()
      return value, grad_digests(model)
    end
    local loss, grads = run "none"
    for _, recompute in ipairs { "block", "selective" } do
      local other_loss, other = run(recompute)
      assert.are.equal(loss, other_loss)
      assert.are.same(grads, other)
    end
  end)

  it("dropout of p = 0 and eval mode are the model without it", function()
    local ids, labels = batch(2, 5, 11, 6)
    local plain = small():loss(ids, labels):item()
    local dropped = small { dropout = .5 }
    assert.are.equal(plain, dropped:loss(ids, labels):item())
    dropped:train()
    assert.are_not.equal(plain, dropped:loss(ids, labels, { seed = 1 }):item())
    local other = dropped:loss(ids, labels, { seed = 2 }):item()
    assert.are_not.equal(other, dropped:loss(ids, labels, { seed = 1 }):item())
    local ok, message = pcall(dropped.loss, dropped, ids, labels)
    assert.is_false(ok)
    assert.matches("needs a seed", message)
  end)

  it("one accumulated micro-batch is the plain step; two halves are close to the whole", function()
    local ids, labels = batch(4, 6, 11, 8)
    local function grads_of(parts)
      local model = small()
      local rows = 4 // parts
      for i = 1, parts do
        local first, last = (i - 1) * rows + 1, i * rows
        model:loss(ids:slice(1, first, last), labels:slice(1, first, last),
          { reduction = "sum" }):backward()
      end
      return model
    end
    assert.are.same(grad_digests(grads_of(1)), grad_digests(grads_of(1)))
    local whole, halves = grads_of(1), grads_of(2)
    local other = nn.params(halves)
    for i, param in ipairs(nn.params(whole)) do
      local a, b = param.tensor.grad, other[i].tensor.grad
      local largest = xt.amax(xt.abs(a)):item()
      assert.is_true(xt.amax(xt.abs(a - b)):item() <= 1e-5 * largest, param.name)
    end
  end)

  it("bf16 has f32 masters, f32 gradients and about the same loss", function()
    local ids, labels = batch(2, 6, 11, 12)
    local full = small():loss(ids, labels):item()
    local model = small { dtype = "bf16" }
    local loss = model:loss(ids, labels)
    assert.is_near(full, loss:item(), 0.02)
    loss:backward()
    for _, param in ipairs(nn.params(model)) do
      assert.are.equal("f32", param.tensor.dtype)
      assert.are.equal("f32", param.tensor.grad.dtype)
    end
  end)
end)
