-- Graphs: feeds, exports, slicing, training steps as exports, state, files, errors.
local xt = require "xtrain"

local function raises(fn, ...)
  local ok, message = pcall(fn)
  assert.is_false(ok, "nothing was raised")
  for _, part in ipairs { ... } do
    assert.is_truthy(message:find(part, 1, true), ("no '%s' in: %s"):format(part, message))
  end
end

local function ops_of(records)
  local list = {}
  for i, record in ipairs(records) do list[i] = record.op end
  return table.concat(list, " ")
end

local function plate()
  return xt.graph(function(b)
    local x = b:input("x", xt.tensor { 1, 2, 3, 4, 5, 6 })
    local mask = b:input("mask", xt.ones { 6 })
    b:export("out", x * mask)
  end)
end

-- ---- a small model, trained eagerly and by replay ----------------------------------------------

local SHAPE = { 2, 8 }

local function batch(step, micro)
  local ids = xt.cast(xt.rand({ 2, 9 }, { seed = xt.seed(5, step, micro) }) * 32, "i32")
  return ids:slice(2, 1, 8):contiguous(), ids:slice(2, 2, 9):contiguous()
end

local function new_model(given)
  local o = { vocab = 32, dim = 16, layers = 2, heads = 2, ffn = 24, tied = true, dropout = 0.1,
    seed = 3 }
  for key, value in pairs(given or {}) do o[key] = value end
  local model = xt.models.qwen3(o)
  model:train()
  return model, xt.optim.adamw(xt.nn.params(model), { weight_decay = 0.1 })
end

local function training_graph(model, optimizer, accum)
  return xt.graph(function(b)
    local seed = b:input("seed", 0)
    local lr = b:input("lr", xt.tensor(0, { dtype = "f64" }))
    local step = b:input("step", 1)
    local out, total = {}, nil
    for micro = 1, accum do
      local like = xt.zeros(SHAPE, { dtype = "i32" })
      local ids = b:input("ids" .. micro, like, { required = true })
      local labels = b:input("labels" .. micro, like, { required = true })
      local loss, count = model:loss(ids, labels,
        { seed = xt.seed(seed, micro), reduction = "sum" })
      loss:backward()
      total = total and total + count or count
      out["loss" .. micro] = loss
    end
    out.norm = optimizer:step(lr, { clip = 1.0, divisor = total, step = step })
    b:export("train", out)
    model:eval()
    local ids = b:input("ids", xt.zeros(SHAPE, { dtype = "i32" }))
    local loss = model:loss(ids, b:input("labels", xt.zeros(SHAPE, { dtype = "i32" })))
    b:export("eval", loss)
    b:export("sample", model(ids))
  end)
end

local function feeds_of(step, accum, lr)
  local feeds = { seed = xt.seed(9, step), lr = lr, step = step }
  for micro = 1, accum do
    feeds["ids" .. micro], feeds["labels" .. micro] = batch(step, micro)
  end
  return feeds
end

local function digests(model)
  local list = {}
  for i, param in ipairs(xt.nn.params(model)) do list[i] = param.tensor:digest() end
  return table.concat(list, " ")
end

