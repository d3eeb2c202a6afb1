-- The contract of the Lua API, name by name: every function, option and golden value is there and
-- does what it says. What a part does in depth is tested in that part's own spec.
local expect = require "expect"
local files = require "files"
local xt = require "xtrain"

local raises, near = expect.raises, expect.near
local write = files.write

local nan, inf = 0 / 0, math.huge

local function i32(value) return xt.tensor(value, { dtype = "i32" }) end

-- The largest difference of two tensors.
local function apart(a, b) return xt.amax(xt.abs(a - b)):item() end

-- ---- tensors and autograd ----------------------------------------------------------------------

describe("constructors", function()
  it("take shape, value, dtype and device, and give what they say", function()
    assert.are.equal("string", type(xt.version))
    for _, dtype in ipairs { "f32", "bf16", "f16", "f64", "i32", "i64", "u8" } do
      local opts = { dtype = dtype, device = "cpu" }
      assert.are.same({ { 1, 2 } }, xt.tensor({ { 1, 2 } }, opts):totable())
      assert.are.same({ 0, 0 }, xt.zeros({ 2 }, opts):totable())
      assert.are.same({ 1, 1 }, xt.ones({ 2 }, opts):totable())
      assert.are.same({ 0, 1, 2 }, xt.arange(3, opts):totable())
      local t = xt.full({ 2 }, 3, opts)
      assert.are.equal(dtype, t.dtype)
      assert.are.same({ 3, 3 }, t:totable())
      assert.are.same({ 3, 3 }, xt.from_bytes(t:bytes(), dtype, { 2 }):totable())
    end
    assert.are.same({}, xt.zeros({}).shape)
    assert.are.same({ 4, 0 }, xt.zeros({ 4, 0 }).shape)
    for _, name in ipairs { "rand", "randn" } do
      assert.are.equal(xt[name]({ 3 }, { seed = 5 }):digest(),
        xt[name]({ 3 }, { seed = 5 }):digest())
      raises("seed", xt[name], { 3 })
    end
    assert.are.equal("cpu", xt.device())
    assert.are.equal("cpu", xt.devices()[1])
  end)

  it("refuse an option they do not know, and list those they know", function()
    for _, name in ipairs { "zeros", "ones", "rand", "randn" } do
      raises("dtype", xt[name], { 2 }, { sed = 1 })
    end
    raises("device", xt.tensor, 1, { dtyp = "f32" })
    raises("dtype", xt.arange, 3, { x = 1 })
    raises("dtype", xt.full, { 2 }, 1, { x = 1 })
  end)
end)

