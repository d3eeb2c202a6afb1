-- Optimizers: values, decay, skipping, state by name.
local xt = require "xtrain"

local function param(name, value) return { name = name, tensor = xt.var(value) } end

local function set_grad(t, value)
  xt.sum(t * xt.tensor(value)):backward()
end

describe("adamw", function()
  it("corrects the bias of its moments: the first step has the size of lr", function()
    local w = param("w", { { 1 } })
    local opt = xt.optim.adamw({ w }, { betas = { .9, .999 }, eps = 1e-8, weight_decay = 0 })
    set_grad(w.tensor, { { .1 } })
    opt:step(.1)
    assert.is_near(0.90000001, w.tensor:item(), 1e-7)
  end)

  it("decays matrices alone, and what decay() says", function()
    local function run(decay)
      local params = { param("w", { { 1 } }), param("gain", { 1 }) }
      local opt = xt.optim.adamw(params, { weight_decay = .1, decay = decay })
      for _, p in ipairs(params) do
        set_grad(p.tensor, p.tensor.ndim == 2 and { { 0 } } or { 0 })
      end
      opt:step(.1)
      return params[1].tensor:item(), params[2].tensor:item()
    end
    local w, gain = run()
    assert.is_near(.99, w, 1e-7)
    assert.are.equal(1, gain)
    w, gain = run(function(name) return name == "gain" end)
    assert.are.equal(1, w)
    assert.is_near(.99, gain, 1e-7)
  end)

  it("returns the norm before clipping, and clips", function()
    local w = param("w", { 0, 0 })
    local opt = xt.optim.sgd({ w })
    set_grad(w.tensor, { 3, 4 })
    local norm = opt:step(1, { clip = 1 })
    assert.are.equal(0, norm.ndim)
    assert.is_near(5, norm:item(), 1e-6)
    local moved = w.tensor:totable()
    assert.is_near(-.6, moved[1], 1e-5)
    assert.is_near(-.8, moved[2], 1e-5)
  end)

  it("divides once by the divisor it is given", function()
    local w = param("w", { 0 })
    local opt = xt.optim.sgd({ w })
    set_grad(w.tensor, { 4 })
    local norm = opt:step(1, { divisor = 4 })
    assert.is_near(1, norm:item(), 1e-6)
    assert.is_near(-1, w.tensor:item(), 1e-6)
  end)

  it("leaves parameters without a gradient as they are", function()
    local a, b = param("a", { { 1 } }), param("b", { { 2 } })
    local opt = xt.optim.adamw({ a, b }, { weight_decay = .1 })
    set_grad(a.tensor, { { 1 } })
    opt:step(.1)
    assert.are.equal(2, b.tensor:item())
    opt:zero_grad()
    assert.is_nil(a.tensor.grad)
    local before = a.tensor:item()
    assert.are.equal(0, opt:step(.1):item())
    assert.are.equal(before, a.tensor:item())
  end)

  it("changes nothing when the norm is not finite, and counts it", function()
    local a, b = param("a", { { 1 } }), param("b", { { 2 } })
    local opt = xt.optim.adamw({ a, b })
    set_grad(a.tensor, { { 1 } })
    set_grad(b.tensor, { { 0 / 0 } })
    local norm = opt:step(.1)
    assert.is_true(norm:item() ~= norm:item())
    assert.are.equal(1, opt.skipped)
    assert.are.equal(0, opt.steps)
    assert.are.equal(1, a.tensor:item())
    assert.are.equal(0, opt:state()["a.m"]:item())
  end)

  it("finds its moments by name, whatever the order of the parameters", function()
    local a, b = param("a", { { 1, 1 } }), param("b", { { 1, 1 } })
    local opt = xt.optim.adamw({ a, b })
    set_grad(a.tensor, { { 1, 1 } })
    set_grad(b.tensor, { { 2, 2 } })
    opt:step(.1)
    local state = opt:state()
    assert.are.equal(1, state.step:item())
    local other = xt.optim.adamw({ param("b", { { 0, 0 } }), param("a", { { 0, 0 } }) })
    assert.is_true(other:load(state))
    for _, name in ipairs { "a.m", "a.v", "b.m", "b.v" } do
      assert.are.equal(state[name]:digest(), other:state()[name]:digest())
    end
    assert.are.equal(1, other.steps)
  end)

  it("says which part of a state is missing or of another shape, and keeps its own", function()
    local opt = xt.optim.adamw({ param("a", { { 1 } }) })
    local ok, message = opt:load { step = xt.tensor(1, { dtype = "i64" }) }
    assert.is_nil(ok)
    assert.matches("'a.m'", message)
    ok, message = opt:load { step = xt.tensor(1, { dtype = "i64" }), ["a.m"] = xt.zeros { 2, 2 },
      ["a.v"] = xt.zeros { 1, 1 } }
    assert.is_nil(ok)
    assert.matches("2x2, wanted 1x1", message)
    assert.are.equal(0, opt.steps)
  end)

  it("names unknown options", function()
    local ok, message = pcall(xt.optim.adamw, {}, { wd = 1 })
    assert.is_false(ok)
    assert.matches("weight_decay", message)
  end)

  it("keeps a bf16 compute copy equal to the rounded master", function()
    local w = param("w", { { 1, 2 } })
    local opt = xt.optim.adamw({ w })
    local copy = w.tensor:to "bf16"
    xt.sum(xt.cast(copy, "f32") * xt.tensor { { 1, -1 } }):backward()
    opt:step(.01)
    assert.are.equal(xt.cast(w.tensor:detach(), "bf16"):digest(),
      w.tensor:to("bf16"):detach():digest())
  end)
end)

