-- The learning-rate schedule of v8: warm-up over 5 % of 36000 steps to 6e-4, then half a cosine
-- down to 6e-5; and what every recipe makes of its own.
--
--   xtrain test recipes/spec           or: busted recipes/spec
local xt = require "xtrain"
local spec = xt.spec
local file = require "xtrain.core.file"

local PEAK, MIN, STEPS = 6e-4, 6e-5, 36000
local WARMUP = STEPS // 20

-- A size at which a step takes no time, for the options a recipe has.
local SMALL = { vocab = 40, dim = 16, layers = 2, heads = 2, kv_heads = 2, head_dim = 8, ffn = 24,
  hidden = 8, seq = 12, batch = 2, global_batch = 2 }

describe("the schedule of v8", function()
  local lr

  before_each(function()
    lr = xt.schedule.cosine { peak = PEAK, min = MIN, warmup = WARMUP, total = STEPS }
  end)

  it("rises in a line over 1800 steps, from more than 0 to the peak", function()
    assert.are.equal(1800, WARMUP)
    assert.is_near(PEAK / 1800, lr(1), 1e-18)
    assert.is_near(PEAK / 2, lr(900), 1e-18)
    assert.are.equal(PEAK, lr(1800))
    for step = 2, 1800 do
      assert.is_near(PEAK / 1800, lr(step) - lr(step - 1), 1e-15)
    end
  end)

  it("falls along half a cosine to the minimum, and stays there", function()
    local quarter = (STEPS - WARMUP) // 4
    assert.is_near(MIN + (PEAK - MIN) * (1 + math.sqrt(0.5)) / 2, lr(WARMUP + quarter), 1e-15)
    assert.is_near((PEAK + MIN) / 2, lr(WARMUP + 2 * quarter), 1e-15)
    assert.is_near(MIN + (PEAK - MIN) * (1 - math.sqrt(0.5)) / 2, lr(WARMUP + 3 * quarter), 1e-15)
    assert.are.equal(MIN, lr(STEPS))
    assert.are.equal(MIN, lr(STEPS + 1000))
    for step = WARMUP + 1, STEPS do assert.is_true(lr(step) < lr(step - 1)) end
  end)

  it("depends on the step alone, so a resumed run needs nothing restored", function()
    local again = xt.schedule.cosine { peak = PEAK, min = MIN, warmup = WARMUP, total = STEPS }
    local late = again(30000)
    again(5)
    assert.are.equal(late, lr(30000))
  end)

  if file.exists "recipes/v8.lua" then
    it("is what recipes/v8.lua trains with", function()
      assert.are.equal(STEPS, spec.options_of("recipes/v8.lua").steps)
      local made = spec.trial("recipes/v8.lua", { steps = 3, fit = SMALL, made_up = true,
        options = { steps = STEPS } })
      for step = 1, 3 do assert.are.equal(lr(step), made.steps[step].lr) end
    end)
  end
end)

for _, name in ipairs(file.list "recipes") do
  local path = "recipes/" .. name
  if name:find "%.lua$" then
    describe(path, function()
      it("warms up: the first rate is more than 0, the next is larger", function()
        local made = spec.trial(path, { steps = 2, fit = SMALL, made_up = true,
          options = { steps = 1000 } })
        assert.is_true(made.steps[1].lr > 0)
        assert.is_true(made.steps[2].lr > made.steps[1].lr)
      end)
    end)
  end
end
