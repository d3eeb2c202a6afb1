-- mlp: a network of two layers on points in the plane, with a model, a loss and data of its own.
--
--   build/release/xtrain recipes/mlp.lua            a few seconds
--   ... recipes/mlp.lua hidden=128 noise=0.1         any option below can be overridden
--
-- Two spirals wind around each other; the model says to which one a point belongs. Nothing here is
-- about text: docs/first-model.md goes through it.
local xt = require "xtrain"

-- ---- options -----------------------------------------------------------------------------------

local run = xt.recipe {
  name = "mlp",

  turns = 1.5, -- of each spiral around the middle
  noise = 0.02, -- deviation of the points from their spiral
  hidden = 64, -- width of the hidden layer
  dropout = 0.0, -- of the hidden layer

  steps = 1500,
  batch = 64, -- points a step
  lr = 2e-2, -- peak of the learning rate
  warmup = 50, -- steps
  focus = 1.0, -- how much more a point on the wrong side counts; 0: all points alike
  log_every = 250,
  save_every = 500,
}

-- ---- data: any object with a method batch(step, micro) -> inputs, targets ----------------------

-- n points (n, 2) and their spirals (n, 1), which are 1 and -1: a pure function of the seed.
local function spirals(n, seed)
  local t = xt.sqrt(xt.rand({ n, 1 }, { seed = xt.seed(seed, "t") })) -- even along the arm
  local side = xt.cast(xt.lt(xt.rand({ n, 1 }, { seed = xt.seed(seed, "side") }), 0.5), "f32")
  side = side * 2 - 1
  local angle = t * (2 * math.pi * run.turns)
  local points = xt.concat({ xt.cos(angle), xt.sin(angle) }, 2) * (t * side)
  return points + xt.randn({ n, 2 }, { seed = xt.seed(seed, "noise") }) * run.noise, side
end

local data = {}

function data:batch(step, micro)
  return spirals(run.batch, xt.seed(run.seed, step, micro))
end

-- ---- model: a plain table of layers and a forward ----------------------------------------------

local class = xt.nn.class "mlp"

-- (n, 2) -> (n, 1): above 0 means the spiral of 1. seed: of what is dropped in training.
function class:forward(x, seed)
  return self.second(self.drop(xt.tanh(self.first(x)), seed))
end

local model = setmetatable({
  first = xt.nn.linear { d_in = 2, d_out = run.hidden, bias = true, seed = false },
  drop = xt.nn.dropout { p = run.dropout },
  second = xt.nn.linear { d_in = run.hidden, d_out = 1, bias = true, seed = false },
}, class)
xt.nn.init(model, run.seed, function(name)
  return name == "first.weight" and 4.0 or 1 / math.sqrt(run.hidden)
end)
model:train()
run:attach { model = model }

-- The logistic loss log(1 + e^-m) of the margin m = score * side, summed over points; each counts
-- more, up to (1 + focus) times, the surer the model is of the wrong side. And how many points.
local function loss_of(points, side, seed)
  local margin = model(points, seed) * side
  local weight = 1 + run.focus * xt.sigmoid(-margin:detach())
  return xt.sum(weight * xt.softplus(-margin)), side.numel
end

-- ---- optimizer, schedule, loop -----------------------------------------------------------------

local opt = xt.optim.adamw(xt.nn.params(model), { betas = { 0.9, 0.99 }, weight_decay = 0.0 })
local lr = xt.schedule.cosine {
  peak = run.lr, min = 0, warmup = run.warmup, total = run.options.steps,
}

for step in run:steps() do
  local norm = run:train(step, {
    data = data, loss = loss_of, optimizer = opt, lr = lr(step), clip = 1.0,
  })
  run:log(step, { lr = lr(step), grad_norm = norm })
  if run:due(step, run.save_every) then run:save(step) end
end

-- ---- what it has learned -----------------------------------------------------------------------

local right = xt.evaluating(model, function()
  local points, side = spirals(2000, xt.seed(run.seed, "unseen"))
  return xt.mean(xt.cast(xt.gt(model(points) * side, 0), "f32")):item()
end)
print(("right side for %.1f %% of 2000 unseen points"):format(100 * right))

local rows = xt.evaluating(model, function()
  local lines = {}
  for y = 1, -1, -0.15 do
    local line = {}
    for x = -1, 1.001, 0.05 do
      line[#line + 1] = model(xt.tensor { { x, y } }):item() > 0 and "#" or "."
    end
    lines[#lines + 1] = table.concat(line)
  end
  return lines
end)
print(table.concat(rows, "\n"))