local function eager_step(model, optimizer, step, accum, lr)
  local bits, total = {}, 0
  optimizer:zero_grad()
  for micro = 1, accum do
    local ids, labels = batch(step, micro)
    local loss, count = model:loss(ids, labels,
      { seed = xt.seed(9, step, micro), reduction = "sum" })
    loss:backward()
    total = total + count
    bits[micro] = loss:digest()
  end
  local norm = optimizer:step(lr, { clip = 1.0, divisor = total })
  bits[#bits + 1] = norm:digest()
  return table.concat(bits, " ")
end

local function replay_step(g, step, accum, lr, given)
  local out = g:run("train", feeds_of(step, accum, lr), given)
  local bits = {}
  for micro = 1, accum do bits[micro] = out["loss" .. micro]:digest() end
  bits[#bits + 1] = out.norm:digest()
  return table.concat(bits, " ")
end

describe("a graph", function()
  it("takes a fed mask, and without one is the identity", function()
    local g = plate()
    local mask = xt.init.dropout(7, 0.5) { 6 }
    assert.same({ 1, 2, 3, 4, 5, 6 }, g:run("out"):totable())
    assert.same({ 2, 2, 0, 0, 2, 2 }, mask:totable())
    assert.same({ 2, 4, 0, 0, 10, 12 }, g:run("out", { mask = mask }):totable())
    assert.same({ 1, 2, 3, 4, 5, 6 }, g:run("out"):totable()) -- feeds lay over one run
  end)

  it("launches nothing for a mask of ones that is not fed", function()
    local g = plate()
    assert.equal("", ops_of(g:records("out")))
    assert.equal("mul", ops_of(g:records("out", { "mask" })))
    assert.equal("mul", ops_of(g:records("out", { "mask", "x" })))
  end)

  it("takes integers and numbers as 0-dim inputs", function()
    local g = xt.graph(function(b)
      local i, x = b:input("i", 7), b:input("x", 0.5)
      assert.same({ "i64", 0, "f32", 0 }, { i.dtype, i.ndim, x.dtype, x.ndim })
      b:export("sum", { i = i + 1, x = x * 2 })
    end)
    local out = g:run("sum", { x = 4 })
    assert.same({ 8, 8.0 }, { out.i:item(), out.x:item() })
    assert.equal(11, g:run("sum", { i = 10 }).i:item())
  end)

  it("computes only what an export needs", function()
    local g = xt.graph(function(b)
      local x = b:input("x", xt.ones { 4 })
      local y = xt.exp(x)
      b:export("small", y)
      b:export("large", { y = y, z = xt.sin(xt.tanh(y)) })
    end)
    assert.equal("exp", ops_of(g:records("small")))
    assert.equal("exp tanh sin", ops_of(g:records("large")))
  end)

  it("gives no gradient to a mask, and gradient * mask to what it covers", function()
    local w = xt.var(xt.randn({ 4, 8 }, { seed = 1 }))
    local g = xt.graph(function(b)
      local mask = b:input("mask", xt.ones { 4, 8 })
      local grads = xt.grad(xt.sum(xt.exp(w) * mask), { w })
      b:export("grad", grads[1])
    end)
    local mask = xt.init.dropout(3, 0.5) { 4, 8 }
    local plain = xt.grad(xt.sum(xt.exp(w)), { w })[1]
    assert.equal((plain * mask):digest(), g:run("grad", { mask = mask }):digest())
    local count = select(2, ops_of(g:records("grad", { "mask" })):gsub("mul", ""))
    assert.equal(1, count) -- gradient * mask; none for the mask
  end)

  it("reads a value on the host only where no input is in it", function()
    local g = xt.graph(function(b)
      local x = b:input("x", xt.ones { 3 })
      assert.equal(6, xt.sum(xt.arange(4)):item())
      raises(function() xt.sum(x):item() end, "depends on input 'x'", "graph_spec.lua:")
      raises(function() xt.debug.stats(x * 2) end, "depends on input 'x'", "graph_spec.lua:")
      raises(function() return x:totable() end, "depends on input 'x'")
      raises(function() return x:bytes() end, "depends on input 'x'")
      raises(function() return tostring(x) end, "depends on input 'x'")
      raises(function() return x:digest() end, "depends on input 'x'")
      b:export("out", x)
    end)
    assert.same({ 1, 1, 1 }, g:run("out"):totable())
  end)

  it("refuses values of its recording outside of it", function()
    local kept
    local g = xt.graph(function(b)
      kept = xt.exp(b:input("x", xt.ones { 3 }))
      b:export("out", kept)
    end)
    raises(function() kept:item() end, "one element")
    raises(function() return kept + 1 end, "value of a graph")
    raises(function() return kept:totable() end, "graph")
    raises(function() g:run("out", { x = kept }) end, "input 'x'", "recorded graph")
  end)

  it("refuses a plain seed, and mixes seeds that are inputs", function()
    raises(function()
      xt.graph(function(b) b:export("out", xt.dropout(b:input("x", xt.ones { 3 }), 0.5, 7)) end)
    end, "dropout", "seed is a plain number inside a graph", "graph_spec.lua:")
    local g = xt.graph(function(b)
      local seed = xt.seed(b:input("seed", 42), 1, 2)
      b:export("out", { seed = seed, mask = xt.dropout_mask({ 50 }, 0.5, seed) })
    end)
    assert.equal(0xfcee76b4159be538, g:run("out").seed:item())
    local one = g:run("out", { seed = 1 }).mask:digest()
    assert.equal(xt.dropout_mask({ 50 }, 0.5, xt.seed(1, 1, 2)):digest(), one)
    assert.not_equal(one, g:run("out", { seed = 2 }).mask:digest())
    assert.equal(one, g:run("out", { seed = 1 }).mask:digest())
  end)

  it("says what is wrong with a feed, and runs nothing", function()
    local w = xt.zeros { 6 }
    local g = xt.graph(function(b)
      local x = b:input("tokens", xt.ones { 6 }, { required = true })
      local mask = b:input("mask", xt.ones { 6 })
      w:add_(x * mask)
      b:export("out", x * mask)
    end)
    local x = xt.ones { 6 }
    raises(function() g:run("out", { token = x }) end, "unknown input 'token'", "'tokens'")
    raises(function() g:run("aut", { tokens = x }) end, "unknown export 'aut'", "'out'")
    raises(function() g:run("out", {}) end, "'tokens'", "graph_spec.lua:", "required", "f32 6")
    raises(function() g:run("out", { tokens = xt.ones { 5 } }) end, "'tokens'",
      "graph_spec.lua:", "f32 5", "f32 6")
    raises(function() g:run("out", { tokens = xt.ones({ 6 }, { dtype = "bf16" }) }) end,
      "'tokens'", "graph_spec.lua:", "bf16 6", "f32 6")
    raises(function() g:run("out", { { tokens = x }, { tokens = x } }) end, "'tokens'",
      "graph_spec.lua:", "given twice")
    raises(function() g:run("out", { tokens = "x" }) end, "'tokens'", "given a string")
    raises(function() g:run("out", { tokens = x }, { state = {} }) end, "state 'state.1'")
    assert.same({ 0, 0, 0, 0, 0, 0 }, w:totable())
    g:run("out", { tokens = x })
    assert.same({ 1, 1, 1, 1, 1, 1 }, w:totable())
  end)

  it("names both devices when a feed lies on another", function()
    if #xt.devices() < 2 then return pending "there is one device" end
    local g = plate()
    raises(function() g:run("out", { x = xt.ones({ 6 }, { device = "cuda" }) }) end, "input 'x'",
      "graph_spec.lua:", "is on cuda", "wanted cpu")
  end)

  it("says what is wrong with its function", function()
    raises(function()
      xt.graph(function(b)
        b:input("x", 1)
        b:input("x", 1)
      end)
    end, "'x'", "declared twice", "graph_spec.lua:")
    raises(function() xt.graph(function() end) end, "exports nothing")
    raises(function()
      xt.graph(function(b)
        local x = b:input("x", xt.ones { 2 })
        x:fill_(0)
        b:export("out", x)
      end)
    end, "input 'x' is written in place")
    raises(function() xt.graph(function() xt.graph(function() end) end) end, "already")
    raises(function() xt.graph(function() error "mine" end) end, "mine")
    assert.same({ 2, 2 }, xt.full({ 2 }, 2):totable()) -- recording has ended each time
  end)

  it("notices a constant that was changed since", function()
    local c = xt.ones { 3 }
    local g = xt.graph(function(b) b:export("out", b:input("x", xt.ones { 3 }) + c) end)
    assert.same({ 2, 2, 2 }, g:run("out"):totable())
    c:fill_(5)
    raises(function() g:run("out") end, "constant", "changed in place", "graph_spec.lua:")
  end)

  it("takes feeds that are views, and does not see later writes to a default", function()
    local default = xt.ones { 2, 3 }
    local g = xt.graph(function(b) b:export("out", b:input("x", default) * 2) end)
    default:fill_(9)
    assert.same({ { 2, 2, 2 }, { 2, 2, 2 } }, g:run("out"):totable())
    local view = xt.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }):transpose(1, 2)
    assert.same({ { 2, 6, 10 }, { 4, 8, 12 } }, g:run("out", { x = view }):totable())
  end)

  it("describes its exports and draws itself", function()
    local g = plate()
    assert.same({ "out" }, g:exports())
    assert.equal("mask", g:inputs()[2].name)
    assert.equal("out(x: f32 6 = default, mask: f32 6 = ones) -> f32 6", g:describe())
    assert.equal("out(x: f32 6 = default) -> f32 6", g:describe("out", {}))
    assert.is_truthy(g:describe "out":find("mul +f32 6 +24 bytes +.-graph_spec.lua:%d+"))
    assert.is_truthy(g:dot():find("digraph", 1, true))
  end)
end)

