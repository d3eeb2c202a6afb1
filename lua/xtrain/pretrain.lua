-- Pretraining of a language model on token shards: what recipes v0 to v8 and gpt2 share. A recipe
-- says what is its own and leaves the rest to `train`, which reads like a recipe itself: to change
-- something in it, copy it into yours.
--
--   local run = xt.recipe(xt.pretrain.options { name = "mine", dim = 512, layers = 16, ... })
--   xt.pretrain.train(run)
local xt = require "xtrain"
local options = require "xtrain.options"
local file = require "xtrain.core.file"
local fail = xt.core.fail

local M = {}

-- ---- options -----------------------------------------------------------------------------------

-- What a recipe does not say itself. It must say dim, layers, heads, ffn, steps, seq, batch and
-- global_batch.
local DEFAULTS = {
  family = "qwen3", -- of the models below

  corpus = "tinystories", -- the shards are in data/CORPUS
  data = "", -- another folder with token shards, *.bin
  held_out = 1000000, -- the last tokens of the shards, which are never trained on
  text = "", -- a text file to learn instead; its last twentieth is held out
  tokenizer = "", -- of the shards, where it is not beside them; of the text, or it gets its own

  vocab = 50257, -- GPT-2's; of a text without tokenizer=, the most that its own may have
  tied = false, -- the head is the embedding
  dropout = 0.0,
  recompute = "none", -- "block" or "selective": less memory, more time
  attention = "auto",

  accum = 0, -- micro-batches a step; 0: global_batch / (ranks x batch)
  lr = 6e-4, -- at the end of the warm-up
  min_lr = 6e-5, -- at the last step
  warmup_share = 0.05, -- of the steps
  betas = { 0.9, 0.95 },
  weight_decay = 0.1, -- of matrices
  clip = 1.0, -- largest norm of the gradients

  eval_every = 500, -- steps; held-out loss and a sample
  eval_batches = 16, -- of the held-out tokens
  final_batches = 0, -- the same at the end; all when 0
  save_every = 500,
  prompt = "Once upon a time", -- samples begin with this
  sample_max = 120, -- tokens; 0: no samples
}

-- With smoke=true, unless they are given: the same parts, so small that any machine is done at
-- once. Two micro-batches a step.
local SMOKE = {
  dim = 64, layers = 2, heads = 2, ffn = 171, batch = 2, global_batch = 4, seq = 64,
  held_out = 1000, eval_every = 2, eval_batches = 2, final_batches = 4, sample_max = 24,
}

-- Options of a family, and how a model is made of them.
local FAMILIES = {
  qwen3 = {
    options = {
      kv_heads = 0, -- as many as heads when 0
      head_dim = 0, -- dim / heads when 0
      rope_theta = 10000.0,
      eps = 1e-5,
      qk_norm = true,
    },
    make = function(run, o)
      o.kv_heads = run.kv_heads > 0 and run.kv_heads or nil
      o.head_dim = run.head_dim > 0 and run.head_dim or nil
      o.rope_theta, o.eps, o.qk_norm = run.rope_theta, run.eps, run.qk_norm
      return xt.models.qwen3(o)
    end,
  },
  gpt2 = {
    options = {
      context = 0, -- learned positions; seq when 0
      eps = 1e-5,
    },
    make = function(run, o)
      o.context, o.eps = run.context > 0 and run.context or run.seq, run.eps
      return xt.models.gpt2(o)
    end,
  },
}

local function family_of(name)
  options.choice("pretrain", "family", name, options.names(FAMILIES))
  return FAMILIES[name]
end

