-- v6: v5 on another corpus, FineWeb-edu, about one epoch of it.
--
--   xtrain recipes/v6.lua device=cuda      v6.lua smoke=true: three small steps on any machine
--
-- Its ancestor saw 2.29 billion tokens (1.02 epochs) at 218 thousand a second on eight GPUs, and
-- reached a held-out loss of 3.07; on the held-out tokens of TinyStories, 2.75.
-- Held-out losses of v6 to v8 are of one million tokens of FineWeb-edu: they compare with each
-- other, and not with those of v0 to v5.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v6",

  corpus = "fineweb-edu",
  dim = 768, layers = 18, heads = 24, ffn = 2048,
  dtype = "bf16",

  steps = 35000,
  seq = 256, batch = 32, global_batch = 256,
  prompt = "The most important thing about",
})

xt.pretrain.train(run)