describe("a lent input", function()
  local function counter()
    return xt.graph(function(b)
      local cache = b:input("cache", xt.zeros { 2, 4 }, { lent = true })
      local row = b:input("row", xt.ones { 2, 1 })
      xt.index_copy_(cache, 2, b:input("at", 0):reshape { 1 }, row)
      b:export("next", { cache = cache, sum = xt.sum(cache) })
    end)
  end

  it("is written in place, and comes out as the tensor that went in", function()
    local g, cache = counter(), xt.zeros { 2, 4 }
    local out = g:run("next", { cache = cache, at = 1 })
    assert.same({ { 0, 1, 0, 0 }, { 0, 1, 0, 0 } }, cache:totable())
    out = g:run("next", { cache = out.cache, at = 3, row = xt.full({ 2, 1 }, 5) })
    assert.same({ { 0, 1, 0, 5 }, { 0, 1, 0, 5 } }, cache:totable())
    assert.equal(12, out.sum:item())
    out.cache:fill_(2)
    assert.equal(2, xt.amin(cache):item())
    assert.equal("index_copy_ sum", ops_of(g:records("next")):gsub("reshape ", ""))
  end)

  it("must be fed, lie in one piece and be nothing else of the run", function()
    local g = counter()
    raises(function() g:run("next") end, "input 'cache'", "graph_spec.lua:", "required")
    raises(function() g:run("next", { cache = xt.zeros({ 4, 2 }):transpose(1, 2) }) end,
      "input 'cache'", "not contiguous")
    local both = xt.zeros { 2, 5 }
    raises(function()
      g:run("next", { cache = both:reshape { 10 }:slice(1, 1, 8):reshape { 2, 4 },
        row = both:reshape { 10 }:slice(1, 9, 10):reshape { 2, 1 } })
    end, "input 'cache'", "shares its bytes with row")
    raises(function() g:run("next", { cache = xt.zeros { 2, 4 }, at = 4 }) end, "index[1] is 4",
      "made at")
  end)
end)

