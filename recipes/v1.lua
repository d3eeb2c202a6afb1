-- v1: v0 with a model two hundred times as large, on seven times as many tokens. What was missing
-- was capacity: the loss falls by more than anything after it took off.
--
--   xtrain recipes/v1.lua                  v1.lua smoke=true: three small steps on any machine
--
-- Its ancestor had 8.4 million parameters in its blocks (34 in all), saw 5.1 million tokens (0.01
-- epochs) at 3.3 thousand a second on one GPU, and reached a held-out loss of 2.58.
-- Held-out losses of v0 to v5 are of one million tokens of TinyStories: they compare with each
-- other, and not with those of v6 to v8.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v1",

  corpus = "tinystories",
  dim = 256, layers = 8, heads = 8, ffn = 1024,

  steps = 5000,
  seq = 128, batch = 8, global_batch = 8,
})

xt.pretrain.train(run)
