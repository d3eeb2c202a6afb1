-- One row an op, for every device; tests/op_runner.lua says what a row holds and what every op
-- must stand. ops_spec.lua runs them on the CPU, cuda_spec.lua on a GPU.
local xt = require "xtrain"

local rows, order = {}, {}

local function row(name, spec)
  spec.name = name
  assert(not rows[name], "two rows for " .. name)
  rows[name] = spec
  order[#order + 1] = name
end

-- Shapes that show broadcasting and sizes of 1, for ops of one and of two tensors.
local ONE_ALSO = { { {} }, { { 1 } }, { { 1, 1, 1 } }, { { 300 } } }
local ONE_EMPTY = { { { 0 } }, { { 3, 0, 2 } } }
local TWO_ALSO = {
  { { 2, 3 }, { 3 } }, { { 3 }, { 2, 3 } }, { { 4, 1 }, { 1, 5 } }, { { 2, 1, 3 }, { 4, 1 } },
  { {}, { 2, 2 } }, { { 1 }, { 1, 1 } },
}
local TWO_EMPTY = { { { 0 }, { 0 } }, { { 2, 0 }, { 1 } }, { { 0, 3 }, { 3 } } }
local TWO_WRONG = { { { 2, 3 }, { 2, 4 }, says = "do not broadcast" }, { { 3 }, { 2 } } }

local function unary(name, domain, more)
  local spec = more or {}
  local x = { shape = { 3, 5 } }
  for key, value in pairs(domain or {}) do x[key] = value end
  spec.inputs = { x }
  spec.also, spec.empty = spec.also or ONE_ALSO, spec.empty or ONE_EMPTY
  row(name, spec)
end

local function binary(name, a, b, more)
  local spec = more or {}
  local function input(domain)
    local x = { shape = { 3, 5 } }
    for key, value in pairs(domain or {}) do x[key] = value end
    return x
  end
  spec.inputs = { input(a), input(b) }
  spec.also, spec.empty = spec.also or TWO_ALSO, spec.empty or TWO_EMPTY
  spec.wrong = spec.wrong or TWO_WRONG
  row(name, spec)
end

-- ---- pointwise ---------------------------------------------------------------------------------

binary("add")
binary("sub")
binary("mul")
binary("div", {}, { low = 0.5, high = 2 }, { bf16 = 3 })
binary("pow", { low = 0.5, high = 2 }, { low = -2, high = 2 }, { bf16 = 3 })
unary("neg")
unary("exp")
unary("log", { low = 0.1, high = 3 })
unary("sqrt", { low = 0.1, high = 3 })
unary("rsqrt", { low = 0.1, high = 3 })
unary("abs", { away = 0.1 })
unary("sin")
unary("cos")
unary("tanh")
unary("sigmoid")
unary("relu", { away = 0.1 })
unary("silu")
unary("softplus")
unary("erf")
unary("gelu", nil, {
  call = function(op, x) return op(x) + op(x, { approx = "none" }) end, bf16 = 6,
})
unary("clamp", { away = 0.1 }, { call = function(op, x) return op(x, -1.003, 1.501) end })
binary("minimum")
binary("maximum")
binary("eq", { kind = "int", below = 3 }, { kind = "int", below = 3 }, { grad = false })
binary("lt", {}, {}, { grad = false })
binary("gt", {}, {}, { grad = false })
binary("swiglu")
row("where", {
  inputs = { { shape = { 3, 5 }, kind = "u8", below = 2 }, { 3, 5 }, { 3, 5 } },
  also = { { { 1, 5 }, { 3, 1 }, { 3, 5 } }, { {}, { 2 }, { 2 } } },
  empty = { { { 0 }, { 0 }, { 1 } } },
  wrong = { { { 2 }, { 3 }, { 3 }, says = "broadcast" } },
})
row("masked_fill", {
  inputs = { { 3, 5 }, { shape = { 3, 5 }, kind = "u8", below = 2 } },
  call = function(op, x, mask) return op(x, mask, -1.5) end,
  also = { { { 2, 3 }, { 3 } } },
  empty = { { { 0 }, { 0 } } },
  wrong = { { { 3 }, { 2 }, says = "broadcast" } },
})
unary("cast", nil, { call = function(op, x) return op(op(x, "f64"), x.dtype) end })

-- ---- in place: no gradient flows through them ---------------------------------------------------

row("fill_", {
  inputs = { { 3, 5 } }, grad = false, empty = ONE_EMPTY,
  call = function(op, x) op(x, 0.5) return x end,
  op = nil,
})
row("copy_", {
  inputs = { { 3, 5 }, { 3, 5 } }, grad = false, empty = TWO_EMPTY,
  call = function(op, x, y)
    local z = x:clone()
    op(z, y)
    return z
  end,
  wrong = { { { 3, 5 }, { 4 }, says = "" } },
})
row("add_", {
  inputs = { { 3, 5 }, { 3, 5 } }, grad = false,
  call = function(op, x, y)
    local z = x:clone()
    op(z, y, 0.5)
    return z
  end,
  wrong = { { { 3, 5 }, { 4 }, says = "" } },
})

row("index_copy_", {
  inputs = { { 4, 6 }, { shape = { 3 }, kind = "int", below = 6 }, { 4, 3 } }, grad = false,
  call = function(op, x, index, src)
    local z = x:clone()
    op(z, 2, index, src)
    return z
  end,
  also = { { { 1, 3 }, { 1 }, { 1, 1 } }, { { 2, 9 }, { 5 }, { 2, 5 } } },
  empty = { { { 0, 6 }, { 2 }, { 0, 2 } }, { { 4, 6 }, { 0 }, { 4, 0 } } },
  wrong = { { { 4, 2 }, { 9 }, { 4, 9 }, says = "" }, { { 4, 6 }, { 3 }, { 4, 2 }, says = "src" } },
})

-- ---- reductions --------------------------------------------------------------------------------

local REDUCE_ALSO = { { {} }, { { 1 } }, { { 1, 7 } }, { { 4, 1, 3 } }, { { 300 } } }
local function reduction(name, more)
  local spec = more or {}
  spec.inputs = spec.inputs or { { 4, 3, 5 } }
  spec.also, spec.empty = spec.also or REDUCE_ALSO, spec.empty or ONE_EMPTY
  spec.bf16 = spec.bf16 or 4
  row(name, spec)
end
-- Over all dimensions, one, several, and with the dimension kept, added up by broadcasting.
local function several(op, x)
  local y = op(x)
  if x.ndim > 0 then y = y + op(x, 1):reshape({ -1 }):sum() + op(x, -1,
  { keepdim = true }):sum() end
  if x.ndim > 1 then y = y + op(x, { 1, -1 }):sum() end
  return y
end
reduction("sum", { call = several, bf16 = 40 })
reduction("mean", { call = several, empty = {}, bf16 = 8 })
reduction("amax", { call = several, empty = {}, bf16 = 40 })
reduction("amin", { call = several, empty = {}, bf16 = 40 })
reduction("norm", { call = several, bf16 = 40 })
reduction("argmax", { grad = false, empty = {} })
reduction("cumsum", { bf16 = 8 })
reduction("softmax", { call = function(op, x) return op(x) + op(x, 1) end,
  also = { { { 1 } }, { { 1, 7 } }, { { 4, 1, 3 } } } })
reduction("log_softmax", { call = function(op, x) return op(x) + op(x, 1) end,
  also = { { { 1 } }, { { 1, 7 } }, { { 4, 1, 3 } } } })
reduction("logsumexp", { also = { { { 1 } }, { { 1, 7 } }, { { 4, 1, 3 } } }, empty = { { { 0,
  3 } } } })
row("topk", {
  inputs = { { 4, 6 } }, call = function(op, x) return (op(x, 3)) end,
  also = { { { 1, 3 } }, { { 5 } } }, empty = { { { 0, 4 } } }, wrong = { { { 2, 2 },
  says = "k" } },
})

-- ---- shape -------------------------------------------------------------------------------------

row("reshape", {
  inputs = { { 3, 4 } }, call = function(op, x) return op(x, { 2, -1 }) end,
  also = { { { 2, 1, 3 } } }, empty = { { { 0, 4 } } }, wrong = { { { 3 }, says = "" } },
})
row("transpose", {
  inputs = { { 3, 4, 2 } }, call = function(op, x) return op(x, 1, 3) end,
  also = { { { 1, 5, 1 } } }, empty = { { { 3, 0, 2 } } },
  wrong = { { { 2, 3 }, says = "x has 2 dimensions" } },
})
row("permute", {
  inputs = { { 3, 4, 2 } }, call = function(op, x) return op(x, { 3, 1, 2 }) end,
  also = { { { 1, 5, 1 } } }, empty = { { { 3, 0, 2 } } }, wrong = { { { 3, 2 }, says = "" } },
})
row("slice", {
  inputs = { { 4, 5 } }, call = function(op, x) return op(x, 2, 2, 4) end,
  also = { { { 1, 4 } } }, empty = { { { 0, 5 } } }, wrong = { { { 4, 3 }, says = "" } },
})
row("select", {
  inputs = { { 4, 5 } }, call = function(op, x) return op(x, 2, -2) end,
  also = { { { 1, 2 } } }, empty = { { { 0, 5 } } }, wrong = { { { 4, 1 }, says = "" } },
})
row("expand", {
  inputs = { { 4, 1 } }, call = function(op, x) return op(x, { 2, 4, 3 }) end,
  also = { { { 1 } }, { {} } }, empty = {}, wrong = { { { 2, 2 }, says = "" } },
})
row("unsqueeze", { inputs = { { 3, 2 } }, call = function(op, x) return op(x, 2) end,
  also = { { { 1, 1 } } }, empty = { { { 0, 2 } } } })
row("squeeze", { inputs = { { 3, 1, 2 } }, call = function(op, x) return op(x, 2) end,
  also = { { { 1, 1 } } }, empty = { { { 0, 1 } } } })
row("flip", {
  inputs = { { 3, 4, 2 } }, call = function(op, x) return op(x, 2) + op(x, -1) end,
  also = { { { 1, 1 } }, { { 2, 5 } } }, empty = { { { 0, 4 } } },
  wrong = { { { 3 }, says = "x has 1 dimension" } },
})
unary("contiguous")
unary("clone")
row("concat", {
  inputs = { { 2, 3 }, { 4, 3 } }, call = function(op, a, b) return op({ a, b }, 1) end,
  also = { { { 1, 1 }, { 1, 1 } } }, empty = { { { 0, 3 }, { 2, 3 } }, { { 0, 3 }, { 0, 3 } } },
  wrong = { { { 2, 3 }, { 2, 4 }, says = "" } },
})
row("stack", {
  inputs = { { 2, 3 }, { 2, 3 } }, call = function(op, a, b) return op({ a, b }, -1) end,
  also = { { {}, {} }, { { 1 }, { 1 } } }, empty = { { { 0, 3 }, { 0, 3 } } },
  wrong = { { { 2, 3 }, { 2, 4 }, says = "" } },
})
row("repeat_kv", {
  inputs = { { 2, 3, 2, 4 } }, call = function(op, x) return op(x, 3) end,
  also = { { { 1, 1, 1, 1 } } }, empty = { { { 0, 3, 2, 4 } } }, wrong = { { { 2, 3 },
  says = "" } },
})

-- ---- products, norms, indices -------------------------------------------------------------------

row("matmul", {
  inputs = { { 3, 4 }, { 4, 5 } }, bf16 = 3, library = true,
  also = {
    { { 2, 3, 4 }, { 4, 5 } }, { { 3, 4 }, { 2, 4, 5 } }, { { 2, 1, 3, 4 }, { 3, 4, 2 } },
    { { 4 }, { 4 } }, { { 4 }, { 4, 2 } }, { { 3, 4 }, { 4 } }, { { 1, 1 }, { 1, 1 } },
    { { 1, 40 }, { 40, 33 } },
  },
  empty = { { { 0, 4 }, { 4, 5 } }, { { 3, 0 }, { 0, 5 } }, { { 2, 0, 4 }, { 4, 5 } } },
  wrong = { { { 3, 4 }, { 5, 2 }, says = "inner sizes 4 and 5 differ" }, { { 2, 3, 4 }, { 3, 4,
  5 } },
    { {}, { 4 } } },
})
row("linear", {
  inputs = { { 2, 3, 4 }, { 5, 4 }, { 5 } }, bf16 = 4, library = true,
  also = { { { 4 }, { 2, 4 }, { 2 } }, { { 1, 1 }, { 1, 1 }, { 1 } } },
  empty = { { { 0, 4 }, { 5, 4 }, { 5 } } },
  wrong = { { { 3, 4 }, { 5, 3 }, { 5 }, says = "" }, { { 3, 4 }, { 5, 4 }, { 4 }, says = "" } },
})
row("rmsnorm", {
  inputs = { { 3, 8 }, { 8 } }, call = function(op, x, w) return op(x, w, 1e-5) end, bf16 = 4,
  also = { { { 8 }, { 8 } }, { { 2, 3, 5 }, { 5 } }, { { 4, 1 }, { 1 } } },
  empty = { { { 0, 8 }, { 8 } } }, wrong = { { { 3, 8 }, { 7 }, says = "" } },
})
row("layernorm", {
  inputs = { { 3, 8 }, { 8 }, { 8 } }, call = function(op, x, w, b) return op(x, w, b, 1e-5) end,
  bf16 = 4, also = { { { 2, 3, 5 }, { 5 }, { 5 } } }, empty = { { { 0, 8 }, { 8 }, { 8 } } },
  wrong = { { { 3, 8 }, { 7 }, { 8 }, says = "" } },
})
row("rope", {
  inputs = { { 2, 3, 2, 6 } }, f32 = 64,
  call = function(op, x)
    return op(x) + op(x, { layout = "interleaved", offset = 2, theta = 100 })
  end,
  also = { { { 1, 1, 1, 2 } } }, empty = { { { 0, 3, 2, 6 } }, { { 2, 0, 2, 6 } } },
  wrong = { { { 2, 3, 2, 5 }, says = "" }, { { 3, 4 }, says = "" } },
})
row("rmsnorm_rope", {
  inputs = { { 3, 3, 2, 6 }, { 6 } }, f32 = 64, bf16 = 6,
  call = function(op, x, w)
    local y = op(x, w, 1e-5)
      + op(x, w, 1e-5, { layout = "interleaved", offset = 2, theta = 100 })
    if x.ndim < 4 then return y end
    local function positions(shape, dtype)
      return xt.rand(shape, { seed = 3 }):mul(50):to(dtype)
    end
    local batch, seq = x.shape[1], x.shape[2]
    return y + op(x, w, 1e-5, { positions = positions({ seq }, "i32") })
      + op(x, w, { layout = "interleaved", positions = positions({ batch, seq }, "i64") })
  end,
  also = {
    { { 1, 1, 1, 2 }, { 2 } }, { { 3, 5, 1, 32 }, { 32 } }, { { 1, 2, 3, 34 }, { 34 } },
    { { 3, 2, 5, 64 }, { 64 } }, { { 1, 3, 2, 128 }, { 128 } }, { { 3, 1, 2, 160 }, { 160 } },
    { { 1, 1, 2, 514 }, { 514 } },
  },
  empty = { { { 0, 3, 2, 6 }, { 6 } }, { { 2, 0, 2, 6 }, { 6 } }, { { 2, 3, 0, 6 }, { 6 } },
    { { 2, 3, 2, 0 }, { 0 } } },
  wrong = { { { 2, 3, 2, 5 }, { 5 }, says = "even last dimension" },
    { { 2, 3, 2, 6 }, { 4 }, says = "weight is f32 4" }, { { 3, 4 }, { 4 }, says = "" } },
})
row("index_select", {
  inputs = { { 4, 3 }, { shape = { 5 }, kind = "int", below = 3 } },
  call = function(op, x, index) return op(x, 2, index) end,
  also = { { { 1, 3 }, { 1 } } }, empty = { { { 4, 3 }, { 0 } } },
  wrong = { { { 4, 1 }, { 9 }, says = "" } },
})
row("gather", {
  inputs = { { 4, 3 }, { shape = { 4, 2 }, kind = "int", below = 3 } },
  call = function(op, x, index) return op(x, 2, index) end,
  also = { { { 1, 3 }, { 1, 5 } } }, empty = { { { 4, 3 }, { 4, 0 } } },
  wrong = { { { 4, 3 }, { 2 }, says = "" } },
})
row("embedding", {
  inputs = { { 6, 4 }, { shape = { 2, 5 }, kind = "int", below = 6 } },
  also = { { { 6, 1 }, { 1 } }, { { 6, 3 }, {} } }, empty = { { { 6, 4 }, { 0 } } },
  wrong = { { { 2, 4 }, { 40 }, says = "" } },
})

-- ---- losses, attention, random -----------------------------------------------------------------

row("cross_entropy", {
  inputs = { { 6, 5 }, { shape = { 6 }, kind = "int", below = 5 } }, bf16 = 4,
  call = function(op, logits, labels)
    return op(logits, labels) + op(logits, labels, { reduction = "sum", label_smoothing = 0.1 })
  end,
  also = { { { 2, 3, 5 }, { 2, 3 } }, { { 1, 5 }, { 1 } } }, empty = { { { 0, 5 }, { 0 } } },
  wrong = { { { 6, 5 }, { 5 }, says = "" } },
})
row("linear_cross_entropy", {
  inputs = { { 6, 4 }, { 5, 4 }, { shape = { 6 }, kind = "int", below = 5 } }, bf16 = 6,
  call = function(op, x, w, labels)
    return op(x, w, labels) + op(x, w, labels, { reduction = "sum", label_smoothing = 0.1 })
  end,
  also = { { { 2, 3, 4 }, { 5, 4 }, { 2, 3 } }, { { 2, 3 }, { 1031, 3 }, { 2 } } },
  empty = { { { 0, 4 }, { 5, 4 }, { 0 } } },
  wrong = { { { 6, 4 }, { 5, 3 }, { 6 }, says = "" } },
})
row("count_valid", {
  inputs = { { shape = { 3, 4 }, kind = "int", below = 5 } }, grad = false, exact = true,
  call = function(op, labels) return op(labels) end, empty = { { { 0 } } },
})
row("attention", {
  inputs = { { 2, 5, 4, 6 }, { 2, 7, 2, 6 }, { 2, 7, 2, 6 } }, bf16 = 6,
  call = function(op, q, k, v)
    local y = op(q, k, v, { causal = true, impl = "flash" })
    return y + op(q, k, v, { impl = "composed", dropout = 0.3, seed = 9 })
      + op(q, k, v, { impl = "flash", dropout = 0.3, seed = 9, scale = 0.4 })
      + (q.shape[1] == 2 and op(q, k, v, { lengths = xt.tensor({ 4, 7 }, { dtype = "i32" }) }) or y)
  end,
  also = { { { 1, 1, 1, 1 }, { 1, 1, 1, 1 }, { 1, 1, 1, 1 } },
    { { 1, 70, 2, 3 }, { 1, 70, 1, 3 }, { 1, 70, 1, 3 } } },
  empty = { { { 0, 5, 4, 6 }, { 0, 7, 2, 6 }, { 0, 7, 2, 6 } },
    { { 1, 0, 4, 6 }, { 1, 7, 2, 6 }, { 1, 7, 2, 6 } } },
  wrong = { { { 2, 5, 4, 6 }, { 2, 7, 3, 6 }, { 2, 7, 3, 6 }, says = "multiple of Hkv" },
    { { 2, 5, 4, 6 }, { 2, 7, 2, 5 }, { 2, 7, 2, 5 } }, { { 2, 5 }, { 2, 5 }, { 2, 5 } } },
})
row("swiglu_mlp", {
  inputs = { { 2, 3, 6 }, { 10, 6 }, { 10, 6 }, { 4, 10 } }, bf16 = 6,
  also = { { { 5, 6 }, { 7, 6 }, { 7, 6 }, { 6, 7 } }, { { 1, 1 }, { 1, 1 }, { 1, 1 }, { 1, 1 } },
    { { 6 }, { 4, 6 }, { 4, 6 }, { 3, 4 } } },
  empty = { { { 0, 6 }, { 10, 6 }, { 10, 6 }, { 4, 10 } },
    { { 2, 6 }, { 0, 6 }, { 0, 6 }, { 4, 0 } } },
  wrong = { { { 2, 6 }, { 10, 5 }, { 10, 5 }, { 4, 10 }, says = "10x5, wanted ffn x 6" },
    { { 2, 6 }, { 10, 6 }, { 9, 6 }, { 4, 10 }, says = "wanted 10x6 as gate is" },
    { { 2, 6 }, { 10, 6 }, { 10, 6 }, { 10, 4 }, says = "10x4, wanted out x 10" } },
})
unary("dropout", nil, { call = function(op, x) return op(x, 0.4, 123) end })
row("dropout_mask", { inputs = {}, call = function(op) return op({ 3, 5 }, 0.5, 7) end,
  grad = false })
row("rand", { inputs = {}, call = function(op) return op({ 3, 5 }, { seed = 7 }) end,
  grad = false })
row("randn", { inputs = {}, call = function(op) return op({ 3, 5 }, { seed = 7 }) end,
  grad = false })
row("multinomial", {
  inputs = { { shape = { 4, 6 }, low = 0.1, high = 1 } }, grad = false, bf16 = false, exact = true,
  call = function(op, probs) return op(probs, 3) end, empty = { { { 0, 6 } } },
})

return { rows = rows, order = order }
