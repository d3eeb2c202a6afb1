-- Gradient accumulation: many micro-batches are the one large batch, whatever the split, and memory
-- follows the micro-batch.
local xt = require "xtrain"
local active = require "xtrain.active"
local file = require "xtrain.core.file"
local nn = xt.nn

local ROWS, SEQ, VOCAB = 8, 16, 29

-- ids and labels (ROWS, SEQ) of a step; a third of the labels does not count, unevenly so.
local function whole_batch(step)
  local function draw(name)
    local x = xt.rand({ ROWS, SEQ }, { seed = xt.seed(6, step, name) })
    return x, xt.cast(xt.clamp(x * VOCAB, 0, VOCAB - 1), "i32")
  end
  local _, ids = draw "ids"
  local _, labels = draw "labels"
  local u = draw "ignored"
  local rows = xt.arange(ROWS):to("f32"):reshape { ROWS, 1 }
  local ignored = xt.lt(u * ROWS, rows * 0.7) -- none in the first row, most in the last
  return ids, xt.where(ignored, xt.full({ ROWS, SEQ }, -100, { dtype = "i32" }), labels)
end

-- A run of a recipe inside this process: `sizes` are the rows of each micro-batch, or a number of
-- equal ones. Returns the losses and gradients of every step, and the parameters at the end.
local function train(sizes, steps, more)
  if type(sizes) == "number" then
    local equal = {}
    for i = 1, sizes do equal[i] = ROWS // sizes end
    sizes = equal
  end
  local dir = os.tmpname()
  os.remove(dir)
  local run = xt.recipe({ name = "accumulation", log_every = 1 },
    { "out=" .. dir, "steps=" .. steps, "accum=" .. #sizes })
  run.own.progress.show = function() end
  local o = { vocab = VOCAB, dim = 32, layers = 2, heads = 2, ffn = 48, seed = 7 }
  for name, value in pairs(more or {}) do o[name] = value end
  local model = xt.models.qwen3(o)
  model:train()
  local opt = xt.optim.adamw(nn.params(model), {})
  local data = {}
  function data:batch(step, micro)
    local ids, labels = whole_batch(step)
    local first = 1
    for i = 1, micro do first = first + sizes[i] end
    local last = first + sizes[micro + 1] - 1
    return ids:slice(1, first, last), labels:slice(1, first, last)
  end
  local out = { losses = {}, gradients = {}, parameters = {} }
  for step in run:steps() do
    for micro, ids, labels in run:micros(step, data) do
      local sum, count = model:loss(ids, labels,
        { seed = xt.seed(run.seed, step, micro), reduction = "sum" })
      run:backward(sum, count)
    end
    out.gradients[step] = {}
    for _, param in ipairs(nn.params(model)) do
      out.gradients[step][param.name] = param.tensor.grad / run:divisor()
    end
    local norm = opt:step(1e-3, { clip = 1.0 })
    run:log(step, { lr = 1e-3, grad_norm = norm })
  end
  for line in assert(file.read(dir .. "/metrics.jsonl")):gmatch "[^\n]+" do
    local row = xt.json.decode(line)
    out.losses[row.step], out.digest = row.loss, row.digest
  end
  for _, param in ipairs(nn.params(model)) do
    out.parameters[param.name] = param.tensor:detach()
  end
  active.run = nil
  file.remove_tree(dir)
  return out
end

describe("accumulation", function()
  after_each(function() active.run = nil end)

  it("of N micro-batches is the whole batch, at each of 20 steps, whatever the split", function()
    local one = train(1, 20)
    assert.are.equal(20, #one.gradients)
    for _, sizes in ipairs { 2, 4, 8, { 1, 4, 3 } } do
      local many = train(sizes, 20)
      for step, loss in ipairs(one.losses) do
        -- Relative to a loss of about 3: a few units in the last place of f32.
        assert.is_true(math.abs(many.losses[step] - loss) <= 1e-6 * math.max(1, loss),
          ("step %d: %.9g, %.9g"):format(step, loss, many.losses[step]))
      end
      for step, gradients in ipairs(one.gradients) do
        for name, gradient in pairs(gradients) do
          local largest = xt.amax(xt.abs(gradient)):item()
          local worst = xt.amax(xt.abs(gradient - many.gradients[step][name])):item()
          assert.is_true(worst <= 1e-5 * largest,
            ("step %d, %s: %g of %g"):format(step, name, worst, largest))
        end
      end
    end
  end)

  it("of one micro-batch is the plain step, bit for bit", function()
    local run = train(1, 5, { dropout = .1 })
    -- The same without a recipe: mean loss, backward, step.
    local model = xt.models.qwen3 { vocab = VOCAB, dim = 32, layers = 2, heads = 2, ffn = 48,
      seed = 7, dropout = .1 }
    model:train()
    local opt = xt.optim.adamw(nn.params(model), {})
    for step = 1, 5 do
      local ids, labels = whole_batch(step)
      local sum, count = model:loss(ids, labels, { seed = xt.seed(1, step, 0), reduction = "sum" })
      assert.are.equal(run.losses[step], sum:item() / count)
      sum:backward()
      opt:step(1e-3, { clip = 1.0, divisor = count })
      opt:zero_grad()
    end
    for _, param in ipairs(nn.params(model)) do
      assert.are.equal(run.parameters[param.name]:digest(), param.tensor:digest(), param.name)
    end
  end)

  it("weighs tokens alike: 4 over one and 1, 1, 1 over three give 1.75 in any split", function()
    local values = { 4, 1, 1, 1 }
    local function step_of(splits)
      local run = xt.recipe({ name = "tokens" }, { "bench=1", "accum=" .. #splits })
      local w = xt.var(xt.tensor { 0.0 })
      local opt = xt.optim.sgd({ { name = "w", tensor = w } }, {})
      local data = {}
      function data.batch(_, _, micro)
        local split = splits[micro + 1]
        local list = table.move(values, split[1], split[2], 1, {})
        return xt.tensor(list), xt.tensor(list)
      end
      run.options.bench = 0
      for _, x in run:micros(1, data) do run:backward((x * w):sum(), x.numel) end
      local norm = opt:step(1.0):item()
      assert.is_near(-1.75, w:item(), 1e-6)
      return norm
    end
    local splits = { { { 1, 4 } }, { { 1, 1 }, { 2, 4 } }, { { 1, 3 }, { 4, 4 } },
      { { 1, 2 }, { 3, 4 } }, { { 1, 1 }, { 2, 2 }, { 3, 3 }, { 4, 4 } } }
    for _, split in ipairs(splits) do assert.is_near(1.75, step_of(split), 1e-6) end
  end)

  it("steps the schedule once an update, not once a micro-batch", function()
    local lr = xt.schedule.cosine { peak = 1, min = 0, warmup = 1, total = 5 }
    local run = xt.recipe({ name = "schedule" }, { "bench=1", "accum=2" })
    run.options.bench = 0
    local w = xt.var(xt.tensor { 0.0 })
    local opt = xt.optim.sgd({ { name = "w", tensor = w } }, {})
    local data = { batch = function() return xt.ones { 1 }, xt.ones { 1 } end }
    local moved = {}
    for step = 1, 5 do
      local before = w:item()
      for _, x in run:micros(step, data) do run:backward((x * w):sum(), 1) end
      opt:step(lr(step))
      moved[step] = before - w:item()
    end
    for step, want in ipairs { 1, .853553, .5, .146447, 0 } do
      assert.is_near(want, moved[step], 2e-6)
    end
  end)

  it("counts a micro-batch without any label as nothing, and skips a step without any", function()
    local one = train({ 8 }, 1)
    -- The last rows hold no label in the one split, and are not there in the other.
    local function split(drop)
      local sizes = drop and { 4 } or { 4, 4 }
      local saved = whole_batch
      whole_batch = function(step)
        local ids, labels = saved(step)
        local keep = labels:slice(1, 1, 4)
        return ids, xt.concat({ keep, xt.full({ 4, SEQ }, -100, { dtype = "i32" }) }, 1)
      end
      local out = train(sizes, 3)
      whole_batch = saved
      return out
    end
    local with, without = split(false), split(true)
    assert.are.same(without.losses, with.losses)
    for name, t in pairs(without.parameters) do
      assert.are.equal(t:digest(), with.parameters[name]:digest(), name)
    end
    assert.are_not.equal(one.losses[1], with.losses[1])
  end)

  it("needs the memory of a micro-batch: 4 of 16 within 5 % of one of 16", function()
    local function peak(rows, accum)
      local model = xt.models.qwen3 { vocab = 64, dim = 64, layers = 3, heads = 4, ffn = 128,
        seed = 7 }
      model:train()
      local opt = xt.optim.adamw(nn.params(model), {})
      local ids = xt.zeros({ rows, 32 }, { dtype = "i32" })
      for step = 1, 3 do
        for micro = 1, accum do
          local sum = model:loss(ids, ids, { seed = micro, reduction = "sum" })
          sum:backward()
        end
        opt:step(1e-3, { clip = 1.0, divisor = rows * 32 * accum })
        opt:zero_grad()
        xt.collect()
        if step == 1 then xt.memory_reset_peak() end
      end
      return xt.memory().peak_bytes
    end
    local one, four, large = peak(16, 1), peak(16, 4), peak(64, 1)
    assert.is_true(four <= 1.05 * one, ("%d, %d"):format(one, four))
    assert.is_true(large > 2 * one, ("%d, %d"):format(one, large))
  end)
end)
