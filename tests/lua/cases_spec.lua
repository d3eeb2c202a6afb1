-- Known traps of training systems, each of which was a bug somewhere, with the right answer. Where
-- the rest of them is tested:
--
--   dropout, recomputation, seeds          dropout_spec, segment_spec, random_test.c, seed_test.c
--   dropout of each recipe and launcher    recipes_spec
--   warm-up, wsd, cosine, stepping twice   schedule_spec, recipe_spec
--   bias correction, decay of gains        optim_spec
--   one token counts as any other          accumulation_spec
--   resume, moments by name, killed saves  recipe_spec, verify_spec, optim_spec, disk_spec
--   the branch of where not taken          autograd_spec, pointwise_test.c
--   the two layouts of rope                norm_test.c
--   kinks and planted errors               autograd_spec
--   broadcast gradients, kept and changed  autograd_spec
--   Qwen's cuts, control tokens in text    tokenizer_test.c, tokenizer_spec
--   printing 10^12 elements                tensor_spec
--   200,000 ops and a small stack          segment_spec
--   another order each epoch               recipe_spec
--   eval mode undone                       nn_spec, dropout_spec, equality_spec
local expect = require "expect"
local xt = require "xtrain"

local raises, near = expect.raises, expect.near

local inf = math.huge

local function i32(value) return xt.tensor(value, { dtype = "i32" }) end

-- ---- losses ------------------------------------------------------------------------------------

-- Both losses as a function of logits (rows, 5): the second makes them from one-hot rows.
local LOSSES = {
  cross_entropy = xt.cross_entropy,
  linear_cross_entropy = function(logits, labels, o)
    local eye = {}
    for i = 1, logits.shape[1] do
      eye[i] = {}
      for j = 1, logits.shape[1] do eye[i][j] = i == j and 1 or 0 end
    end
    return xt.linear_cross_entropy(xt.tensor(eye), logits:transpose(1, 2):contiguous(), labels, o)
  end,
}

describe("a loss whose labels are all ignored", function()
  it("is 0 with zero gradients, one label is enough for a mean", function()
    for name, loss_of in pairs(LOSSES) do
      for _, dtype in ipairs { "f32", "f64" } do
        if name == "cross_entropy" or dtype == "f32" then
          for _, reduction in ipairs { "mean", "sum" } do
            local logits = xt.var(xt.zeros({ 2, 5 }, { dtype = dtype }))
            local loss = loss_of(logits, i32 { -100, -100 }, { reduction = reduction })
            assert.are.equal(0, loss:item())
            loss:backward()
            assert.are.equal(0, xt.norm(logits.grad):item())
            logits:zero_grad()
            loss = loss_of(logits, i32 { 2, -100 }, { reduction = reduction })
            assert.is_near(1.609438, loss:item(), 1e-6)
            loss:backward()
            near({ { .2, .2, -.8, .2, .2 }, { 0, 0, 0, 0, 0 } }, logits.grad:totable())
          end
        end
      end
    end
    assert.are.equal(0, xt.count_valid(i32 { -100, -100 }):item())
    assert.are.equal(1, xt.count_valid(i32 { 2, -100 }):item())
  end)

  it("is a step that is skipped and counted: parameters and moments stay as they were", function()
    for _, kind in ipairs { "adamw", "sgd", "muon" } do
      local w = xt.var(xt.randn({ 2, 5 }, { seed = 1 }))
      local opt = xt.optim[kind]({ { name = "w", tensor = w } }, kind == "sgd"
        and { momentum = 0.9 } or { weight_decay = 0.1 })
      xt.cross_entropy(w, i32 { 1, 2 }):backward()
      opt:step(0.1)
      opt:zero_grad()
      local function digests()
        local out = { w:digest() }
        for name, tensor in pairs(opt:state()) do out[name] = tensor:digest() end
        return out
      end
      local before = digests()
      xt.cross_entropy(w, i32 { -100, -100 }, { reduction = "sum" }):backward()
      opt:step(0.1, { divisor = 0 })
      assert.are.same(before, digests())
      assert.are.equal(1, opt.skipped)
    end
  end)
end)

