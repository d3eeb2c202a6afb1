-- The share of bf16 weights whose update rounds to nothing: counted by hand, and in the log.
local xt = require "xtrain"
local active = require "xtrain.active"
local file = require "xtrain.core.file"

local U = 2.0 ^ -8 -- half of what lies between two bf16 numbers from 1 to 2

-- {weight, gradient}: sgd with a learning rate of 1 subtracts the gradient.
local WEIGHTS = {
  { 1, -U / 4, lost = true }, -- nearer to 1 than to the next number
  { 1, -U, lost = true }, -- halfway: to the even one, which is 1
  { 1, -U * 1.01 }, -- past the half
  { 1, U / 4, lost = true }, -- below 1 the numbers lie closer,
  { 1, U / 2 * 1.01 }, -- and half of that is passed
  { 1 + U / 2, -U / 4, lost = true }, -- a master between two numbers moves on between them
  { 1 + U, -U / 8 }, -- and here over the middle
  { -3, U / 2, lost = true },
  { 0, U * 2.0 ^ -30 }, -- at 0 nothing is too small
  { 1, 0, still = true }, -- no update: neither changed nor lost
  { 1, -2.0 ^ -30, still = true }, -- lost to the f32 master already
  { 100, -0.125, lost = true },
  { 100, -1 },
}

-- A run of `steps` steps of sgd on `params` whose gradient is given: the rows of its log.
local function rows_of(params, words, steps, gradient_of)
  local dir = os.tmpname()
  os.remove(dir)
  finally(function()
    active.run = nil
    file.remove_tree(dir)
  end)
  local run = xt.recipe({ name = "lost" }, { "out=" .. dir, "steps=" .. steps,
    table.unpack(words) })
  run.own.progress.show = function() end
  local opt = xt.optim.sgd(params, {})
  local data = { batch = function() return xt.ones { 1 }, xt.ones { 1 } end }
  for step in run:steps() do
    for _ in run:micros(step, data) do run:backward(gradient_of(step), 1) end
    run:log(step, { lr = 1.0, grad_norm = opt:step(1.0) })
  end
  local rows = {}
  for line in assert(file.read(dir .. "/metrics.jsonl")):gmatch "[^\n]+" do
    rows[#rows + 1] = xt.json.decode(line)
  end
  return rows
end

local function columns()
  local weights, gradients, changed, lost = {}, {}, 0, 0
  for i, row in ipairs(WEIGHTS) do
    weights[i], gradients[i] = row[1], row[2]
    if not row.still then changed = changed + 1 end
    if row.lost then lost = lost + 1 end
  end
  return xt.tensor(weights), xt.tensor(gradients), changed, lost
end

describe("lost updates", function()
  it("are counted exactly, over the bf16 weights that changed, and logged", function()
    local weights, gradients, changed, lost = columns()
    local w = xt.var(weights)
    -- In two parameters more, which must not be counted: one that computes in f32 and loses all of
    -- its updates, and one that nobody uses.
    local gain, unused = xt.var(xt.full({ 50 }, 3)), xt.var(xt.ones { 50 })
    unused:to "bf16"
    local params = { { name = "gain", tensor = gain }, { name = "unused", tensor = unused },
      { name = "w", tensor = w } }
    local rows = rows_of(params, { "lost_updates=true", "log_every=1" }, 1, function()
      w:to "bf16" -- the copy that a forward computes with
      return xt.sum(w * gradients) + xt.sum(gain * U / 2)
    end)
    assert.are.equal(6, lost)
    assert.are.equal(11, changed)
    assert.are.equal(lost / changed, rows[1].lost_updates)
    -- What they have become, for each of them.
    for i, row in ipairs(WEIGHTS) do
      local before, now = xt.tensor(row[1]), w:detach()[i]
      assert.are.equal(row.still or false, before:item() == now:item(), "master " .. i)
      assert.are.equal(row.lost or row.still or false,
        before:to("bf16"):item() == now:to("bf16"):item(), "copy " .. i)
    end
  end)

  it("are none where no weight changes, and not in the log of f32 or without the option", function()
    local function lost(words, dtype, gradient)
      local w = xt.var(xt.ones { 4 })
      local rows = rows_of({ { name = "w", tensor = w } }, words, 4, function()
        return xt.sum(xt.cast(w:to(dtype), "f32") * gradient)
      end)
      local out = {}
      for i, row in ipairs(rows) do out[i] = row.lost_updates or "none" end
      return out
    end
    local option = "lost_updates=true"
    assert.are.same({ 0.0, 0.0, 0.0, 0.0 }, lost({ option, "log_every=1" }, "bf16", 0))
    assert.are.same({ 1.0, 1.0, 1.0, 1.0 }, lost({ option, "log_every=1" }, "bf16", U / 8))
    -- Step 1, then every log_every steps.
    assert.are.same({ 1.0, 1.0, 1.0 }, lost({ option, "log_every=2" }, "bf16", U / 8))
    local without = { "none", "none", "none", "none" }
    assert.are.same(without, lost({ "log_every=1" }, "bf16", U / 8))
    assert.are.same(without, lost({ option, "log_every=1" }, "f32", U / 8))
  end)

  it("keep the sum of their steps in the master: four quarters of a step are one", function()
    local w = xt.var(xt.ones { 8 })
    local rows = rows_of({ { name = "w", tensor = w } }, { "lost_updates=true", "log_every=1" }, 4,
      function()
        return xt.sum(xt.cast(w:to "bf16", "f32") * -U / 2)
      end)
    -- 1 + U/2, 1 + U (halfway, to the even 1), 1 + 3/2 U (rounds to 1 + 2 U), 1 + 2 U
    local shares = {}
    for i, row in ipairs(rows) do shares[i] = row.lost_updates end
    assert.are.same({ 1.0, 1.0, 0.0, 1.0 }, shares)
    assert.are.equal(1 + 2 * U, w:to("bf16"):detach()[1]:item())
  end)
end)