describe("a frozen graph", function()
  it("holds its weights as constants, and computes once what depends on no input", function()
    local w = xt.var(xt.full({ 3 }, 2))
    local g = xt.graph(function(b)
      local x = b:input("x", xt.ones { 3 }, { required = true })
      b:export("out", x * xt.exp(w):to "f32" + w)
    end, { frozen = true })
    assert.equal("mul add", ops_of(g:records("out")))
    assert.same({}, g:state())
    assert.is_near(math.exp(2) + 2, g:run("out", { x = xt.ones { 3 } }):totable()[1], 1e-5)
    local path = os.tmpname()
    assert.is_true(g:save(path))
    local loaded = assert(xt.graph_load(path))
    os.remove(path)
    assert.equal(g:run("out", { x = xt.ones { 3 } }):digest(),
      loaded:run("out", { x = xt.ones { 3 } }):digest())
    xt.no_grad(function() w:fill_(3) end)
    raises(function() g:run("out", { x = xt.ones { 3 } }) end, "constant", "changed in place")
  end)

  it("takes the bf16 copies that are there, and leaves them", function()
    local w = xt.var(xt.randn({ 4, 4 }, { seed = 1 }))
    local copy = w:to "bf16"
    local g = xt.graph(function(b)
      b:export("out", xt.linear(b:input("x", xt.ones({ 2, 4 }, { dtype = "bf16" })), w:to "bf16"))
    end, { frozen = true })
    assert.is_nil(ops_of(g:records("out")):find("cast", 1, true))
    local x = xt.ones({ 2, 4 }, { dtype = "bf16" })
    assert.equal(xt.linear(x, copy):digest(), g:run("out"):digest())
  end)

  it("takes no gradient and writes to nothing from outside", function()
    local w, c = xt.var(xt.ones { 3 }), xt.ones { 3 }
    raises(function()
      xt.graph(function(b) b:export("out", xt.grad(xt.sum(w * b:input("x", 1.0)), { w })[1]) end,
        { frozen = true })
    end, "does not depend on any variable")
    raises(function()
      xt.graph(function(b)
        c:add_(b:input("x", xt.ones { 3 }))
        b:export("out", c)
      end, { frozen = true })
    end, "a frozen graph writes to")
    xt.sum(w * 2):backward() -- outside gradients are recorded as before
    assert.same({ 2, 2, 2 }, w.grad:totable())
  end)
end)

