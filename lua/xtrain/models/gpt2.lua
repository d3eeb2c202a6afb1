-- GPT-2 (Radford et al. 2019): pre-norm blocks with LayerNorm, learned positions, biases, one
-- projection for queries, keys and values, and gelu.
--
--   x = embed[ids] + positions[0 .. S-1]                    (B, S, D)
--   x = x + attention(norm(x));  x = x + W_down gelu(W_up norm(x))   once a block
--   logits = norm(x) W_head^T                               (B, S, V)
local xt = require "xtrain"
local nn = require "xtrain.nn"
local options = require "xtrain.options"
local language = require "xtrain.models.language"
local fail = xt.core.fail

-- ---- attention and MLP -------------------------------------------------------------------------

local attention = nn.class("gpt2.attention")

local function new_attention(o)
  local self = setmetatable({ heads = o.heads, head_dim = o.head_dim,
    dropout = o.attention_dropout }, attention)
  self.qkv = nn.linear { d_in = o.dim, d_out = 3 * o.dim, bias = true, seed = false,
    device = o.device }
  self.out = nn.linear { d_in = o.dim, d_out = o.dim, bias = true, seed = false,
    device = o.device }
  self.how = { causal = true, impl = o.attention }
  return self
end

function attention:forward(x, cache, index, seed)
  local batch, seq, dim = table.unpack(x.shape)
  local shape = { batch, seq, self.heads, self.head_dim }
  local qkv = self.qkv(x) -- (B, S, 3 D)
  local q = qkv:slice(3, 1, dim):reshape(shape)
  local k = qkv:slice(3, dim + 1, 2 * dim):reshape(shape)
  local v = qkv:slice(3, 2 * dim + 1, 3 * dim):reshape(shape)
  if cache then
    k, v = cache:extend(index, k, v)
  end
  local how = nn.attending(self.how, self.dropout, seed, cache)
  return self.out(xt.attention(q, k, v, how):reshape { batch, seq, dim })
end

local mlp = nn.class("gpt2.mlp")

local function new_mlp(o)
  local self = setmetatable({ gelu = { approx = o.gelu } }, mlp)
  self.up = nn.linear { d_in = o.dim, d_out = o.ffn, bias = true, seed = false, device = o.device }
  self.down = nn.linear { d_in = o.ffn, d_out = o.dim, bias = true, seed = false,
    device = o.device }
  return self
end

function mlp:forward(x) return self.down(xt.gelu(self.up(x), self.gelu)) end

-- ---- a block -----------------------------------------------------------------------------------

local function new_block(index, o)
  local self = setmetatable({ index = index, dropout = o.dropout }, language.block)
  self.attn_norm = nn.layernorm { dim = o.dim, eps = o.eps, device = o.device }
  self.attn = new_attention(o)
  self.mlp_norm = nn.layernorm { dim = o.dim, eps = o.eps, device = o.device }
  self.mlp = new_mlp(o)
  return self
end

-- ---- the model ---------------------------------------------------------------------------------

local gpt2 = language.class("gpt2")

-- Raises where there is no learned position for token number `last`.
function gpt2:check_length(last)
  if last > self.config.context then
    fail(("gpt2: position %d is beyond the context of %d"):format(last, self.config.context))
  end
end

function gpt2:start(ids, cache)
  local o = self.config
  if cache and cache.positions then -- whoever feeds them calls check_length
    local weight = nn.compute(self.positions.weight, { dtype = o.dtype })
    return self.embed(ids, o.dtype) + xt.index_select(weight, 1, cache.positions)
  end
  local first = cache and cache.length or 0
  local last = first + ids.shape[2]
  self:check_length(last)
  local positions = nn.compute(self.positions.weight, { dtype = o.dtype })
  return self.embed(ids, o.dtype) + positions:slice(1, first + 1, last)
end

-- gpt2{vocab, dim, layers, heads, ffn = 4 dim, context = 1024, eps = 1e-5, tied = true,
-- gelu = "tanh"|"none", dropout = 0, embed_dropout = 0, attention_dropout = 0, seed = 0, recompute,
-- attention, dtype, device}: options of the same name as in models.qwen3. context is the number of
-- learned positions.
local function new(given)
  local o = options.read("models.gpt2", given, language.options { ffn = options.optional_size,
    context = 1024, eps = 1e-5, tied = true, gelu = "tanh",
    -- a model's config, given back, has these
    head_dim = options.optional, kv_heads = options.optional })
  options.choice("models.gpt2", "gelu", o.gelu, { "tanh", "none" })
  language.check("models.gpt2", o)
  if o.head_dim * o.heads ~= o.dim or o.kv_heads ~= o.heads then
    fail("models.gpt2: head_dim is dim / heads, and kv_heads is heads")
  end
  o.ffn = o.ffn or 4 * o.dim
  local self = setmetatable({ kind = "gpt2", config = o, training = false }, gpt2)
  self.embed = nn.embedding { vocab = o.vocab, dim = o.dim, seed = false, device = o.device }
  self.positions = nn.embedding { vocab = o.context, dim = o.dim, seed = false,
    device = o.device }
  self.blocks = {}
  for i = 1, o.layers do self.blocks[i] = new_block(i, o) end
  self.norm = nn.layernorm { dim = o.dim, eps = o.eps, device = o.device }
  return language.finish(self, { "%.out%.weight$", "%.down%.weight$" })
end

return { gpt2 = new }
