-- What a GPU must do beyond single ops: specs of the CPU run there again, training and its
-- equalities, memory, faults. Skipped where there is none.
local xt = require "xtrain"
local core = require "xtrain.core"

local there = table.concat(xt.devices(), " "):find("cuda", 1, true) ~= nil

-- The same specs with tensors made on the GPU, by this process and all that it starts.
local AGAIN = { "parity/models", "parity/stories", "parity/gates", "lua/equality", "lua/dropout",
  "lua/segment", "lua/optim", "lua/autograd", "lua/generate", "lua/replay", "lua/verify" }

local function small_model(dtype, more)
  local o = { vocab = 199, dim = 64, layers = 3, heads = 4, kv_heads = 2, ffn = 172, dtype = dtype,
    seed = 3 }
  for name, value in pairs(more or {}) do o[name] = value end
  return xt.models.qwen3(o)
end

-- ids and labels of a step: a language of its own, learnable, the same on every device.
local function batch(step, device)
  local ids, labels = {}, {}
  for b = 1, 4 do
    ids[b], labels[b] = {}, {}
    local at = (step * 31 + b * 17) % 199
    for s = 1, 32 do
      ids[b][s] = at
      at = (at * 3 + 7 + (step * b * s) % 2) % 199
      labels[b][s] = at
    end
  end
  return xt.tensor(ids, { dtype = "i32", device = device }),
    xt.tensor(labels, { dtype = "i32", device = device })
end

-- Losses of so many steps of AdamW.
local function losses(steps, dtype)
  local model = small_model(dtype)
  model:train()
  local opt = xt.optim.adamw(xt.nn.params(model), { betas = { 0.9, 0.95 }, weight_decay = 0.1 })
  local list = {}
  for step = 1, steps do
    local ids, labels = batch(step)
    opt:zero_grad()
    local loss = model:loss(ids, labels)
    loss:backward()
    opt:step(3e-3, { clip = 1.0 })
    list[step] = loss:item()
    xt.collect()
  end
  return list, model
end