describe("a number that is no label, id or position", function()
  it("is an error with its place and value, and nothing breaks after it", function()
    local logits, table_ = xt.zeros { 2, 3 }, xt.zeros { 3, 2 }
    for _, dtype in ipairs { "i32", "i64" } do
      local function ids(list) return xt.tensor(list, { dtype = dtype }) end
      for _, bad in ipairs { 3, 7, -4, -1, 2147483647 } do
        local calls = {
          function() return xt.cross_entropy(logits, ids { 0, bad }) end,
          function() return xt.linear_cross_entropy(logits, table_:reshape { 2, 3 }, ids { 0,
            bad }) end,
          function() return xt.embedding(table_, ids { 0, bad }) end,
          function() return xt.index_select(table_, 1, ids { 0, bad }) end,
          function() return xt.gather(table_, 1, ids { { 0, 0 }, { 0, bad } }) end,
        }
        for k, call in ipairs(calls) do
          local ok, message = pcall(call)
          assert.is_false(ok, k .. " took " .. bad)
          assert.is_truthy(message:find(tostring(bad), 1, true), message)
        end
        assert.is_near(math.log(3), xt.cross_entropy(logits, ids { 0, 2 }):item(), 1e-6)
      end
    end
    -- The ignored one may be any number.
    assert.is_near(math.log(3), xt.cross_entropy(logits, i32 { 1, 255 }, { ignore = 255 }):item(),
      1e-6)
    raises("-100", xt.cross_entropy, logits, i32 { 1, -100 }, { ignore = 255 })
    raises("2", xt.cross_entropy, logits, i32 { 0, 9 }) -- the row
  end)
end)

-- ---- numbers -----------------------------------------------------------------------------------

describe("infinities that are not selected", function()
  it("leave no NaN in gradients: where, masked_fill, clamp, logsumexp, softmax", function()
    local a = xt.var(xt.tensor { 100, -1 })
    local y = xt.where(xt.tensor({ 0, 1 }, { dtype = "u8" }), xt.exp(a), a + 1)
    near({ 101, math.exp(-1) }, y:totable())
    xt.sum(y):backward()
    near({ 1, math.exp(-1) }, a.grad:totable())
    local b = xt.var(xt.tensor { 1, 2 })
    local mask = xt.tensor({ 1, 0 }, { dtype = "u8" })
    xt.sum(xt.masked_fill(xt.exp(b * xt.tensor { 100, 1 }), mask, 0)):backward()
    assert.are.equal(0, b.grad:totable()[1] == b.grad:totable()[1] and 0 or 1)
    local c = xt.var(xt.tensor { { -inf, -inf }, { 0, -inf } })
    local sums = xt.logsumexp(c)
    assert.are.same({ -inf, 0 }, sums:totable())
    xt.sum(sums):backward()
    assert.are.same({ { 0, 0 }, { 1, 0 } }, c.grad:totable())
    assert.are.same({ 1, 0 }, xt.softmax(xt.tensor { 0, -inf }):totable())
  end)
end)

describe("rope", function()
  it("takes angles of whole positions in f32, whatever the dtype of x", function()
    local cosines = { [257] = 0.8193055, [15962] = -0.9080159, [15963] = -0.8431253 }
    for position, want in pairs(cosines) do
      for _, layout in ipairs { "half", "interleaved" } do
        for _, o in ipairs { { offset = position }, { positions = i32 { position } },
          { positions = xt.tensor({ position }, { dtype = "i64" }) } } do
          o.layout = layout
          local x = xt.tensor({ 1, 0 }, { dtype = "f32" }):reshape { 1, 1, 1, 2 }
          assert.is_near(want, xt.rope(x, o):reshape({ 2 }):totable()[1], 1e-6)
          local half = xt.rope(x:to "bf16", o)
          assert.are.equal(xt.tensor(want):to("bf16"):item(), half:reshape({ 2 }):totable()[1])
        end
      end
    end
    near({ -1.984111, 1.959901, 2.462378, 4.019800 },
      xt.rope(xt.tensor { { { { 1, 2, 3, 4 } } } }, { offset = 1 }):reshape({ 4 }):totable())
    near({ -1.142640, 1.922076, 2.959851, 4.029800 },
      xt.rope(xt.tensor { { { { 1, 2, 3, 4 } } } }, { offset = 1,
        layout = "interleaved" }):reshape({ 4 }):totable())
  end)
end)

