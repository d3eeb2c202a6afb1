-- Dropout, proven on the real models: it is linear, fair and the same in every dtype; recomputation
-- and evaluation cannot see it. That it is live in every recipe is in recipes_spec.lua.
local xt = require "xtrain"
local nn = xt.nn

-- ---- a small model -----------------------------------------------------------------------------

local VOCAB = 31
local ALL = { dropout = .1, embed_dropout = .1, attention_dropout = .1 }

local function model_of(kind, more)
  local o = { vocab = VOCAB, dim = 32, layers = 2, heads = 4, ffn = 48, seed = 7 }
  if kind == "qwen3" then o.kv_heads = 2 end
  for name, value in pairs(more or {}) do o[name] = value or nil end
  return xt.models[kind](o)
end

local function batch(seed)
  local function draw(name)
    local x = xt.rand({ 2, 24 }, { seed = xt.seed(seed, name) }) * VOCAB
    return xt.cast(xt.clamp(x, 0, VOCAB - 1), "i32")
  end
  return draw "ids", draw "labels"
end

local function with(a, b)
  local out = {}
  for name, value in pairs(a) do out[name] = value end
  for name, value in pairs(b) do out[name] = value end
  return out
end

-- Digests of all there is after `steps` steps of training: each loss, the logits and every gradient
-- of the first step, the norms, and at the end every parameter.
local function trace(model, steps, wrap)
  local seen = {}
  local function note(name, t) seen[name] = t:digest() end
  local opt = xt.optim.adamw(nn.params(model), {})
  model:train()
  for step = 1, steps do
    local ids, labels = batch(xt.seed(1, step))
    local seed = xt.seed(3, step, 0)
    if step == 1 then note("logits", model(ids, { seed = seed }):detach()) end
    local function loss_of(x, y) return (model:loss(x, y, { seed = seed })) end
    local loss = wrap and xt.checkpoint(wrap, loss_of, ids, labels) or loss_of(ids, labels)
    loss:backward()
    note("loss " .. step, loss:detach())
    if step == 1 then
      for _, param in ipairs(nn.params(model)) do
        note("gradient " .. param.name, assert(param.tensor.grad, param.name))
      end
    end
    note("norm " .. step, opt:step(1e-2, { clip = 1.0 }))
    opt:zero_grad()
  end
  for _, param in ipairs(nn.params(model)) do note(param.name, param.tensor:detach()) end
  return seen
end

-- ---- the op ------------------------------------------------------------------------------------