-- ---- 20 steps against recurrences written out, and against PyTorch ------------------------------

-- A matrix (3, 4) and a vector (4), each pulled to a target with a force of its own, so that
-- gradients depend on weights. Everything here is also in plain Lua numbers, which are f64.
local function start(n, k)
  local w, target, pull = {}, {}, {}
  for i = 0, n - 1 do
    w[i + 1] = (i * 7 + k) % 11 / 4 - 1.25
    target[i + 1] = (i * 5 + k) % 13 / 8 - 0.75
    pull[i + 1] = (i + k) % 3 + 1
  end
  return { w = w, target = target, pull = pull }
end

local LR, CLIP, STEPS = 0.02, 5, 20

-- The weights after 20 steps of xt's optimizer: {w = list of 12, b = list of 4}.
local function trained(make, dtype)
  local function tensor(list, shape) return xt.tensor(list, { dtype = dtype }):reshape(shape) end
  local function part(n, shape, k)
    local p = start(n, k)
    local w = xt.var(tensor(p.w, shape))
    return w, function()
      return xt.sum((w - tensor(p.target, shape)) ^ 2 * tensor(p.pull, shape))
    end
  end
  local w, pull_w = part(12, { 3, 4 }, 0)
  local b, pull_b = part(4, { 4 }, 1)
  local opt = make { { name = "w", tensor = w }, { name = "b", tensor = b } }
  for _ = 1, STEPS do
    opt:zero_grad();
    (pull_w() + pull_b()):backward()
    opt:step(LR, { clip = CLIP })
  end
  return { w = w:reshape({ 12 }):totable(), b = b:totable() }
end

-- The same by update(part, g, t), which changes part.w given the clipped gradient of step t.
local function written_out(update)
  local parts = { w = start(12, 0), b = start(4, 1) }
  parts.w.matrix = true
  for t = 1, STEPS do
    local grads, square = {}, 0
    for name, p in pairs(parts) do
      grads[name] = {}
      for i = 1, #p.w do
        grads[name][i] = 2 * (p.w[i] - p.target[i]) * p.pull[i]
        square = square + grads[name][i] ^ 2
      end
    end
    local by = math.min(1, CLIP / (math.sqrt(square) + 1e-6))
    for name, p in pairs(parts) do
      for i = 1, #p.w do grads[name][i] = grads[name][i] * by end
      update(p, grads[name], t)
    end
  end
  return { w = parts.w.w, b = parts.b.w }
end

local function largest_difference(a, b)
  local largest = 0
  for name, list in pairs(a) do
    for i, x in ipairs(list) do
      local apart = math.abs(x - b[name][i])
      if apart > largest or apart ~= apart then largest = apart end
    end
  end
  return largest
end

