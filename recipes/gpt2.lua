-- gpt2: GPT-2 small (Radford et al. 2019), 124 million parameters: LayerNorm, learned positions,
-- biases, gelu, and a head that is the embedding. Steps of half a million tokens, ten billion in
-- all, as GPT-2 is usually trained again.
--
--   xtrain recipes/gpt2.lua device=cuda                  gpt2.lua smoke=true: three small steps
--   xtrain recipes/gpt2.lua device=cuda bench=20 batch=64     how fast a step is, without data
--
-- It has no ancestor to compare with; losses on FineWeb-edu compare with those of v6 to v8 where
-- the held-out tokens are the same.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "gpt2", family = "gpt2",

  corpus = "fineweb-edu",
  dim = 768, layers = 12, heads = 12, ffn = 3072,
  tied = true,
  dtype = "bf16",

  steps = 19000,
  seq = 1024, batch = 32, global_batch = 512,
  prompt = "The most important thing about",
})

xt.pretrain.train(run)