-- options{name = ..., what is the recipe's own} -> all options, for xt.recipe.
function M.options(given)
  local family = family_of(given.family or DEFAULTS.family)
  local all, smoke = {}, {}
  for _, list in ipairs { DEFAULTS, family.options, given } do
    for name, value in pairs(list) do all[name] = value end
  end
  for _, list in ipairs { SMOKE, given.smoke or {} } do
    for name, value in pairs(list) do smoke[name] = value end
  end
  all.smoke = smoke
  return all
end

-- ---- data --------------------------------------------------------------------------------------

local HELD_OUT_SHARE, SMOKE_HELD_OUT_SHARE = 0.05, 0.2 -- of a text
local SMOKE_BYTES = 1 << 20 -- that a smoke run takes of a text
local FEWEST_BYTES = 1 << 14 -- a shorter text is repeated in a smoke run
local SMOKE_VOCAB = 512

-- "one two three ... nine hundred ninety-nine": a text for when there is none.
local function counting()
  local ones = { "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen" }
  local tens = { false, "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty",
    "ninety" }
  local lines = {}
  for i = 1, 999 do
    local words, rest = {}, i % 100
    if i >= 100 then words[1] = ones[i // 100] .. " hundred" end
    if rest >= 20 then
      words[#words + 1] = tens[rest // 10] .. (rest % 10 > 0 and "-" .. ones[rest % 10] or "")
    elseif rest > 0 then
      words[#words + 1] = ones[rest]
    end
    lines[i] = "Then comes " .. table.concat(words, " ") .. ".\n"
  end
  return table.concat(lines)
end

-- The token shards of a folder, in the order of their names.
local function shards_in(dir)
  local found = {}
  for _, name in ipairs(file.exists(dir) == "folder" and file.list(dir) or {}) do
    if name:find "%.bin$" then found[#found + 1] = dir .. "/" .. name end
  end
  return found
end

local HOW_TO_MAKE = [[
%s: there are no token shards (*.bin) in %s. They are made by

    xtrain tokenize --tokenizer gpt2 --out %s FILE...

where gpt2 is a folder with GPT-2's vocab.bpe and encoder.json (or its tokenizer.json), and each
FILE is text of %s, plain or JSONL with a field "text", .gz and .zst too. Shards that are
elsewhere: data=FOLDER. Without shards: text=FILE learns any text, smoke=true takes three small
steps on any machine, bench=5 times steps on made-up tokens.]]

local function must(value, message)
  if not value then fail(message) end
  return value
end

-- A tokenizer whose ids all have a row in the model's embedding.
local function load_tokenizer(run, path)
  local tokenizer = must(xt.tokenizer.load(path))
  if tokenizer.vocab_size > run.vocab then
    fail(("%s: %s has %d ids, and vocab=%d is less"):format(run.name, path, tokenizer.vocab_size,
      run.vocab))
  end
  return tokenizer
end

-- The path of the tokenizer beside shards, or nil.
local function beside(dir)
  if file.exists(dir .. "/tokenizer.json") or file.exists(dir .. "/vocab.bpe") then return dir end
end

-- {train, held_out, tokenizer or nil, bytes_per_token or nil, vocab}
local function of_shards(run, dir, files)
  local o = run.options
  local function tokens(part)
    local training = part == "train"
    return must(xt.data.tokens { files = files, seq = run.seq, batch = run.batch, part = part,
      held_out = run.held_out, seed = run.seed, accum = training and o.accum or 1,
      rank = training and run.own.rank or 0, world = training and run.own.world or 1 })
  end
  local path = run.tokenizer ~= "" and run.tokenizer or beside(dir)
  return { train = tokens "train", held_out = tokens "held_out", vocab = run.vocab,
    tokenizer = path and load_tokenizer(run, path) }
end

-- The text of a smoke run, in the run folder: the beginning of the one that was given, or counting.
local function smoke_text(run, dir)
  local text = counting()
  if run.text ~= "" then
    local handle = must(io.open(run.text, "rb"))
    text = handle:read(SMOKE_BYTES)
    handle:close()
    if not text then fail(run.name .. ": there is nothing in " .. run.text) end
    if #text < FEWEST_BYTES then text = (text .. "\n"):rep(FEWEST_BYTES // #text + 1) end
  else
    run.own.progress:say(run.name .. ": there are no token shards, so that this smoke run learns "
      .. "to count; text=FILE gives it another text")
  end
  must(file.mkdir(dir))
  must(file.write_atomic(dir .. "/text.txt", text))
  return dir .. "/text.txt"
end

-- "stories-gpt2", "stories-50257": what the tokens of a text depend on.
local function name_of_text(run)
  local function base(path)
    return path:gsub("/+$", ""):match("[^/]*$"):gsub("(.)%.%w+$", "%1")
  end
  return base(run.text) .. "-" .. (run.tokenizer ~= "" and base(run.tokenizer) or run.vocab)
end

-- The same of a text.
local function of_text(run)
  local o = run.options
  local dir = o.smoke and run.out .. "/data" or "data/" .. name_of_text(run)
  if run.tokenizer ~= "" then load_tokenizer(run, run.tokenizer) end
  local made = xt.data.prepare {
    text = o.smoke and smoke_text(run, dir) or run.text, dir = dir, tokenizer = run.tokenizer,
    vocab = o.smoke and math.min(run.vocab, SMOKE_VOCAB) or run.vocab,
    held_out = o.smoke and SMOKE_HELD_OUT_SHARE or HELD_OUT_SHARE,
  }
  local tokenizer = must(xt.tokenizer.load(made.tokenizer))
  return { tokenizer = tokenizer, bytes_per_token = made.bytes_per_token,
    vocab = run.tokenizer ~= "" and run.vocab or tokenizer.vocab_size,
    train = must(xt.data.tokens { files = made.train, seq = run.seq, batch = run.batch,
      seed = run.seed, accum = o.accum, rank = run.own.rank, world = run.own.world }),
    held_out = must(xt.data.tokens { files = made.held_out, seq = run.seq, batch = run.batch }) }
end

local function corpus_of(run)
  if run.options.bench > 0 then return { vocab = run.vocab } end
  if run.text ~= "" then
    if run.data ~= "" then fail(run.name .. ": text= and data= are two sources: give one") end
    return of_text(run)
  end
  local dir = run.data ~= "" and run.data or "data/" .. run.corpus
  local files = shards_in(dir)
  if #files > 0 then return of_shards(run, dir, files) end
  if run.options.smoke and run.data == "" then return of_text(run) end
  fail(HOW_TO_MAKE:format(run.name, dir, dir, run.corpus))
end

-- ---- batch, model, schedule --------------------------------------------------------------------

-- A step sees global_batch sequences: those of all ranks, micro-batches and rows. Settles accum.
local function settle_batch(run)
  local o, world = run.options, run.own.world
  if o.accum == 0 then
    local rows = world * run.batch
    if o.bench > 0 then
      o.accum = 1 -- a step of one micro-batch is what is timed
    elseif run.global_batch % rows == 0 then
      o.accum = run.global_batch // rows
    else
      fail(("%s: global_batch %d is no multiple of %d ranks x batch %d; accum=N sets the "
        .. "micro-batches a step itself"):format(run.name, run.global_batch, world, run.batch))
    end
    run.accum = o.accum
  end
  return world * run.batch * o.accum
end

-- model(run, vocab) -> the model that the options of the run describe, with vocab tokens.
function M.model(run, vocab)
  return family_of(run.family).make(run, {
    vocab = vocab, dim = run.dim, layers = run.layers, heads = run.heads, ffn = run.ffn,
    tied = run.tied, dropout = run.dropout, recompute = run.recompute, attention = run.attention,
    dtype = run.dtype, seed = run.seed,
  })
end

-- schedule(run) -> lr(step): linear warm-up over a share of the steps, then half a cosine.
function M.schedule(run)
  local steps = run.options.steps
  return xt.schedule.cosine { peak = run.lr, min = run.min_lr, total = steps,
    warmup = math.floor(run.warmup_share * steps + 0.5) }
end

-- ---- samples -----------------------------------------------------------------------------------

-- Text with U+FFFD in the place of bytes that are no UTF-8.
local function legible(text)
  local parts, first = {}, 1
  while true do
    local _, bad = utf8.len(text, first)
    parts[#parts + 1] = text:sub(first, (bad or 0) - 1)
    if not bad then return table.concat(parts) end
    parts[#parts + 1] = "\u{FFFD}"
    first = bad + 1
  end
end

-- What the model makes of the prompt, up to the end of a document or of its learned positions.
local function sample(run, model, tokenizer)
  local ids, prompt, max = {}, tokenizer:encode(run.prompt), run.sample_max
  if model.check_length then max = math.min(max, model.config.context - #prompt) end
  for _, id in ipairs(xt.generate(model, prompt, {
    max = max, temperature = 0.8, top_p = 0.95, seed = run.seed,
    stop = tokenizer:id "<|endoftext|>",
  })) do
    -- A vocabulary that is padded has ids that stand for nothing.
    if id < tokenizer.vocab_size then ids[#ids + 1] = id end
  end
  return legible(run.prompt .. tokenizer:decode(ids))
end

-- ---- the run -----------------------------------------------------------------------------------

-- "329.4M parameters; a step is 256 sequences of 256 tokens, 32 x 8; 36000 steps see 2.4B tokens"
local function say_what(run, model, rows)
  local count = require("xtrain.log").count
  local numbers = 0
  for _, param in ipairs(xt.nn.params(model)) do numbers = numbers + param.tensor.numel end
  run.own.progress:say(("%s: %s parameters; a step is %d sequences of %d tokens, batch %d x "
    .. "accum %d; %d steps see %s tokens"):format(run.name, count(numbers), rows, run.seq,
    run.batch, run.options.accum, run.options.steps, count(run.options.steps * rows * run.seq)))
end

-- train(run): from options to a trained model: data, model, optimizer, loop, and what it has
-- learned. run: xt.recipe(xt.pretrain.options {...}).
function M.train(run)
  local o = run.options
  local rows = settle_batch(run)
  local corpus = corpus_of(run)
  local tokenizer = run.sample_max > 0 and corpus.tokenizer
  run:attach { tokenizer = corpus.tokenizer, bytes_per_token = corpus.bytes_per_token }

  local model = M.model(run, corpus.vocab)
  model:train()
  local opt = xt.optim.adamw(xt.nn.params(model), {
    betas = run.betas, weight_decay = run.weight_decay,
  })
  local lr = M.schedule(run)
  if o.bench == 0 and not run.own.replay then say_what(run, model, rows) end

  -- Of a micro-batch: the summed loss, and how many labels it sums.
  local function loss_of(ids, labels, seed)
    return model:loss(ids, labels, { seed = seed, reduction = "sum" })
  end

  for step in run:steps() do
    local norm = run:train(step, {
      data = corpus.train, loss = loss_of, optimizer = opt, lr = lr(step), clip = run.clip,
    })
    run:log(step, { lr = lr(step), grad_norm = norm })

    if run:due(step, run.eval_every) then
      run:log(step, {
        held_out = xt.data.evaluate(model, corpus.held_out, run.eval_batches),
        sample = tokenizer and sample(run, model, tokenizer) or nil,
      })
    end
    if run:due(step, run.save_every) then run:save(step) end
  end

  local loss = xt.data.evaluate(model, corpus.held_out,
    run.final_batches > 0 and run.final_batches or nil)
  print(("held-out loss %.4f nats a token"):format(loss) .. (corpus.bytes_per_token
    and (", %.4f bits a byte"):format(xt.data.bits_per_byte(loss, corpus.bytes_per_token)) or ""))
  if tokenizer then print("\n" .. sample(run, model, tokenizer) .. "\n") end
  print("saved in " .. run.out)
  if tokenizer and not o.smoke then
    print(("to go on:    the same command with out=%s resume=auto steps=%d"):format(run.out,
      2 * o.steps))
    print(('to generate: xtrain generate %s --prompt "%s"'):format(run.out, run.prompt))
  end
end

return M