describe("fed dropout", function()
  for _, dtype in ipairs { "f32", "bf16" } do
    for _, p in ipairs { 0.1, 0.2, 0.3, 0.5 } do
      it(("is op.dropout to the bit: %s, p = %.1f, 50 steps"):format(dtype, p), function()
        local function new()
          local w = xt.var(xt.randn({ 8, 8 }, { seed = 1 }))
          return w, xt.optim.adamw({ { name = "w", tensor = w } }, {})
        end
        local drop = xt.nn.feed_dropout { "mask" }
        local w1, o1 = new()
        local w2, o2 = new()
        local x = xt.randn({ 16, 8 }, { seed = 2 }):to(dtype)
        local g = xt.graph(function(b)
          local y = drop(xt.linear(x, w2:to(dtype)), b)
          local loss = xt.sum(xt.cast(xt.tanh(y), "f32"))
          loss:backward()
          local lr = b:input("lr", xt.tensor(0, { dtype = "f64" }))
          o2:step(lr, { step = b:input("step", 1) })
          b:export("train", { y = y, loss = loss })
        end)
        for step = 1, 50 do
          local y = xt.dropout(xt.linear(x, w1:to(dtype)), p, step)
          local loss = xt.sum(xt.cast(xt.tanh(y), "f32"))
          o1:zero_grad()
          loss:backward()
          o1:step(1e-2)
          local mask = xt.dropout_mask(y.shape, p, step)
          local out = g:run("train", { mask = mask, lr = 1e-2, step = step })
          -- + 0: what the op drops is 0, and a negative number times the mask's 0 is -0.
          assert.equal((y + 0):digest(), (out.y + 0):digest())
          assert.equal(loss:digest(), out.loss:digest())
          assert.equal(w1:digest(), w2:digest())
        end
      end)
    end
  end

  it("holds a name and nothing else, and costs nothing when it is not fed", function()
    local drop = xt.nn.feed_dropout { "mask" }
    assert.same({ "name" }, require "xtrain.options".names(drop))
    for _, dtype in ipairs { "f32", "bf16" } do
      local w = xt.var(xt.ones { 4, 4 })
      local g = xt.graph(function(b)
        local x = b:input("x", xt.ones({ 2, 4 }, { dtype = dtype }))
        b:export("out", xt.tanh(drop(xt.exp(x), b)))
        b:export("sum", xt.sum(w))
      end)
      assert.equal("exp tanh", ops_of(g:records("out")))
    end
  end)
end)