describe("uniform numbers", function()
  it("stop short of 1: the largest is 1 - 2^-24", function()
    -- The seed whose element 0 has all bits set: splitmix64, backwards.
    local function unshift(x, by)
      local y = x
      for _ = 1, 64 // by + 1 do y = x ~ (y >> by) end
      return y
    end
    local h = unshift(-1, 31) * 0x319642b2d24d8ec3
    h = unshift(h, 27) * 0x96de1b173f119089
    local seed = unshift(h, 30) - 0x9E3779B97F4A7C15
    assert.are.equal(1 - 2.0 ^ -24, xt.rand({ 1 }, { seed = seed }):item())
    assert.are.equal(1, xt.dropout_mask({ 1 }, 0, seed):item())
    assert.is_true(xt.dropout_mask({ 1 }, 0.9999, seed):item() > 0)
    local draws = xt.rand({ 1 << 20 }, { seed = 1 })
    assert.is_true(xt.amax(draws):item() < 1 and xt.amin(draws):item() >= 0)
  end)

  it("p = 0 keeps the element whose number is 0", function()
    -- No bit set: the seed before the one whose splitmix64 is 0.
    assert.are.equal(0, xt.rand({ 1 }, { seed = -0x9E3779B97F4A7C15 }):item())
    assert.are.equal(1, xt.dropout_mask({ 1 }, 0, -0x9E3779B97F4A7C15):item())
    assert.are.equal(5, xt.dropout(xt.tensor { 5 }, 0, -0x9E3779B97F4A7C15):item())
  end)
end)

-- ---- layouts and sizes -------------------------------------------------------------------------

describe("strides", function()
  it("are what kernels go by: known values of a transposed matrix", function()
    local base = xt.var(xt.tensor { { 1, 2, 3 }, { 4, 5, 6 } })
    local y = base:transpose(1, 2)
    assert.are.same({ 5, 7, 9 }, y:sum(2):totable())
    near({ .0474259, .9525741 }, xt.softmax(y)[1]:totable())
    xt.sum(y * xt.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }):backward()
    assert.are.same({ { 1, 3, 5 }, { 2, 4, 6 } }, base.grad:totable())
  end)

  it("of sizes of 1 do not matter: such a view is contiguous, and is no copy", function()
    local row = xt.arange(13, { dtype = "f32" })
    for _, view in ipairs { row:expand { 1, 13 }, row:reshape { 13, 1 }:transpose(1, 2),
      row:reshape { 1, 13, 1 }:permute { 3, 1, 2 }, xt.zeros({ 4, 13 }):slice(1, 2, 2) } do
      assert.is_true(view:is_contiguous())
      assert.is_true(view:reshape({ 13 }):shares_storage(view))
      assert.are.equal(view:clone():digest(), view:digest())
    end
    assert.is_false(row:expand({ 2, 13 }):is_contiguous())
    assert.is_true(xt.zeros({ 0, 5 }):transpose(1, 2):is_contiguous())
  end)
end)

