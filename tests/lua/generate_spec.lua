-- Generation: the cache changes nothing, sampling is a function of the seed, filters and stops.
local xt = require "xtrain"

local function model_of(more)
  local o = { vocab = 17, dim = 16, layers = 2, heads = 4, kv_heads = 2, head_dim = 4, ffn = 24,
    seed = 3 }
  for name, value in pairs(more or {}) do o[name] = value end
  return xt.models.qwen3(o)
end

-- A model whose logits lie apart: freshly drawn weights hardly differ.
local function sharp(dtype)
  local model = model_of { dtype = dtype }
  xt.no_grad(function()
    for _, param in ipairs(xt.nn.params(model)) do
      if param.tensor.ndim == 2 then
        param.tensor:copy_(xt.randn(param.tensor.shape, { seed = xt.seed(1, param.name) }) * 0.5)
      end
    end
  end)
  return model
end

-- Greedy without a cache: the whole sequence again for every token.
local function slow_greedy(model, prompt, max)
  local ids, out = table.move(prompt, 1, #prompt, 1, {}), {}
  for i = 1, max do
    local logits = model(xt.tensor({ ids }, { dtype = "i32" }))
    local id = xt.argmax(logits:select(1, 1):select(1, #ids), -1):item()
    ids[#ids + 1], out[i] = id, id
  end
  return out
end

describe("generate", function()
  it("greedy with the cache gives the tokens that the model gives without, past its first block",
    function()
      local model = sharp()
      assert.are.same(slow_greedy(model, { 1, 2, 3 }, 80),
        xt.generate(model, { 1, 2, 3 }, { max = 80, temperature = 0 }))
    end)

  it("logits with a cache are those of the whole sequence", function()
    local model = sharp()
    local ids = xt.tensor({ { 1, 5, 9, 2, 7, 7 } }, { dtype = "i32" })
    local whole = model(ids)
    xt.no_grad(function()
      local cache = model:cache(2)
      model(ids:slice(2, 1, 3), { cache = cache })
      for i = 4, 6 do
        local one = model(ids:slice(2, i, i), { cache = cache })
        local apart = xt.amax(xt.abs(one - whole:slice(2, i, i))):item()
        assert.is_true(apart < 1e-5, "position " .. i .. ": " .. apart)
      end
    end)
  end)

  for _, dtype in ipairs { "f32", "bf16" } do
    it("decodes by a graph whose cache goes in and comes out, with eager's bits: " .. dtype,
      function()
        local kv_cache = require "xtrain.kv_cache"
        local more = { vocab = 17, dim = 16, layers = 2, heads = 4, ffn = 24, seed = 3,
          dtype = dtype }
        local models = { sharp(dtype), xt.models.gpt2(more) }
        more.attention = "composed"
        models[3] = xt.models.llama(more)
        for _, model in ipairs(models) do
          xt.no_grad(function()
            local prompt = xt.tensor({ { 1, 2, 3 } }, { dtype = "i32" })
            local eager, cache = model:cache(70), model:cache(70)
            model(prompt, { cache = eager })
            model(prompt, { cache = cache })
            local id = xt.tensor({ { 5 } }, { dtype = "i32" })
            local g = xt.graph(function(b)
              local fed = kv_cache.fed(b, cache)
              fed.out.logits = model(b:input("ids", id), { cache = fed, last = true })
              b:export("next", fed.out)
            end, { frozen = true })
            local now = {}
            for i, block in ipairs(cache.blocks) do
              now["k." .. i], now["v." .. i] = block.k, block.v
            end
            for at = 3, 69 do
              local want = model(id, { cache = eager, last = true })
              now = g:run("next", { now, { ids = id, at = at } })
              assert.are.equal(want:digest(), now.logits:digest())
              id:fill_(xt.argmax(want:reshape { 17 }, -1):item())
              now.logits = nil
            end
            assert.are.equal(eager.blocks[2].k:digest(), now["k.2"]:digest())
            assert.are.equal(cache.blocks[2].k:digest(), now["k.2"]:digest())
          end)
        end
      end)

    it("gives the ids of eager decoding past the first room of its cache: " .. dtype, function()
      local model = sharp(dtype)
      local how = { max = 300, temperature = 0.7, top_k = 9, seed = 4 }
      local class, ids = getmetatable(model), {}
      for _, in_graphs in ipairs { true, false } do
        class.decodes_in_graphs = in_graphs
        ids[#ids + 1] = xt.generate(model, { 1, 2, 3 }, how)
      end
      class.decodes_in_graphs = true
      assert.are.equal(300, #ids[1])
      assert.are.same(ids[2], ids[1])
    end)
  end

  it("does not go beyond the positions that a GPT-2 has learned", function()
    local model = xt.models.gpt2 { vocab = 17, dim = 16, layers = 1, heads = 2, context = 8 }
    assert.are.equal(5, #xt.generate(model, { 1, 2, 3 }, { max = 5 }))
    local ok, message = pcall(xt.generate, model, { 1, 2, 3 }, { max = 9 })
    assert.is_false(ok)
    assert.matches("position 9 is beyond the context of 8", message)
  end)

  it("samples the same for the same seed and differently for another", function()
    local model = model_of()
    local function sample(seed, more)
      local o = { max = 30, seed = seed }
      for name, value in pairs(more or {}) do o[name] = value end
      return xt.generate(model, { 1 }, o)
    end
    assert.are.same(sample(1), sample(1))
    assert.are_not.same(sample(1), sample(2))
    local filtered = { top_k = 5, top_p = .9, min_p = .01 }
    assert.are.same(sample(1, filtered), sample(1, filtered))
  end)

  it("filters cut off tails: what leaves one token is greedy", function()
    local model = sharp()
    local greedy = xt.generate(model, { 4 }, { max = 20, temperature = 0 })
    assert.are.same(greedy, xt.generate(model, { 4 }, { max = 20, top_k = 1 }))
    assert.are.same(greedy, xt.generate(model, { 4 }, { max = 20, top_p = 1e-6 }))
    assert.are.same(greedy, xt.generate(model, { 4 }, { max = 20, min_p = 1 }))
  end)

  it("ends at a stop token, which is left out, and when on_token says so", function()
    local model = sharp()
    local all = xt.generate(model, { 4 }, { max = 20, temperature = 0 })
    local at = 1
    while all[at] ~= all[6] do at = at + 1 end
    local short = xt.generate(model, { 4 }, { max = 20, temperature = 0, stop = { 99, all[6] } })
    assert.are.equal(at - 1, #short)
    local seen = {}
    xt.generate(model, { 4 }, { max = 20, temperature = 0, on_token = function(id)
      seen[#seen + 1] = id
      return #seen < 3
    end })
    assert.are.same({ all[1], all[2], all[3] }, seen)
    assert.are.same({}, xt.generate(model, { 4 }, { max = 0 }))
  end)

  it("takes a tensor as a prompt, and names an empty one", function()
    local model = sharp()
    local o = { max = 5, temperature = 0 }
    assert.are.same(xt.generate(model, { 4, 2 }, o),
      xt.generate(model, xt.tensor({ 4, 2 }, { dtype = "i32" }), o))
    local ok, message = pcall(xt.generate, model, {}, o)
    assert.is_false(ok)
    assert.matches("prompt is empty", message)
  end)

  it("drops nothing, whatever mode the model is in, and restores the mode", function()
    local model = model_of { dropout = .9 }
    local o = { max = 10, temperature = 0 }
    local eval = xt.generate(model, { 1, 2 }, o)
    model:train()
    assert.are.same(eval, xt.generate(model, { 1, 2 }, o))
    assert.is_true(model.training)
  end)
end)
