-- Recipes with graph=true: a run whose steps are replays of one graph is the run without, bit for
-- bit. Each run is its own process.
local xt = require "xtrain"
local active = require "xtrain.active"
local training = require "training"
local raises = require("expect").raises

local STEPS = 200
local SMALL = "text=text.txt vocab=270 dim=16 heads=2 layers=2 ffn=24 batch=2 seq=24 accum=2"
  .. " dropout=0.1 warmup=20 clip=0.5 save_every=50 eval_every=100 log_every=1 steps=" .. STEPS

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place(SMALL, function(place)
      place:write("text.txt", training.text(30000))
      fn(place)
    end)
  end)
end

describe("a run with graph=true", function()
  test("is the eager run over 200 steps, in every process, also in bf16", function(place)
    for _, more in ipairs { "", " dtype=bf16" } do
      local out = { "eager" .. #more, "first" .. #more, "second" .. #more }
      place:must("graph=false out=" .. out[1] .. more)
      place:must("graph=true out=" .. out[2] .. more)
      place:must("graph=true out=" .. out[3] .. more)
      local want = place:rows(out[1])
      assert.is_true(#want >= STEPS)
      for i = 2, 3 do
        assert.are.same(want, place:rows(out[i]))
        assert.are.same(place:digests(out[1], STEPS), place:digests(out[i], STEPS))
      end
    end
  end)

  test("goes on from a save, its own or an eager run's, and can be verified", function(place)
    place:must "graph=true out=whole"
    place:must "graph=true out=part steps=100"
    place:must "graph=false out=eager steps=100"
    for _, words in ipairs { "graph=true out=part", "graph=false out=eager" } do
      local start = words:gsub("true", "TRUE"):gsub("false", "true"):gsub("TRUE", "false")
      local _, errors = place:must(start .. " resume=auto") -- changes the form half way
      assert.matches("resumed from", errors)
    end
    local whole = place:digests("whole", STEPS)
    -- The schedule of the shorter runs was another one, so only they are alike.
    assert.are.same(place:digests("part", STEPS), place:digests("eager", STEPS))
    assert.are.not_same(whole, place:digests("part", STEPS))
    place:must "graph=true out=again"
    os.execute(("rm -r '%s/again/step-00000200'"):format(place.dir))
    local _, errors = place:must "graph=true out=again resume=auto"
    assert.matches("resumed from .*150", errors)
    assert.are.same(whole, place:digests("again", STEPS))
    local ok = os.execute(("cd '%s' && '%s' verify again >verified 2>&1"):format(place.dir,
      training.program))
    assert.is_true(ok, place:read "verified")
  end)
end)

-- ---- steps that change nothing, and what cannot be recorded ------------------------------------

describe("run:train", function()
  local folder

  before_each(function()
    folder = os.tmpname()
    os.remove(folder)
  end)
  after_each(function()
    active.run = nil
    os.execute("rm -rf " .. folder)
  end)

  -- A run of three steps of y = x w by x of a list, and what it said.
  local function run_on(batches, words, loss)
    words[#words + 1], words[#words + 2] = "out=" .. folder, "steps=" .. #batches
    local run = xt.recipe({ name = "short", lr = 0.5 }, words)
    local said = {}
    run.own.progress.say = function(_, text) said[#said + 1] = text end
    run.own.progress.show = function() end
    local w = xt.var(xt.ones { 3 })
    local opt = xt.optim.adamw({ { name = "w", tensor = w } }, {})
    local data = { batch = function(_, step)
      local x = batches[step]
      return xt.tensor(x), xt.full({ 3 }, x[1] == 7 and -100 or 1, { dtype = "i32" })
    end }
    local digests = {}
    for step in run:steps() do
      local norm = run:train(step, { data = data, optimizer = opt, lr = 0.5,
        loss = function(x, labels)
          if loss then return loss(x, w) end
          return xt.sum(xt.exp(x * w)), xt.count_valid(labels)
        end })
      digests[step] = w:digest() .. " " .. norm:digest() .. " " .. opt.steps
      run:log(step, {})
    end
    active.run = nil
    os.execute("rm -rf " .. folder)
    return digests, said
  end

  it("skips what is not finite or has no label, and says the same in both forms", function()
    local batches = { { 1, 2, 3 }, { 1000, 1, 1 }, { 7, 1, 1 }, { 2, 1, 1 } }
    local want, said = run_on(batches, { "graph=false" })
    local got, replayed = run_on(batches, { "graph=true" })
    assert.are.same(want, got)
    assert.are.equal(3, #said)
    assert.matches("step 2: the loss is inf; .*\n  exp at .*replay_spec.lua:%d+, in forward: the "
      .. "result f32 3: 1 inf", said[1])
    assert.matches("step 2 skipped, nothing changed: the gradient norm is .*not finite: w", said[2])
    assert.matches("step 3 skipped, nothing changed: no label", said[3])
    assert.are.same(said, replayed)
  end)

  it("skips a loss that is not finite though its gradients are, in both forms", function()
    local function loss(x, w) -- the logarithm of 0 in step 2, with a gradient of 0
      return xt.sum(w * x) + xt.sum(xt.log(x - x[1] + (x[1] - 1000)):detach()), 1
    end
    local batches = { { 1001, 2000, 3000 }, { 1000, 2000, 3000 }, { 1001, 2000, 3000 } }
    local want, said = run_on(batches, { "graph=false" }, loss)
    local got, replayed = run_on(batches, { "graph=true" }, loss)
    assert.are.same(want, got)
    assert.are.equal(2, #said)
    assert.matches("step 2: the loss is %-inf; .*\n  log at .*, in forward: the result f32 3: 1 "
      .. "%-inf, min", said[1])
    assert.matches("step 2 skipped, nothing changed: the loss is %-inf; loss %-inf$", said[2])
    assert.are.same(said, replayed)
    assert.matches(" 2$", want[3]) -- two updates in three steps
  end)

  it("says so when no parameter has a gradient", function()
    raises("no parameter has a gradient", run_on, { { 1, 2, 3 } }, { "graph=true" }, function(x)
      return xt.sum(xt.var(xt.ones { 3 }) * x), 1
    end)
  end)

  it("names the line that reads a value on the host", function()
    raises("depends on input 'ids.1'", run_on, { { 1, 2, 3 } }, { "graph=true" }, function(x)
      return xt.sum(x * xt.sum(x):item()), 1
    end)
  end)

  it("calls the loss once in a run, and refuses another shape", function()
    local calls = 0
    local batches = { { 1, 2, 3 }, { 1, 2, 3 }, { 1, 2 } }
    raises("'ids.1'", run_on, batches, { "graph=true" }, function(x, w)
      calls = calls + 1
      return xt.sum(w * x), 1
    end)
    assert.are.equal(1, calls)
  end)

  it("is what graph=true replays: a loop of one's own and lost_updates are refused", function()
    local run = xt.recipe({ name = "short" }, { "graph=true", "out=" .. folder })
    raises("graph=true replays steps that are taken by run:train", function()
      run:backward(xt.sum(xt.var(xt.ones { 2 })), 1)
    end)
    raises("lost_updates", xt.recipe, { name = "short" },
      { "graph=true", "lost_updates=true", "out=" .. folder })
    raises("loss is a number, wanted a function", function()
      run:train(1, { data = {}, loss = 3, optimizer = {}, lr = 1 })
    end)
    raises("option 'data' is missing", function()
      run:train(1, { loss = print, optimizer = {}, lr = 1 })
    end)
  end)
end)
