-- v3: v2 wider and deeper, for nearly seven times as many steps. The ancestor could afford it, for
-- it had learned to run a batch in one pass instead of sequence by sequence: one GPU then did seven
-- times the work of four.
--
--   xtrain recipes/v3.lua device=cuda      v3.lua smoke=true: three small steps on any machine
--
-- Its ancestor had 67 million parameters in its blocks (119 in all), saw 246 million tokens (0.53
-- epochs) at 26 thousand a second on one GPU, and reached a held-out loss of 1.30.
-- Held-out losses of v0 to v5 are of one million tokens of TinyStories: they compare with each
-- other, and not with those of v6 to v8.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v3",

  corpus = "tinystories",
  dim = 512, layers = 16, heads = 16, ffn = 2048,

  steps = 30000,
  seq = 256, batch = 32, global_batch = 32,
})

xt.pretrain.train(run)