describe("dropout", function()
  it("has the gradient of a linear map, to 1e-9 in f64", function()
    for _, p in ipairs { 0.1, 0.5, 0.9, 1.0 } do
      local x = xt.randn({ 7, 13 }, { seed = 3, dtype = "f64" })
      local ok, report = xt.gradcheck(function(t) return xt.dropout(t, p, 11) end, { x },
        { tol = 1e-9, h = 1e-3 })
      assert.is_true(ok, report)
      -- Exactly: f(x + y) = f(x) + f(y) element by element, for powers of two.
      local y = xt.var(x)
      local out = xt.dropout(y, p, 11)
      out:sum():backward()
      local mask = xt.dropout_mask({ 7, 13 }, p, 11)
      assert.are.same(mask:totable(), y.grad:to("f32"):totable())
    end
  end)

  it("has x as its mean: within 5 sigma over 1000 masks, for each element and for all", function()
    local n, masks = 256, 1000
    for _, p in ipairs { 0.1, 0.5 } do
      local x = xt.randn({ n }, { seed = 5 })
      local sum = xt.zeros({ n }, { dtype = "f64" })
      for i = 1, masks do sum = sum + xt.dropout(x, p, xt.seed(9, i)):to "f64" end
      local mean = (sum / masks):totable()
      -- Of one element: x^2 p / (1 - p) is the variance of x * keep / (1 - p).
      local whole, variance = 0, 0
      for i, value in ipairs(x:totable()) do
        local sigma = math.abs(value) * math.sqrt(p / (1 - p) / masks)
        assert.is_true(math.abs(mean[i] - value) <= 5 * sigma, ("element %d"):format(i))
        whole, variance = whole + mean[i] - value, variance + sigma * sigma
      end
      assert.is_true(math.abs(whole) <= 5 * math.sqrt(variance))
    end
  end)

  it("drops the same elements in every dtype", function()
    local x = xt.rand({ 50, 33 }, { seed = 2 }) + 1
    local function kept(dtype)
      return xt.gt(xt.abs(xt.dropout(x:to(dtype), 0.3, 77):to "f32"), 0):digest()
    end
    for _, dtype in ipairs { "bf16", "f16", "f64" } do
      assert.are.equal(kept "f32", kept(dtype), dtype)
    end
  end)

  it("has another mask for each step, micro-batch, layer and site", function()
    local seen, n = {}, 4096
    local function enter(...)
      local digest = xt.dropout_mask({ n }, 0.5, xt.seed(...)):digest()
      assert.is_nil(seen[digest], table.concat({ ... }, ","))
      seen[digest] = true
    end
    for _, seed in ipairs { 1, 2 } do
      for step = 1, 6 do
        for micro = 0, 3 do
          for layer = 1, 4 do
            for _, site in ipairs { 0xA77, 0xF7F } do enter(seed, step, micro, layer, site) end
          end
        end
      end
    end
    -- Two masks that have nothing to do with each other differ in half of their places.
    local function differ(a, b)
      local left, right = xt.dropout_mask({ 10000 }, .5, a), xt.dropout_mask({ 10000 }, .5, b)
      return 1 - xt.mean(xt.cast(xt.eq(left, right), "f32")):item()
    end
    local function pair(a, b) assert.is_near(.5, differ(a, b), .02) end
    pair(xt.seed(1, 1, 1), xt.seed(2, 1, 0)) -- seed + rank would be the same
    pair(xt.seed(1, 1, 0, 1, 0xA77), xt.seed(1, 1, 0, 2, 0xA77)) -- layers of a step
    pair(xt.seed(1, 1, 0, 1, 0xA77), xt.seed(1, 1, 1, 1, 0xA77)) -- micro-batches, so ranks
    pair(xt.seed(1, 0, 0, 1, 0xA77), xt.seed(1, 1, 0, 0, 0xA77)) -- XOR would be the same
    assert.are.equal(0, differ(xt.seed(1, 1, 0, 1), xt.seed(1, 1, 0, 1))) -- the same activation
  end)
end)

-- ---- models ------------------------------------------------------------------------------------

