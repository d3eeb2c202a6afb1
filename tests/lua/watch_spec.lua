-- Looking on while a model computes: xt.debug.watch, tape, step, journal, why, compare.
local xt = require "xtrain"
local raises = require("expect").raises

local function line() return debug.getinfo(2, "l").currentline end

local function seeded(shape, seed) return xt.randn(shape, { seed = seed }) end

-- first (3 -> 5), tanh, last (5 -> 2)
local function small()
  local model = { first = xt.nn.linear { d_in = 3, d_out = 5, bias = true, seed = 1 },
    last = xt.nn.linear { d_in = 5, d_out = 2, seed = 2 } }
  function model.forward(x)
    local h = model.first(x)
    h = h:tanh()
    h = model.last(h)
    return (h * h):sum()
  end
  return model
end

local function zero(model)
  for _, param in ipairs(xt.nn.params(model)) do param.tensor:zero_grad() end
end

local function grads(model)
  local all = {}
  for _, param in ipairs(xt.nn.params(model)) do
    all[#all + 1] = param.name .. " " .. param.tensor.grad:digest()
  end
  return all
end

after_each(function()
  xt.debug.unwatch()
  xt.debug.journal(false)
end)

describe("watch", function()
  it("tells of a parameter of a composed op once, by the part that it goes into", function()
    local m = { attn = xt.nn.attention { dim = 8, heads = 2, qk_norm = true, seed = 1 },
      mlp = xt.nn.swiglu { dim = 8, ffn = 12, seed = 2 } }
    local told = {}
    for _, pattern in ipairs { "mlp.*", "attn.[qk]_norm.*" } do
      xt.debug.watch(pattern, function(e)
        if e.kind == "activation" then told[#told + 1] = e.name .. " " .. e.op end
      end, { model = m })
    end
    m.mlp(m.attn(xt.randn({ 1, 3, 8 }, { seed = 1 })))
    xt.debug.unwatch()
    table.sort(told)
    assert.are.same({ "attn.k_norm.weight rmsnorm", "attn.q_norm.weight rmsnorm",
      "mlp.down linear", "mlp.gate linear", "mlp.up linear" }, told)
  end)

  it("tells of an op's results and of the gradients that arrive at them", function()
    local seen = {}
    local w = xt.debug.watch("tanh", function(e) seen[#seen + 1] = e end)
    local x = xt.var(xt.tensor { 0.5, -1 })
    local made = line() + 1
    local y = x:tanh();
    (y * 3):sum():backward()
    xt.exp(x) -- another op
    assert.are.equal(2, #seen)
    assert.are.equal("activation", seen[1].kind)
    assert.are.equal("tanh", seen[1].op)
    assert.are.equal(y:digest(), seen[1].value:digest())
    assert.matches("watch_spec.lua:" .. made .. "$", seen[1].where)
    assert.are.equal("gradient", seen[2].kind)
    assert.are.same({ 3, 3 }, seen[2].value:totable())
    assert.matches("watch_spec.lua:" .. made .. "$", seen[2].where)
    assert.are.same(x.grad:totable(), seen[2].inputs[1]:totable())
    assert.matches("gradient through tanh at .*: f32 2: min 3, max 3", tostring(seen[2]))
    w:stop()
    x:tanh()
    assert.are.equal(2, #seen)
    assert.are.equal(2, w.count)
  end)

  it("tells of parameters by path: what was computed with them, and their whole gradients",
    function()
      local model, seen = small(), {}
      xt.debug.watch(".*%.weight", function(e) seen[#seen + 1] = e end, { model = model })
      local loss = model.forward(seeded({ 4, 3 }, 3)) + model.forward(seeded({ 4, 3 }, 4))
      assert.are.equal(4, #seen)
      assert.are.equal("first.weight", seen[1].name)
      assert.are.same({ 4, 5 }, seen[1].value.shape)
      loss:backward()
      assert.are.equal(6, #seen) -- one each, though each is used twice
      assert.are.equal("first.weight", seen[5].name)
      assert.are.equal(model.first.weight.grad:digest(), seen[5].value:digest())
      assert.are.equal("last.weight", seen[6].name)
      assert.matches("gradient last.weight at .*watch_spec.lua:%d+: f32 2x5: min",
        tostring(seen[6]))
      xt.grad(model.forward(seeded({ 4, 3 }, 3)), { model.last.weight })
      assert.are.equal(8, #seen) -- the activations alone
    end)

  it("follows compute copies to their masters, and the run in progress", function()
    local weight = xt.var(seeded({ 2, 3 }, 5))
    local seen = {}
    xt.debug.watch("w", function(e) seen[#seen + 1] = e.kind .. " " .. e.value.dtype end,
      { model = { w = weight } })
    xt.linear(seeded({ 4, 3 }, 6):to "bf16", weight:to "bf16"):sum():backward()
    assert.are.same({ "activation bf16", "gradient f32" }, seen)
  end)

  it("changes nothing, and what it computes is neither told nor recorded", function()
    local model = small()
    local x = seeded({ 4, 3 }, 7)
    local function run()
      zero(model)
      local loss = xt.checkpoint(model.forward, x) + model.forward(x)
      loss:backward()
      return grads(model), #xt.debug.tape(loss)
    end
    local want, records = run()
    local count = 0
    xt.debug.watch(".*", function(e)
      count = count + 1
      return (xt.abs(e.value) * xt.var(xt.ones {})):mean():item()
    end, { model = model })
    local got, watched = run()
    assert.are.same(want, got)
    assert.are.equal(records, watched)
    assert.is_true(count > 10)
  end)

  it("makes the op fail where its function raises, with nothing leaked or half done", function()
    local model = small()
    local x = seeded({ 4, 3 }, 8)
    xt.debug.watch("tanh", function(e) error("stop at " .. e.kind, 0) end, { activations = false })
    local loss = model.forward(x)
    raises("backward: tanh made at", function() loss:backward() end)
    assert.is_nil(model.last.weight.grad)
    xt.debug.unwatch()
    model.forward(x):backward()
    local want = grads(model)
    zero(model)
    xt.debug.watch("tanh", function() error("stop", 0) end)
    xt.collect()
    local before = xt.debug.live_count()
    raises("tanh: stop", model.forward, x)
    xt.collect()
    assert.are.equal(before, xt.debug.live_count())
    xt.debug.unwatch()
    model.forward(x):backward()
    assert.are.same(want, grads(model))
  end)

  it("loses nothing where any allocation fails, forward or backward", function()
    local model, x = small(), seeded({ 4, 3 }, 9)
    local function look(e) return e.value:abs():mean():item() end
    xt.debug.watch(".*", look, { model = model })
    local function run()
      local loss = xt.checkpoint(model.forward, x)
      loss:backward()
    end
    run()
    local want = grads(model)
    zero(model)
    xt.collect()
    local before, failures = xt.debug.live_count(), 0
    for n = 1, 2000 do
      xt.debug.fail_allocation(n)
      local ok = pcall(run)
      xt.debug.fail_allocation(0)
      if ok then break end
      failures = failures + 1
      zero(model)
      xt.collect()
      assert.are.equal(before, xt.debug.live_count(), "allocation " .. n)
    end
    assert.is_true(failures > 20)
    assert.are.same(want, grads(model))
  end)

  it("may end itself, run in a coroutine, and see another watch", function()
    local count, other = 0, 0
    local w
    w = xt.debug.watch("exp", function()
      count = count + 1
      coroutine.wrap(function() xt.ones({ 2 }):exp() end)()
      w:stop()
    end)
    xt.debug.watch("exp", function() other = other + 1 end)
    xt.ones({ 2 }):exp()
    xt.ones({ 2 }):exp()
    assert.are.equal(1, count)
    assert.are.equal(2, other)
  end)

  it("refuses names that are none, and says which is near", function()
    raises("no op and no parameter is called 'sofmax' (did you mean 'softmax'?)", xt.debug.watch,
      "sofmax", print)
    raises("(did you mean 'last.weight'?)", xt.debug.watch, "last.weigh", print,
      { model = small() })
    raises("fn is a number", xt.debug.watch, "exp", 3)
    raises("pattern is a nil", xt.debug.watch)
    raises("unknown option 'modell'", xt.debug.watch, "exp", print, { modell = 1 })
  end)
end)

describe("the tape", function()
  it("without an argument is that of the newest value, and prints a line a record", function()
    local model = small()
    local loss = model.forward(seeded({ 4, 3 }, 1))
    local records = xt.debug.tape()
    assert.are.equal(#xt.debug.tape(loss), #records)
    assert.are.equal("sum", records[1].op)
    local text = tostring(records)
    assert.matches("record +op +results +bytes kept +line\n +%d+ +sum +f32 scalar +0 +%S+watch_s",
      text)
    assert.matches("\n5 records, %d+ bytes kept$", text)
    loss = nil -- luacheck: no unused
    xt.collect()
    assert.are.equal(0, #xt.debug.tape())
  end)
end)

describe("step", function()
  it("goes through a backward op by op, forwards and back", function()
    local model = small()
    local x = seeded({ 4, 3 }, 2)
    model.forward(x):backward()
    local want = grads(model)
    zero(model)
    local loss = model.forward(x)
    local w = xt.debug.step { loss, model = model }
    assert.are.same(want, grads(model))
    local ops = {}
    for s in w do ops[#ops + 1] = s.op end
    assert.are.same({ "sum", "mul", "linear", "tanh", "linear" }, ops)
    assert.are.equal("tanh", w:back().op)
    assert.are.equal("linear", w:next().op)
    assert.is_nil(w:next())
    w = xt.debug.step { loss, model = model } -- kept
    local s = w:find "tanh"
    assert.are.same({ 4, 5 }, s.grads_out[1].shape)
    local y = s.outputs[1]
    local expected = s.grads_out[1] * (1 - y * y)
    assert.is_true((expected - s.grads_in[1]):abs():amax():item() < 1e-6)
    s = w:find "watch_spec.lua"
    assert.are.equal("first.weight", s.paths[2])
    assert.matches("5 of 5  linear at .*watch_spec.lua:%d+\n    gradient of the result +f32 4x5: "
      .. "min .*\n    gives weight = first.weight +f32 5x3: min", tostring(s))
  end)

  it("finds the step at which gradients stop being finite", function()
    local x = xt.var(xt.tensor { 0, 4 })
    local w = xt.debug.step { (xt.sqrt(x * 2) * 3):sum() }
    local s = w:bad()
    assert.are.equal("sqrt", s.op)
    assert.matches("gives x +f32 2: 1 inf, min 0.53", tostring(s))
    assert.is_nil(w:bad())
    raises("wanted a table with the value", xt.debug.step, x)
    raises("unknown option 'sead'", xt.debug.step, { x:sum(), sead = 1 })
  end)
end)

describe("why", function()
  it("leads from a gradient back to the loss, op by op", function()
    local model = small()
    xt.debug.journal(true)
    model.forward(seeded({ 4, 3 }, 3)):backward()
    local made = line() - 1
    local function ops(report)
      local list = {}
      for i, hop in ipairs(report.hops) do list[i] = hop.op .. " " .. hop.step.names[hop.input] end
      return list
    end
    for _, t in ipairs { model.first.weight, model.first.weight.grad } do
      local report = xt.debug.why(t)
      assert.are.same({ "linear weight", "tanh x", "linear x", "mul a", "sum x" }, ops(report))
      assert.matches("watch_spec.lua:" .. made .. "$", report.where)
      assert.is_nil(report.begins)
      assert.matches("^gradient f32 5x3: min .*\n  from linear at .*watch_spec.lua:%d+, as its "
        .. "weight: f32 5x3: .*\n  from the backward at ", tostring(report))
    end
  end)

  it("follows a value that is not finite to where it began", function()
    xt.debug.journal(true)
    local x = xt.var(xt.tensor { 0, 4 })
    local y = x * 2
    local made = line() + 1
    local z = xt.sqrt(y) + y * 100;
    (z * 3):sum():backward()
    local report = xt.debug.why(x.grad)
    assert.are.equal("sqrt", report.begins.op)
    assert.matches("watch_spec.lua:" .. made .. "$", report.begins.where)
    assert.matches("sqrt at [^\n]*<%-%- here it stops being finite\n", tostring(report))
  end)

  it("needs no journal where the value to go back from is given", function()
    local model = small()
    local loss = model.forward(seeded({ 4, 3 }, 3))
    local report = xt.debug.why(model.last.weight, loss)
    assert.are.equal("linear", report.hops[1].op)
    assert.is_nil(model.last.weight.grad)
    loss:backward()
    raises("the records were freed by the backward", xt.debug.why, model.last.weight, loss)
  end)

  it("says what is missing", function()
    local x = xt.var(xt.tensor { 1 })
    raises("no backward was written down: xt.debug.journal(true) before it", xt.debug.why, x)
    raises("wanted a gradient or a variable, not a nil", xt.debug.why)
    xt.debug.journal(true)
    x:sum():backward()
    raises("the last backward did not make this tensor", xt.debug.why, xt.ones { 1 })
  end)
end)

describe("compare", function()
  -- A small network; `wrong` plants a difference in one op of one direction.
  local function network(wrong)
    return function(device, side)
      local weight = xt.var(xt.randn({ 5, 3 }, { seed = 1, device = device }))
      local x = xt.randn({ 4, 3 }, { seed = 2, device = device })
      if side.dtype then x, weight = x:to(side.dtype), weight:to(side.dtype) end
      local h = xt.tanh(xt.linear(x, weight))
      local planted = side.bad and wrong or ""
      h = h * (planted == "forward" and 1.01 or 1)
      local y = xt.softmax(h)
      if planted == "backward" then y = y + y * 0.01 - y:detach() * 0.01 else y = y + 0 * y end
      local loss = (y * y):sum()
      loss:backward()
      assert.are.equal(device, xt.device())
    end
  end

  it("passes equal ways, at any number of threads to the bit", function()
    local ok, report = xt.debug.compare(network(), "cpu", { device = "cpu", threads = 1 },
      { tol = 0 })
    assert.is_true(ok, tostring(report))
    assert.is_true(report.calls > 10)
    assert.are.equal(0, report.unpaired)
    assert.matches("cpu and cpu threads=1 agree in %d+ calls", tostring(report))
  end)

  it("names an op whose results have other shapes, be one of them empty", function()
    local ok, report = xt.debug.compare(function(_, side)
      return xt.exp(xt.zeros { side.empty and 0 or 3 })
    end, "cpu", { empty = true })
    assert.is_false(ok)
    assert.matches("in forward: the result is 3 with cpu and f32 0 with cpu empty=true",
      tostring(report))
  end)

  it("names the first op that parts, its line, element and both values", function()
    local ok, report = xt.debug.compare(network "forward", "cpu", { bad = true })
    assert.is_false(ok)
    assert.are.equal("mul", report.op)
    assert.is_nil(report.rule)
    assert.are.equal(0, report.inputs)
    assert.is_near(0.01, report.difference, 1e-5)
    assert.is_near(report.a * 1.01, report.b, 1e-6)
    assert.matches("mul at .*watch_spec.lua:%d+, in forward: element %[%d%]%[%d%] is %S+ with "
      .. "cpu and %S+ with bad=true cpu\n", tostring(report))
  end)

  it("finds what differs in backward alone", function()
    local ok, report = xt.debug.compare(function(_, side)
      local x = xt.var(xt.randn({ 4, 3 }, { seed = 2 }))
      local y = x:exp()
      local kept = side.bad and y * 1.02 + (y * -0.02):detach() or y * 1 + (y * 0):detach();
      (kept * kept):sum():backward()
    end, {}, { bad = true }, { tol = 1e-6 })
    assert.is_false(ok)
    assert.are.equal("mul", report.op) -- of y by another number, before any backward
    ok, report = xt.debug.compare(function(_, side)
      local x = xt.var(xt.randn({ 4, 3 }, { seed = 2 }))
      local y = x:exp():sum()
      y:backward(side.bad and xt.tensor(1.5) or xt.tensor(1.0))
    end, {}, { bad = true })
    assert.is_false(ok)
    assert.are.equal("exp", report.rule) -- that of sum only repeats what it is given
    assert.matches("in the backward of exp", tostring(report))
  end)

  it("allows what rounding may do in the coarser dtype, and no more where asked", function()
    local ok, report = xt.debug.compare(network(), "cpu", { dtype = "bf16" })
    assert.is_true(ok, tostring(report))
    ok, report = xt.debug.compare(network(), "cpu", { dtype = "bf16" }, { tol = 1e-4 })
    assert.is_false(ok)
    assert.are.equal("linear", report.op)
  end)

  it("pairs NaNs and infinities with themselves, and nothing else", function()
    local function fn(_, side)
      local x = xt.tensor { 0, -1, side.zero or 4 }
      return x:log()
    end
    assert.is_true((xt.debug.compare(fn, {}, {}, { tol = 0 })))
    local ok, report = xt.debug.compare(fn, {}, { zero = 0 })
    assert.is_false(ok)
    assert.are.equal("log", report.op)
    assert.are.equal("[3]", report.index)
  end)

  it("restores device and threads, also when the function raises", function()
    local threads = xt.threads()
    raises("oops", xt.debug.compare, function() error("oops", 0) end, "cpu", { threads = 1 })
    assert.are.equal(threads, xt.threads())
    raises("fn is a nil", xt.debug.compare)
    local function nothing() end
    raises("b is a nil, wanted a device", xt.debug.compare, nothing, "cpu")
    raises("device", xt.debug.compare, nothing, "cpu", "abacus")
  end)
end)
