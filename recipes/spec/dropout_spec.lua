-- How dropout is wired, in every recipe: the option reaches the model, masks follow the seed that
-- the loop passes, nothing is drawn from anywhere else, and evaluation drops nothing.
local xt = require "xtrain"
local spec = xt.spec
local file = require "xtrain.core.file"

local SMALL = { vocab = 40, dim = 16, layers = 2, heads = 2, kv_heads = 2, head_dim = 8, ffn = 24,
  hidden = 8, seq = 12, batch = 2, global_batch = 2 }

local function tokens(seed)
  return xt.cast(xt.rand({ 2, 12 }, { seed = seed }) * 39, "i32")
end

for _, name in ipairs(file.list "recipes") do
  local path = "recipes/" .. name
  if name:find "%.lua$" then
    describe("dropout in " .. path, function()
      local has = spec.options_of(path)

      local function trial(given)
        return spec.trial(path, { steps = 3, fit = SMALL, made_up = true, options = given })
      end

      it("is an option that is off until it is asked for", function()
        assert.are.equal(0.0, has.dropout)
        assert.are.same_digest(trial {}, trial { dropout = 0.0 })
      end)

      it("changes what the first step sees", function()
        local off, on = trial { dropout = 0.0 }, trial { dropout = 0.5 }
        assert.are_not.equal(off.steps[1].loss, on.steps[1].loss)
        assert.are_not.equal(on.steps[1].loss, trial({ dropout = 0.4 }).steps[1].loss)
      end)

      it("comes from seeds alone: the same steps twice are the same bits", function()
        assert.are.same_digest(trial { dropout = 0.5 }, trial { dropout = 0.5 })
      end)

      if has.recompute then
        it("drops the same elements where blocks are recomputed", function()
          assert.are.same_digest(trial { dropout = 0.5, recompute = "none" },
            trial { dropout = 0.5, recompute = "block" })
        end)
      end

      it("follows the seed in training, and is gone in evaluation", function()
        local model = trial({ dropout = 0.5 }).model
        if not (model and model.loss) then return end -- the recipe's own, without a loss
        local ids, labels = tokens(1), tokens(2)
        local function loss(seed) return model:loss(ids, labels, { seed = seed }):item() end
        assert.is_true(model.training)
        assert.are.equal(loss(1), loss(1))
        assert.are_not.equal(loss(1), loss(2))
        xt.evaluating(model, function()
          assert.are.equal(loss(1), loss(2))
          assert.are.equal(loss(1), loss(nil))
        end)
      end)
    end)
  end
end
