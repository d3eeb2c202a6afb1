-- xt.gradcheck of functions and models: what is wrong is named by input or parameter, element and
-- both values, and in a model by layer.
local xt = require "xtrain"
local raises = require("expect").raises

local function seeded(shape, seed) return xt.randn(shape, { seed = seed }) end

-- The gradient of x is that of `factor` times what it is.
local function scaled(x, factor)
  return x * factor + x:detach() * (1 - factor)
end

describe("gradcheck of a function", function()
  it("names the input, the element and both values", function()
    local function fn(a, b)
      local one = xt.zeros(b.shape, { dtype = "f64" })
      one[2][3] = 0.5 -- element [2][3] of b has half its gradient
      return a:tanh():matmul(scaled(b, xt.ones(b.shape, { dtype = "f64" }) - one))
    end
    local a, b = seeded({ 4, 2 }, 1), seeded({ 2, 3 }, 2)
    local ok, report = xt.gradcheck(fn, { a, b })
    assert.is_false(ok)
    assert.are.equal(1, #report.wrong)
    local found = report.wrong[1]
    assert.are.equal(2, found.input)
    assert.are.equal(6, found.element)
    assert.are.equal("[2][3]", found.index)
    assert.is_near(0.5 * found.slope, found.gradient, 1e-8)
    local wanted = ("input 2, element [2][3]: gradient %.9g, slope %.9g\n"):format(found.gradient,
      found.slope)
    assert.is_truthy(tostring(report):find(wanted, 1, true), tostring(report))
    assert.are.same({ "input 1" }, report.right)
  end)

  it("finds the one wrong element among many, wherever it is", function()
    for _, element in ipairs { 1, 500, 777, 1000 } do
      local ok, report = xt.gradcheck(function(x)
        local factor = xt.ones({ 1000 }, { dtype = "f64" })
        factor[element] = 1.1
        return scaled(x, factor):exp()
      end, { seeded({ 1000 }, 3) }, { seed = element })
      assert.is_false(ok)
      assert.are.equal(element, report.wrong[1].element)
    end
  end)

  it("finds errors that cancel along the direction of a half", function()
    local ok, report = xt.gradcheck(function(x) return scaled(x, 1.5):sum() end,
      { seeded({ 2, 2 }, 5) })
    assert.is_false(ok)
    assert.is_near(report.wrong[1].gradient, 1.5 * report.wrong[1].slope, 1e-6)
  end)

  it("finds a wrong element beside a kink", function()
    local ok, report = xt.gradcheck(function(x) return scaled(x:relu(), 0.5) end,
      { xt.tensor { 0, -1, 2 } })
    assert.is_false(ok)
    assert.are.equal("[3]", report.wrong[1].index)
    assert.is_near(0.5 * report.wrong[1].slope, report.wrong[1].gradient, 1e-9)
    assert.is_true(report.kinks > 0)
  end)

  it("passes a right one of large and of tiny values", function()
    for _, size in ipairs { 1e-6, 1, 1e4 } do
      local ok, report = xt.gradcheck(function(x) return (x * x):sum() * size end,
        { seeded({ 50 }, 6) })
      assert.is_true(ok, tostring(report))
    end
  end)
end)

-- ---- models ------------------------------------------------------------------------------------

local ids = xt.tensor({ { 1, 2, 3, 4 }, { 5, 6, 7, 8 } }, { dtype = "i32" })
local labels = xt.tensor({ { 2, 3, 4, 5 }, { 6, -100, 8, 9 } }, { dtype = "i32" })

local function small(more)
  local o = { vocab = 11, dim = 8, layers = 2, heads = 2, ffn = 12, tied = true, seed = 3 }
  for name, value in pairs(more or {}) do o[name] = value end
  return xt.models.qwen3(o)
end

local function digests(model)
  local all = {}
  for i, param in ipairs(xt.nn.params(model)) do
    all[i] = ("%s %s %s"):format(param.name, param.tensor.dtype, param.tensor:digest())
  end
  return all
end

describe("gradcheck of what cuts a gradient", function()
  it("names the line that reads what carries none, after a detach or under no_grad", function()
    local x = seeded({ 4, 3 }, 1)
    local read
    local function detached(t)
      local size = xt.sqrt(xt.mean(t * t, -1, { keepdim = true }) + 1e-6):detach() * 2
      read = debug.getinfo(1, "l").currentline + 1
      return t / size
    end
    local ok, report = xt.gradcheck(detached, { x })
    assert.is_false(ok)
    assert.are.equal(1, #report.cuts)
    assert.are.equal("div", report.cuts[1].op)
    assert.are.equal("b", report.cuts[1].input)
    assert.are.equal("input 1", report.cuts[1].name)
    assert.matches("gradcheck_spec.lua:" .. read .. "$", report.cuts[1].where)
    assert.matches("div at %S+gradcheck_spec.lua:%d+: its b depends on input 1 and carries no grad",
      tostring(report))
    ok, report = xt.gradcheck(function(t)
      return t * xt.no_grad(function() return xt.exp(t) end)
    end, { x })
    assert.is_false(ok)
    assert.are.same({ "mul", "b" }, { report.cuts[1].op, report.cuts[1].input })
  end)

  it("says nothing of constants, of comparisons, and of other faults", function()
    local x, c = seeded({ 4, 3 }, 1), seeded({ 4, 3 }, 2):to "f64"
    local ok, report = xt.gradcheck(function(t)
      local mask = xt.cast(xt.gt(t, 0), "f64")
      local half = xt.tensor(0.5, { dtype = "f64" })
      return (t * half + t:detach() * half) * mask + c
    end, { x })
    assert.is_false(ok)
    for _, cut in ipairs(report.cuts) do
      assert.are.same({ "add", "b" }, { cut.op, cut.input }) -- of the detach, which is one
    end
    assert.are.equal(1, #report.cuts)
    assert.are.same({}, select(2, xt.gradcheck(function(t) return t * t:detach() end,
      { xt.zeros { 2 } })).cuts) -- right at 0, so nobody asks
  end)
end)

describe("gradcheck of a model", function()
  it("passes the library's, and leaves them as they were", function()
    for _, model in ipairs { small(), small { recompute = "block" }:train(), small { tied = false },
      xt.models.gpt2 { vocab = 11, dim = 8, layers = 1, heads = 2, context = 8, seed = 3 } } do
      local before, dtype = digests(model), model.config.dtype
      local ok, report = xt.gradcheck(model, { ids, labels })
      assert.is_true(ok, tostring(report))
      assert.are.same(before, digests(model))
      assert.are.equal(dtype, model.config.dtype)
      assert.is_nil(model.embed.weight.grad)
    end
  end)

  it("names parameter, element and both values, and the layer that is wrong", function()
    local model = small()
    local mlp = model.blocks[2].mlp
    function mlp:forward(x) -- the gate does not count
      local gate = xt.silu(xt.linear(x, self.gate)):detach()
      return xt.linear(gate * xt.linear(x, self.up), self.down)
    end
    local class = getmetatable(mlp)
    local wrong = { __index = setmetatable({ forward = mlp.forward }, class),
      __call = class.__call }
    mlp.forward = nil
    setmetatable(mlp, wrong)
    local before = digests(model)
    local ok, report = xt.gradcheck(model, { ids, labels })
    assert.is_false(ok)
    local by_path = {}
    for _, found in ipairs(report.wrong) do by_path[found.path] = found end
    local gate = by_path["blocks.2.mlp.gate"]
    assert.are.equal(0, gate.gradient)
    assert.is_true(math.abs(gate.slope) > 1e-6)
    assert.is_nil(by_path["blocks.2.mlp.down"])
    assert.is_nil(by_path["norm.weight"])
    assert.is_truthy(by_path["blocks.1.attn.wq"])
    assert.are.same({ "blocks.2.mlp" }, report.layers)
    assert.are.equal("mul", report.cuts[1].op)
    assert.matches("layer blocks.2.mlp is wrong by itself: parameter gate, element %[%d+%]%[%d+%]: "
      .. "gradient 0, slope %-?%d", tostring(report))
    assert.are.same(before, digests(model))
    -- The slope that is named is the derivative, and the model itself gives another gradient.
    local at = model.blocks[2].mlp.gate:detach()
    for _, k in ipairs { gate.index:match "%[(%d+)%]%[(%d+)%]" } do
      at = at:select(1, math.tointeger(tonumber(k)))
    end
    local function loss(by)
      return xt.no_grad(function()
        at:add_(xt.tensor(by))
        local value = model:loss(ids, labels):item()
        at:add_(xt.tensor(-by))
        return value
      end)
    end
    assert.is_near(gate.slope, (loss(0.5) - loss(-0.5)), 0.1 * math.abs(gate.slope) + 1e-6)
  end)

  it("takes a function that uses a model, and one without a loss", function()
    local layer = xt.nn.linear { d_in = 3, d_out = 2, bias = true, seed = 1 }
    local x = seeded({ 4, 3 }, 7)
    assert.is_true((xt.gradcheck(layer, { x })))
    local ok, report = xt.gradcheck(function(t) return scaled(layer(t), 0.9) end, { x },
      { model = layer })
    assert.is_false(ok)
    assert.are.equal("parameter bias", report.wrong[1].name)
    assert.is_near(0.9 * report.wrong[1].slope, report.wrong[1].gradient, 1e-8)
  end)

  it("puts the model back when it raises", function()
    local model = small()
    local before = digests(model)
    raises("label", xt.gradcheck, model, { ids, labels + 100 })
    assert.are.same(before, digests(model))
    assert.are.equal("f32", model.config.dtype)
  end)

  it("calls the forward of a plain table, and says what it cannot call", function()
    local line = { weight = xt.var(xt.randn({ 2, 3 }, { seed = 1 })) }
    function line:forward(t) return (xt.linear(t, self.weight) ^ 2):sum() end
    assert.is_true((xt.gradcheck(line, { xt.randn({ 4, 3 }, { seed = 2 }) })))
    raises("gradcheck: fn is a table that cannot be called", xt.gradcheck, {}, { ids })
    raises("gradcheck: fn is a number, wanted a function or a model", xt.gradcheck, 3, { ids })
  end)
end)