local function adamw_update(o)
  return function(p, g, t)
    p.m, p.v = p.m or {}, p.v or {}
    local decay = p.matrix and o.weight_decay or 0
    for i = 1, #g do
      p.m[i] = o.betas[1] * (p.m[i] or 0) + (1 - o.betas[1]) * g[i]
      p.v[i] = o.betas[2] * (p.v[i] or 0) + (1 - o.betas[2]) * g[i] ^ 2
      local m, v = p.m[i] / (1 - o.betas[1] ^ t), p.v[i] / (1 - o.betas[2] ^ t)
      p.w[i] = p.w[i] * (1 - LR * decay) - LR * m / (math.sqrt(v) + o.eps)
    end
  end
end

local function sgd_update(o)
  return function(p, g)
    local first = not p.m
    p.m = p.m or {}
    for i = 1, #g do
      local grad = g[i] + (p.matrix and o.weight_decay or 0) * p.w[i]
      if first then
        p.m[i] = grad
      else
        p.m[i] = (o.momentum or 0) * p.m[i] + (1 - (o.dampening or 0)) * grad
      end
      p.w[i] = p.w[i] - LR * (o.nesterov and grad + o.momentum * p.m[i] or p.m[i])
    end
  end
end

-- name -> optimizer, options, the update written out
local CASES = {
  adamw = { "adamw", { betas = { 0.9, 0.95 }, eps = 1e-8, weight_decay = 0.1 }, adamw_update },
  sgd = { "sgd", { weight_decay = 0.1 }, sgd_update },
  sgd_momentum = { "sgd", { momentum = 0.9, dampening = 0.5, weight_decay = 0.0 }, sgd_update },
  sgd_nesterov = { "sgd", { momentum = 0.9, nesterov = true, weight_decay = 0.1 }, sgd_update },
}

-- What PyTorch 2.13 has after the same 20 steps in f64; tests/bench/optimizers.py --lua prints it.
local PYTORCH = {
  adamw = {
    w = { -0.8240386042047, 0.09396743643996, -0.08804447982494, 0.8063043135917,
      0.1313864497426, -0.3262821991222, 0.5673469660855, 0.3663565849872, -0.6037326697616,
      0.3314049654095, 0.1512622888996, -0.8104196970299 },
    b = { -0.6275040371301, 0.352582320388, 0.1490436258848, -0.8509563706831 },
  },
  sgd = {
    w = { -1.03886200866, 0.1290874079893, 0.2344883729808, 0.6082123024426, 0.1720824889948,
      0.3517325594712, 0.5382478067001, 0.2150775700003, -0.708184863143, 0.4682833109577,
      0.2580726510058, -0.5909406766526 },
    b = { -0.7820170735153, 0.1999478146312, 0.05585435524689, -0.7413731715358 },
  },
  sgd_momentum = {
    w = { -0.7182883046614, -0.3223729477345, 0.7134140136161, -0.6109909336852,
      0.08552541045311, 1.070121020424, -0.3292792383466, 0.4934237686407, -0.5449697448939,
      -0.04756754300796, 0.9013221268283, -0.1882627380859 },
    b = { -0.5065762313593, -0.1600605102121, 0.6804954668426, -0.09867787317174 },
  },
  sgd_nesterov = {
    w = { -0.5848837685529, -0.1000280874366, 0.394331461739, -0.9075955569655, 0.1271043816492,
      0.5914971926085, -0.5469789265102, 0.354236850735, -0.6521684509628, -0.1863622960549,
      0.5813693198209, -0.4550027200933 },
    b = { -0.6332267725586, 0.0753138945515, 0.8542237308683, -0.3941958026368 },
  },
}

describe("20 steps", function()
  for name, case in pairs(CASES) do
    local kind, o, update = table.unpack(case)
    it("of " .. name .. " are its recurrence and PyTorch's, in f64 and f32", function()
      local function make(params) return xt.optim[kind](params, o) end
      local got = trained(make, "f64")
      assert.is_true(largest_difference(got, written_out(update(o))) < 1e-13)
      assert.is_true(largest_difference(got, PYTORCH[name]) < 1e-12) -- 13 digits are written above
      -- 20 roundings of weights below 2, and of moments, that the pull draws back together
      assert.is_true(largest_difference(trained(make, "f32"), got) < 5e-6)
    end)
  end
end)

-- ---- muon --------------------------------------------------------------------------------------

