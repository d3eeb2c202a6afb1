-- tiny: a small language model from scratch, on a laptop, in a few minutes.
--
--   ./dev train                                 builds xtrain and runs this file
--   build/release/xtrain recipes/tiny.lua       the same, when it is built
--   ... recipes/tiny.lua steps=200 lr=1e-3      any option below can be overridden
--
-- It learns the King James Bible with a vocabulary of its own and ends with the loss on text that
-- it has never seen, in bits a byte, and a sample.
local xt = require "xtrain"

-- ---- options -----------------------------------------------------------------------------------

local bible = "build/data/bible.txt" -- made when it is missing

local run = xt.recipe {
  name = "tiny",

  text = bible, -- what to learn; its last twentieth is held out
  vocab = 2048, -- size of the byte-level BPE vocabulary

  dim = 224, -- width of the model
  layers = 4,
  heads = 7, -- attention heads, of dim / heads each
  ffn = 608, -- width of the feed-forward part
  dropout = 0.0,
  recompute = "none", -- "block": less memory, more time

  steps = 750,
  batch = 8, -- sequences a step
  seq = 128, -- tokens a sequence
  lr = 3e-3, -- peak of the learning rate
  warmup = 50, -- steps
  weight_decay = 0.1,
  clip = 1.0, -- largest norm of the gradients

  log_every = 20,
  eval_every = 250,
  save_every = 250,
  prompt = "And God said", -- the sample begins with this
}

-- ---- data: made once, in build/data/tiny -------------------------------------------------------

local text, train, held_out
if run.bench == 0 then -- a benchmark makes up its tokens
  text = xt.data.prepare {
    text = run.text, dir = "build/data/tiny", vocab = run.vocab, held_out = 0.05,
    make = run.text == bible and "bible -f gen1:1-rev22:21" or "",
    hint = "the package bible-kjv brings it: ./dev setup",
  }
  train = assert(xt.data.tokens { files = text.train, seq = run.seq, batch = run.batch,
    accum = run.accum, seed = run.seed })
  held_out = assert(xt.data.tokens { files = text.held_out, seq = run.seq, batch = run.batch })
  run:attach { tokenizer = text.tokenizer, bytes_per_token = text.bytes_per_token }
end

-- ---- model, optimizer, schedule ----------------------------------------------------------------

local model = xt.models.qwen3 {
  vocab = text and text.vocab or run.vocab, -- a short text has fewer than were asked for
  dim = run.dim, layers = run.layers, heads = run.heads, ffn = run.ffn,
  tied = true, dropout = run.dropout, recompute = run.recompute, dtype = run.dtype,
  seed = run.seed,
}
model:train()

local opt = xt.optim.adamw(xt.nn.params(model), {
  betas = { 0.9, 0.95 }, weight_decay = run.weight_decay,
})

local lr = xt.schedule.cosine {
  peak = run.lr, min = run.lr / 20, warmup = run.warmup, total = run.options.steps,
}

-- ---- the loop ----------------------------------------------------------------------------------

-- Of a micro-batch: the summed loss, and how many labels it sums.
local function loss_of(ids, labels, seed)
  return model:loss(ids, labels, { seed = seed, reduction = "sum" })
end

for step in run:steps() do
  local norm = run:train(step, {
    data = train, loss = loss_of, optimizer = opt, lr = lr(step), clip = run.clip,
  })
  run:log(step, { lr = lr(step), grad_norm = norm })

  if run:due(step, run.eval_every) then
    local loss = xt.data.evaluate(model, held_out, 16) -- of 16 batches; all of them at the end
    run:log(step, { held_out = loss })
  end
  if run:due(step, run.save_every) then run:save(step) end
end

-- ---- what it has learned -----------------------------------------------------------------------

local loss = xt.data.evaluate(model, held_out)
print(("held-out loss %.4f nats a token, %.4f bits a byte"):format(loss,
  xt.data.bits_per_byte(loss, text.bytes_per_token)))

local tokenizer = assert(xt.tokenizer.load(text.tokenizer))
local ids = xt.generate(model, tokenizer:encode(run.prompt), {
  max = 400, temperature = 0.8, top_p = 0.95, seed = run.seed,
})
local sample = run.prompt .. tokenizer:decode(ids)
local words, last = 0, #sample
for place in sample:gmatch("%S+()") do
  words = words + 1
  if words == 200 then last = place - 1 end
end
print("\n" .. sample:sub(1, last) .. "\n")

print("saved in " .. run.out)
print(("to go on:    xtrain recipes/tiny.lua out=%s resume=auto steps=%d"):format(run.out,
  2 * run.options.steps))
print(('to generate: xtrain generate %s --prompt "In the beginning"'):format(run.out))