for _, kind in ipairs { "qwen3", "gpt2" } do
  describe("dropout in " .. kind, function()
    it("of p = 0 is the model without it, of every site and of all", function()
      local plain = trace(model_of(kind), 3)
      assert.are.same(plain, trace(model_of(kind, { dropout = 0.0, embed_dropout = 0.0,
        attention_dropout = 0.0 }), 3))
      -- With a seed that goes all the way down, so that every op of p = 0 is met.
      local reached = model_of(kind, { embed_dropout = 2 ^ -30 }) -- drops nothing, scales by 1
      assert.are.same(plain, trace(reached, 3))
      for _, site in ipairs { "dropout", "embed_dropout", "attention_dropout" } do
        local model = model_of(kind, { [site] = .5 })
        local other = trace(model, 1)
        assert.are_not.equal(plain["loss 1"], other["loss 1"], site)
        assert.are_not.equal(plain["gradient blocks.1.attn_norm.weight"],
          other["gradient blocks.1.attn_norm.weight"], site)
      end
    end)

    it("stands where attention and MLP are added, with the seeds that are promised", function()
      local p, s = .25, xt.seed(3, 1, 0)
      local model = model_of(kind, { dropout = p, embed_dropout = p, layers = 1 })
      model:train()
      local ids = batch(4)
      local x = xt.dropout(model:start(ids), p, xt.seed(s, 0, 0xE3B))
      local block = model.blocks[1]
      x = x + xt.dropout(block.attn(block.attn_norm(x)), p, xt.seed(s, 1, 0xA77))
      x = x + xt.dropout(block.mlp(block.mlp_norm(x)), p, xt.seed(s, 1, 0xF7F))
      local logits = nn.project(model.norm(x), model.head.weight)
      assert.are.equal(logits:digest(), model(ids, { seed = s }):digest())
    end)

    it("is absent in evaluation, which is p = 0 bit for bit and leaves training alone", function()
      local ids, labels = batch(4)
      local plain = model_of(kind)
      local model = model_of(kind, with(ALL, { dropout = .5 }))
      assert.are.equal(plain(ids):digest(), model(ids):digest())
      model:train()
      local kept = model:loss(ids, labels, { seed = 5 }):item()
      local before = {}
      for i, param in ipairs(nn.params(model)) do before[i] = param.tensor:digest() end
      xt.evaluating(model, function()
        local loss = model:loss(ids, labels, { seed = 5 }):item()
        assert.are.equal(plain:loss(ids, labels):item(), loss)
        xt.generate(model, { 1, 2 }, { max = 3, seed = 1 })
      end)
      pcall(xt.evaluating, model, function() error "on purpose" end)
      assert.is_true(model.training)
      assert.are.equal(kept, model:loss(ids, labels, { seed = 5 }):item())
      for i, param in ipairs(nn.params(model)) do
        assert.are.equal(before[i], param.tensor:digest())
        assert.is_nil(param.tensor.grad)
      end
    end)

    for _, dtype in ipairs { "f32", "bf16" } do
      for _, impl in ipairs { "composed", "flash" } do
        it(("survives recomputation: 20 steps, %s, %s"):format(dtype, impl), function()
          local function run(recompute, steps, wrap)
            return trace(model_of(kind, with(ALL, { recompute = recompute, dtype = dtype,
              attention = impl })), steps, wrap)
          end
          local plain = run("none", 20)
          assert.are.same(plain, run("block", 20))
          assert.are.same(plain, run("selective", 20))
        end)
      end
    end
  end)
end

describe("segments in a model", function()
  for _, dtype in ipairs { "f32", "bf16" } do
    it("nest, whole or selective, and verify what they replay: " .. dtype, function()
      local function run(recompute, wrap)
        local o = with(ALL, { recompute = recompute, dtype = dtype })
        return trace(model_of("qwen3", o), 2, wrap)
      end
      local function call(f, ...) return f(...) end
      local function twice(f, ...) return xt.checkpoint({ verify = true }, f, ...) end
      local plain = run "none"
      assert.are.same(plain, run("block", call)) -- blocks in a segment of the whole loss
      assert.are.same(plain, run("selective", call))
      assert.are.same(plain, run("block", twice))
      assert.are.same(plain, run("none", twice))
    end)
  end

  it("verify names the op whose replay gives other bits", function()
    local x = xt.var(xt.rand({ 64 }, { seed = 1 }))
    local y = xt.checkpoint({ verify = true }, function(t)
      return xt.exp(xt.exp(t * 0.5))
    end, x)
    y:sum():backward() -- nothing is wrong here
    local hidden = xt.tensor { 2.0 }
    y = xt.checkpoint({ verify = true }, function(t)
      return xt.exp(xt.exp(t * hidden))
    end, x)
    hidden:fill_(3.0)
    local ok, message = pcall(function() y:sum():backward() end)
    assert.is_false(ok)
    assert.matches("mul at .*dropout_spec.lua:%d+", message)
  end)
end)

-- ---- attention ---------------------------------------------------------------------------------