describe("on cuda,", function()
  if not there then
    pending("training, memory and faults: there is no GPU here")
    return
  end
  before_each(function() xt.device("cuda") end)
  after_each(function() xt.device("cpu") end)

  for _, name in ipairs(AGAIN) do
    it("the specs of " .. name .. " pass", function()
      local pipe = io.popen(("LD_PRELOAD= XT_DEVICE=cuda %s %s --output=TAP --pattern=_spec "
        .. "tests/%s_spec.lua 2>&1"):format(os.getenv "XTRAIN", os.getenv "XT_BUSTED", name))
      local text = pipe:read "a"
      assert(pipe:close(), text)
      assert.is_truthy(text:find("\nok ", 1, true), text)
    end)
  end

  -- Sizes that tensor cores take slowly are grown inside; what lies beside the result is not ours.
  it("products of odd sizes leave what lies beside them alone", function()
    local GUARD = 64
    local function draw(rows, cols, turned, seed)
      local t = xt.randn(turned and { cols, rows } or { rows, cols }, { seed = seed }):to "bf16"
      return turned and t:transpose(1, 2) or t
    end
    local function check(m, n, k, how, turned_a, turned_b)
      local a, b = draw(m, k, turned_a, 1), draw(k, n, turned_b, 2)
      local wanted = a:to("cpu"):to("f64"):matmul(b:to("cpu"):to "f64")
      local all = xt.full({ m + 2 * GUARD, n }, 7)
      local target = all:slice(1, GUARD + 1, GUARD + m)
      local what = ("%s, %d x %d x %d"):format(how, m, n, k)
      xt.call("matmul_acc", target, a, b, how == "add")
      if how == "add" then wanted = wanted + 7 end
      local bound = 1e-5 * xt.amax(xt.abs(wanted)):item()
      local off = xt.amax(xt.abs(target:to("cpu"):to("f64") - wanted)):item()
      assert.is_true(off <= bound, what .. ": off by " .. off)
      local before, after = all:slice(1, 1, GUARD), all:slice(1, GUARD + m + 1, m + 2 * GUARD)
      for _, edge in ipairs { before, after } do
        assert.are.equal(7, xt.amax(edge):item(), what)
        assert.are.equal(7, xt.amin(edge):item(), what)
      end
    end
    local SIZES = { { 521, 410, 130 }, { 512, 410, 136 }, { 410, 512, 129 }, { 410, 264, 256 } }
    for _, size in ipairs(SIZES) do
      local m, n, k = table.unpack(size)
      for _, turned_a in ipairs { false, true } do
        for _, turned_b in ipairs { false, true } do
          check(m, n, k, "write", turned_a, turned_b)
          check(m, n, k, "add", turned_a, turned_b)
        end
      end
    end
  end)

  -- Large enough to be grown inside, which the rows of the op runner are not.
  it("swiglu_mlp of an odd width agrees with the ops that it stands for", function()
    local function draw(shape, seed, scale)
      return xt.var((xt.randn(shape, { seed = seed }) * scale):to("bf16"):to "f32")
    end
    local x = draw({ 3, 200, 128 }, 1, 1)
    local weights = { draw({ 346, 128 }, 2, 0.1), draw({ 346, 128 }, 3, 0.1),
      draw({ 120, 346 }, 4, 0.1) }
    local up = xt.randn({ 3, 200, 120 }, { seed = 5 }):to "bf16"
    local function run(fused, dtype)
      local all = { x, table.unpack(weights) }
      for _, t in ipairs(all) do t:zero_grad() end
      for _ = 1, 2 do -- the second time gradients are added to
        local given = {}
        for i, t in ipairs(all) do given[i] = dtype == "f32" and t or t:to(dtype) end
        local gx, gate, upper, down = table.unpack(given)
        local y = fused and xt.swiglu_mlp(gx, gate, upper, down)
          or xt.linear(xt.swiglu(xt.linear(gx, gate), xt.linear(gx, upper)), down)
        y = y + (gx:slice(3, 1, 120)) -- x has another gradient to be added to
        y:backward(up:to(dtype))
      end
      local grads = {}
      for i, t in ipairs(all) do grads[i] = t.grad:to("cpu"):to "f64" end
      return grads
    end
    local wanted = run(false, "f32")
    for _, dtype in ipairs { "f32", "bf16" } do
      for i, got in ipairs(run(true, dtype)) do
        local off = xt.norm(got - wanted[i]):item() / xt.norm(wanted[i]):item()
        assert.is_true(off < (dtype == "f32" and 1e-5 or 1e-2), dtype .. " " .. i .. ": " .. off)
      end
    end
  end)

  it("AdamW in f32 gives the bits of the CPU over 20 steps", function()
    local digests = {}
    for _, device in ipairs { "cpu", "cuda" } do
      xt.device(device)
      local params = {}
      for i, shape in ipairs { { 33, 65 }, { 7 }, { 1, 1000 }, { 2048 } } do
        params[i] = { name = "p" .. i, tensor = xt.var(xt.randn(shape, { seed = i })) }
      end
      local opt = xt.optim.adamw(params, { betas = { 0.9, 0.95 }, weight_decay = 0.1 })
      for step = 1, 20 do
        for i, param in ipairs(params) do
          local t = param.tensor
          core.set_grad(t, xt.randn(t.shape, { seed = xt.seed(9, step, i) }))
        end
        opt:step(1e-3)
      end
      local list = {}
      for i, param in ipairs(params) do list[i] = tostring(param.tensor:digest()) end
      digests[device] = table.concat(list, " ")
    end
    assert.are.equal(digests.cpu, digests.cuda)
  end)

  -- The bound: 1 % of the loss at the start. On the CPU the two are apart by 0.37 % of it, where
  -- the steps of 2^-8 that bf16 takes have been added up 200 times.
  it("bf16 training follows f32 over 200 steps, and both learn", function()
    local wide, narrow = losses(200, "f32"), losses(200, "bf16")
    local worst = 0
    for first = 1, 191, 10 do
      local a, b = 0, 0
      for i = first, first + 9 do a, b = a + wide[i] / 10, b + narrow[i] / 10 end
      worst = math.max(worst, math.abs(a - b))
    end
    assert.is_true(wide[200] < 0.1 * wide[1], "f32 ends at " .. wide[200])
    assert.is_true(worst < 0.01 * wide[1], "means of ten steps are apart by " .. worst)
  end)

  it("a training loop asks the driver for nothing after its second step", function()
    local model = small_model("bf16")
    model:train()
    local opt = xt.optim.adamw(xt.nn.params(model), {})
    local before
    for step = 1, 12 do
      local ids, labels = batch(1)
      opt:zero_grad()
      model:loss(ids, labels):backward()
      opt:step(1e-3, { clip = 1.0 })
      xt.collect()
      if step == 2 then before = xt.memory("cuda").system_allocs end
    end
    assert.are.equal(before, xt.memory("cuda").system_allocs)
  end)

  it("forward and backward of a step do not wait for the device", function()
    local model = small_model("bf16")
    model:train()
    local ids, labels = batch(1)
    model:loss(ids, labels):backward()
    core.finish()
    local before = xt.memory("cuda").waits
    model:loss(ids, labels):backward()
    assert.are.equal(before, xt.memory("cuda").waits)
  end)

  it("a product's algorithm is known, kept, and taken again from a run; tuning changes no sum",
    function()
      local a = xt.randn({ 320, 136 }, { seed = 1 }):to("bf16")
      local w = xt.var(xt.randn({ 136, 264 }, { seed = 2 }))
      -- The product, and a gradient that is added to what is there twice.
      local function results()
        local c = xt.matmul(a, w:to("bf16"))
        w:zero_grad()
        for _ = 1, 2 do xt.sum(xt.matmul(a, w:to("bf16"))):backward() end
        return c:digest(), w.grad:digest(), w.grad:to("cpu")
      end
      local function chosen()
        for _, choice in ipairs(core.products()) do
          if choice.m == 320 and choice.n == 264 then return choice end
        end
      end
      local product, gradient, wanted = results()
      local before = chosen()
      assert.truthy(before.from == "heuristic" or before.from == "table", before.from)
      local gpu, version, digest = core.product_library()
      assert.are.same({ gpu, version }, { before.device, before.version })
      assert.matches("^0x%x+$", digest)
      core.use_products(before.row, "a run")
      local same_product, same_gradient = results()
      assert.are.same({ product, gradient }, { same_product, same_gradient })
      assert.are.equal("run", chosen().from)
      core.tune(true)
      local _, _, tuned = results()
      core.tune(false)
      assert.truthy(chosen().measured > 1)
      local most = xt.amax(xt.abs(wanted)):item()
      -- Other algorithms add the same numbers in another order, in f32.
      assert.truthy(xt.amax(xt.abs(tuned - wanted)):item() <= 1e-5 * most)
      core.use_products(before.row, "a run")
      assert.are.equal(product, (results()))
    end)

  it("a step of run:train waits only when its update is queued", function()
    local folder = os.tmpname() .. ".run"
    local run = xt.recipe({ name = "waits", device = "cuda", steps = 3, batch = 4, seq = 32,
      vocab = 199, accum = 2, out = folder }, {})
    local model = small_model("bf16")
    model:train()
    local opt = xt.optim.adamw(xt.nn.params(model), {})
    local began, queued
    local queue = opt.queue
    function opt:queue(...)
      local norm = queue(self, ...)
      queued = xt.memory("cuda").waits
      return norm
    end
    for step in run:steps() do
      began, queued = xt.memory("cuda").waits, nil
      run:train(step, { optimizer = opt, lr = 1e-3, clip = 1.0,
        data = { batch = function(_, at, micro) return batch(10 * at + micro) end },
        loss = function(ids, labels) return model:loss(ids, labels, { reduction = "sum" }) end })
      assert.are.equal(began, queued)
    end
    os.execute("rm -rf " .. folder)
  end)

  it("compare finds the calls of the CPU and of the GPU alike, forward and backward", function()
    for dtype, tol in pairs { f32 = 1e-5, bf16 = 2e-2 } do
      local same, report = xt.debug.compare(function(device)
        local model = small_model(dtype)
        model:train()
        model:loss(batch(1, device)):backward()
      end, "cpu", "cuda", { tol = tol })
      assert.is_true(same, tostring(report))
      assert.is_true(report.calls > 200, tostring(report))
    end
  end)

  it("a tensor of 2^31 + 16 bytes is indexed rightly", function()
    local n = 2 ^ 31 + 16 | 0
    local t = xt.zeros({ n }, { dtype = "u8" })
    t:slice(1, n - 3, n):fill_(7)
    t:slice(1, 1, 2):fill_(5)
    assert.are.equal(7, t[n]:item())
    assert.are.equal(0, t[n - 4]:item())
    assert.are.equal(4 * 7 + 2 * 5, xt.sum(t:to("i64"):reshape { n // 16, 16 }):item())
    local back = xt.add(t, t)
    assert.are.equal(14, back[n - 1]:item())
    t, back = nil, nil -- luacheck: ignore
    xt.collect()
    core.memory_trim("cuda")
  end)

  it("out of memory is an error with the biggest holders, and work goes on", function()
    local held = xt.zeros { 1 << 20 } -- luacheck: ignore
    xt.collect()
    core.memory_trim("cuda") -- what is cached would do
    core.memory_limit(xt.memory("cuda").reserved_bytes + (64 << 20), "cuda")
    local ok, message = pcall(xt.zeros, { 1 << 28 })
    core.memory_limit(0, "cuda")
    assert.is_false(ok)
    assert.is_truthy(tostring(message):find("out of memory on cuda", 1, true), message)
    assert.is_truthy(tostring(message):find("cuda_runs_spec.lua", 1, true), message)
    assert.are.equal(10, xt.ones({ 10 }):sum():item())
  end)

  it("a label out of range is told with row and value, and the device stays usable", function()
    local logits = xt.randn({ 4, 5 }, { seed = 1 })
    local labels = xt.tensor({ 1, 2, 9, 3 }, { dtype = "i32" })
    local ok, message = pcall(function() return xt.cross_entropy(logits, labels):item() end)
    assert.is_false(ok)
    assert.is_truthy(tostring(message):find("labels[3] is 9", 1, true), message)
    assert.are.equal(10, xt.ones({ 10 }):sum():item())
  end)
end)
