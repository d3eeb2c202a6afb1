-- Gradients as Lua sees them: variables, backward, grad, no_grad, gradcheck, the tape.
local expect = require "expect"
local xt = require "xtrain"

local message_of = expect.message_of
local function raises(wanted, fn) expect.raises_in("autograd_spec.lua", wanted, fn) end

-- The line of this file that is running.
local function line() return debug.getinfo(2, "l").currentline end

describe("backward", function()
  it("leaves gradients in the variables, and adds them up", function()
    local x = xt.var(xt.tensor { 1, 2, 3 })
    assert.is_true(x.is_var)
    assert.is_nil(x.grad)
    local y = (x * x):sum()
    assert.is_false(y.is_var)
    y:backward()
    assert.are.same({ 2, 4, 6 }, x.grad:totable());
    (x * 2):sum():backward()
    assert.are.same({ 4, 6, 8 }, x.grad:totable())
    x:zero_grad()
    assert.is_nil(x.grad)
  end)

  it("takes a seed, and wants one when the output is no scalar", function()
    local x = xt.var(xt.tensor { 1, 2 })
    raises("backward", function() (x * 2):backward() end);
    (x * 2):backward(xt.tensor { 1, 10 })
    assert.are.same({ 2, 20 }, x.grad:totable())
  end)

  it("twice names the line of the first, unless the graph was kept", function()
    local x = xt.var(xt.tensor { 1, 2 })
    local y = (x * x):sum()
    y:backward(nil, { retain = true })
    local first = line() + 1
    y:backward()
    assert.are.same({ 4, 8 }, x.grad:totable())
    raises("autograd_spec.lua:" .. first, function() y:backward() end)
    local z = (x * x):sum()
    z:backward { retain = true }
    z:backward()
    raises("unknown option", function() z:backward { retian = true } end)
  end)

  it("undoes broadcasting", function()
    local a, b = xt.var(xt.ones { 1 }), xt.ones { 5, 4 };
    (a * b):sum():backward()
    assert.are.same({ 20 }, a.grad:totable())
    local c, d = xt.var(xt.ones { 4, 1 }), xt.var(xt.ones { 1, 4 });
    (c * d):sum():backward()
    assert.are.same({ { 4 }, { 4 }, { 4 }, { 4 } }, c.grad:totable())
    assert.are.same({ { 4, 4, 4, 4 } }, d.grad:totable())
  end)

  it("passes through strided views", function()
    local x = xt.var(xt.tensor { { 1, 2, 3 }, { 4, 5, 6 } })
    local y = x:transpose(1, 2)
    assert.are.same({ 5, 7, 9 }, y:sum(2):totable());
    (y * xt.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }):sum():backward()
    assert.are.same({ { 1, 3, 5 }, { 2, 4, 6 } }, x.grad:totable())
  end)

  it("does not reach what was not selected", function()
    local a = xt.var(xt.tensor { 100 })
    local y = xt.where(xt.tensor { 1 }:lt(0), a:exp(), a + 1)
    assert.are.equal(101, y:item())
    y:sum():backward()
    assert.are.equal(1, a.grad:item())
    local l = xt.var(xt.tensor { -math.huge, -math.huge })
    l:logsumexp(1):backward()
    assert.are.same({ 0, 0 }, l.grad:totable())
  end)

  it("of 200,000 ops in a chain works", function()
    local x = xt.var(xt.tensor { 1.0 })
    local y = x
    for _ = 1, 200000 do y = y + 0 end
    y:backward()
    assert.are.equal(1, x.grad:item())
  end)

  it("drops what nobody holds any more", function()
    local x = xt.var(xt.rand({ 64 }, { seed = 1 }))
    xt.collect()
    local before = xt.debug.live_count()
    local y = x
    for _ = 1, 100 do y = y:exp():log() end
    assert.is_true(#xt.debug.tape(y) == 200)
    y = nil -- luacheck: ignore
    xt.collect()
    assert.are.equal(before, xt.debug.live_count())
  end)
end)

describe("a tensor kept for backward and changed since", function()
  it("is an error with the line that kept it and the line that changed it", function()
    local a = xt.var(xt.tensor { 1, 2, 3 })
    local kept = line() + 1
    local b = a:sigmoid()
    local changed = line() + 1
    xt.no_grad(function() b[2] = 2 end)
    local message = message_of(function() b:sum():backward() end)
    assert.is_truthy(message:find("autograd_spec.lua:" .. kept, 1, true), message)
    assert.is_truthy(message:find("autograd_spec.lua:" .. changed, 1, true), message)
  end)

  it("is never written so that a gradient gets lost", function()
    local w = xt.var(xt.ones { 3, 3 })
    local s = xt.zeros { 3, 3 }
    raises("gradient", function() s[2] = w:matmul(xt.ones { 3, 1 }):reshape { 3 } end)
    raises("gradient", function() w[1] = 3 end)
    raises("no_grad", function() w:fill_(0) end)
    xt.no_grad(function() w[1] = 3 end)
    assert.are.same({ 3, 3, 3 }, w[1]:totable())
  end)
end)

describe("xt.grad", function()
  it("gives gradients as values and leaves .grad alone", function()
    local x, y = xt.var(xt.tensor { 1, 2 }), xt.var(xt.tensor { 3, 4 })
    local z = xt.var(xt.tensor { 0, 0 })
    local grads = xt.grad((x * y):sum(), { x, y, z })
    assert.are.same({ 3, 4 }, grads[1]:totable())
    assert.are.same({ 1, 2 }, grads[2]:totable())
    assert.is_nil(grads[3])
    assert.is_nil(x.grad)
  end)

  it("says which input is no tensor", function()
    local x = xt.var(xt.tensor { 1 })
    raises("inputs[2] is the number 3", function() xt.grad((x * 2):sum(), { x, 3 }) end)
  end)
end)

