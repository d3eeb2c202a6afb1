-- Schedules are functions of the step alone, and steps count from 1.
local schedule = require("xtrain").schedule

local function values(fn, last)
  local list = {}
  for step = 1, last do list[step] = fn(step) end
  return list
end

local function near(expected, got)
  assert.are.equal(#expected, #got)
  for i, value in ipairs(expected) do assert.is_near(value, got[i], 1e-6) end
end

describe("schedule", function()
  it("warms up to the peak at the last warm-up step, and never has a first step of 0", function()
    near({ .25, .5, .75, 1, 1 }, values(schedule.constant { peak = 1, warmup = 4 }, 5))
    assert.are.equal(schedule.cosine { peak = 1, warmup = 0, total = 9 }(1),
      schedule.cosine { peak = 1, warmup = 1, total = 9 }(1))
    assert.are.equal(3e-4, schedule.constant(3e-4)(1))
  end)

  it("cosine falls from the peak to min at the last step", function()
    near({ 1, .853553, .5, .146447, 0 },
      values(schedule.cosine { peak = 1, min = 0, warmup = 1, total = 5 }, 5))
    local fn = schedule.cosine { peak = 1, min = 0.1, warmup = 2, total = 10 }
    assert.are.equal(0.1, fn(10))
    assert.are.equal(0.1, fn(11))
  end)

  it("linear falls in a line to min at the last step", function()
    near({ .5, 1, .75, .5, .25, 0 },
      values(schedule.linear { peak = 1, warmup = 2, total = 6 }, 6))
  end)

  it("wsd stays at the peak and falls over the decay part, one part above min last", function()
    near({ .25, .5, .75, 1, 1, 1, 1, .75, .5, .25 },
      values(schedule.wsd { peak = 1, min = 0, warmup = 4, total = 10, decay = 4 }, 10))
    near({ .25, .5, .75, 1, 1, 1, 1, 1, 1, 1 },
      values(schedule.wsd { peak = 1, warmup = 4, total = 10, decay = 0 }, 10))
  end)

  it("is a pure function: step 5 is the same whatever was asked before", function()
    local fn = schedule.cosine { peak = 1, warmup = 2, total = 10 }
    local alone = fn(5)
    for step = 1, 10 do fn(step) end
    assert.are.equal(alone, fn(5))
  end)

  it("is a function that can be asked what it is", function()
    local fn = schedule.wsd { peak = 1e-3, warmup = 4, total = 10, decay = 4 }
    assert.are.equal("function", type(fn))
    assert.are.equal("wsd{decay = 4, min = 0, peak = 0.001, total = 10, warmup = 4}",
      schedule.describe(fn))
    assert.are.equal("constant{peak = 2, warmup = 0}", schedule.describe(schedule.constant(2)))
    assert.is_nil(schedule.describe(print))
  end)

  it("stays within its bounds for every length, warm-up and decay", function()
    for _, total in ipairs { 1, 2, 7, 30 } do
      for _, warmup in ipairs { 0, 1, 3, total } do
        for _, kind in ipairs { "cosine", "linear", "wsd" } do
          local o = { peak = 2, min = .5, warmup = warmup, total = total }
          if kind == "wsd" then o.decay = math.min(3, total) end
          local fn, top = schedule[kind](o), 0
          for step = 1, total + 3 do
            local lr = fn(step)
            assert.is_true(lr == lr and lr > 0 and lr <= 2, kind .. " " .. step .. ": " .. lr)
            if step >= warmup then assert.is_true(lr >= .5, kind .. " " .. step .. ": " .. lr) end
            top = math.max(top, lr)
          end
          if total > math.max(warmup, 1) then assert.are.equal(2, top) end
        end
      end
    end
  end)

  it("names an unknown option and the nearest known one", function()
    assert.has_error(function() schedule.cosine { peak = 1, totl = 5 } end)
    local _, message = pcall(schedule.cosine, { peak = 1, totl = 5 })
    assert.matches("totl", message)
    assert.matches("did you mean 'total'", message)
    _, message = pcall(schedule.cosine, { peak = 1 })
    assert.matches("'total' is missing", message)
  end)
end)
