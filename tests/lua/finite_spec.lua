-- The first value that is not finite: four planted faults, each named by op, line and direction,
-- with nothing changed by the step.
local xt = require "xtrain"
local training = require "training"

-- Two micro-batches a step; the fault is in the second one of step 3.
local RECIPE = [[
local xt = require "xtrain"
local run = xt.recipe { name = "faulty", steps = 6, accum = 2, log_every = 1, fault = "", at = 3,
  impure = false, dtype = "f32", whole = false }
local data = {}
function data.batch(_, step, micro)
  return xt.rand({ 4, 3 }, { seed = xt.seed(run.seed, step, micro) }) + 1, xt.ones { 4, 2 }
end
local model = { first = xt.nn.linear { d_in = 3, d_out = 5, bias = true, seed = 1 },
  last = xt.nn.linear { d_in = 5, d_out = 2, seed = 2 } }
run:attach { model = model }
local function forward(x, bad)
  local h = model.first(x)
  h = h:tanh() -- of a weight that is inf
  if bad == "log" then h = xt.log(h * 0) end -- log
  if bad == "exp" then h = xt.exp(h * 0 + 1000) end -- exp
  if bad == "backward" then h = h + xt.sqrt(h * 0) end -- backward
  h = model.last(h) -- last
  return h
end
local opt = xt.optim.adamw(xt.nn.params(model), {})
local function digests()
  local all = {}
  for _, p in ipairs(xt.nn.params(model)) do all[#all + 1] = p.tensor:digest() end
  local state = opt:state()
  local names = {}
  for name in pairs(state) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do all[#all + 1] = state[name]:digest() end
  return table.concat(all, " ")
end
local calls, now = 0, nil
local function loss_of(x, y, micro)
  calls = calls + 1
  local out = forward(x, now == run.at and micro == 1 and run.fault)
  if run.impure then out = out * calls end
  local off = out - y
  return (off * off):sum(), y.numel
end
local queue = opt.queue
function opt:queue(lr, o) -- when it has queued a step, nothing of it has been read
  local norm = queue(self, lr, o)
  print("queued", now, run.own.loss == nil and self.measured.value == nil)
  return norm
end
for step in run:steps() do
  now = step
  if step == run.at and run.fault == "weight" then
    xt.no_grad(function() model.last.weight[1][2] = math.huge end)
  end
  local before = digests()
  local norm
  if run.whole then
    norm = run:train(step, { data = data, optimizer = opt, lr = 1e-2, clip = 1.0,
      loss = function(x, y) return loss_of(x, y, calls % 2) end })
  else
    for micro, x, y in run:micros(step, data) do run:backward(loss_of(x, y, micro)) end
    norm = opt:step(1e-2, { clip = 1.0 })
  end
  run:log(step, { lr = 1e-2, grad_norm = norm })
  print(step, before == digests() and "same" or "changed")
end
print("calls", calls)
run:save(run.options.steps)
]]

local function line_of(marker)
  local number = 0
  for line in RECIPE:gmatch "([^\n]*)\n" do
    number = number + 1
    if line:find("-- " .. marker .. "$") then return number end
  end
end

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("out=a", function(place)
      fn(place, place:write("faulty.lua", RECIPE))
    end)
  end)
end

-- fault = what the report must say, and for a trap that raises, what the error must say.
local FAULTS = {
  log = { "the loss is NaN", "log at FILE:%d, in forward: the result f32 4x5: 20 %%-inf, none "
    .. "finite; x f32 4x5: min 0, max 0", "FILE:%d: log: the result f32 4x5: 20 %%-inf" },
  exp = { "the loss is NaN", "exp at FILE:%d, in forward: the result f32 4x5: 20 inf, none finite; "
    .. "x f32 4x5: min 1000, max 1000", "FILE:%d: exp: the result f32 4x5: 20 inf" },
  backward = { "the gradient norm is NaN", " at FILE:%d, in the backward of sqrt: the result f32 "
    .. "4x5: [%%d inf,-]+none finite; .*", "backward: sqrt made at FILE:%d: " },
  last = { "the loss is ", "linear at FILE:%d, in forward: the result f32 4x2: .*weight f32 2x5, "
    .. "a variable: 1 inf, min ", "FILE:%d: linear: the result f32 4x2: " },
}

local function pattern_of(text, place, marker)
  local path = (place.dir .. "/faulty.lua"):gsub("%p", "%%%0")
  return (text:format(line_of(marker)):gsub("FILE", (path:gsub("%%", "%%%%"))))
end

describe("a step that is not finite", function()
  for marker, wanted in pairs(FAULTS) do
    local fault = marker == "last" and "weight" or marker
    for _, form in ipairs { "whole=false", "whole=true" } do
      test("is made again and named: " .. fault .. ", " .. form, function(place, script)
        local out, errors = place:must(form .. " fault=" .. fault, script)
        assert.matches("step 3: " .. wanted[1], errors)
        assert.matches(pattern_of(wanted[2], place, marker), errors)
        assert.is_nil(errors:find("differently", 1, true), errors)
        local named = errors:find("not finite before the step: last.weight\n", 1, true)
        assert.are.equal(fault == "weight", named ~= nil)
        assert.matches("step 3 skipped, nothing changed: ", errors)
        local _, skips = errors:gsub("skipped, nothing changed", "")
        for step = 1, 6 do
          local skipped = step == 3 or step > 3 and fault == "weight"
          local line = step .. "\t" .. (skipped and "same" or "changed")
          assert.is_truthy(out:find(line, 1, true), out)
        end
        -- Two micro-batches a step, and those of step 3 again; of a row of such steps, the first.
        assert.matches("calls\t14\n", out)
        assert.are.equal(fault == "weight" and 4 or 1, skips)
        local rows = place:read "a/metrics.jsonl"
        assert.matches('"nonfinite": ?%["step 3: [^\n]*"step": ?3', rows)
      end)
    end

    test("stops a run with trap=true at the op: " .. fault, function(place, script)
      local code, out, errors = place:run("trap=true fault=" .. fault, nil, script)
      assert.are.equal(1, code)
      assert.matches(pattern_of(wanted[3], place, marker), errors)
      assert.is_truthy(out:find("2\tchanged", 1, true))
      assert.is_nil(out:find("3\t", 1, true))
    end)
  end

  test("is queued whole by run:train before any of it is read, to the same bits",
    function(place, script)
      local out = place:must("fault=log whole=true", script)
      local _, queued = out:gsub("queued\t%d\ttrue\n", "")
      assert.are.equal(6, queued, out)
      local a = place:digests("a", 6)
      place.words = "out=b"
      place:must("fault=log", script)
      assert.are.same(a, place:digests("b", 6))
    end)

  test("leaves the run what it is when the step had not been", function(place, script)
    place:must("fault=log", script)
    local a = place:digests("a", 6)
    place.words = "out=b"
    place:must("fault=log", script)
    assert.are.same(a, place:digests("b", 6))
    place.words = "out=c trap=true"
    place:must("", script) -- the trap alone changes nothing
    place.words = "out=d"
    place:must("", script)
    assert.are.same(place:digests("c", 6), place:digests("d", 6))
  end)

  test("says so where the second time was another", function(place, script)
    local _, errors = place:must("fault=exp impure=true", script)
    assert.is_nil(errors:find("differently", 1, true)) -- inf stays inf
    _, errors = place:must("out=b fault=backward impure=true", script)
    assert.matches("came out differently", errors)
  end)
end)

describe("the trap", function()
  after_each(function() xt.debug.trap(false) end)

  it("lets a mask of -inf pass, and not one that an op made of finite values", function()
    xt.debug.trap(true)
    local x = xt.var(xt.randn({ 2, 3 }, { seed = 1 }))
    local mask = xt.tensor({ { 0, 1, 0 }, { 1, 0, 0 } }, { dtype = "u8" })
    local y = xt.softmax(xt.masked_fill(x, mask, -math.huge))
    y = y + xt.softmax(x + xt.tensor { 0, 0, -math.huge });
    (y * y):sum():backward()
    assert.is_true(x.grad:abs():sum():item() > 0)
    local ok, message = pcall(function() return xt.tensor { 0 }:log() end)
    assert.is_false(ok)
    assert.matches("log: the result f32 1: 1 %-inf, none finite; x f32 1: 0$", message)
  end)

  it("lets attention pass whose rows see nothing, forward and backward", function()
    local function draw(seed) return xt.var(xt.randn({ 1, 4, 2, 8 }, { seed = seed })) end
    local q, k, v = draw(1), draw(2), draw(3)
    xt.debug.trap(true)
    for _, impl in ipairs { "composed", "flash" } do
      local out = xt.attention(q, k, v, { lengths = xt.tensor({ 0 }, { dtype = "i32" }),
        impl = impl })
      out:sum():backward()
      assert.are.equal(0, q.grad:abs():sum():item())
    end
  end)

  it("catches a gradient that is added in place", function()
    local w = xt.var(xt.ones { 2, 3 })
    local x = xt.full({ 4, 3 }, 1e30)
    local y = xt.linear(x, w) * 1e-30
    xt.debug.trap(true)
    local ok, message = pcall(function() y:backward(xt.full({ 4, 2 }, 1e30)) end)
    assert.is_true(ok, message)
    w:zero_grad()
    y = xt.linear(x, w)
    ok, message = pcall(function() y:backward(xt.full({ 4, 2 }, 1e30)) end)
    assert.is_false(ok)
    assert.matches("backward: linear made at .*finite_spec.lua:%d+: .*: what it wrote, f32 2x3: "
      .. "6 inf", message)
    assert.is_nil(w.grad)
  end)
end)
