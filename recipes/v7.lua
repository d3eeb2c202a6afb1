-- v7: v6 with more steps on the same tokens, to see what repeating them gives.
--
--   xtrain recipes/v7.lua device=cuda      v7.lua smoke=true: three small steps on any machine
--
-- Its ancestor saw 3.28 billion tokens (1.45 epochs) at 218 thousand a second on eight GPUs, and
-- reached a held-out loss of 3.01, flat from step 44,000: repeating the data gave 0.05.
-- Held-out losses of v6 to v8 are of one million tokens of FineWeb-edu: they compare with each
-- other, and not with those of v0 to v5.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v7",

  corpus = "fineweb-edu",
  dim = 768, layers = 18, heads = 24, ffn = 2048,
  dtype = "bf16",

  steps = 50000,
  seq = 256, batch = 32, global_batch = 256,
  prompt = "The most important thing about",
})

xt.pretrain.train(run)