describe("a training step as an export", function()
  it("gives the eager run's bits over 200 steps: dropout, accumulation, clipping, schedule",
    function()
      local lr = xt.schedule.cosine { peak = 3e-3, min = 1e-4, warmup = 5, total = 200 }
      local a, opt_a = new_model()
      local b, opt_b = new_model()
      local g = training_graph(b, opt_b, 2)
      for step = 1, 200 do
        assert.equal(eager_step(a, opt_a, step, 2, lr(step)), replay_step(g, step, 2, lr(step)))
      end
      assert.equal(digests(a), digests(b))
      a:eval()
      b:eval()
      local ids = batch(1, 1)
      local logits = g:run("sample", { ids = ids }) -- of the weights that were trained
      assert.equal(a(ids):digest(), logits:digest())
      assert.equal(b(ids):digest(), logits:digest())
    end)

  for _, dtype in ipairs { "f32", "bf16" } do
    for _, recompute in ipairs { "block", "selective" } do
      it(("gives them with recompute = %s in %s too"):format(recompute, dtype), function()
        local given = { dtype = dtype, recompute = recompute }
        local a, opt_a = new_model(given)
        local b, opt_b = new_model(given)
        local g = training_graph(b, opt_b, 1)
        for step = 1, 8 do
          assert.equal(eager_step(a, opt_a, step, 1, 1e-3), replay_step(g, step, 1, 1e-3))
        end
        assert.equal(digests(a), digests(b))
      end)
    end
  end

  it("changes nothing by being recorded, and samples without a loss", function()
    local model, opt = new_model()
    local before = digests(model)
    local g = training_graph(model, opt, 1)
    assert.equal(before, digests(model))
    for _, param in ipairs(xt.nn.params(model)) do assert.is_nil(param.tensor.grad) end
    local sample, eval, train = ops_of(g:records("sample")), ops_of(g:records("eval")),
      ops_of(g:records("train"))
    assert.is_nil(sample:find("cross_entropy", 1, true))
    assert.is_truthy(eval:find("cross_entropy", 1, true))
    assert.is_nil(eval:find("adamw", 1, true))
    assert.is_nil(eval:find("dropout", 1, true))
    assert.is_truthy(train:find("adamw adamw$")) -- written after everything else
    g:run("eval")
    g:run("sample")
    assert.equal(before, digests(model))
  end)

  it("repeats a step's bits, differs between steps, and records nothing for a new rate", function()
    local model, opt = new_model()
    local g = training_graph(model, opt, 1)
    local first = {}
    for name, t in pairs(g:state()) do first[name] = t:clone() end
    local one = replay_step(g, 1, 1, 1e-3)
    local records = #g:records()
    local feeds = feeds_of(1, 1, 5e-4)
    feeds.seed = 77
    assert.not_equal(one, g:run("train", feeds).loss1:digest())
    assert.equal(records, #g:records())
    assert.equal(one, replay_step(g, 1, 1, 1e-3, { state = first }))
  end)

  it("runs on another table of state, and leaves its own alone", function()
    local model, opt = new_model()
    local g = training_graph(model, opt, 1)
    local clone = {}
    for name, t in pairs(g:state()) do clone[name] = t:clone() end
    assert.is_truthy(clone["blocks.1.attn.wq"] and clone["blocks.1.attn.wq.m"])
    local before = digests(model)
    local bits = replay_step(g, 1, 1, 1e-3, { state = clone })
    assert.equal(before, digests(model))
    assert.not_equal(g:state()["blocks.1.attn.wq"]:digest(), clone["blocks.1.attn.wq"]:digest())
    assert.equal(bits, replay_step(g, 1, 1, 1e-3))
    assert.equal(g:state()["blocks.1.attn.wq"]:digest(), clone["blocks.1.attn.wq"]:digest())
    raises(function() g:run("sample", nil, { state = { norm = xt.ones { 2 } } }) end,
      "unknown state 'norm'", "norm.weight")
    clone["norm.weight"] = xt.ones { 3 }
    raises(function() replay_step(g, 2, 1, 1e-3, { state = clone }) end,
      "state 'norm.weight' is f32 3, wanted f32 16")
  end)

  it("leaves the state as it was when a run fails", function()
    local model, opt = new_model()
    local g = training_graph(model, opt, 1)
    local before = digests(model)
    local feeds = feeds_of(1, 1, 1e-3)
    feeds.labels1 = xt.full(SHAPE, 99, { dtype = "i32" })
    raises(function() g:run("train", feeds) end, "99", "made at")
    feeds = feeds_of(1, 1, 0 / 0)
    raises(function() g:run("train", feeds) end, "lr")
    assert.equal(before, digests(model))
    feeds = feeds_of(1, 1, xt.tensor(1e-3, { dtype = "f64" }))
    feeds.seed, feeds.step = xt.tensor(1, { dtype = "i64" }), xt.tensor(1, { dtype = "i64" })
    g:run("train", feeds) -- plans are made
    local now = digests(model)
    local failed = 0
    for n = 1, 400 do
      local live = xt.debug.live_count()
      xt.debug.fail_allocation(n)
      local ok = pcall(g.run, g, "train", feeds)
      xt.debug.fail_allocation(0)
      xt.collect()
      if ok then break end
      failed = failed + 1
      assert.is_true(xt.debug.live_count() <= live)
      assert.equal(now, digests(model))
    end
    assert.is_true(failed > 0)
  end)

  for _, dtype in ipairs { "f32", "bf16" } do
    for _, recompute in ipairs { "none", "selective", "block" } do
      it(("has the peak that was planned, and an eager step's: %s, recompute = %s"):format(dtype,
        recompute), function()
          local model, opt = new_model { vocab = 1024, dim = 128, heads = 4, layers = 4, ffn = 344,
            dtype = dtype, recompute = recompute, dropout = 0.0 }
          local function tokens(seed)
            return xt.cast(xt.rand({ 8, 96 }, { seed = seed }) * 1024, "i32")
          end
          local ids, labels = tokens(1), tokens(2)
          local function peak_of(fn)
            xt.collect()
            xt.memory_reset_peak()
            local live = xt.memory().live_bytes
            fn()
            return xt.memory().peak_bytes - live
          end
          local g = xt.graph(function(b)
            local i, l = b:input("ids", ids), b:input("labels", labels)
            local loss, count = model:loss(i, l, { reduction = "sum" })
            loss:backward()
            local lr, step = b:input("lr", xt.tensor(1e-3, { dtype = "f64" })), b:input("step", 1)
            b:export("train", opt:step(lr, { clip = 1.0, divisor = count, step = step }))
          end)
          local before = digests(model)
          local planned = g:memory("train", {}).peak
          assert.equal(before, digests(model))
          local measured = peak_of(function() g:run("train") end)
          assert.is_true(math.abs(measured - planned) <= 0.01 * planned,
            ("planned %d, measured %d"):format(planned, measured))
          if dtype == "bf16" then -- of an eager run they outlive the step; the plan counts them
            for _, param in ipairs(xt.nn.params(model)) do
              assert.is_nil(xt.compute_copy_peek(param.tensor))
            end
          end
          local eager = peak_of(function()
            local loss, count = model:loss(ids, labels, { reduction = "sum" })
            loss:backward()
            opt:step(1e-3, { clip = 1.0, divisor = count })
          end)
          assert.is_true(math.abs(eager - planned) <= 0.05 * planned,
            ("planned %d, eager %d"):format(planned, eager))
        end)
    end
  end

  it("gives an eager muon's bits, with groups of its parameters", function()
    local function new()
      local model = new_model { dropout = 0.0 }
      return model, xt.optim.muon(xt.nn.params(model), { scale = "adamw", weight_decay = 0.1,
        group = function(name) if name:find "norm" then return { lr = 0.5 } end end })
    end
    local a, opt_a = new()
    local b, opt_b = new()
    local g = training_graph(b, opt_b, 2)
    for step = 1, 10 do
      assert.equal(eager_step(a, opt_a, step, 2, 3e-3), replay_step(g, step, 2, 3e-3))
      assert.equal(digests(a), digests(b))
    end
    local feeds, state = feeds_of(11, 2, 3e-3), {} -- gradients that are not finite change nothing
    for name, t in pairs(g:state()) do state[name] = t:clone() end
    state["norm.weight"]:fill_(math.huge)
    local before = state["blocks.1.attn.wq"]:digest()
    local norm = g:run("train", feeds, { state = state }).norm:item()
    assert.is_true(norm ~= norm or norm == math.huge)
    assert.equal(before, state["blocks.1.attn.wq"]:digest())
  end)

  it("wants learning rate and step as inputs", function()
    local w = xt.var(xt.ones { 3 })
    local opt = xt.optim.sgd({ { name = "w", tensor = w } }, {})
    raises(function()
      xt.graph(function() xt.sum(w):backward() opt:step(0.1) end)
    end, "lr is a plain number inside a graph", "graph_spec.lua:")
    raises(function()
      xt.graph(function(b) xt.sum(w):backward() opt:step(b:input("lr", 0.1)) end)
    end, "step is a plain number inside a graph")
    local g = xt.graph(function(b)
      xt.sum(w * w):backward()
      opt:step(b:input("lr", 0.5), { step = b:input("step", 1) })
      b:export("w", w)
    end)
    assert.same({ 0, 0, 0 }, g:run("w"):totable())
  end)
end)

describe("a saved graph", function()
  it("runs in another process with the same bits, without the recipe", function()
    local model, opt = new_model()
    local g = training_graph(model, opt, 1)
    local path = os.tmpname()
    replay_step(g, 1, 1, 1e-3)
    assert.is_true(g:save(path))
    local loaded = assert(xt.graph_load(path))
    assert.equal(g:describe(), loaded:describe())
    local here = {}
    for step = 2, 5 do
      local feeds = feeds_of(step, 1, 1e-3)
      here[#here + 1] = g:run("train", feeds).loss1:digest()
      assert.equal(here[#here], loaded:run("train", feeds).loss1:digest())
    end
    for name, t in pairs(g:state()) do assert.equal(t:digest(), loaded:state()[name]:digest()) end
    local program = os.getenv("XTRAIN")
    if not program then
      os.remove(path)
      return
    end
    local ids = batch(1, 1)
    assert(xt.safetensors.save(path .. ".ids", { ids = ids }))
    assert.is_true(g:save(path))
    local pipe = assert(io.popen(([['%s' -e '
      local g = assert(xt.graph_load("%s"))
      local ids = xt.safetensors.load("%s.ids").ids
      print(g:run("sample", {ids = ids}):digest())' 2>&1]]):format(program, path, path)))
    local text = pipe:read "a"
    pipe:close()
    os.remove(path)
    os.remove(path .. ".ids")
    assert.equal(g:run("sample", { ids = ids }):digest() .. "\n", text)
  end)

  it("is refused when it is none", function()
    local path = os.tmpname()
    assert(xt.safetensors.save(path, { x = xt.ones { 2 } }))
    local g, message = xt.graph_load(path)
    assert.is_nil(g)
    assert.is_truthy(message:find("no graph", 1, true))
    os.remove(path)
    assert.is_nil((xt.graph_load(path)))
  end)
end)

describe("recording under failing allocations", function()
  it("leaks nothing", function()
    local w = xt.var(xt.ones { 3 })
    local function make()
      return xt.graph(function(b)
        local x = b:input("x", xt.ones { 3 })
        local y = xt.checkpoint(function() return xt.exp(x * w) end)
        xt.sum(y):backward()
        b:export("out", y)
      end)
    end
    make():run("out")
    xt.collect()
    local live = xt.debug.live_count()
    for n = 1, 300 do
      xt.debug.fail_allocation(n)
      local ok = pcall(function() make():run("out") end)
      xt.debug.fail_allocation(0)
      xt.collect()
      w:zero_grad()
      assert.equal(live, xt.debug.live_count(), "after failure " .. n)
      if ok then break end
    end
  end)
end)
