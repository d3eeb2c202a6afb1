-- Qwen3 and Llama: decoders of pre-norm blocks with RMSNorm, rotary positions, grouped-query
-- attention and SwiGLU. Llama is Qwen3 without the norms of queries and keys.
--
--   x = embed[ids]                                       (B, S, D)
--   x = x + attention(norm(x));  x = x + swiglu(norm(x))   once a block
--   logits = norm(x) W_head^T                            (B, S, V)
local nn = require "xtrain.nn"
local options = require "xtrain.options"
local language = require "xtrain.models.language"

-- ---- a block -----------------------------------------------------------------------------------

local function new_block(index, o)
  local self = setmetatable({ index = index, dropout = o.dropout }, language.block)
  self.attn_norm = nn.rmsnorm { dim = o.dim, eps = o.eps, device = o.device }
  self.attn = nn.attention { dim = o.dim, heads = o.heads, kv_heads = o.kv_heads,
    head_dim = o.head_dim, rope_theta = o.rope_theta, rope_layout = o.rope_layout,
    rope_scaling = o.rope_scaling,
    qk_norm = o.qk_norm, eps = o.eps, impl = o.attention, dropout = o.attention_dropout,
    seed = false, device = o.device }
  self.mlp_norm = nn.rmsnorm { dim = o.dim, eps = o.eps, device = o.device }
  self.mlp = nn.swiglu { dim = o.dim, ffn = o.ffn, seed = false, device = o.device }
  return self
end

-- ---- the model ---------------------------------------------------------------------------------

local decoder = language.class("decoder")

function decoder:start(ids) return self.embed(ids, self.config.dtype) end

local function build(kind, qk_norm, given)
  local o = options.read("models." .. kind, given, language.options {
    kv_heads = options.optional_size, head_dim = options.optional_size, ffn = options.size,
    rope_theta = 10000.0, rope_layout = "half", rope_scaling = options.optional, eps = 1e-6,
    qk_norm = qk_norm })
  language.check("models." .. kind, o)
  local self = setmetatable({ kind = kind, config = o, training = false }, decoder)
  self.embed = nn.embedding { vocab = o.vocab, dim = o.dim, seed = false, device = o.device }
  self.blocks = {}
  for i = 1, o.layers do self.blocks[i] = new_block(i, o) end
  self.norm = nn.rmsnorm { dim = o.dim, eps = o.eps, device = o.device }
  return language.finish(self, { "%.wo$", "%.down$" })
end

-- qwen3{vocab, dim, layers, heads, kv_heads = heads, head_dim = dim / heads, ffn, rope_theta = 1e4,
-- rope_layout = "half"|"interleaved", rope_scaling (as in nn.attention), eps = 1e-6, tied = false,
-- qk_norm = true, dropout = 0, embed_dropout = 0, attention_dropout = 0, seed = 0,
-- recompute = "none"|"block"|"selective", attention = "auto"|"composed"|"flash",
-- dtype = "f32"|"bf16", context, device}
-- dropout: of what attention and MLP add to the residual stream; attention_dropout: of the
-- probabilities, after the softmax. seed = false leaves the weights zero, for a caller that loads
-- them. context: the longest sequence
-- the model is meant for; written to config.json, and no bound here.
local function qwen3(given) return build("qwen3", true, given) end

-- llama{...}: as qwen3, with qk_norm = false.
local function llama(given) return build("llama", false, given) end

return { qwen3 = qwen3, llama = llama }
