-- v5: the model of v4 in bf16 (the weights that are kept stay f32), with twice the batch, for three
-- and a half times the tokens: as much as TinyStories can give.
--
--   xtrain recipes/v5.lua device=cuda      v5.lua smoke=true: three small steps on any machine
--
-- Its ancestor saw 2.49 billion tokens (5.33 epochs) at 217 thousand a second on eight GPUs, and
-- reached a held-out loss of 1.11: 3.5 times the data of v4 gave 5 %. The corpus is used up.
-- Held-out losses of v0 to v5 are of one million tokens of TinyStories: they compare with each
-- other, and not with those of v6 to v8.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v5",

  corpus = "tinystories",
  dim = 768, layers = 18, heads = 24, ffn = 2048,
  dtype = "bf16",

  steps = 38000,
  seq = 256, batch = 32, global_batch = 256,
})

xt.pretrain.train(run)
