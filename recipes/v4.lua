-- v4: v3 wider and deeper, with four times the batch: the first that sees TinyStories more than
-- once. Narrow heads stay, 24 of 32.
--
--   xtrain recipes/v4.lua device=cuda      v4.lua smoke=true: three small steps on any machine
--
-- Its ancestor had 127 million parameters in its blocks (205 in all), saw 721 million tokens (1.54
-- epochs) at 145 thousand a second on eight GPUs, with an allocator that keeps its memory, and
-- reached a held-out loss of 1.17.
-- Held-out losses of v0 to v5 are of one million tokens of TinyStories: they compare with each
-- other, and not with those of v6 to v8.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v4",

  corpus = "tinystories",
  dim = 768, layers = 18, heads = 24, ffn = 2048,

  steps = 22000,
  seq = 256, batch = 32, global_batch = 128,
})

xt.pretrain.train(run)