describe("attention with dropout of its probabilities", function()
  local function qkv(dtype, hkv)
    local function draw(name, heads)
      return xt.randn({ 2, 37, heads, 16 }, { seed = xt.seed(8, name), dtype = dtype })
    end
    return draw("q", 4), draw("k", hkv), draw("v", hkv)
  end

  local function run(impl, dtype, hkv, options)
    local q, k, v = qkv(dtype, hkv)
    q, k, v = xt.var(q), xt.var(k), xt.var(v)
    local out = xt.attention(q, k, v, with({ impl = impl, causal = true }, options))
    local weight = xt.randn(out.shape, { seed = 4, dtype = dtype })
    xt.sum(out * weight):backward()
    return { out = out:detach(), q = q.grad, k = k.grad, v = v.grad }
  end

  -- Both sum 37 products of numbers that bf16 and f32 round: relative to the largest value, a few
  -- units in the last place (2^-8 and 2^-24) times the square root of the length.
  for dtype, unit in pairs { f32 = 2 ^ -24, bf16 = 2 ^ -8, f64 = 2 ^ -53 } do
    for _, hkv in ipairs { 4, 2, 1 } do
      it(("is the same composed and tiled: %s, %d key heads"):format(dtype, hkv), function()
        for _, p in ipairs { 0.0, 0.3 } do
          local composed = run("composed", dtype, hkv, { dropout = p, seed = 3 })
          local tiled = run("flash", dtype, hkv, { dropout = p, seed = 3 })
          for name, t in pairs(composed) do
            local a, b = t:to "f64", tiled[name]:to "f64"
            local largest = xt.amax(xt.abs(a)):item()
            local worst = xt.amax(xt.abs(a - b)):item()
            assert.is_true(worst <= 4 * unit * math.sqrt(37) * largest,
              ("%s: %g of %g"):format(name, worst, largest))
          end
        end
      end)
    end
  end

  it("drops the element ((b H + h) Sq + q) Sk + k, after the softmax", function()
    local q, k, v = qkv("f64", 4)
    local p, seed = .3, 21
    local function first(t) return t:transpose(2, 3) end
    local scores = xt.matmul(first(q), first(k):transpose(3, 4)) / math.sqrt(16)
    local probs = xt.softmax(scores) * xt.dropout_mask(scores.shape, p, seed):to "f64"
    local want = first(xt.matmul(probs, first(v)))
    for _, impl in ipairs { "composed", "flash" } do
      local got = xt.attention(q, k, v, { impl = impl, dropout = p, seed = seed })
      assert.is_true(xt.amax(xt.abs(got - want)):item() < 1e-7, impl) -- the mask's 1/(1-p) is f32
    end
  end)
end)

-- A decoder put together from ops alone, with the weights of `model` and no notion of groups:
-- attend(q, k, v) mixes the values of one head, (B, S, 1, D) each. Returns the logits.
local function plain_heads(model, ids, attend)
  local op, o = xt.op, model.config
  local function copy(weight) return nn.compute(weight, { dtype = o.dtype }) end
  local function heads(x, weight)
    return op.reshape(op.linear(x, copy(weight)), { ids.shape[1], ids.shape[2], o.heads,
      o.head_dim })
  end
  local x = op.embedding(copy(model.embed.weight), ids)
  for _, block in ipairs(model.blocks) do
    local attn, mlp = block.attn, block.mlp
    local y = op.rmsnorm(x, block.attn_norm.weight, o.eps)
    local q, k, v = heads(y, attn.wq), heads(y, attn.wk), heads(y, attn.wv)
    q = op.rmsnorm_rope(q, attn.q_norm.weight, o.eps, { theta = o.rope_theta })
    k = op.rmsnorm_rope(k, attn.k_norm.weight, o.eps, { theta = o.rope_theta })
    local mixed = {}
    for h = 1, o.heads do
      mixed[h] = attend(op.slice(q, 3, h, h), op.slice(k, 3, h, h), op.slice(v, 3, h, h))
    end
    local all = op.reshape(op.concat(mixed, 3), { ids.shape[1], ids.shape[2],
      o.heads * o.head_dim })
    x = op.add(x, op.linear(all, copy(attn.wo)))
    y = op.rmsnorm(x, block.mlp_norm.weight, o.eps)
    x = op.add(x, op.swiglu_mlp(y, copy(mlp.gate), copy(mlp.up), copy(mlp.down)))
  end
  return op.linear(op.rmsnorm(x, model.norm.weight, o.eps), copy(model.head.weight))
