-- Every op on a GPU: against the CPU, and all that tests/op_runner.lua asks of it there. Skipped
-- where there is none.
local runner = require "op_runner"
local xt = require "xtrain"
local core = require "xtrain.core"
local op_rows = require "op_rows"

local there = table.concat(xt.devices(), " "):find("cuda", 1, true) ~= nil

describe("on cuda, op", function()
  if not there then
    pending("every op: there is no GPU here")
    return
  end
  before_each(function()
    xt.device("cuda")
    core.poison(true)
  end)
  after_each(function()
    core.poison(false)
    xt.device("cpu")
  end)

  local checks = { "cuda", "gradient", "f32", "bf16", "strided", "empty", "wrong", "allocation" }
  for _, name in ipairs(op_rows.order) do
    describe(name, function()
      for _, check in ipairs(checks) do
        it("stands the check of " .. check, function()
          local ok, message = runner[check](op_rows.rows[name])
          assert(ok, message and name .. ": " .. message)
        end)
      end
    end)
  end

  -- Ways to the loss of a row of logits: by a warp, held by 128 threads or by 1 to 8 blocks of 256,
  -- read twice. At the ends of their ranges and at widths that are no number of whole vectors.
  local CLASSES = { 5, 1024, 1025, 12800, 12801, 25600, 25603, 51200, 51201, 99999, 151938, 179201,
    204800, 204803 }
  local UNITS = { f64 = 2 ^ -52, f32 = 2 ^ -24, bf16 = 2 ^ -9 } -- one rounding
  local OPTIONS = { {}, { reduction = "sum", label_smoothing = 0.1 }, { reduction = "none" } }

  -- The loss and the gradient of w, to the CPU in f64. `device` has them computed.
  local function loss_and_gradient(device, x, w, labels, o)
    xt.device(device)
    w = xt.var(w:to(device))
    local loss = xt.linear_cross_entropy(x:to(device), w, labels:to(device), o)
    local each = xt.add(xt.mul(loss, 0), 2) -- what comes from upstream
    local grad = xt.grad(loss, { w }, each)[1]
    loss, grad = loss:detach():to("cpu"):to("f64"), grad:to("cpu"):to("f64")
    xt.device("cuda")
    return loss, grad
  end

  -- A loss is right to 16 roundings of f32 (f64), of itself and of a logit of 4. An element of the
  -- gradient is right to two of bf16; in f32 and f64 to 32: 16 for logits that are less than 32
  -- apart, whose difference is rounded, and as many for exponential, sum and quotient. With
  -- smoothing, which takes the same from every element, it is that much of what was there before.
  local function compare(dtype, x, w, labels, o)
    local loss, grad = loss_and_gradient("cuda", x, w, labels, o)
    local to_loss, to_grad = loss_and_gradient("cpu", x:to("f64"), w:to("f64"), labels, o)
    xt.device("cpu")
    local unit = dtype == "f64" and UNITS.f64 or UNITS.f32
    local off = xt.abs(loss - to_loss) - (xt.abs(to_loss) + 4) * (16 * unit)
    local even = 2 * (o.label_smoothing or 0) / w.shape[1]
    local share = dtype == "bf16" and 2 * UNITS.bf16 or 32 * unit
    local grad_off = xt.abs(grad - to_grad) - (xt.abs(to_grad) + even) * share
    local worst, grad_worst = off:reshape({ -1 }):amax():item(), grad_off:amax():item()
    xt.device("cuda")
    local what = ("%s, %d classes, reduction %s"):format(dtype, w.shape[1], o.reduction or "mean")
    assert(worst <= 0, what .. ": the loss is off by " .. worst)
    assert(grad_worst <= 0, what .. ": the gradient is off by " .. grad_worst)
  end

  -- With the identity for x a row's logits are a column of w, and w's gradient is theirs.
  it("linear_cross_entropy has every element of the gradient right for any number of classes",
    function()
      for _, dtype in ipairs { "bf16", "f32", "f64" } do
        for i, n in ipairs(CLASSES) do
          xt.device("cpu")
          local x = xt.tensor({ { 1, 0, 0, 0 }, { 0, 1, 0, 0 }, { 0, 0, 1, 0 }, { 0, 0, 0, 1 } },
            { dtype = dtype })
          local w = xt.mul(xt.randn({ n, 4 }, { seed = i }), 2):to(dtype)
          local labels = xt.tensor({ 0, n - 1, -100, n // 2 }, { dtype = "i64" })
          for _, o in ipairs(OPTIONS) do compare(dtype, x, w, labels, o) end
          xt.device("cpu")
          local one, column = xt.ones({ 1, 1 }):to(dtype), w:slice(2, 1, 1):contiguous()
          compare(dtype, one, column, xt.tensor({ n - 2 }, { dtype = "i32" }), {})
          xt.device("cpu")
          column = column:to("f64") -- now some classes are impossible
          local never = xt.full({ n, 1 }, -math.huge, { dtype = "f64" })
          local some = xt.where(xt.gt(column, 1), never, column)
          local likely = some:reshape({ n }):argmax(1):item()
          compare(dtype, one, some:to(dtype), xt.tensor({ likely }, { dtype = "i32" }), {})
        end
      end
    end)

  -- So many that the weights are copied to be multiplied.
  it("linear_cross_entropy of 50257 classes agrees with the CPU", function()
    local given, row = op_rows.rows.linear_cross_entropy, {}
    for key, value in pairs(given) do row[key] = value end
    row.inputs = { { 16, 32 }, { 50257, 32 }, { shape = { 16 }, kind = "int", below = 50257 } }
    local ok, message = runner.cuda(row)
    assert(ok, message)
  end)

  it("linear_cross_entropy of labels that are all ignored is 0, and so is its gradient", function()
    for _, dtype in ipairs { "bf16", "f32" } do
      for _, n in ipairs(CLASSES) do
        local w = xt.randn({ n, 2 }, { seed = 1 }):to(dtype)
        local x, labels = xt.ones({ 3, 2 }):to(dtype), xt.full({ 3 }, -100, { dtype = "i32" })
        for _, o in ipairs(OPTIONS) do
          local loss, grad = loss_and_gradient("cuda", x, w, labels, o)
          assert.are.equal(0, xt.abs(loss):sum():item())
          assert.are.equal(0, xt.abs(grad):sum():item())
        end
      end
    end
  end)

  it("linear_cross_entropy tells a label out of range for any number of classes", function()
    for _, n in ipairs(CLASSES) do
      local x, w = xt.ones({ 3, 2 }):to("bf16"), xt.ones({ n, 2 }):to("bf16")
      local labels = xt.tensor({ 0, n, 1 }, { dtype = "i32" })
      local ok, message = pcall(function()
        return xt.linear_cross_entropy(x, w, labels):item()
      end)
      assert.is_false(ok)
      assert.is_truthy(tostring(message):find(("labels[2] is %d"):format(n), 1, true), message)
    end
  end)

  -- Each width takes another kernel; the last has more rows than the blocks of backward take at
  -- once.
  for _, shape in ipairs { { 3, 5, 3, 2 }, { 3, 5, 3, 32 }, { 3, 5, 3, 34 }, { 3, 5, 3, 64 },
    { 70, 5, 3, 64 }, { 3, 5, 3, 128 }, { 3, 5, 3, 160 }, { 3, 5, 3, 256 }, { 3, 5, 3, 512 },
    { 2, 300, 32, 128 } } do
    it("rmsnorm_rope gives what the CPU gives at " .. table.concat(shape, "x"), function()
      local row = { inputs = { shape, { shape[4] } } }
      assert(runner.cuda(setmetatable(row, { __index = op_rows.rows.rmsnorm_rope })))
    end)
  end

  it("has kernels for all that the CPU has", function()
    local missing = {}
    for _, op in ipairs(xt.ops()) do
      local there_is = {}
      for _, dtype in ipairs(core.kernels(op.name, "cuda")) do there_is[dtype] = true end
      for _, dtype in ipairs(core.kernels(op.name, "cpu")) do
        if not there_is[dtype] then missing[#missing + 1] = op.name .. " " .. dtype end
      end
    end
    assert(#missing == 0, "no kernel on cuda: " .. table.concat(missing, ", "))
  end)
end)
