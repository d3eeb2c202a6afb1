-- Qwen3 and Llama: decoders of pre-norm blocks with RMSNorm, rotary positions, grouped-query
-- attention and SwiGLU. Llama is Qwen3 without the norms of queries and keys.
--
--   x = embed[ids]                                       (B, S, D)
--   x = x + attention(norm(x));  x = x + swiglu(norm(x))   once a block
--   logits = norm(x) W_head^T                            (B, S, V)
local xt = require "xtrain"
local nn = require "xtrain.nn"
local options = require "xtrain.options"
local kv_cache = require "xtrain.kv_cache"
local active = require "xtrain.active"
local fail = xt.core.fail

-- Where dropout stands in a block; mixed into the seed after the block's number.
local SITE_ATTENTION, SITE_MLP = 0xA77, 0xF7F

-- ---- a block -----------------------------------------------------------------------------------

local block = nn.class("block")

local function new_block(index, o)
  local self = setmetatable({ index = index, dropout = o.dropout }, block)
  self.attn_norm = nn.rmsnorm { dim = o.dim, eps = o.eps, device = o.device }
  self.attn = nn.attention { dim = o.dim, heads = o.heads, kv_heads = o.kv_heads,
    head_dim = o.head_dim, rope_theta = o.rope_theta, rope_layout = o.rope_layout,
    qk_norm = o.qk_norm, eps = o.eps, impl = o.attention, seed = false, device = o.device }
  self.mlp_norm = nn.rmsnorm { dim = o.dim, eps = o.eps, device = o.device }
  self.mlp = nn.swiglu { dim = o.dim, ffn = o.ffn, seed = false, device = o.device }
  return self
end

-- seed: of this micro-batch, nil when nothing is dropped.
function block:forward(x, seed, cache)
  local y = self.attn(self.attn_norm(x), cache, self.index)
  if seed then y = xt.dropout(y, self.dropout, xt.seed(seed, self.index, SITE_ATTENTION)) end
  x = x + y
  y = self.mlp(self.mlp_norm(x))
  if seed then y = xt.dropout(y, self.dropout, xt.seed(seed, self.index, SITE_MLP)) end
  return x + y
end

-- ---- the model ---------------------------------------------------------------------------------

local decoder = nn.class("decoder")

local function build(kind, o)
  options.choice("models." .. kind, "recompute", o.recompute, { "none", "block", "selective" })
  options.choice("models." .. kind, "dtype", o.dtype, { "f32", "bf16", "f64" })
  o.kv_heads = o.kv_heads or o.heads
  o.head_dim = o.head_dim or o.dim // o.heads
  local self = setmetatable({ kind = kind, config = o, training = false }, decoder)
  self.embed = nn.embedding { vocab = o.vocab, dim = o.dim, seed = false, device = o.device }
  self.blocks = {}
  for i = 1, o.layers do self.blocks[i] = new_block(i, o) end
  self.norm = nn.rmsnorm { dim = o.dim, eps = o.eps, device = o.device }
  if o.tied then
    self.head = { weight = self.embed.weight }
  else
    self.head = nn.linear { d_in = o.dim, d_out = o.vocab, seed = false, device = o.device }
  end
  -- Both projections of a block add to the residual stream, whose variance would grow with depth.
  if o.seed ~= false then
    local residual = 0.02 / math.sqrt(2 * math.max(o.layers, 1))
    nn.init(self, o.seed, function(name)
      return (name:find("%.wo$") or name:find("%.down$")) and residual or 0.02
    end)
  end
  if active.run then active.run:enter_model(self) end
  return self
end

local function known(qk_norm)
  return { vocab = options.required, dim = options.required, layers = options.required,
    heads = options.required, kv_heads = options.optional, head_dim = options.optional,
    ffn = options.required, rope_theta = 10000.0, rope_layout = "half", eps = 1e-6,
    tied = false, qk_norm = qk_norm, dropout = 0.0, seed = options.optional, recompute = "none",
    attention = "auto", dtype = "f32", device = options.optional }
end

-- ids (B, S) integers -> (B, S, D), normalised, in the compute dtype. opts: {seed, cache}.
function decoder:hidden(ids, opts)
  local seed, cache = opts and opts.seed, opts and opts.cache
  local config = self.config
  if not self.training or config.dropout == 0 then
    seed = nil
  elseif seed == nil then
    fail(self.kind .. ": dropout in training mode needs a seed: model:loss(ids, labels, "
      .. "{seed = xt.seed(run.seed, step, micro)})")
  end
  if xt.core.graph_recording() then require("xtrain.graph").name_params(nn.params(self)) end
  local x = self.embed(ids, config.dtype)
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
function decoder:forward(ids, opts)
  local x = self:hidden(ids, opts)
  if opts and opts.last then x = x:slice(2, x.shape[2], x.shape[2]) end
  return nn.project(x, self.head.weight)
end

local loss_options = { seed = options.optional, reduction = "mean" }

-- labels (B, S): labels[b][s] follows ids[b][s]; -100 is ignored. Returns the loss and the number
-- of labels that count; in a graph, as a 0-dim tensor.
function decoder:loss(ids, labels, given)
  local o = options.read("loss", given, loss_options)
  local x = self:hidden(ids, o)
  local loss = xt.linear_cross_entropy(x, nn.compute(self.head.weight, x), labels,
    { reduction = o.reduction })
  local count = xt.count_valid(labels)
  return loss, xt.core.graph_recording() and count or count:item()
end

-- A cache for `rows` tokens to begin with: model(ids, {cache = cache}) continues after what it
-- holds.
function decoder:cache(rows) return kv_cache.new(rows) end

-- Weights that take part in matrix products for each token, the head included.
function decoder:matmul_weights()
  local count = self.head.weight.numel
  for _, param in ipairs(nn.params(self.blocks)) do
    if param.tensor.ndim == 2 then count = count + param.tensor.numel end
  end
  return count
end

-- qwen3{vocab, dim, layers, heads, kv_heads = heads, head_dim = dim / heads, ffn, rope_theta = 1e4,
-- eps = 1e-6, tied = false, qk_norm = true, dropout = 0, seed = 0, recompute = "none"|"block"|
-- "selective", attention = "auto"|"composed"|"flash", dtype = "f32"|"bf16", device,
-- rope_layout = "half"|"interleaved"}
-- seed = false leaves the weights zero, for a caller that loads them.
local function qwen3(given)
  local o = options.read("models.qwen3", given, known(true))
  if o.seed == nil then o.seed = 0 end
  return build("qwen3", o)
end

-- llama{...}: as qwen3, with qk_norm = false.
local function llama(given)
  local o = options.read("models.llama", given, known(false))
  if o.seed == nil then o.seed = 0 end
  return build("llama", o)
end

return { qwen3 = qwen3, llama = llama }