describe("nothing", function()
  it("is a batch like any other: outputs of size 0, gradients of weights that are 0", function()
    local x, w = xt.var(xt.zeros { 0, 4 }), xt.var(xt.ones { 3, 4 })
    local y = xt.linear(x, w)
    assert.are.same({ 0, 3 }, y.shape)
    xt.sum(y):backward()
    assert.are.same({ { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }, w.grad:totable())
    assert.are.same({ 0, 4 }, x.grad.shape)
    local z = xt.var(xt.zeros { 0, 2 })
    local l = xt.log_softmax(z)
    assert.are.same({ 0, 2 }, l.shape)
    xt.sum(l):backward()
    assert.are.same({ 0, 2 }, z.grad.shape)
    local e = xt.var(xt.ones { 5, 2 })
    xt.sum(xt.embedding(e, xt.zeros({ 0 }, { dtype = "i32" }))):backward()
    assert.are.equal(0, xt.norm(e.grad):item())
    assert.are.equal(0, xt.sum(xt.zeros { 0, 3 }):item())
    local mean = xt.mean(xt.zeros { 0, 3 }):item()
    assert.is_true(mean ~= mean)
    local ids = xt.zeros({ 0, 4 }, { dtype = "i32" })
    for _, kind in ipairs { "qwen3", "gpt2" } do
      local model = xt.models[kind] { vocab = 5, dim = 4, layers = 1, heads = 1, ffn = 4, seed = 1 }
      local loss, count = model:loss(ids, ids)
      assert.are.equal(0, count)
      assert.are.equal(0, loss:item())
      loss:backward()
    end
  end)
end)

describe("grouped heads", function()
  it("share their key head with neighbours, and its gradient is the sum", function()
    for _, impl in ipairs { "composed", "flash" } do
      local q, k = xt.ones { 1, 1, 4, 1 }, xt.ones { 1, 1, 2, 1 }
      local v = xt.var(xt.tensor { { { { 10 }, { 20 } } } })
      local y = xt.attention(q, k, v, { impl = impl })
      near({ 10, 10, 20, 20 }, y:reshape({ 4 }):totable())
      xt.sum(y):backward()
      near({ 2, 2 }, v.grad:reshape({ 2 }):totable())
      near({ 10, 10, 20, 20 }, xt.repeat_kv(v, 2):reshape({ 4 }):totable())
    end
  end)
end)

-- ---- sharing -----------------------------------------------------------------------------------

describe("flattening twice", function()
  it("gives two views of the same bytes, and a tied weight stays tied in bf16", function()
    local m = xt.zeros { 3, 4 }
    local p1, p2 = m:reshape { -1 }, m:reshape { -1 }
    p2:fill_(2)
    assert.are.same(xt.full({ 12 }, 2):totable(), p1:totable())
    for _, kind in ipairs { "qwen3", "gpt2" } do
      local model = xt.models[kind] { vocab = 5, dim = 4, layers = 1, heads = 1, ffn = 4, seed = 1,
        tied = true, dtype = "bf16" }
      local a, b = model.embed.weight:to "bf16", model.head.weight:to "bf16"
      assert.is_true(a:shares_storage(b))
      local ids = i32 { { 1, 2 } }
      model:loss(ids, ids):backward()
      local opt = xt.optim.adamw(xt.nn.params(model))
      opt:step(0.1)
      assert.are.equal(model.embed.weight:to("bf16"):digest(),
        model.head.weight:to("bf16"):digest())
      assert.are.equal(model.embed.weight:detach():clone():to("bf16"):digest(),
        model.head.weight:to("bf16"):digest())
    end
  end)
end)

describe("a parameter that nobody used", function()
  it("has no gradient and is not touched by decay, by any optimizer", function()
    for _, kind in ipairs { "adamw", "sgd", "muon" } do
      local a, b = xt.var(xt.ones { 2, 2 }), xt.var(xt.ones { 2, 2 })
      local opt = xt.optim[kind]({ { name = "a", tensor = a }, { name = "b", tensor = b } },
        { weight_decay = 0.1 })
      xt.sum(a * 2):backward()
      opt:step(0.1)
      assert.is_nil(b.grad)
      assert.are.equal(xt.ones({ 2, 2 }):digest(), b:detach():digest())
      assert.are_not.equal(xt.ones({ 2, 2 }):digest(), a:detach():digest())
    end
  end)
end)

describe("a replayed graph", function()
  it("drops by its seed: other elements each step, the same for the same step", function()
    local n = 10000
    local x = xt.ones { n }
    local g = xt.graph(function(b)
      local seed = xt.seed(b:input("base", 3), b:input("step", 0))
      local q = b:input("q", xt.ones { 1, 100, 1, 4 } / 4)
      b:export("all", { mask = xt.dropout_mask({ n }, .5, seed), y = xt.dropout(x, .5, seed),
        noise = xt.rand({ n }, { seed = seed }), likely = xt.multinomial(xt.ones { n, 2 }, seed),
        attention = xt.attention(q, q, q, { dropout = .5, seed = seed }) })
    end)
    local function replay(step)
      local out = g:run("all", { step = step })
      for name, t in pairs(out) do out[name] = t:clone() end
      return out
    end
    local steps, again = { replay(1), replay(2), replay(3) }, replay(1)
    for name, first in pairs(steps[1]) do
      assert.are.equal(first:digest(), again[name]:digest(), name)
      for i = 1, 3 do
        local other = steps[i % 3 + 1][name]
        assert.are_not.equal(steps[i][name]:digest(), other:digest(), name)
        if name == "mask" or name == "y" then
          local same = xt.mean(xt.cast(xt.eq(steps[i][name], other), "f32")):item()
          assert.is_near(.5, same, .02)
        end
      end
    end
    assert.are.equal(xt.dropout_mask({ n }, .5, xt.seed(3, 2)):digest(), steps[2].mask:digest())
  end)
end)

describe("weight decay", function()
  it("reaches the matrices of every model, and no gain and no bias, with any optimizer", function()
    for _, kind in ipairs { "qwen3", "llama", "gpt2" } do
      for _, optimizer in ipairs { "adamw", "sgd", "muon" } do
        local params = xt.nn.params(xt.models[kind] { vocab = 7, dim = 8, layers = 1, heads = 2,
          ffn = 12, context = 4, seed = 1 })
        local vectors, matrices = 0, 0
        for _, param in ipairs(params) do
          local t = param.tensor
          xt.no_grad(function() t:fill_(1) end)
          xt.sum(t * 0):backward() -- a gradient that is there, and 0
        end
        local opts = { weight_decay = .1 }
        if optimizer == "muon" then opts.adamw = { weight_decay = .1 } end
        xt.optim[optimizer](params, opts):step(.1)
        for _, param in ipairs(params) do
          local t = param.tensor:detach()
          local name = optimizer .. ": " .. kind .. "." .. param.name
          if t.ndim >= 2 then
            matrices = matrices + 1
            assert.is_near(.99, xt.amin(t):item(), 1e-6, name)
            assert.is_near(.99, xt.amax(t):item(), 1e-6, name)
          else
            vectors = vectors + 1
            assert.are.equal(xt.ones(t.shape):digest(), t:digest(), name)
          end
        end
        assert.is_true(vectors >= 3 and matrices >= 5)
      end
    end
  end)
end)

-- ---- memory ------------------------------------------------------------------------------------

describe("tensors that are dropped in a loop", function()
  it("are freed without collectgarbage, under a limit that holds 16 of them", function()
    xt.collect()
    local limit = xt.memory().live_bytes + (256 << 20)
    xt.debug.memory_limit(limit)
    finally(function() xt.debug.memory_limit(0) end)
    xt.memory_reset_peak()
    for _ = 1, 200 do
      local _ = xt.zeros { 1 << 22 } -- 16 MiB
    end
    assert.is_true(xt.memory().peak_bytes <= limit)
    -- More than there is: an error with the holders and their lines, and then all is as before.
    local held = xt.zeros { 1 << 22 }
    local ok, message = pcall(function() return xt.zeros { 1 << 27 } end)
    assert.is_false(ok)
    assert.is_truthy(message:find("cases_spec.lua:%d+"), message)
    assert.are.equal(0, held[1]:item())
    assert.are.equal(1 << 22, xt.zeros({ 1 << 22 }).numel)
  end)
end)

-- ---- files -------------------------------------------------------------------------------------

describe("safetensors", function()
  local function file_of(header, bytes, length)
    local path = os.tmpname()
    finally(function() os.remove(path) end)
    local file = assert(io.open(path, "wb"))
    file:write(("<I8"):pack(length or #header), header, bytes)
    file:close()
    return path
  end

  local function refused(wanted, ...)
    local made = xt.memory().made_bytes
    local tensors, message = xt.safetensors.load(file_of(...))
    assert.is_nil(tensors)
    assert.is_truthy(message:find(wanted), message)
    assert.are.equal(made, xt.memory().made_bytes) -- before anything was allocated
  end

  it("holds scalars and tensors of nothing", function()
    local header = '{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
      .. '"e":{"dtype":"F32","shape":[0,3],"data_offsets":[4,4]}}'
    local tensors = assert(xt.safetensors.load(file_of(header, ("<f"):pack(2.5))))
    assert.are.same({}, tensors.s.shape)
    assert.are.equal(2.5, tensors.s:item())
    assert.are.same({ 0, 3 }, tensors.e.shape)
  end)

  it("is refused with a reason when its header does not fit its bytes", function()
    local function one(shape, first, last)
      return ('{"a":{"dtype":"F32","shape":[%s],"data_offsets":[%d,%d]}}'):format(shape, first,
        last)
    end
    local four = ("<f"):pack(1)
    refused("a", one("1", 0, 0), "")
    refused("a", one("1", 0, 8), four .. four)
    refused("a", one("1", 0, 4), "") -- the end is past the file
    refused("a", one("1", 4, 8), four .. four) -- a gap at the start
    refused(".", '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
      .. '"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}', four .. four .. four)
    refused(".", '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
      .. '"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', four) -- the same bytes twice
    refused("a", one("1", 4, 0), four)
    refused("a", one("-1", 0, 4), four)
    refused("a", one("4611686018427387904,4", 0, 4), four) -- the product wraps to 0
    refused(".", one("1", 0, 4), four, 100000001)
    refused(".", one("1", 0, 4), four, 1 << 40)
    refused(".", one("1", 0, 4), four, -1)
    refused(".", one("1", 0, 4), four .. four) -- bytes that nobody owns
  end)
end)

describe("json", function()
  it("keeps integers integers, floats floats, and gives the same text back", function()
    local text = '{"n": 9007199254740993, "rope_theta": 1000000.0, "vocab_size": 151936}'
    local value = xt.json.decode(text)
    assert.are.equal("integer", math.type(value.vocab_size))
    assert.are.equal("float", math.type(value.rope_theta))
    assert.are.equal(9007199254740993, value.n)
    assert.are.equal(text, xt.json.encode(value))
    for _, number in ipairs { "0", "-1", "9223372036854775807", "-9223372036854775808", "0.1",
      "1e+300", "-0.0", "1e-05", "123456789012345680.0" } do
      local again = xt.json.encode(xt.json.decode(number))
      assert.are.equal(tonumber(number), tonumber(again))
      assert.are.equal(math.type(tonumber(number)), math.type(xt.json.decode(again)), number)
    end
  end)
end)