-- Matrices as lists of rows, in Lua numbers.
local function product(a, b)
  local c = {}
  for i = 1, #a do
    c[i] = {}
    for j = 1, #b[1] do
      local sum = 0
      for k = 1, #b do sum = sum + a[i][k] * b[k][j] end
      c[i][j] = sum
    end
  end
  return c
end

local function turned(a)
  local t = {}
  for j = 1, #a[1] do
    t[j] = {}
    for i = 1, #a do t[j][i] = a[i][j] end
  end
  return t
end

-- The singular values of a, by one-sided Jacobi rotations of its rows (of the shorter side).
local function singular_values(a)
  if #a > #a[1] then a = turned(a) end
  local rows = {}
  for i, row in ipairs(a) do rows[i] = table.move(row, 1, #row, 1, {}) end
  local function dot(x, y)
    local sum = 0
    for k = 1, #x do sum = sum + x[k] * y[k] end
    return sum
  end
  for _ = 1, 30 do
    local worst = 0
    for i = 1, #rows - 1 do
      for j = i + 1, #rows do
        local x, y = rows[i], rows[j]
        local xx, yy, xy = dot(x, x), dot(y, y), dot(x, y)
        if math.abs(xy) > 1e-14 * math.sqrt(xx * yy) then
          worst = math.max(worst, math.abs(xy) / math.sqrt(xx * yy))
          local tau = (yy - xx) / (2 * xy)
          local t = (tau >= 0 and 1 or -1) / (math.abs(tau) + math.sqrt(1 + tau * tau))
          local c = 1 / math.sqrt(1 + t * t)
          local s = c * t
          for k = 1, #x do
            x[k], y[k] = c * x[k] - s * y[k], s * x[k] + c * y[k]
          end
        end
      end
    end
    if worst < 1e-12 then break end
  end
  local values = {}
  for i, row in ipairs(rows) do values[i] = math.sqrt(dot(row, row)) end
  table.sort(values)
  return values
end

describe("muon", function()
  it("updates matrices by steps whose singular values are in [0.5, 1.5]", function()
    for i, shape in ipairs { { 16, 48 }, { 48, 16 }, { 24, 24 }, { 1, 7 }, { 7, 1 }, { 33, 34 } } do
      local w = param("w", xt.randn(shape, { seed = i }))
      local opt = xt.optim.muon { w }
      xt.sum(w.tensor * xt.randn(shape, { seed = 10 + i }) * 1e-3):backward()
      local before = w.tensor:detach():clone()
      opt:step(1)
      local values = singular_values((before - w.tensor):totable())
      assert.are.equal(math.min(shape[1], shape[2]), #values)
      assert.is_true(values[1] >= 0.5 and values[#values] <= 1.5,
        ("%dx%d: %.3f to %.3f"):format(shape[1], shape[2], values[1], values[#values]))
    end
  end)

  it("keeps the singular vectors, and lifts values of a 10,000th of the largest", function()
    -- Columns of a rotation in each plane, scaled: singular values are the scales.
    local scales = { 1, 0.1, 1e-2, 1e-3, 1e-4 }
    local q = xt.optim.orthogonalize(xt.randn({ 5, 5 }, { seed = 3, dtype = "f64" }), 30)
    local g = q:matmul(xt.tensor(scales, { dtype = "f64" }):reshape { 5, 1 } * q:transpose(1, 2))
    local values = singular_values(xt.optim.orthogonalize(g):totable())
    assert.is_true(values[1] >= 0.5 and values[5] <= 1.5)
    -- g is symmetric and positive, and so is its nearest orthogonal matrix: the identity, nearly.
    local o = xt.optim.orthogonalize(g)
    assert.is_true(xt.amax(xt.abs(o - o:transpose(1, 2))):item() < 1e-9)
    local commute = xt.amax(xt.abs(o:matmul(g) - g:matmul(o))):item()
    assert.is_true(commute < 1e-9)
  end)

  it("of a gradient of zeros moves nothing", function()
    local w = param("w", { { 1, 2 }, { 3, 4 } })
    set_grad(w.tensor, { { 0, 0 }, { 0, 0 } })
    xt.optim.muon({ w }):step(1)
    assert.are.same({ { 1, 2 }, { 3, 4 } }, w.tensor:totable())
  end)

  it("is its recurrence over 20 steps: momentum, five iterations, decay; the rest by adamw",
    function()
      -- The iteration in plain numbers, on a matrix of 3 rows and 4 columns.
      local function iterate(list)
        local x = {}
        for i = 1, 3 do x[i] = table.move(list, 4 * i - 3, 4 * i, 1, {}) end
        local function scaled(by)
          for _, row in ipairs(x) do
            for j = 1, #row do row[j] = row[j] * by end
          end
        end
        local function frobenius(a)
          local sum = 0
          for _, row in ipairs(a) do
            for _, value in ipairs(row) do sum = sum + value ^ 2 end
          end
          return math.sqrt(sum)
        end
        scaled(1 / math.sqrt(frobenius(product(x, turned(x)))))
        for _ = 1, 5 do
          local gram = product(x, turned(x))
          local square = product(gram, gram)
          for i = 1, 3 do
            for j = 1, 3 do
              gram[i][j] = -4.7750 * gram[i][j] + 2.0315 * square[i][j] + (i == j and 3.4445 or 0)
            end
          end
          x = product(gram, x)
        end
        local flat = {}
        for i = 1, 12 do flat[i] = x[(i - 1) // 4 + 1][(i - 1) % 4 + 1] end
        return flat
      end
      local adamw = adamw_update { betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0 }
      for _, nesterov in ipairs { true, false } do
        local want = written_out(function(p, g, t)
          if not p.matrix then return adamw(p, g, t) end
          p.m = p.m or {}
          local u = {}
          for i = 1, #g do
            p.m[i] = 0.95 * (p.m[i] or 0) + 0.05 * g[i]
            u[i] = nesterov and 0.05 * g[i] + 0.95 * p.m[i] or p.m[i]
          end
          for i, o in ipairs(iterate(u)) do p.w[i] = p.w[i] * (1 - LR * 0.1) - LR * o end
        end)
        local got = trained(function(params)
          return xt.optim.muon(params, { weight_decay = 0.1, steps = 5, nesterov = nesterov })
        end, "f64")
        assert.is_true(largest_difference(got, want) < 1e-11)
      end
    end)

  it("leaves embeddings, positions, head and gains to adamw", function()
    local model = xt.models.gpt2 { vocab = 11, dim = 8, layers = 1, heads = 2, context = 8,
      tied = false }
    local opt = xt.optim.muon(xt.nn.params(model))
    local state = opt:state()
    for _, name in ipairs { "embed.weight", "positions.weight", "head.weight", "norm.weight",
      "blocks.1.attn.out.bias" } do
      assert.is_truthy(state[name .. ".v"], name)
    end
    for _, name in ipairs { "blocks.1.attn.qkv.weight", "blocks.1.mlp.up.weight" } do
      assert.is_truthy(state[name .. ".m"], name)
      assert.is_nil(state[name .. ".v"], name)
    end
    local own = xt.optim.muon(xt.nn.params(model), {
      matrices = function(name) return name == "head.weight" end }):state()
    assert.is_nil(own["head.weight.v"])
    assert.is_truthy(own["blocks.1.mlp.up.weight.v"])
  end)

  it("scales by shape when asked", function()
    local function moved(scale)
      local w = param("w", xt.zeros { 8, 2 })
      xt.sum(w.tensor * xt.randn({ 8, 2 }, { seed = 1 })):backward()
      xt.optim.muon({ w }, { scale = scale }):step(1)
      return xt.norm(w.tensor):item()
    end
    assert.is_near(2, moved "original" / moved "none", 1e-5)
    assert.is_near(0.2 * math.sqrt(8), moved "adamw" / moved "none", 1e-5)
    assert.has_error(function() moved "big" end)
  end)

  it("keeps a bf16 compute copy equal to the rounded master", function()
    local w = param("w", { { 1, 2 }, { 3, 5 } })
    local opt = xt.optim.muon { w }
    xt.sum(xt.cast(w.tensor:to "bf16", "f32") * xt.tensor { { 1, -1 }, { 2, 1 } }):backward()
    opt:step(.1)
    assert.are.equal(xt.cast(w.tensor:detach(), "bf16"):digest(),
      w.tensor:to("bf16"):detach():digest())
  end)
end)

-- ---- groups ------------------------------------------------------------------------------------

describe("groups", function()
  it("are made by a function of name and tensor", function()
    local params = { param("a", { { 1 } }), param("b", { { 1 } }), param("gain", { 1 }),
      param("c", { { 1 } }) }
    local opt = xt.optim.sgd(params, { weight_decay = .5, group = function(name, tensor)
      assert(tensor.is_var)
      if name == "b" then return { lr = .1, weight_decay = 0 } end
      if name == "gain" then return { weight_decay = 1 } end
    end })
    for _, p in ipairs(params) do set_grad(p.tensor, p.tensor.ndim == 2 and { { 1 } } or { 1 }) end
    opt:step(.1)
    for i, want in ipairs { 1 - .1 * 1.5, 1 - .01, 1 - .1 * 2, 1 - .1 * 1.5 } do
      assert.is_near(want, params[i].tensor:item(), 1e-6)
    end
    assert.are.equal(3, #opt.groups) -- a and c alike
    local text = tostring(opt)
    assert.matches("sgd, 1 steps taken", text)
    assert.matches("2 parameters, 2 elements: sgd: .*lr = 1.0.*weight_decay = 0.5", text)
    assert.matches("lr = 0.1", text)
  end)

  it("have betas, eps and momentum of their own", function()
    local a, b = param("a", { { 1 } }), param("b", { { 1 } })
    local opt = xt.optim.adamw({ a, b }, { weight_decay = 0, group = function(name)
      if name == "b" then return { betas = { 0, 0 }, eps = 1 } end
    end })
    set_grad(a.tensor, { { 1 } })
    set_grad(b.tensor, { { 1 } })
    opt:step(.1)
    assert.is_near(.9, a.tensor:item(), 1e-6)
    assert.is_near(.95, b.tensor:item(), 1e-6) -- 1 / (sqrt(1) + 1)
  end)

  it("that say what there is not are an error that names the parameter and the options", function()
    local p = param("a", { { 1 } })
    local ok, message = pcall(xt.optim.adamw, { p }, { group = function() return { wd = 1 } end })
    assert.is_false(ok)
    assert.matches("group of 'a'", message)
    assert.matches("weight_decay", message)
    ok, message = pcall(xt.optim.adamw, { p }, { betas = { .9, 1 } })
    assert.is_false(ok)
    assert.matches("betas are", message)
    ok, message = pcall(xt.optim.sgd, { p }, { nesterov = true })
    assert.is_false(ok)
    assert.matches("nesterov wants a momentum", message)
  end)
end)

describe("a step that is queued", function()
  local KINDS = { { "adamw" }, { "sgd" }, { "sgd", { momentum = .9, nesterov = true } },
    { "muon" } }

  local function digests(case, take)
    local params = {}
    for i, shape in ipairs { { 33, 65 }, { 7 }, { 64, 32 } } do
      params[i] = { name = "p" .. i, tensor = xt.var(xt.randn(shape, { seed = i })) }
    end
    local opt = xt.optim[case[1]](params, case[2] or {})
    for step = 1, 4 do
      for i, p in ipairs(params) do
        local grad = xt.randn(p.tensor.shape, { seed = xt.seed(9, step, i) })
        xt.core.set_grad(p.tensor, grad)
      end
      take(opt)
    end
    local list = { opt.steps }
    for _, p in ipairs(params) do list[#list + 1] = tostring(p.tensor:digest()) end
    for name, t in pairs(opt:state()) do list[#list + 1] = name .. " " .. tostring(t:digest()) end
    table.sort(list, function(a, b) return tostring(a) < tostring(b) end)
    return list
  end

  it("gives the bits of one that is not, whatever the optimizer", function()
    for _, case in ipairs(KINDS) do
      local wanted = digests(case, function(opt) opt:step(1e-2, { clip = 1.0, divisor = 3 }) end)
      local got = digests(case, function(opt)
        local norm = opt:queue(1e-2, { clip = 1.0, divisor = 3, guard = xt.tensor(2.0) })
        opt:replayed(1e-2, norm, 3)
      end)
      assert.are.same(wanted, got, case[1])
    end
  end)
end)

describe("clip_grad_norm", function()
  it("returns the norm before and scales in place", function()
    local w = param("w", { 0, 0 })
    set_grad(w.tensor, { 3, 4 })
    assert.is_near(5, xt.clip_grad_norm({ w }, 1):item(), 1e-6)
    assert.is_near(.6, w.tensor.grad:totable()[1], 1e-5)
  end)
end)