describe("a tensor", function()
  local t = xt.tensor { { 1, 2, 3 }, { 4, 5, 6 } }

  it("has its properties, which are read-only", function()
    assert.are.same({ 2, 3 }, t.shape)
    assert.are.same({ 2, 6, "f32", "cpu", false },
      { t.ndim, t.numel, t.dtype, t.device, t.is_var })
    assert.is_nil(t.grad)
    for _, name in ipairs { "shape", "ndim", "numel", "dtype", "device", "grad", "is_var" } do
      raises("read-only", function() t[name] = 1 end)
    end
  end)

  it("has its methods", function()
    assert.are.equal(2.5, xt.tensor(2.5):item())
    assert.are.equal(7, i32({ { 7 } }):item())
    assert.are.same({ { 1, 2, 3 }, { 4, 5, 6 } }, t:totable())
    assert.are.equal("f64", t:to("f64").dtype)
    assert.is_true(t:to("cpu") == t)
    assert.is_false(t:clone():shares_storage(t))
    assert.are.same(t:totable(), t:clone():totable())
    local turned = t:transpose(1, 2)
    assert.is_false(turned:is_contiguous())
    assert.is_true(turned:contiguous():is_contiguous())
    assert.is_true(t:detach():shares_storage(t))
    assert.are.equal(16, #t:digest())
    assert.are.same({ 3, 2 }, t:reshape({ 3, -1 }).shape)
    assert.are.same({ { 1, 4 }, { 2, 5 }, { 3, 6 } }, t:transpose(-1, -2):totable())
    assert.are.same({ 3, 2 }, t:permute({ 2, 1 }).shape)
    assert.are.same({ { 2, 3 }, { 5, 6 } }, t:slice(2, 2, 3):totable())
    assert.are.same({ { 2, 3 }, { 5, 6 } }, t:slice(-1, -2, -1):totable())
    assert.are.same({ 3, 6 }, t:select(2, -1):totable())
    assert.are.same({ 2, 2, 3 }, t:expand({ 2, 2, 3 }).shape)
    assert.are.same({ 4, 5, 6 }, t[2]:totable())
    raises("wanted one element", function() t:item() end)
  end)

  it("is written in place, on a variable under no_grad alone, never onto itself shifted", function()
    local x = xt.zeros { 4 }
    assert.is_true(x:copy_(xt.tensor { 1, 2, 3, 4 }) == x)
    x:add_(xt.ones { 4 })
    x:add_(xt.ones { 4 }, 10)
    assert.are.same({ 12, 13, 14, 15 }, x:totable())
    x:fill_(2)
    assert.are.same({ 2, 2, 2, 2 }, x:totable())
    local w = xt.var(xt.zeros { 4 })
    for _, change in ipairs { function() w:fill_(1) end, function() w:copy_(x) end,
      function() w:add_(x) end } do
      raises("no_grad", change)
      xt.no_grad(change)
    end
    assert.are.same({ 4, 4, 4, 4 }, w:totable())
    raises("overlap", function() x:slice(1, 1, 3):copy_(x:slice(1, 2, 4)) end)
    raises("several elements in one place", function() xt.zeros({ 1 }):expand({ 3 }):fill_(1) end)
    assert.are.same({ 2, 2, 2, 2 }, x:totable())
  end)

  it("has operators, with broadcasting and with numbers of its dtype", function()
    local a, b = xt.tensor { { 1, 2 }, { 3, 4 } }, xt.tensor { 2, 4 }
    assert.are.same({ { 3, 6 }, { 5, 8 } }, (a + b):totable())
    assert.are.same({ { -1, -2 }, { 1, 0 } }, (a - b):totable())
    assert.are.same({ { 2, 8 }, { 6, 16 } }, (a * b):totable())
    assert.are.same({ { .5, .5 }, { 1.5, 1 } }, (a / b):totable())
    assert.are.same({ { 1, 4 }, { 9, 16 } }, (a ^ 2):totable())
    assert.are.same({ { -1, -2 }, { -3, -4 } }, (-a):totable())
    assert.are.same({ { 2, 1 }, { 0, -1 } }, (3 - a):totable())
    assert.are.same({ 8, 2 }, (16 / xt.tensor { 2, 8 }):totable())
    for _, dtype in ipairs { "bf16", "f16", "f64", "i64" } do
      assert.are.equal(dtype, (xt.ones({ 2 }, { dtype = dtype }) * 2).dtype)
    end
    raises("f32", function() return xt.ones { 2 } + xt.ones({ 2 }, { dtype = "f64" }) end)
  end)

  it("keeps NaN and infinity in every float dtype", function()
    for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
      local list = xt.tensor({ nan, inf, -inf }, { dtype = dtype }):totable()
      assert.is_true(list[1] ~= list[1] and list[2] == inf and list[3] == -inf, dtype)
    end
  end)
end)

describe("autograd", function()
  it("has var, backward, grad, no_grad and checkpoint", function()
    local x = xt.var(xt.tensor { 1, 2, 3 })
    assert.is_true(x.is_var)
    local y = xt.sum(x * x)
    y:backward(nil, { retain = true })
    y:backward()
    assert.are.same({ 4, 8, 12 }, x.grad:totable())
    x:zero_grad()
    assert.is_nil(x.grad);
    (x * x):backward(xt.tensor { 1, 0, -1 })
    assert.are.same({ 2, 0, -6 }, x.grad:totable())
    local values = xt.grad(x * x, { x }, xt.tensor { 1, 1, 1 })
    assert.are.same({ 2, 4, 6 }, values[1]:totable())
    assert.are.same({ 2, 0, -6 }, x.grad:totable())
    assert.are.equal(6, xt.no_grad(function() return xt.sum(x) end):item())
    x:zero_grad()
    xt.sum(xt.checkpoint(function(a, k) return a * a * k end, x, 2)):backward()
    assert.are.same({ 4, 8, 12 }, x.grad:totable())
  end)

  it("has gradcheck, which gives true or false and a report", function()
    local input = { xt.randn({ 4 }, { seed = 1 }) }
    local ok, report = xt.gradcheck(function(a) return xt.tanh(a) end, input)
    assert.is_true(ok)
    assert.is_truthy(tostring(report))
    assert.is_false((xt.gradcheck(function(a)
      return xt.tanh(a) * 1.01 - xt.tanh(a):detach() * 0.01
    end, input)))
  end)

  it("has seeds by mixing, with golden values", function()
    assert.are.equal(0xf34fe9248c9342e5, xt.seed(42, 1))
    assert.are.equal(0xfcee76b4159be538, xt.seed(42, 1, 2))
    assert.are.equal(0x6d8c53aa725bea28, xt.seed(42, 1, 1, 1, 0xA77))
    assert.are.equal(xt.seed(42, 1, 2), xt.seed(xt.seed(42, 1), 2))
    assert.are.equal(xt.seed(42, 1), xt.seed(42.0, 1.0))
    assert.are.equal("integer", math.type(xt.seed(1, "name")))
    raises("hex", xt.seed, 42, 0.5)
    raises("hex", xt.seed, 1e300)
  end)
end)

describe("a compute copy", function()
  it("is cached by version, has its gradient in the master and is written by the optimizer",
    function()
      local w = xt.var(xt.tensor { { 1, 2 }, { 3, 4 } })
      local copy = w:to "bf16"
      assert.is_true(copy:shares_storage(w:to "bf16"))
      xt.sum(copy * xt.ones({ 2, 2 }, { dtype = "bf16" })):backward()
      xt.sum(w:to "bf16"):backward() -- a second use adds there
      assert.are.equal("f32", w.grad.dtype)
      assert.are.same({ { 2, 2 }, { 2, 2 } }, w.grad:totable())
      xt.optim.sgd({ { name = "w", tensor = w } }):step(.25)
      assert.are.same({ { .5, 1.5 }, { 2.5, 3.5 } }, w:totable())
      assert.are.same({ { .5, 1.5 }, { 2.5, 3.5 } }, w:to("bf16"):totable())
    end)
end)

-- ---- ops ---------------------------------------------------------------------------------------

-- Every op of the contract, with its arguments in order; those after a bar are named.
local OPS = [[
add(a b) sub(a b) mul(a b) div(a b) pow(a b) neg(x) exp(x) log(x) sqrt(x) rsqrt(x) abs(x) sin(x)
cos(x) tanh(x) sigmoid(x) relu(x) silu(x) erf(x) minimum(a b) maximum(a b) eq(a b) lt(a b) gt(a b)
gelu(x | approx) clamp(x lo hi) where(cond a b) masked_fill(x mask value) cast(x dtype)
sum(x dims | keepdim) mean(x dims | keepdim) amax(x dims | keepdim) amin(x dims | keepdim)
norm(x dims | keepdim) argmax(x dim) cumsum(x dim) softmax(x dim) log_softmax(x dim)
logsumexp(x dim) topk(x k dim) matmul(a b) concat(tensors dim) stack(tensors dim)
index_select(x dim index) gather(x dim index) embedding(weight ids)
cross_entropy(logits labels | reduction ignore label_smoothing)
linear_cross_entropy(x weight labels | reduction ignore label_smoothing)
rmsnorm(x weight eps) layernorm(x weight bias eps) swiglu(gate up) repeat_kv(x group)
rope(x | theta layout offset positions)
rmsnorm_rope(x weight eps | theta layout offset positions)
attention(q k v | causal scale mask lengths documents dropout seed impl)
dropout(x p seed) dropout_mask(shape p seed) multinomial(probs seed)
]]

describe("ops", function()
  it("have the names and signatures of the contract", function()
    local listed, count = {}, 0
    for _, op in ipairs(xt.ops()) do listed[op.name] = op end
    local function trimmed(list) return (list:gsub("^%s+", ""):gsub("%s+$", "")) end
    for name, words in OPS:gmatch("([%w_]+)(%b())") do
      local op = assert(listed[name], "no op " .. name)
      assert.is_true(op == xt.op[name] and op == xt[name])
      assert.are.equal("userdata", type(op))
      assert.are.equal(name, op.name)
      assert.are.equal(name .. "(", op.signature:sub(1, #name + 1))
      assert.is_true(#op.doc > 0)
      assert.is_truthy(tostring(op):find(op.signature, 1, true))
      local positional, named = words:match("^%(([^|]*)|?(.*)%)$")
      local got_positional, got_named = {}, {}
      for _, param in ipairs(op.params) do
        local list = param.named and got_named or got_positional
        list[#list + 1] = param.name
      end
      assert.are.equal(trimmed(positional), table.concat(got_positional, " "), name)
      assert.are.equal(trimmed(named), table.concat(got_named, " "), name)
      count = count + 1
    end
    assert.are.equal(57, count)
  end)

  it("are methods of tensors too", function()
    local x = xt.tensor { { 1, 2 }, { 3, 5 } }
    for name, words in OPS:gmatch("([%w_]+)(%b())") do
      if words:find("^%([abxq][ )]") then assert.is_truthy(x[name], "no method " .. name) end
    end
    assert.are.equal(xt.softmax(x, 1):digest(), x:softmax(1):digest())
  end)

  it("have the defaults of the contract", function()
    local x = xt.tensor { { 1, 2 }, { 3, 5 } }
    for _, name in ipairs { "argmax", "cumsum", "softmax", "log_softmax", "logsumexp" } do
      assert.are.equal(xt[name](x, -1):digest(), xt[name](x):digest(), name)
      assert.are.equal(xt[name](x, 2):digest(), xt[name](x):digest(), name)
    end
    for _, name in ipairs { "sum", "mean", "amax", "amin", "norm" } do
      assert.are.same({}, xt[name](x).shape, name)
      assert.are.same({ 1, 1 }, xt[name](x, { keepdim = true }).shape, name)
      assert.are.same({ 2, 1 }, xt[name](x, 2, { keepdim = true }).shape, name)
      assert.are.equal(xt[name](x):digest(), xt[name](x, { 1, 2 }):digest(), name)
    end
    assert.are.same({ 4, 2 }, xt.concat({ x, x }).shape)
    assert.are.same({ 2, 2, 2 }, xt.stack({ x, x }).shape)
    local values, indices = xt.topk(x, 1)
    assert.are.same({ { 2 }, { 5 } }, values:totable())
    assert.are.same({ { 1 }, { 1 } }, indices:totable())
    assert.are.equal(xt.gelu(x, { approx = "tanh" }):digest(), xt.gelu(x):digest())
    assert.are_not.equal(xt.gelu(x, { approx = "none" }):digest(), xt.gelu(x):digest())
    local labels = i32 { 1, -100 }
    assert.are.equal(xt.cross_entropy(x, labels, { reduction = "mean", ignore = -100,
      label_smoothing = 0 }):digest(), xt.cross_entropy(x, labels):digest())
    local r = xt.randn({ 1, 3, 1, 4 }, { seed = 1 })
    assert.are.equal(xt.rope(r, { theta = 10000, layout = "half", offset = 0 }):digest(),
      xt.rope(r):digest())
    assert.are.equal(xt.attention(r, r, r, { causal = false, scale = 0.5 }):digest(),
      xt.attention(r, r, r):digest())
  end)

  it("count numbers in tensors from 0, and dimensions from 1", function()
    local x = xt.tensor { { 10, 20, 30 }, { 40, 50, 60 } }
    assert.are.same({ { 10, 30 }, { 40, 60 } }, xt.index_select(x, 2, i32 { 0, 2 }):totable())
    assert.are.same({ { 30 }, { 40 } }, xt.gather(x, 2, i32 { { 2 }, { 0 } }):totable())
    assert.are.same({ { 40, 50, 60 } }, xt.embedding(x, i32 { 1 }):totable())
    assert.are.same({ 2, 2 }, xt.argmax(x):totable())
    assert.are.equal(0, xt.multinomial(xt.tensor { 1, 0, 0 }, 3):item())
  end)

  it("rope: row s stands at offset + s, or where positions says", function()
    local x = xt.randn({ 1, 5, 2, 6 }, { seed = 1 })
    local o = { theta = 100, layout = "interleaved" }
    local whole = xt.rope(x, o)
    o.offset = 2
    assert.are.equal(whole:slice(2, 3, 5):digest(), xt.rope(x:slice(2, 3, 5), o):digest())
    o.offset, o.positions = nil, i32 { 2, 3, 4 }
    assert.are.equal(whole:slice(2, 3, 5):digest(), xt.rope(x:slice(2, 3, 5), o):digest())
  end)

  it("attention: causal aligns the last query with the last key, for every implementation",
    function()
      local q = xt.randn({ 2, 3, 4, 8 }, { seed = 1 })
      local k, v = xt.randn({ 2, 5, 2, 8 }, { seed = 2 }), xt.randn({ 2, 5, 2, 8 }, { seed = 3 })
      local mask = xt.tensor({ { 1, 1, 1, 0, 0 }, { 1, 1, 1, 1, 0 }, { 1, 1, 1, 1, 1 } },
        { dtype = "u8" })
      for _, impl in ipairs { "auto", "composed", "flash" } do
        local causal = { causal = true, impl = impl }
        local a = xt.attention(q, k, v, causal)
        assert.is_true(apart(a, xt.attention(q, k, v, { mask = mask, impl = impl })) < 1e-6, impl)
        -- Query head h uses key head floor(h / 2).
        local two = xt.attention(q, xt.repeat_kv(k, 2), xt.repeat_kv(v, 2), causal)
        assert.is_true(apart(a, two) < 1e-6, impl)
        local lengths = xt.attention(q, k, v, { lengths = i32 { 0, 4 }, impl = impl })
        assert.are.equal(0, xt.amax(xt.abs(lengths[1])):item())
        assert.is_true(xt.norm(lengths[2]):item() > 0)
      end
      local s = xt.randn({ 1, 4, 1, 8 }, { seed = 4 })
      local documents = xt.attention(s, s, s, { causal = true,
        documents = i32 { { 0, 0, 1, 1 } } })
      local half = s:slice(2, 3, 4)
      local second = xt.attention(half, half, half, { causal = true })
      assert.is_true(apart(documents:slice(2, 3, 4), second) < 1e-6)
      for _, width in ipairs { 1, 3, 80, 256 } do
        local x = xt.randn({ 1, 2, 1, width }, { seed = 5 })
        assert.are.same({ 1, 2, 1, width }, xt.attention(x, x, x, { causal = true }).shape)
      end
      raises("seed is missing", xt.attention, q, k, v, { dropout = 0.5 })
      xt.attention(q, k, v, { dropout = 0 })
    end)

  it("attention: dropout counts element ((b H + h) Sq + q) Sk + k, after the softmax", function()
    local q, k = xt.randn({ 2, 3, 2, 5 }, { seed = 1 }), xt.randn({ 2, 5, 2, 5 }, { seed = 2 })
    -- With the identity for values, the output is the dropped probabilities themselves.
    local v = xt.zeros { 2, 5, 2, 5 }
    for i = 1, 5 do
      for b = 1, 2 do
        for h = 1, 2 do v[b][i][h][i]:fill_(1) end
      end
    end
    local probs = xt.attention(q, k, v):permute { 1, 3, 2, 4 }
    local want = probs * xt.dropout_mask({ 2, 2, 3, 5 }, 0.4, 11)
    for _, impl in ipairs { "composed", "flash" } do
      local got = xt.attention(q, k, v, { dropout = 0.4, seed = 11, impl = impl })
      assert.is_true(apart(got:permute { 1, 3, 2, 4 }, want) < 1e-6, impl)
    end
  end)

  it("linear_cross_entropy is cross_entropy of the product", function()
    local x, w = xt.randn({ 2, 3, 4 }, { seed = 1 }), xt.randn({ 7, 4 }, { seed = 2 })
    local labels = i32 { { 1, -100, 6 }, { 0, 2, 6 } }
    for _, reduction in ipairs { "mean", "sum", "none" } do
      local o = { reduction = reduction, label_smoothing = 0.1 }
      local a = xt.linear_cross_entropy(x, w, labels, o)
      local b = xt.cross_entropy(x:matmul(w:transpose(1, 2)), labels, o)
      assert.are.same(b.shape, a.shape)
      near(b:totable(), a:totable(), 1e-5)
    end
  end)

  it("give the golden masks, whose kept elements hold 1/(1-p)", function()
    local function keeps(p, seed, n)
      local out = {}
      for i, value in ipairs(xt.dropout_mask({ n }, p, seed):totable()) do
        out[i] = value == 0 and 0 or 1
        if value ~= 0 then assert.is_near(1 / (1 - p), value, 1e-6) end
      end
      return table.concat(out, " ")
    end
    assert.are.equal("1 0 1 1 0 0 0 1 1 0 1 1 1 1 1 1", keeps(0.3, 42, 16))
    assert.are.equal("1 0 0 0 0 0 0 1 1 0 0 1 1 1 1 1", keeps(0.5, 42, 16))
    assert.are.equal("1 1 1 1 1 1 1 1 1 0 1 1 1 1 1 0 1 0 1 1 1 1 1 1",
      keeps(0.1, 0x8000000000000005, 24))
    local x = xt.randn({ 16 }, { seed = 1 })
    -- + 0 makes the zeros positive that a negative x leaves negative
    assert.are.equal((x * xt.dropout_mask({ 16 }, 0.3, 42) + 0):digest(),
      (xt.dropout(x, 0.3, 42) + 0):digest())
    assert.are.same({ 2, 2, 0, 0, 2, 2 }, xt.init.dropout(7, 0.5)({ 6 }):totable())
  end)
end)

describe("the decisions", function()
  it("no valid label is a loss of 0; a masked row is zero; the mean of nothing is NaN", function()
    local logits = xt.var(xt.zeros { 2, 5 })
    local loss = xt.cross_entropy(logits, i32 { -100, -100 })
    assert.are.equal(0, loss:item())
    loss:backward()
    assert.are.same({ { 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0 } }, logits.grad:totable())
    local mean = xt.mean(xt.zeros { 0 }):item()
    assert.is_true(mean ~= mean)
    assert.are.equal(0, xt.sum(xt.zeros { 0 }):item())
    local q = xt.var(xt.ones { 1, 2, 1, 4 })
    local mask = xt.tensor({ { 0, 0 }, { 1, 1 } }, { dtype = "u8" })
    for _, impl in ipairs { "composed", "flash" } do
      local y = xt.attention(q, q, q, { mask = mask, impl = impl })
      assert.are.same({ 0, 0, 0, 0 }, y[1][1][1]:totable())
      local grad = xt.grad(xt.sum(y[1][1]), { q })[1]
      assert.are.equal(0, grad and xt.amax(xt.abs(grad)):item() or 0)
    end
  end)

  it("rmsnorm in bf16 rounds the normalised value, then multiplies by the f32 gain", function()
    local x = xt.randn({ 3, 16 }, { seed = 1, dtype = "bf16" })
    local gain = xt.rand({ 16 }, { seed = 2 })
    local f = x:to "f32"
    local normal = (f * xt.rsqrt(xt.mean(f * f, -1, { keepdim = true }) + 1e-6)):to "bf16"
    local want = (normal:to "f32" * gain):to "bf16"
    assert.are.equal(want:digest(), xt.rmsnorm(x, gain, 1e-6):digest())
  end)
end)

-- ---- layers, models, optimizers, schedules -----------------------------------------------------

describe("layers", function()
  it("have the options of the contract", function()
    local nn = xt.nn
    local x = xt.randn({ 2, 3, 8 }, { seed = 1 })
    assert.are.same({ 5, 8 }, nn.linear({ d_in = 8, d_out = 5, bias = true }).weight.shape)
    assert.are.same({ 2, 3, 5 }, nn.linear({ d_in = 8, d_out = 5, bias = false })(x).shape)
    assert.are.same({ 2, 8 }, nn.embedding({ vocab = 4, dim = 8 })(i32 { 1, 3 }).shape)
    assert.are.same({ 2, 3, 8 }, nn.rmsnorm({ dim = 8, eps = 1e-6 })(x).shape)
    assert.are.same({ 2, 3, 8 }, nn.layernorm({ dim = 8, eps = 1e-5 })(x).shape)
    assert.are.same({ 2, 3, 8 }, nn.attention({ dim = 8, heads = 2 })(x).shape)
    assert.are.same({ 2, 3, 8 }, nn.swiglu({ dim = 8, ffn = 12 })(x).shape)
    local drop = nn.dropout { p = 0.5 }
    assert.is_true(drop(x) == x)
    drop:train()
    assert.are.equal(xt.dropout(x, 0.5, 3):digest(), drop(x, 3):digest())
  end)
end)

describe("models", function()
  local function options_of(more)
    local o = { vocab = 11, dim = 12, layers = 2, heads = 3, seed = 1, dropout = 0 }
    for name, value in pairs(more) do o[name] = value end
    return o
  end
  local kinds = {
    qwen3 = options_of { kv_heads = 1, head_dim = 6, ffn = 10, rope_theta = 1e6, eps = 1e-6,
      tied = true, qk_norm = true },
    llama = options_of { kv_heads = 3, head_dim = 4, ffn = 10, rope_theta = 1e4, eps = 1e-5,
      tied = false, qk_norm = false },
    gpt2 = options_of { eps = 1e-5, context = 16 },
  }

  for kind, o in pairs(kinds) do
    it(kind .. " has the calls, the loss, the modes and the paths of the contract", function()
      local model = xt.models[kind](o)
      local ids, labels = i32 { { 1, 2, 3 }, { 4, 5, 6 } }, i32 { { 2, 3, -100 }, { 5, 6, 7 } }
      assert.are.same({ 2, 3, 11 }, model(ids).shape)
      local loss, count = model:loss(ids, labels)
      assert.are.equal(5, count)
      assert.are.same({}, loss.shape)
      local sum = model:loss(ids, labels, { seed = 1, reduction = "sum" })
      assert.is_near(sum:item(), loss:item() * 5, 1e-4)
      assert.is_near(xt.cross_entropy(model(ids), labels):item(), loss:item(), 1e-5)
      assert.is_false(model.training)
      model:train()
      assert.is_true(model.training)
      model:eval()
      assert.is_false(model.training)
      model:train()
      assert.is_false(xt.evaluating(model, function(m) return m.training end))
      assert.is_true(model.training)
      for i, param in ipairs(xt.nn.params(model)) do
        assert.are.equal("string", type(param.name))
        assert.is_true(param.tensor.is_var)
        if i == 1 then assert.is_truthy(param.name:find("^blocks%.1%.")) end
      end
    end)

    it(kind .. " has recompute, attention and dtype", function()
      local ids, labels = i32 { { 1, 2, 3 } }, i32 { { 2, 3, 4 } }
      local plain = xt.models[kind](o):loss(ids, labels):item()
      for name, values in pairs { recompute = { "none", "block", "selective" },
        attention = { "auto", "composed", "flash" }, dtype = { "f32", "bf16" } } do
        for _, value in ipairs(values) do
          local with = {}
          for key, each in pairs(o) do with[key] = each end
          with[name] = value
          local model = xt.models[kind](with)
          model:train()
          local loss = model:loss(ids, labels, { seed = 1 })
          assert.is_near(plain, loss:item(), name == "dtype" and 0.02 or 1e-5)
          loss:backward()
          for _, param in ipairs(xt.nn.params(model)) do
            assert.are.equal("f32", param.tensor.dtype)
            if param.tensor.grad then assert.are.equal("f32", param.tensor.grad.dtype) end
          end
        end
      end
      raises("recompute", xt.models[kind], options_of { recompute = "all", ffn = 8 })
      raises("attention", function()
        xt.models[kind](options_of { attention = "fast", ffn = 8 })(ids)
      end)
    end)
  end
end)

describe("optimizers", function()
  it("have the options, state and results of the contract", function()
    for kind, o in pairs { adamw = { betas = { 0.9, 0.95 }, eps = 1e-8, weight_decay = 0.1,
      decay = function(name, tensor) return name == "w" and tensor.ndim == 2 end },
      sgd = { momentum = 0.9, nesterov = true }, muon = { momentum = 0.9 } } do
      local params = { { name = "w", tensor = xt.var(xt.ones { 2, 2 }) },
        { name = "b", tensor = xt.var(xt.ones { 2 }) } }
      local opt = xt.optim[kind](params, o)
      xt.sum(params[1].tensor * 3):backward()
      xt.sum(params[2].tensor * 4):backward()
      local norm = opt:step(0.1, { clip = 1.0 })
      assert.are.same({}, norm.shape)
      assert.is_near(math.sqrt(4 * 9 + 2 * 16), norm:item(), 1e-5)
      local state = opt:state()
      assert.are.equal(1, state.step:item())
      if kind == "adamw" then
        for _, name in ipairs { "w.m", "w.v", "b.m", "b.v" } do assert.is_truthy(state[name]) end
      end
      assert.is_true(xt.optim[kind](params, o):load(state))
      opt:zero_grad()
      assert.is_nil(params[1].tensor.grad)
    end
  end)

  it("clip_grad_norm gives the norm", function()
    local w = xt.var(xt.zeros { 2 })
    xt.sum(w * xt.tensor { 3, 4 }):backward()
    assert.is_near(5, xt.clip_grad_norm({ { name = "w", tensor = w } }, 2.5):item(), 1e-6)
    near({ 1.5, 2 }, w.grad:totable(), 1e-5)
  end)
end)

describe("schedules", function()
  it("are the functions of the step that the contract gives values of", function()
    local s = xt.schedule
    local function values(fn, n)
      local out = {}
      for step = 1, n do out[step] = fn(step) end
      return out
    end
    for _, fn in ipairs { s.constant { peak = 1, warmup = 4 },
      s.cosine { peak = 1, min = 0, warmup = 4, total = 100 },
      s.linear { peak = 1, min = 0, warmup = 4, total = 100 },
      s.wsd { peak = 1, min = 0, warmup = 4, total = 100, decay = 10 } } do
      assert.are.same({ .25, .5, .75, 1 }, values(fn, 4))
    end
    assert.are.same(values(s.cosine { peak = 1, warmup = 1, total = 8 }, 8),
      values(s.cosine { peak = 1, warmup = 0, total = 8 }, 8))
    assert.are.equal(0.1, s.cosine { peak = 1, min = 0.1, warmup = 2, total = 20 }(20))
    local wsd = s.wsd { peak = 3, min = 1, warmup = 1, total = 9, decay = 4 }
    for step = 6, 9 do assert.are.equal(1 + 2 * (9 - step + 1) / 4, wsd(step)) end
  end)
end)

-- ---- text, data, files -------------------------------------------------------------------------

describe("text and files", function()
  it("tokenizers are loaded, trained, saved; they encode, decode and stream", function()
    local dir = files.temporary(finally)
    local text = write(dir .. "/text", ("hello world "):rep(30))
    local tok = assert(xt.tokenizer.train { files = { text }, vocab = 265, pattern = "qwen" })
    assert.is_true(tok.vocab_size > 256 and tok.vocab_size <= 265)
    assert(tok:save(dir))
    for _, path in ipairs { dir, dir .. "/tokenizer.json" } do
      local again = assert(xt.tokenizer.load(path))
      assert.are.same(tok:encode("hello you"), again:encode("hello you", { special = false }))
      assert.are.equal("hello you", again:decode(again:encode("hello you")))
    end
    local stream, out = tok:stream(), {}
    for _, id in ipairs(tok:encode("héllo")) do out[#out + 1] = stream:add(id) end
    assert.are.equal("héllo", table.concat(out) .. stream:finish())
    assert.are.same({ 97, 98 }, xt.tokenizer.bytes():encode("ab"))
    local missing, message = xt.tokenizer.load(dir .. "/none")
    assert.is_nil(missing)
    assert.are.equal("string", type(message))
  end)

  it("json keeps integers integers", function()
    local value = xt.json.decode('{"a": 1, "b": 1.0, "c": [true, null, "x"]}')
    assert.are.equal("integer", math.type(value.a))
    assert.are.equal("float", math.type(value.b))
    assert.are.same({ a = 1 }, xt.json.decode(xt.json.encode { a = 1 }))
  end)

  it("safetensors are loaded whole or by name, with metadata", function()
    local path = files.temporary(finally) .. "/x.safetensors"
    local a, b = xt.randn({ 2, 3 }, { seed = 1 }), xt.zeros({ 0 }, { dtype = "i64" })
    assert(xt.safetensors.save(path, { a = a, b = b }, { k = "v" }))
    local all, metadata = xt.safetensors.load(path)
    assert.are.equal(a:digest(), all.a:digest())
    assert.are.equal(b:digest(), all.b:digest())
    assert.are.equal("v", metadata.k)
    local one = xt.safetensors.load(path, { "b" })
    assert.is_nil(one.a)
    assert.is_truthy(one.b)
    local nothing, message = xt.safetensors.load(path .. "x")
    assert.is_nil(nothing)
    assert.are.equal("string", type(message))
  end)

  it("data.tokens reads shards of the documented layout, by the documented numbers", function()
    local dir, paths, n = files.temporary(finally), {}, 41
    for version, width in ipairs { "<I2", "<I4" } do
      local parts = { ("<i4i4i4"):pack(20240520, version, n), ("\0"):rep(1024 - 12) }
      for i = 1, n do parts[#parts + 1] = width:pack(i - 1) end
      paths[version] = write(dir .. "/" .. version .. ".bin", table.concat(parts))
    end
    for _, path in ipairs(paths) do
      local o = { files = path, seq = 4, batch = 2, seed = 3 }
      local d = assert(xt.data.tokens(o))
      local ids, labels = d:batch(3)
      assert.are.same({ 2, 4 }, ids.shape)
      assert.are.equal("i32", ids.dtype)
      assert.are.equal((ids + 1):digest(), labels:digest())
      -- Window number ((step-1) world accum + rank accum + micro) batch + row.
      o.accum, o.rank, o.world, o.batch = 2, 1, 2, 1
      local other = assert(xt.data.tokens(o))
      assert.are.equal(d:batch(2)[2]:digest(), (other:batch(1, 1))[1]:digest())
      assert.are.equal(d:batch(4)[1]:digest(), (other:batch(2, 0))[1]:digest())
    end
    local shards = assert(xt.data.tokens { files = paths, seq = 4, batch = 1, seed = 1 })
    assert.are.equal(2 * n, shards.count)
  end)

  it("hf saves and loads a folder; hf.state names tensors and gradients", function()
    local dir = files.temporary(finally)
    local model = xt.models.qwen3 { vocab = 11, dim = 8, layers = 1, heads = 2, ffn = 8, seed = 1 }
    assert(xt.hf.save(dir, model, xt.tokenizer.bytes()))
    local again, config = xt.hf.load(dir)
    assert.is_truthy(again, config)
    assert.are.equal(11, config.vocab_size)
    local ids = i32 { { 1, 2, 3 } }
    model:loss(ids, ids):backward()
    local state, grads = xt.hf.state(model), xt.hf.state(model, "grad")
    assert.are.same({ 8, 8 }, state["model.layers.0.self_attn.q_proj.weight"].shape)
    assert.are.same({ 8, 8 }, grads["model.layers.0.self_attn.q_proj.weight"].shape)
    assert.is_truthy(xt.tokenizer.load(dir))
  end)

  it("generate has its options", function()
    local model = xt.models.llama { vocab = 11, dim = 8, layers = 1, heads = 2, ffn = 8, seed = 1 }
    local seen = {}
    local ids = xt.generate(model, { 1, 2 }, { max = 4, temperature = 0.7, top_k = 5, top_p = 0.9,
      min_p = 0.01, seed = 3, stop = { 99 }, on_token = function(id) seen[#seen + 1] = id end })
    assert.are.equal(4, #ids)
    assert.are.same(ids, seen)
    assert.are.same(xt.generate(model, { 1, 2 }, { max = 3, temperature = 0 }),
      xt.generate(model, { 1, 2 }, { max = 3, temperature = 0, seed = 9 }))
    raises("temperature", xt.generate, model, { 1 }, { temprature = 1 })
  end)

  it("help explains a name or a value", function()
    local help = require "xtrain.help"
    assert.is_truthy(help.text("matmul"))
    assert.is_truthy(help.text(xt.optim.muon))
    assert.is_truthy(xt.help)
  end)
end)
