-- Layers: plain tables of tensors and sub-layers. Calling a layer runs its `forward`. Parameters
-- are the variables found by walking the table, so a model needs no list of them, and a path such
-- as "blocks.3.attn.wq" is where one lies. Weights are [out, in].
local xt = require "xtrain"
local options = require "xtrain.options"
local rope = require "xtrain.rope"
local fail = xt.core.fail

local M = {}

-- ---- what a layer is ---------------------------------------------------------------------------

local layer = {} -- the methods of every layer

-- Makes a class of layers; its instances are callable and have train and eval.
function M.class(name)
  local class = setmetatable({ kind = name }, { __index = layer })
  class.__index = class
  class.__name = name
  class.__call = function(self, ...) return self:forward(...) end
  class.__tostring = function(self)
    local count = 0
    for _, param in ipairs(M.params(self)) do count = count + param.tensor.numel end
    return ("%s (%d parameters)"):format(name, count)
  end
  return class
end

local function is_tensor(value)
  if type(value) ~= "userdata" then return false end
  local meta = getmetatable(value)
  return type(meta) == "table" and meta.__name == "xtrain.tensor"
end

-- Keys in path order: integers ascending, then strings by byte. Others cannot be named in a path.
local function path_keys(t)
  local integers, strings = {}, {}
  for key in pairs(t) do
    if math.type(key) == "integer" then
      integers[#integers + 1] = key
    elseif type(key) == "string" then
      strings[#strings + 1] = key
    end
  end
  table.sort(integers)
  table.sort(strings, options.by_byte)
  return table.move(strings, 1, #strings, #integers + 1, integers)
end

-- Calls visit(path, value, owner, key) for every tensor and every table below t, in path order,
-- each table once.
local function walk(t, path, visited, visit)
  if visited[t] then return end
  visited[t] = true
  for _, key in ipairs(path_keys(t)) do
    local value = t[key]
    local name = path == "" and tostring(key) or path .. "." .. key
    if type(value) == "table" then
      visit(name, value, t, key)
      walk(value, name, visited, visit)
    elseif is_tensor(value) then
      visit(name, value, t, key)
    end
  end
end

-- Calls visit(path, value, owner, key) for every tensor and every table of a model, value being
-- owner[key], in path order; each table once.
function M.walk(model, visit) walk(model, "", {}, visit) end

-- The variables of a model, in path order, each once under its first path:
-- {name = "blocks.3.attn.wq", tensor = t}.
function M.params(model)
  local params, seen = {}, {}
  walk(model, "", {}, function(name, value)
    if type(value) == "userdata" and value.is_var and not seen[value] then
      seen[value] = true
      params[#params + 1] = { name = name, tensor = value }
    end
  end)
  return params
end

-- Every table of the model that carries a mode, the model itself first.
local function modes(model)
  local found = { model }
  walk(model, "", {}, function(_, value)
    if type(value) == "table" and rawget(value, "training") ~= nil then
      found[#found + 1] = value
    end
  end)
  return found
end

-- Sets the mode of the model and of every layer in it. The mode of a new layer is eval.
function M.set_training(model, on)
  for _, part in ipairs(modes(model)) do part.training = on end
  return model
end

function layer:train() return M.set_training(self, true) end

function layer:eval() return M.set_training(self, false) end

-- fn(model) in eval mode and without recording; the modes are restored even when fn raises.
-- Returns what fn returns.
function M.evaluating(model, fn)
  local parts = modes(model)
  local before = {}
  for i, part in ipairs(parts) do
    before[i] = rawget(part, "training") or false
    part.training = false
  end
  local results = table.pack(pcall(xt.no_grad, function() return fn(model) end))
  for i, part in ipairs(parts) do part.training = before[i] end
  if not results[1] then error(results[2], 0) end
  return table.unpack(results, 2, results.n)
end

-- ---- initial values ----------------------------------------------------------------------------

-- Draws every parameter of two or more dimensions from a normal distribution, seeded by its path:
-- the values do not depend on the order in which a model was put together. std is a number or
-- function(name, tensor) -> number. Gains and biases stay as their layers made them.
function M.init(model, seed, std)
  xt.no_grad(function()
    for _, param in ipairs(M.params(model)) do
      local t = param.tensor
      if t.ndim >= 2 then
        local scale = type(std) == "function" and std(param.name, t) or std
        local draw = { seed = xt.seed(seed, param.name), dtype = t.dtype, device = t.device }
        t:copy_(xt.randn(t.shape, draw) * scale)
      end
    end
  end)
  return model
end

-- Layers inside a model are made with seed = false: the model draws all of them by path.
local function finish(self, o, std)
  if o.seed ~= false then M.init(self, o.seed or 0, std) end
  return self
end

local function gain(dim, o) return xt.var(xt.ones({ dim }, { device = o.device })) end

local function zeros(shape, o) return xt.var(xt.zeros(shape, { device = o.device })) end

-- ---- layers ------------------------------------------------------------------------------------

-- The copy of a weight that computes with x: itself, or its cached copy in x's dtype.
function M.compute(weight, x)
  local dtype = x.dtype
  if weight.dtype == dtype then return weight end
  return weight:to(dtype)
end

-- x (..., in) times a weight [out, in] -> (..., out).
function M.project(x, weight) return xt.linear(x, M.compute(weight, x)) end

local linear = M.class("linear")

-- linear{d_in, d_out, bias = false, seed, device}: y = x W^T + b, x (..., d_in) -> (..., d_out).
function M.linear(given)
  local o = options.read("nn.linear", given, { d_in = options.size, d_out = options.size,
    bias = false, seed = options.optional, device = options.optional })
  local self = setmetatable({}, linear)
  self.weight = zeros({ o.d_out, o.d_in }, o)
  if o.bias then self.bias = zeros({ o.d_out }, o) end
  return finish(self, o, 1 / math.sqrt(o.d_in))
end

function linear:forward(x)
  return xt.linear(x, M.compute(self.weight, x), self.bias and M.compute(self.bias, x))
end

local embedding = M.class("embedding")

-- embedding{vocab, dim, seed, device}: rows of a table, ids (...) -> (..., dim).
function M.embedding(given)
  local o = options.read("nn.embedding", given, { vocab = options.size,
    dim = options.size, seed = options.optional, device = options.optional })
  local self = setmetatable({}, embedding)
  self.weight = zeros({ o.vocab, o.dim }, o)
  return finish(self, o, 0.02)
end

-- dtype: of the rows; the table's own when left out.
function embedding:forward(ids, dtype)
  local weight = self.weight
  if dtype and weight.dtype ~= dtype then weight = weight:to(dtype) end
  return xt.embedding(weight, ids)
end

local rmsnorm = M.class("rmsnorm")

-- rmsnorm{dim, eps = 1e-6}: x / sqrt(mean(x^2) + eps) * gain over the last dimension. The gain
-- stays f32 whatever x is.
function M.rmsnorm(given)
  local o = options.read("nn.rmsnorm", given, { dim = options.size, eps = 1e-6,
    seed = options.optional, device = options.optional })
  return setmetatable({ weight = gain(o.dim, o), eps = o.eps }, rmsnorm)
end

function rmsnorm:forward(x) return xt.rmsnorm(x, self.weight, self.eps) end

local layernorm = M.class("layernorm")

-- layernorm{dim, eps = 1e-5}: (x - mean) / sqrt(variance + eps) * gain + bias, last dimension.
function M.layernorm(given)
  local o = options.read("nn.layernorm", given, { dim = options.size, eps = 1e-5,
    seed = options.optional, device = options.optional })
  return setmetatable({ weight = gain(o.dim, o), bias = zeros({ o.dim }, o), eps = o.eps },
    layernorm)
end

function layernorm:forward(x) return xt.layernorm(x, self.weight, self.bias, self.eps) end

local dropout = M.class("dropout")

-- dropout{p}: drops elements in training mode only, by the seed that the caller passes.
function M.dropout(given)
  local o = options.read("nn.dropout", given, { p = options.number })
  options.probability("nn.dropout", "p", o.p)
  return setmetatable({ p = o.p, training = false }, dropout)
end

function dropout:forward(x, seed)
  if not self.training or self.p == 0 then return x end
  if seed == nil then fail("dropout: a training forward needs a seed: layer(x, seed)") end
  return xt.dropout(x, self.p, seed)
end

-- Options of xt.attention -> the same with dropout, where there is a seed and something to drop;
-- or for the one token that a cache inside a graph is for, which sees the rows that count.
function M.attending(how, p, seed, cache)
  if cache and cache.lengths then return { impl = how.impl, lengths = cache.lengths } end
  if not seed or p == 0 then return how end
  return { causal = how.causal, impl = how.impl, dropout = p, seed = seed }
end

local feed_dropout = M.class("feed_dropout")

-- feed_dropout{name}: the fed form of dropout, in a graph: x times the mask that is the input
-- `name`, f32, of ones unless it is fed. It holds that name and nothing else: no probability, no
-- mode. The product is taken in f32 and rounded once.
function M.feed_dropout(given)
  local name = type(given) == "table" and given[1] or given
  if type(name) ~= "string" then
    fail("nn.feed_dropout: wanted the name of an input: xt.nn.feed_dropout{\"mask\"}")
  end
  return setmetatable({ name = name }, feed_dropout)
end

-- b: what the graph's function was given. A second call takes the same mask.
function feed_dropout:forward(x, b)
  if type(b) ~= "table" or not b.inputs then
    fail("feed_dropout: wanted the graph's builder: layer(x, b)")
  end
  local mask = b.inputs[self.name] or b:input(self.name, xt.ones(x.shape, { device = x.device }))
  return (x:to "f32" * mask):to(x.dtype)
end

local attention = M.class("attention")

-- attention{dim, heads, kv_heads = heads, head_dim = dim / heads, rope_theta = 10000,
-- rope_layout = "half", qk_norm = false, eps = 1e-6, causal = true, impl = "auto", dropout = 0}:
-- self-attention with rotary positions, x (B, S, dim) -> (B, S, dim). rope_theta = false: no
-- rotation. rope_scaling: {rope_type = "linear"|"llama3", factor = ..., ...}, see xtrain/rope.lua.
-- dropout: of the probabilities, where forward is given a seed.
function M.attention(given)
  local o = options.read("nn.attention", given, { dim = options.size,
    heads = options.size, kv_heads = options.optional_size, head_dim = options.optional_size,
    rope_theta = options.optional, rope_layout = "half", rope_scaling = options.optional,
    qk_norm = false, eps = 1e-6, causal = true, impl = "auto", dropout = 0.0,
    seed = options.optional, device = options.optional })
  local kv_heads = o.kv_heads or o.heads
  local head_dim = o.head_dim or o.dim // o.heads
  if o.heads % kv_heads ~= 0 then
    fail(("nn.attention: %d heads cannot share %d kv_heads: no whole number a group")
      :format(o.heads, kv_heads))
  end
  options.probability("nn.attention", "dropout", o.dropout)
  local self = setmetatable({ heads = o.heads, kv_heads = kv_heads, head_dim = head_dim,
    dropout = o.dropout }, attention)
  self.wq = zeros({ o.heads * head_dim, o.dim }, o)
  self.wk = zeros({ kv_heads * head_dim, o.dim }, o)
  self.wv = zeros({ kv_heads * head_dim, o.dim }, o)
  self.wo = zeros({ o.dim, o.heads * head_dim }, o)
  if o.qk_norm then
    local norm = { dim = head_dim, eps = o.eps, device = o.device }
    self.q_norm, self.k_norm = M.rmsnorm(norm), M.rmsnorm(norm)
  end
  if o.rope_theta ~= false then
    self.rope = { theta = o.rope_theta or 10000.0, layout = o.rope_layout, offset = 0 }
    if o.rope_scaling then
      local scaling, message = rope.scaling(o.rope_scaling)
      if not scaling then fail("nn.attention: option 'rope_scaling': " .. message) end
      self.frequencies = xt.tensor(rope.frequencies(self.rope.theta, head_dim, scaling),
        { dtype = "f64", device = o.device })
    end
  end
  self.how = { causal = o.causal, impl = o.impl }
  return finish(self, o, 1 / math.sqrt(o.dim))
end

-- Whether a norm is what M.rmsnorm makes: anything that can be called may have been put in its
-- place.
local function is_rmsnorm(norm) return type(norm) == "table" and norm.forward == rmsnorm.forward end

-- q and k (B, S, H, D) normed a head, where there are norms, and turned by their places, which go
-- on behind those in the cache. Norm and rotation are one op unless the rotation is scaled.
function attention:turn(q, k, cache)
  local how, positions = self.rope, cache and cache.positions
  local first = cache and cache.length or 0
  local q_norm, k_norm = self.q_norm, self.k_norm
  local fused = q_norm and how and not self.frequencies and is_rmsnorm(q_norm)
    and is_rmsnorm(k_norm)
  if q_norm and not fused then q, k = q_norm(q), k_norm(k) end
  if not how then return q, k end
  if self.frequencies then
    local seq = q.shape[2]
    positions = positions or xt.arange(seq, { device = q.device }) + first
    return rope.turn(q, self.frequencies, positions, how.layout),
      rope.turn(k, self.frequencies, positions, how.layout)
  end
  if positions then
    how = { theta = how.theta, layout = how.layout, positions = positions }
  else
    how.offset = first
  end
  if fused then
    return xt.rmsnorm_rope(q, q_norm.weight, q_norm.eps, how),
      xt.rmsnorm_rope(k, k_norm.weight, k_norm.eps, how)
  end
  return xt.rope(q, how), xt.rope(k, how)
end

-- cache, index: a kv_cache and this layer's number in it. Without one, positions start at 0.
-- seed: of the dropout of probabilities; nil drops nothing.
function attention:forward(x, cache, index, seed)
  local batch, seq = x.shape[1], x.shape[2]
  local q = M.project(x, self.wq):reshape { batch, seq, self.heads, self.head_dim }
  local k = M.project(x, self.wk):reshape { batch, seq, self.kv_heads, self.head_dim }
  local v = M.project(x, self.wv):reshape { batch, seq, self.kv_heads, self.head_dim }
  q, k = self:turn(q, k, cache)
  if cache then
    k, v = cache:extend(index, k, v)
  end
  local out = xt.attention(q, k, v, M.attending(self.how, self.dropout, seed, cache))
  return M.project(out:reshape { batch, seq, self.heads * self.head_dim }, self.wo)
end

local swiglu = M.class("swiglu")

-- swiglu{dim, ffn}: W_down (silu(W_gate x) * W_up x), x (..., dim) -> (..., dim).
function M.swiglu(given)
  local o = options.read("nn.swiglu", given, { dim = options.size, ffn = options.size,
    seed = options.optional, device = options.optional })
  local self = setmetatable({}, swiglu)
  self.gate = zeros({ o.ffn, o.dim }, o)
  self.up = zeros({ o.ffn, o.dim }, o)
  self.down = zeros({ o.dim, o.ffn }, o)
  return finish(self, o, 1 / math.sqrt(o.dim))
end

function swiglu:forward(x)
  return xt.swiglu_mlp(x, M.compute(self.gate, x), M.compute(self.up, x), M.compute(self.down, x))
end

return M
