-- What every language model here shares: blocks with recomputation, the head, the loss, the cache.
-- A model has `config` (the options it was made from), `embed`, `blocks`, `norm` and `head`, and a
-- method start(ids, cache) -> (B, S, D) that says how a sequence enters the blocks.
local xt = require "xtrain"
local nn = require "xtrain.nn"
local options = require "xtrain.options"
local kv_cache = require "xtrain.kv_cache"
local active = require "xtrain.active"
local fail = xt.core.fail

local M = {}

-- Where dropout stands; mixed into the seed after the block's number (0: before the blocks).
M.SITE_ATTENTION, M.SITE_MLP = 0xA77, 0xF7F -- what is added to the residual stream
M.SITE_PROBABILITIES, M.SITE_EMBED = 0x50F, 0xE3B

-- The options of every model; `more` adds those of a family.
function M.options(more)
  local known = { vocab = options.size, dim = options.size, layers = options.size,
    heads = options.size, context = options.optional_size, tied = false, dropout = 0.0,
    embed_dropout = 0.0, attention_dropout = 0.0, seed = options.optional, recompute = "none",
    attention = "auto", dtype = "f32", device = options.optional,
    special_ids = options.optional } -- of a config.json that was loaded, to be written again
  for name, default in pairs(more) do known[name] = default end
  return known
end

-- Checks what options.read cannot, and fills in what follows from other options.
function M.check(what, o)
  options.choice(what, "recompute", o.recompute, { "none", "block", "selective" })
  options.choice(what, "dtype", o.dtype, { "f32", "bf16", "f64" })
  for _, name in ipairs { "dropout", "embed_dropout", "attention_dropout" } do
    options.probability(what, name, o[name])
  end
  if o.heads == 0 then fail(what .. ": option 'heads' is 0, wanted at least one") end
  if not o.head_dim and o.dim % o.heads ~= 0 then
    fail(("%s: dim %d is no multiple of heads %d"):format(what, o.dim, o.heads))
  end
  o.head_dim = o.head_dim or o.dim // o.heads
  o.kv_heads = o.kv_heads or o.heads
  if o.seed == nil then o.seed = 0 end
end

-- ---- a block -----------------------------------------------------------------------------------

-- A pre-norm block has attn_norm, attn, mlp_norm and mlp, its number `index` and `dropout`; `attn`
-- takes (x, cache, index, seed), the seed of what it drops itself.
local block = nn.class("block")
M.block = block

-- seed: of this micro-batch, nil when nothing is dropped.
function block:forward(x, seed, cache)
  local y = self.attn(self.attn_norm(x), cache, self.index,
    seed and xt.seed(seed, self.index, M.SITE_PROBABILITIES))
  if seed then y = xt.dropout(y, self.dropout, xt.seed(seed, self.index, M.SITE_ATTENTION)) end
  x = x + y
  y = self.mlp(self.mlp_norm(x))
  if seed then y = xt.dropout(y, self.dropout, xt.seed(seed, self.index, M.SITE_MLP)) end
  return x + y
end

-- ---- the methods -------------------------------------------------------------------------------

local language = {
  decodes_in_graphs = true, -- forward takes a cache of kv_cache.fed
}

-- Makes a class of models.
function M.class(name)
  local class = nn.class(name)
  for method, fn in pairs(language) do class[method] = fn end
  return class
end

-- Makes the head and draws the weights; `residual` names the projections that add to the residual
-- stream, whose variance would grow with depth. For the end of a constructor.
function M.finish(self, residual)
  local o = self.config
  if o.tied then
    self.head = { weight = self.embed.weight }
  else
    self.head = nn.linear { d_in = o.dim, d_out = o.vocab, seed = false, device = o.device }
  end
  if o.seed ~= false then
    local small = 0.02 / math.sqrt(2 * math.max(o.layers, 1))
    nn.init(self, o.seed, function(name)
      for _, pattern in ipairs(residual) do
        if name:find(pattern) then return small end
      end
      return 0.02
    end)
  end
  if active.run then active.run:enter_model(self) end
  return self
end

-- ids (B, S) integers -> (B, S, D), normalised, in the compute dtype. opts: {seed, cache}.
function language:hidden(ids, opts)
  local seed, cache = opts and opts.seed, opts and opts.cache
  local config = self.config
  if not self.training
      or config.dropout + config.embed_dropout + config.attention_dropout == 0 then
    seed = nil
  elseif seed == nil then
    fail(self.kind .. ": dropout in training mode needs a seed: model:loss(ids, labels, "
      .. "{seed = xt.seed(run.seed, step, micro)})")
  end
  if xt.core.graph_recording() then require("xtrain.graph").name_params(nn.params(self)) end
  local x = self:start(ids, cache)
  if seed then x = xt.dropout(x, config.embed_dropout, xt.seed(seed, 0, M.SITE_EMBED)) end
  local recompute = self.training and not cache and config.recompute
  for _, each in ipairs(self.blocks) do
    if recompute == "block" then
      x = xt.checkpoint(each.forward, each, x, seed)
    elseif recompute == "selective" then
      x = xt.checkpoint({ selective = true }, each.forward, each, x, seed)
    else
      x = each:forward(x, seed, cache)
    end
  end
  if cache then cache:advance(ids.shape[2]) end
  return self.norm(x)
end

-- ids (B, S) -> logits (B, S, V). opts: {seed, cache, last}; last: of the last position alone.
function language:forward(ids, opts)
  local x = self:hidden(ids, opts)
  if opts and opts.last then x = x:slice(2, x.shape[2], x.shape[2]) end
  return nn.project(x, self.head.weight)
end

local loss_options = { seed = options.optional, reduction = "mean" }

-- labels (B, S): labels[b][s] follows ids[b][s]; -100 is ignored. Returns the loss and the number
-- of labels that count; in a graph and on a GPU, where nobody waits for it, as a 0-dim tensor.
function language:loss(ids, labels, given)
  local o = options.read("loss", given, loss_options)
  local x = self:hidden(ids, o)
  local loss = xt.linear_cross_entropy(x, nn.compute(self.head.weight, x), labels,
    { reduction = o.reduction })
  local count = xt.count_valid(labels)
  local stays = xt.core.graph_recording() or count.device ~= "cpu"
  return loss, stays and count or count:item()
end

-- A cache for `rows` tokens to begin with: model(ids, {cache = cache}) continues after what it
-- holds.
function language:cache(rows) return kv_cache.new(rows) end

-- Weights that take part in matrix products for each token, the head included.
function language:matmul_weights()
  local count = self.head.weight.numel
  for _, param in ipairs(nn.params(self.blocks)) do
    if param.tensor.ndim == 2 then count = count + param.tensor.numel end
  end
  return count
end

return M
