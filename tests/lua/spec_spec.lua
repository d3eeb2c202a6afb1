-- xtrain test: spec files mean the same there and under busted; and the assertions of xt.spec say
-- where and by how much.
local xt = require "xtrain"
local training = require "training"
local spec = xt.spec

-- ---- both runners ------------------------------------------------------------------------------

-- Every outcome there is; `trace` shows the order in which things were called.
local OUTCOMES = [[
local trace = {}
local function note(what) trace[#trace + 1] = what end
leaked = 1

setup(function() note "setup" end)
teardown(function()
  note "teardown"
  local out = assert(io.open(os.getenv "TRACE", "w"))
  out:write(table.concat(trace, " "), "\n")
  out:close()
end)

describe("outer", function()
  note "describe"
  lazy_setup(function() note "lazy" end)
  lazy_teardown(function() note "unlazy" end)
  before_each(function() note "before1" end)
  after_each(function() note "after1" end)
  it("passes", function()
    note "it"
    finally(function() note "finally" end)
    assert.is_true(true)
  end)
  context("inner", function()
    before_each(function() note "before2" end)
    after_each(function() note "after2" end)
    it("fails", function() assert.are.equal(1, 2, "one and two") end)
    it("breaks", function() error "broken" end)
    it("breaks by an index", function() local t; return t.x end)
    it("waits", function() pending "not yet" end)
    test("fails by assert", function() assert(false, "a message") end)
    pending("is named alone")
  end)
  describe("whose setup breaks", function()
    setup(function() error "no setup" end)
    it("is never run", function() end)
  end)
  describe("whose before_each breaks", function()
    before_each(function() error "no before" end)
    it("is never run either", function() end)
  end)
  insulate("whose after_each breaks", function()
    after_each(function() error "no after" end)
    it("has passed", function() end)
  end)
  it("cannot hold a describe", function() describe("x", function() end) end)
end)

describe("assertions", function()
  local function fails(fn) return not pcall(fn) end
  it("hold", function()
    assert.are.same({ 1, { a = 2 } }, { 1, { a = 2 } })
    assert.are_not.same({ 1 }, { 1, 2 })
    assert.is_not.equal(1, "1")
    assert.is_nil(nil)
    assert.is_not_nil(false)
    assert.falsy(nil)
    assert.is.truthy(0)
    assert.is_near(1, 1.05, 0.1)
    assert.is_string("x")
    assert.is_function(print)
    assert.are.equal("b", (assert.matches("(b)", "abc")))
    assert.no.matches("x", "abc")
    assert.matches("a.c", "xa.c", 2, true)
    assert.has_error(function() error("no", 0) end, "no")
    assert.has_error(function() error "no" end, "no")
    assert.has.errors(function() error { 1 } end, { 1 })
    assert.has_no.errors(function() end)
    assert.error_matches(function() error "line 7" end, "%d")
    assert.message("told").is_true(true)
    assert.are.equal(3, assert(3, "unused"))
    assert.is_true(pcall(assert.is_true, true))
  end)
  it("do not hold", function()
    local count = 0
    for _, fn in ipairs {
      function() assert.are.same({ 1 }, { 2 }) end,
      function() assert.are_not.same({ 1 }, { 1 }) end,
      function() assert.is_nil(false) end,
      function() assert.is_true(1) end,
      function() assert.is_near(1, 1.2, 0.1) end,
      function() assert.matches("x", "abc") end,
      function() assert.has_error(function() end) end,
      function() assert.has_error(function() error "a" end, "b") end,
      function() assert.has_no.errors(function() error "a" end) end,
      function() assert.error_matches(function() error "a" end, "b") end,
      function() assert.is_number "1" end,
      function() assert(nil) end,
    } do
      assert.is_true(fails(fn))
      count = count + 1
    end
    assert.are.equal(12, count)
  end)
  it("say what the user says", function()
    local ok, message = pcall(function() assert.are.equal(1, 2, "here") end)
    assert.is_false(ok)
    assert.matches("here", tostring(message))
    assert.matches("2", tostring(message))
    ok, message = pcall(function() assert.message("told").is_true(false) end)
    assert.is_false(ok)
    assert.matches("told", tostring(message))
  end)
end)
]]

local SECOND = [[
it("sees no globals of the file before", function() assert.is_nil(rawget(_G, "leaked")) end)
]]

local function lines_of(text, pattern)
  local list = {}
  for found in text:gmatch(pattern) do list[#list + 1] = found end
  table.sort(list)
  return list
end

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("", fn)
  end)
end

-- Runs both: their output, their status, and the order of calls.
local function run_both(place, words)
  local out = {}
  for who, program in pairs {
    ours = ("'%s' test"):format(training.program),
    busted = "ASAN_OPTIONS=detect_leaks=0 lua5.4 /usr/bin/busted --output=plainTerminal "
      .. "--pattern=_spec",
  } do
    local _, _, code = os.execute(("cd '%s' && TRACE=trace_%s %s %s >said_%s 2>&1"):format(
      place.dir, who, program, words, who))
    out[who] = { code = code, text = place:read("said_" .. who),
      trace = place:read("trace_" .. who) }
  end
  return out.ours, out.busted
end

describe("xtrain test", function()
  test("comes to the outcomes of busted, in its order", function(place)
    place:write("a_spec.lua", OUTCOMES)
    place:write("b_spec.lua", SECOND)
    local ours, busted = run_both(place, "a_spec.lua b_spec.lua")
    local passed, failed, errors, pending_ = busted.text:match(
      "(%d+) successes / (%d+) failures / (%d+) errors / (%d+) pending")
    assert.is_truthy(passed, busted.text)
    local wanted = ("2 files: %s passed, %s failed, %s errors, %s pending"):format(passed, failed,
      errors, pending_)
    assert.is_truthy(ours.text:find(wanted, 1, true), busted.text .. "\n" .. ours.text)
    assert.are.equal(busted.trace, ours.trace)
    assert.are.same(lines_of(busted.text, "Failure %-> [^\n]*\n([^\n]*)"),
      lines_of(ours.text, "FAILED ([^\n]*)"))
    assert.are.equal(1, ours.code)
    assert.are_not.equal(0, busted.code)
    assert.matches("a_spec.lua:27: one and two\n.*Passed in:\n +%(number%) 2", ours.text)
  end)

  test("passes where busted passes, on the specs of the recipes", function(place)
    local recipes = training.recipe:match "^(.*)/"
    assert(os.execute(("ln -s '%s' '%s/recipes'"):format(recipes, place.dir)))
    local ours, busted = run_both(place, "recipes/spec")
    assert.are.equal(0, busted.code, busted.text)
    assert.are.equal(0, ours.code, ours.text)
    local passed = busted.text:match "(%d+) successes / 0 failures / 0 errors / 0 pending"
    assert.is_true(tonumber(passed) >= 18, busted.text)
    assert.matches(("2 files: %s passed, 0 failed, 0 errors, 0 pending"):format(passed), ours.text)
  end)

  test("picks tests by name, and says what it cannot find", function(place)
    assert(require "xtrain.core.file".mkdir(place.dir .. "/spec/deep"))
    place:write("spec/deep/one_spec.lua", [[
      describe("a", function()
        it("b", function() end)
        it("c", function() error "not picked" end)
      end)
    ]])
    place:write("spec/deep/helper.lua", "error 'no spec'")
    local function run(words)
      local _, _, code = os.execute(("cd '%s' && '%s' test %s >said 2>&1"):format(place.dir,
        training.program, words))
      return code, place:read "said"
    end
    local code, said = run "--filter 'a b'"
    assert.are.equal(0, code, said)
    assert.matches("spec/deep/one_spec.lua: 1 passed, 0 failed, 0 errors, 0 pending", said)
    code, said = run "spec/deep"
    assert.are.equal(1, code)
    assert.matches("ERROR a c\n  [^\n]*one_spec.lua:3: not picked", said)
    code, said = run "nowhere"
    assert.are.equal(2, code)
    assert.matches("nowhere: there is no such file", said)
    code, said = run "--filtre x"
    assert.are.equal(2, code)
    assert.matches("did you mean %-%-filter", said)
    place:write("spec/deep/two_spec.lua", "describe('x' function")
    code, said = run "spec/deep/two_spec.lua"
    assert.are.equal(1, code)
    assert.matches("two_spec.lua:1: ", said)
  end)
end)

-- ---- assertions for recipes --------------------------------------------------------------------

-- What a failing assertion says.
local function said(fn)
  local ok, message = pcall(fn)
  assert.is_false(ok)
  return tostring(message)
end

local function has(text, part)
  assert.is_truthy(text:find(part, 1, true), text)
end

describe("assert.tensor_near", function()
  it("passes on near tensors, and takes tables and numbers for them", function()
    assert.tensor_near({ { 1, 2 }, { 3, 4 } }, xt.tensor { { 1, 2 }, { 3, 4 } })
    assert.tensor_near(xt.tensor { 1, 2 }, xt.tensor { 1, 2.00001 })
    assert.tensor_near(3, xt.tensor(3))
    assert.tensor_near({ 1 }, xt.tensor { 1.4 }, 0.5)
    assert.tensor_near({ 1 / 0, 0 / 0 }, xt.tensor { 1 / 0, 0 / 0 })
    assert.is_not.tensor_near({ 1 }, xt.tensor { 1.4 })
    assert.tensor_near(xt.zeros { 0, 3 }, xt.zeros { 0, 3 })
  end)

  it("names the worst element and both values", function()
    has(said(function()
      assert.tensor_near({ { 1, 2 }, { 3, 4 } }, xt.tensor { { 1.5, 2 }, { 3, 6 } })
    end), "2 of 4 elements differ, [2][2] the most: it is 6, expected 4 (atol 1e-06, rtol 1e-05)")
    has(said(function() assert.tensor_near({ 1, 2 }, xt.tensor { 1, 0 / 0 }, 100) end),
      "1 of 2 elements differ, [2] the most")
    has(said(function() assert.tensor_near({ 1, 2 }, xt.zeros { 2, 1 }) end),
      "the shape is {2, 1}, expected {2}")
    has(said(function() assert.tensor_near({ 1 }, 1) end),
      "the actual value is a number, wanted a tensor")
  end)
end)

describe("assert.same_digest", function()
  it("compares tensors, models and tables of them bit for bit", function()
    assert.are.same_digest(xt.ones { 3 }, xt.ones { 3 })
    assert.are_not.same_digest(xt.ones { 3 }, xt.ones { 3 } + 1e-6)
    local function model() return { a = xt.nn.linear { d_in = 2, d_out = 3, seed = 1 } } end
    assert.are.same_digest(model(), model())
  end)

  it("names what differs", function()
    has(said(function() assert.same_digest(xt.tensor { 1, 2, 3 }, xt.tensor { 1, 5, 4 }) end),
      "the tensors differ: 2 of 3 elements, [2] the most: 2 and 5")
    has(said(function()
      assert.same_digest({ a = { w = xt.ones { 2 } } }, { a = { w = xt.zeros { 2 } } })
    end), "a.w differs: 2 of 2 elements, [1] the most: 1 and 0")
    has(said(function()
      assert.same_digest({ a = xt.ones {}, b = xt.ones {} }, { a = xt.ones {} })
    end), "b is only in the first value")
    has(said(function() assert.same_digest(xt.ones { 2 }, xt.ones({ 2 }, { dtype = "f64" })) end),
      "f32 and f64")
    has(said(function() assert.same_digest(1, 1) end), "wanted tensors")
  end)
end)

describe("assert.gradient", function()
  it("passes on a right one, of a function and of a model", function()
    assert.gradient(function(x) return xt.tanh(x) end, { xt.randn({ 3 }, { seed = 1 }) })
    assert.gradient(xt.nn.linear { d_in = 3, d_out = 2, bias = true, seed = 1 },
      { xt.randn({ 4, 3 }, { seed = 2 }) })
  end)

  it("names parameter, element and both values of a wrong one", function()
    local model = { layer = xt.nn.linear { d_in = 3, d_out = 2, bias = true, seed = 1 } }
    local class = xt.nn.class "wrong"
    function class:forward(x) -- the gradient of the second output's bias is lost
      local bias = self.layer.bias
      local kept = xt.concat({ bias:slice(1, 1, 1), bias:slice(1, 2, 2):detach() }, 1)
      return xt.matmul(x, xt.transpose(self.layer.weight, 1, 2)) + kept
    end
    setmetatable(model, class)
    local text = said(function()
      assert.gradient(model, { xt.randn({ 4, 3 }, { seed = 2 }) })
    end)
    assert.matches("parameter layer.bias, element %[2%]: gradient 0, slope %-?%d", text)
  end)
end)

-- ---- trials of recipes -------------------------------------------------------------------------

local function recipe()
  local run = xt.recipe { name = "line", lr = 0.1, seq = 1, noise = 0.0, shift = 0.0, late = 0 }
  local model = { w = xt.nn.linear { d_in = 1, d_out = 1, bias = true, seed = 1 } }
  run:attach { model = model }
  local opt = xt.optim.adamw(xt.nn.params(model), { weight_decay = 0 })
  local data = {}
  function data:batch(step)
    local x = xt.randn({ 8, 1 }, { seed = xt.seed(run.seed, step) })
    return x, x * 2 + 1
  end
  for step in run:steps() do
    for _, x, y in run:micros(step, data) do
      local off = model.w(x) - y
      if run.late > 0 and step >= run.late then off = off + run.shift end
      run:backward(xt.sum(off * off), 8)
    end
    run:log(step, { grad_norm = opt:step(run.lr), lr = run.lr })
    if run:due(step, 5) then run:save(step) end
  end
  error "what comes after the loop is not run"
end

describe("a trial", function()
  it("makes steps and writes nothing", function()
    local made = spec.trial(recipe, { steps = 20 })
    assert.are.equal(20, #made.steps)
    assert.are.equal(20, made.options.steps)
    assert.is_true(made.steps[20].loss < made.steps[1].loss)
    assert.are.equal(0.1, made.steps[3].lr)
    assert.is_nil(require "xtrain.core.file".exists "runs/line")
    assert.is_nil(require "xtrain.active".run)
  end)

  it("takes overrides, and refuses what the recipe does not have", function()
    assert.are.equal(0.5, spec.trial(recipe, { steps = 1, options = { lr = 0.5 } }).steps[1].lr)
    local made = spec.trial(recipe, { steps = 1, fit = { lr = 0.5, dim = 3 } })
    assert.are.equal(0.5, made.steps[1].lr)
    has(said(function() spec.trial(recipe, { steps = 1, options = { lrr = 1 } }) end),
      "unknown option 'lrr' (did you mean 'lr'?)")
    has(said(function() spec.trial("no/such.lua", { steps = 1 }) end), "no/such.lua")
    has(said(function() spec.trial(function() end, { steps = 1 }) end), "ended before step 1")
    has(said(function() spec.trial(function() error "oh" end, { steps = 1 }) end), "oh")
    assert.are.equal(0.1, spec.options_of(recipe).lr)
  end)

  it("is compared step by step", function()
    local a = spec.trial(recipe, { steps = 6 })
    assert.same_digest(a, spec.trial(recipe, { steps = 6, options = { shift = 3.0 } }))
    has(said(function()
      assert.same_digest(a,
        spec.trial(recipe, { steps = 6, options = { shift = 3.0, late = 4 } }))
    end), "the trials part at step 4: loss ")
  end)
end)

describe("assert.learns", function()
  it("passes where the loss falls, and says how far it fell where that is not enough", function()
    assert.learns(recipe, { steps = 60, below = 1.0 })
    assert.is_not.learns(recipe, { steps = 60, below = 1.0, options = { lr = 1e-9 } })
    local text = said(function() assert.learns(recipe, { steps = 5, below = 1e-9 }) end)
    assert.matches("line: loss %d[%d.e-]* after 5 steps, wanted below 1e%-09; at step 1 it was %d",
      text)
  end)
end)
