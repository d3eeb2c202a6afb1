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

describe("clip_grad_norm", function()
  it("returns the norm before and scales in place", function()
    local w = param("w", { 0, 0 })
    set_grad(w.tensor, { 3, 4 })
    assert.is_near(5, xt.clip_grad_norm({ w }, 1):item(), 1e-6)
    assert.is_near(.6, w.tensor.grad:totable()[1], 1e-5)
  end)
end)
