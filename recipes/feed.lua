-- feed: dropout as data. A small transformer is trained by feeding masks on what its blocks add to
-- the residual stream, and sampled by not feeding them; beside it the same model with op.dropout,
-- whose losses must be the same numbers.
--
--   build/release/xtrain recipes/feed.lua dropout=0.1
local xt = require "xtrain"

-- ---- options -----------------------------------------------------------------------------------

local run = xt.recipe {
  name = "feed",
  vocab = 32, -- tokens; the text counts, every sequence from another start
  dim = 64, layers = 2, heads = 4, ffn = 128,
  dropout = 0.0, -- probability of dropping what a block adds
  steps = 200, batch = 8, seq = 32,
  lr = 3e-3, warmup = 10, clip = 1.0,
}

-- ---- the model, with a place where something may be done to what a block adds -----------------

local function new_model()
  local model = { embed = xt.nn.embedding { vocab = run.vocab, dim = run.dim, seed = false },
    blocks = {}, norm = xt.nn.rmsnorm { dim = run.dim } }
  for i = 1, run.layers do
    model.blocks[i] = {
      attn_norm = xt.nn.rmsnorm { dim = run.dim },
      attn = xt.nn.attention { dim = run.dim, heads = run.heads, seed = false },
      mlp_norm = xt.nn.rmsnorm { dim = run.dim },
      mlp = xt.nn.swiglu { dim = run.dim, ffn = run.ffn, seed = false },
    }
  end
  return xt.nn.init(model, run.seed, 0.1)
end

-- drop(y, layer, site) -> y with elements dropped. -> logits (B, S, V)
local function forward(model, ids, drop)
  local x = model.embed(ids)
  for i, block in ipairs(model.blocks) do
    x = x + drop(block.attn(block.attn_norm(x)), i, 1)
    x = x + drop(block.mlp(block.mlp_norm(x)), i, 2)
  end
  return xt.linear(model.norm(x), model.embed.weight)
end

local function loss_of(logits, labels)
  return xt.cross_entropy(logits:reshape { -1, run.vocab }, labels:reshape { -1 })
end

-- ---- data: counting, from a start that the step draws -------------------------------------------

local function batch(step)
  local start = xt.cast(xt.rand({ run.batch, 1 }, { seed = xt.seed(run.seed, step) }) * run.vocab,
    "i64")
  local all = start + xt.arange(run.seq + 1):reshape { 1, -1 }
  all = all - xt.cast(xt.cast(all, "f64") / run.vocab, "i64") * run.vocab
  all = xt.cast(all, "i32")
  return all:slice(2, 1, run.seq):contiguous(), all:slice(2, 2, run.seq + 1):contiguous()
end

-- ---- fed: one graph that is trained and sampled -------------------------------------------------

local fed = new_model()
local fed_opt = xt.optim.adamw(xt.nn.params(fed), { weight_decay = 0.1 })
local like = xt.zeros({ run.batch, run.seq }, { dtype = "i32" })
local sites = {} -- {name, layer, site}

local g = xt.graph(function(b)
  local function drop(y, layer, site)
    local name = ("mask.%d.%d"):format(layer, site)
    if not b.inputs[name] then sites[#sites + 1] = { name, layer, site } end
    return xt.nn.feed_dropout { name }(y, b)
  end
  b:state(fed)
  local ids = b:input("ids", like)
  local logits = forward(fed, ids, drop)
  b:export("sample", logits)
  local loss = loss_of(logits, b:input("labels", like))
  b:export("eval", loss)
  loss:backward()
  local lr, step = b:input("lr", xt.tensor(0, { dtype = "f64" })), b:input("step", 1)
  b:export("train", { loss = loss, norm = fed_opt:step(lr, { clip = run.clip, step = step }) })
end)

-- ---- beside it, the op --------------------------------------------------------------------------

local eager = new_model()
local eager_opt = xt.optim.adamw(xt.nn.params(eager), { weight_decay = 0.1 })
run:attach { model = eager }

local lr = xt.schedule.cosine { peak = run.lr, min = run.lr / 10, warmup = run.warmup,
  total = run.options.steps }

-- ---- the loop -----------------------------------------------------------------------------------

local same = 0
for step in run:steps() do
  local ids, labels = batch(step)
  local seed = xt.seed(run.seed, step, "drop")

  local masks = {}
  for _, each in ipairs(sites) do
    masks[each[1]] = xt.dropout_mask({ run.batch, run.seq, run.dim }, run.dropout,
      xt.seed(seed, each[2], each[3]))
  end
  local out = g:run("train",
    { { ids = ids, labels = labels, lr = lr(step), step = step }, masks })

  local loss = loss_of(forward(eager, ids, function(y, layer, site)
    return xt.dropout(y, run.dropout, xt.seed(seed, layer, site))
  end), labels)
  run:backward(loss, 1)
  local norm = eager_opt:step(lr(step), { clip = run.clip })
  if out.loss:digest() == loss:digest() and out.norm:digest() == norm:digest() then
    same = same + 1
  end
  run:log(step, { lr = lr(step), grad_norm = norm, fed_loss = out.loss })
end

-- ---- what it has learned, with nothing fed but tokens -------------------------------------------

local ids, labels = batch(0)
local likely = xt.argmax(g:run("sample", { ids = ids }), -1)
print(("steps whose loss and norm are the same bits in both forms: %d of %d"):format(same,
  run.options.steps))
print(("without masks: loss %.4f; %s"):format(g:run("eval", { ids = ids, labels = labels }):item(),
  g:describe("sample", { "ids" }):match "^[^\n]*"))
print("it has seen " .. table.concat(ids:select(1, 1):slice(1, 1, 8):totable(), " ")
  .. " and says " .. table.concat(likely:select(1, 1):slice(1, 1, 8):totable(), " "))