describe("xt.no_grad", function()
  it("records nothing, returns what the function returns, and ends when it raises", function()
    local x = xt.var(xt.tensor { 1, 2 })
    local y, n = xt.no_grad(function(k) return x * k, 7 end, 2)
    assert.is_false(y.requires_grad)
    assert.are.equal(7, n)
    local thrown = {}
    local ok, message = pcall(xt.no_grad, function() error(thrown) end)
    assert.is_false(ok)
    assert.is_true(message == thrown)
    assert.is_true((x * 2).requires_grad)
  end)
end)

describe("xt.checkpoint", function()
  it("calls the function once and gives the same gradients", function()
    local x, calls = xt.var(xt.ones { 1000 }), 0
    local function drop(t)
      calls = calls + 1
      return xt.dropout(t, 0.5, 7) * 3
    end
    local y = xt.checkpoint(drop, x)
    y:sum():backward()
    assert.are.equal(1, calls)
    assert.are.equal(y:digest(), x.grad:digest())
  end)

  it("takes options first or last", function()
    local x = xt.var(xt.ones { 4 })
    local function double(t) return t * 2 end
    assert.are.equal(8, xt.checkpoint({ selective = true }, double, x):sum():item())
    assert.are.equal(8, xt.checkpoint(double, x, { verify = true }):sum():item())
  end)

  it("restores the recorder when the function raises", function()
    local x = xt.var(xt.ones { 4 })
    raises("inside", function() xt.checkpoint(function() error("inside") end) end)
    local y = (x * x):sum()
    y:backward()
    assert.are.same({ 2, 2, 2, 2 }, x.grad:totable())
  end)
end)

describe("compute copies", function()
  it("follow their master and give it f32 gradients", function()
    local w = xt.var(xt.ones { 2, 2 })
    local half = w:to "bf16"
    assert.are.equal("bf16", half.dtype);
    (half * half):sum():backward()
    assert.are.equal("f32", w.grad.dtype)
    assert.are.same({ { 2, 2 }, { 2, 2 } }, w.grad:totable())
    xt.no_grad(function() w:fill_(3) end)
    assert.are.same({ { 3, 3 }, { 3, 3 } }, w:to("bf16"):totable())
  end)
end)

describe("gradcheck", function()
  it("passes right gradients", function()
    local ok, report = xt.gradcheck(function(x, w)
      return xt.softmax(x:matmul(w)):log()
    end, { xt.randn({ 3, 4 }, { seed = 1 }), xt.randn({ 4, 2 }, { seed = 2 }) })
    assert.is_true(ok, tostring(report))
    assert.are.equal(0, report.kinks)
    local labels = xt.tensor({ 1, 0 }, { dtype = "i64" })
    assert.is_true((xt.gradcheck(function(x, l) return xt.cross_entropy(x, l) end,
      { xt.randn({ 2, 3 }, { seed = 3 }), labels })))
  end)

  it("catches a derivative that is off by a thousandth", function()
    local function planted(x)
      local d = x:detach()
      return x:exp() * 1.001 - d:exp() * 0.001
    end
    local ok, report = xt.gradcheck(planted, { xt.randn({ 5 }, { seed = 4 }) })
    assert.is_false(ok)
    assert.is_truthy(tostring(report):find("WRONG", 1, true))
  end)

  it("passes any slope between left and right at a kink, and says so", function()
    for _, name in ipairs { "relu", "abs" } do
      local ok, report = xt.gradcheck(xt.op[name], { xt.tensor { 0, 1, -1 } })
      assert.is_true(ok, tostring(report))
      assert.is_true(report.kinks > 0)
      assert.is_truthy(tostring(report):find("kink", 1, true))
    end
    local function half(x) return x:relu() * 0.5 + x * 0.25 - x:detach() * 0.25 end
    assert.is_false((xt.gradcheck(half, { xt.tensor { 1.0 } })))
  end)

  it("rejects a planted gradient of .5 at 1", function()
    local function planted(x) return x:relu() * 0.5 + x:detach():relu() * 0.5 end
    assert.is_false((xt.gradcheck(planted, { xt.tensor { 1.0 } })))
    -- At 0 the same gradient lies between the slopes.
    local ok, report = xt.gradcheck(function(x)
      local d = x:detach()
      return x:relu() + (x - d) * 0.5 -- slope right: 1, left: 0, plus .5 that is no slope
    end, { xt.tensor { 0.0 } })
    assert.are.equal(1, report.kinks)
    assert.is_true(ok)
  end)
end)

describe("the tape", function()
  it("lists ops, lines and kept bytes", function()
    local x = xt.var(xt.ones { 3 })
    local made = line() + 1
    local y = x:exp():sum()
    local records = xt.debug.tape(y)
    assert.are.equal(2, #records)
    assert.are.equal("sum", records[1].op)
    assert.are.equal("exp", records[2].op)
    assert.are.equal(12, records[2].kept_bytes)
    assert.are.same({ "f32 3" }, records[2].outputs)
    assert.is_truthy(records[2].where:find("autograd_spec.lua:" .. made, 1, true))
    assert.is_truthy(xt.debug.here():find("autograd_spec.lua:", 1, true))
  end)

  it("names the first op that makes a NaN when the trap is set", function()
    xt.debug.trap(true)
    local ok, message = pcall(function() return xt.tensor { -1 }:log() end)
    xt.debug.trap(false)
    assert.is_false(ok)
    assert.is_truthy(message:find("log: ", 1, true), message)
  end)
end)
