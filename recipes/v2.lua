-- v2: v1 wider and deeper, with four times the batch and twice the length: a step sees eight times
-- as many tokens.
--
--   xtrain recipes/v2.lua                  v2.lua smoke=true: three small steps on any machine
--
-- Its ancestor had 28 million parameters in its blocks (67 in all), saw 37 million tokens (0.08
-- epochs) at 3.6 thousand a second on four GPUs, one sequence after the other, and reached a
-- held-out loss of 1.71.
-- Held-out losses of v0 to v5 are of one million tokens of TinyStories: they compare with each
-- other, and not with those of v6 to v8.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v2",

  corpus = "tinystories",
  dim = 384, layers = 12, heads = 12, ffn = 1536,

  steps = 4500,
  seq = 256, batch = 32, global_batch = 32,
})

xt.pretrain.train(run)