end

describe("grouped heads", function()
  -- Logits, and after the backward of a weighted sum of them the gradient of every parameter.
  local function results(model, ids, logits_of)
    for _, param in ipairs(nn.params(model)) do param.tensor:zero_grad() end
    local logits = logits_of(ids)
    logits:backward(xt.randn(logits.shape, { seed = 2, dtype = logits.dtype }))
    local out = { logits = logits:detach() }
    for _, param in ipairs(nn.params(model)) do
      out[param.name] = assert(param.tensor.grad, param.name):clone()
    end
    return out
  end

  for _, impl in ipairs { "composed", "flash" } do
    for _, dtype in ipairs { "f32", "bf16" } do
      it(("with one query head a group are heads one by one, bit for bit: %s, %s"):format(impl,
        dtype), function()
        local model = model_of("qwen3", { kv_heads = 4, attention = impl, dtype = dtype })
        local ids = batch(4)
        local grouped = results(model, ids, model)
        local alone = results(model, ids, function(x)
          return plain_heads(model, x, function(q, k, v)
            return xt.op.attention(q, k, v, { causal = true, impl = impl })
          end)
        end)
        for name, t in pairs(alone) do
          assert.are.equal(t:digest(), grouped[name]:digest(), name)
        end
      end)
    end
  end

  -- The softmax of attention and the op of that name round differently, once an element; then f32
  -- sums of at most 2 x 24 terms in two layers.
  it("with one query head a group are the textbook's attention, to the rounding of f32", function()
    local model = model_of("qwen3", { kv_heads = 4 })
    local ids = batch(4)
    local places = xt.arange(ids.shape[2])
    local future = xt.lt(places:reshape { -1, 1 }, places:reshape { 1, -1 })
    local grouped = results(model, ids, model)
    local textbook = results(model, ids, function(x)
      return plain_heads(model, x, function(q, k, v)
        local function rows(t) return xt.op.select(t, 3, 1) end
        local scores = xt.op.matmul(rows(q), rows(k):transpose(2, 3)) / math.sqrt(q.shape[4])
        local probs = xt.op.softmax(xt.op.masked_fill(scores, future, -math.huge), -1)
        return xt.op.stack({ xt.op.matmul(probs, rows(v)) }, 3)
      end)
    end)
    for name, t in pairs(textbook) do
      local largest = xt.amax(xt.abs(t)):item()
      local worst = xt.amax(xt.abs(t - grouped[name])):item()
      assert.is_true(worst <= 5e-6 * largest, ("%s: %g of %g"):format(name, worst, largest))
    end
  end)

  it("as many as heads is what kv_heads is when left out, through training", function()
    for _, impl in ipairs { "composed", "flash" } do
      local o = with(ALL, { attention = impl })
      local plain = trace(model_of("qwen3", with(o, { kv_heads = false })), 3)
      assert.are.same(plain, trace(model_of("qwen3", with(o, { kv_heads = 4 })), 3))
    end
  end)

  it("are the heads repeated, bit for bit", function()
    local function draw(name, heads)
      return xt.randn({ 2, 9, heads, 8 }, { seed = xt.seed(8, name) })
    end
    local q, k, v = draw("q", 4), draw("k", 2), draw("v", 2)
    for _, impl in ipairs { "composed", "flash" } do
      local grouped = xt.attention(q, k, v, { causal = true, impl = impl })
      local repeated = xt.attention(q, xt.repeat_kv(k, 2), xt.repeat_kv(v, 2),
        { causal = true, impl = impl })
      assert.are.equal(repeated:digest(), grouped:digest(), impl)
    end
  end)
end)
