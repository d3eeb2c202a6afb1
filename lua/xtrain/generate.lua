-- Continues a sequence of tokens: the prompt in one pass, then one token a pass on cached keys and
-- values, by a graph whose cache goes in and comes out. Sampling is a pure function of (seed,
-- position): the same call gives the same text.
local xt = require "xtrain"
local nn = require "xtrain.nn"
local kv_cache = require "xtrain.kv_cache"
local options = require "xtrain.options"
local fail = xt.core.fail

-- The prompt as a (1, S) i32 tensor; from a list of ids or a tensor (S) or (1, S).
local function prompt_tensor(ids, device)
  if type(ids) == "table" then
    if #ids == 0 then fail("generate: the prompt is empty: give at least one token id") end
    return xt.tensor({ ids }, { dtype = "i32", device = device })
  end
  if ids.ndim == 1 then ids = ids:reshape { 1, ids.shape[1] } end
  if ids.ndim ~= 2 or ids.shape[1] ~= 1 or ids.shape[2] == 0 then
    fail("generate: the prompt is a list of ids or a tensor (S) or (1, S), not "
      .. table.concat(ids.shape, "x"))
  end
  return ids
end

-- The set of ids that end a sequence, from nothing, an id or a list of them.
local function stop_set(stop)
  local set = {}
  if math.type(stop) == "integer" then
    set[stop] = true
  elseif stop ~= nil then
    for _, id in ipairs(stop) do set[id] = true end
  end
  return set
end

-- Picks a token from logits (V), f32.
local function pick(logits, o, seed)
  if o.temperature == 0 then return xt.argmax(logits, -1):item() end
  local scaled = logits / o.temperature
  if not (o.top_k or o.top_p or o.min_p) then
    return xt.multinomial(xt.softmax(scaled), seed):item()
  end
  -- Sorted by falling probability, each filter cuts off a tail. The first always stays.
  local vocab = logits.shape[1]
  local values, order = xt.topk(scaled, math.min(o.top_k or vocab, vocab), -1)
  local probs = xt.softmax(values)
  if o.top_p then
    local before = xt.cumsum(probs, -1) - probs
    probs = xt.masked_fill(probs, xt.gt(before, o.top_p), 0)
  end
  if o.min_p then
    local least = probs:select(1, 1) * o.min_p
    probs = xt.masked_fill(probs, xt.lt(probs, least), 0)
  end
  local at = xt.multinomial(probs / xt.sum(probs), seed)
  return order:select(1, at:item() + 1):item()
end

-- A pass over one more token, as a graph: its weights are what they are now. input: (1, 1) ids.
local function record(model, cache, input)
  return xt.graph(function(b)
    local fed = kv_cache.fed(b, cache)
    local ids = b:input("ids", input, { required = true })
    fed.out.logits = model(ids, { cache = fed, last = true })
    b:export("next", fed.out)
  end, { frozen = true })
end

-- decoder(model, cache) -> step(input) -> logits of what follows the token in input, (1, 1, V).
local function decoder(model, cache)
  if not model.decodes_in_graphs
    or #xt.core.kernels("index_copy_", cache.blocks[1].k.device) == 0 then
    return function(input) return model(input, { cache = cache, last = true }) end
  end
  local graph, feeds
  return function(input)
    if cache:reserve() or not graph then
      graph, feeds = record(model, cache, input), { ids = input }
      for i, block in ipairs(cache.blocks) do
        feeds["k." .. i], feeds["v." .. i] = block.k, block.v
      end
    end
    feeds.at = cache.length
    if model.check_length then model:check_length(cache.length + 1) end
    local logits = graph:run("next", feeds).logits
    cache:advance(1)
    return logits
  end
end

-- generate(model, ids, {max = 64, temperature = 1, top_k, top_p, min_p, seed = 0, stop, on_token})
-- -> the list of new ids, at most max, without the token of `stop` that ended it. temperature 0
-- takes the most likely token. on_token(id) sees each as it comes; returning false ends.
local function generate(model, ids, given)
  local o = options.read("generate", given, { max = 64, temperature = 1.0,
    top_k = options.optional, top_p = options.optional, min_p = options.optional, seed = 0,
    stop = options.optional, on_token = options.optional })
  if type(model) ~= "table" or not model.cache then
    fail(("generate: the first argument is a %s, wanted a model"):format(type(model)))
  end
  if o.temperature < 0 then fail("generate: temperature is below 0: " .. o.temperature) end
  local stop = stop_set(o.stop)
  return nn.evaluating(model, function()
    local input = prompt_tensor(ids)
    local cache = model:cache(input.shape[2] + math.min(o.max, 256))
    local out, step = {}, nil
    while #out < o.max do
      local logits
      if step then
        logits = step(input)
      else
        logits = model(input, { cache = cache, last = true })
        step = decoder(model, cache)
      end
      logits = xt.cast(logits:reshape { logits.numel }, "f32")
      local id = pick(logits, o, xt.seed(o.seed, cache.length))
      if stop[id] then break end
      out[#out + 1] = id
      if o.on_token and o.on_token(id) == false then break end
      if input.shape[2] > 1 or #out == 1 then
        input = xt.zeros({ 1, 1 }, { dtype = "i32", device = input.device })
      end
      input:fill_(id)
      xt.collect()
    end
    return out
  end)
end

return generate
