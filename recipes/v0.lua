-- v0: the first model that learned anything. A Qwen3-style decoder of 41 thousand parameters and an
-- embedding and a head of 1.6 million each, AdamW, warm-up and cosine, on a sip of TinyStories.
--
--   xtrain recipes/v0.lua                  wants token shards in data/tinystories, or says how to
--   xtrain recipes/v0.lua smoke=true       make them; this needs nothing
--
-- Its ancestor saw the same 0.72 million tokens and reached a held-out loss of 3.80.
-- Held-out losses of v0 to v5 are of one million tokens of TinyStories: they compare with each
-- other, and not with those of v6 to v8.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v0",

  corpus = "tinystories",
  dim = 32, layers = 4, heads = 2, ffn = 64,

  steps = 700,
  seq = 128, batch = 8, global_batch = 8,
  eval_every = 100,
})

xt.pretrain.train(run)
