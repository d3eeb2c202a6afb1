-- v8: v6 with 78 % more parameters in its blocks. What its blocks compute is not kept for backward
-- but made again, so that a batch of 32 fits where it did not.
--
--   xtrain recipes/v8.lua device=cuda                   v8.lua smoke=true: three small steps
--   xtrain recipes/v8.lua device=cuda bench=20 recompute=none       how fast a step is, no data
--
-- and how fast one is of the sizes in docs/performance.md, with bench=20 recompute=none:
--
--   heads=16 ffn=2816 vocab=50304 batch=32 seq=1024                                  heads of 64
--   dim=768 layers=12 heads=12 ffn=2048 tied=true batch=64 seq=1024                  GPT-2-small
--   layers=28 heads=16 kv_heads=8 head_dim=128 ffn=3072 vocab=151936 tied=true batch=8 seq=2048
--                                                                                    Qwen3-0.6B
--
-- Its ancestor had 226 million parameters in its blocks (329 in all), saw 2.36 billion tokens (1.05
-- epochs) at 129 thousand a second on eight GPUs, and reached a held-out loss of 2.98: the larger
-- model gave 3 %. Capacity and data must grow together.
-- Held-out losses of v6 to v8 are of one million tokens of FineWeb-edu: they compare with each
-- other, and not with those of v0 to v5.
local xt = require "xtrain"

local run = xt.recipe(xt.pretrain.options {
  name = "v8",

  corpus = "fineweb-edu",
  dim = 1024, layers = 18, heads = 32, ffn = 2730,
  dtype = "bf16",
  recompute = "block",

  steps = 36000,
  seq = 256, batch = 32, global_batch = 256,
  prompt = "The most important thing about",
})

xt.pretrain.train(run)
