-- run:train: one step of training, from its micro-batches to the optimizer. With graph=true the
-- first step is recorded, and it and all others are replays of that one graph: batch, seeds,
-- learning rate and step number are its inputs, parameters and moments its state.
local xt = require "xtrain"
local finite = require "xtrain.finite"
local options = require "xtrain.options"
local fail = xt.core.fail

local function all_backward(run, step, o)
  for micro, ids, labels in run:micros(step, o.data) do
    run:backward(o.loss(ids, labels, xt.seed(run.options.seed, step, micro)))
  end
end

-- The step's losses as one number in f64, and its labels: a number, or 0-dim where they are not
-- known here.
local function unread_sums(own)
  local total, count = nil, own.count
  for _, sum in ipairs(own.sums) do
    local wide = xt.cast(sum, "f64")
    total = total and total + wide or wide
  end
  for _, each in ipairs(own.counts) do count = count == 0 and each or each + count end
  return total, count
end

-- The definition: what a replayed step gives the bits of. All of it is queued before loss and norm
-- are looked at: what is not finite changes nothing, there as here, and is then made again.
local function eager(run, step, o)
  local own, optimizer = run.own, o.optimizer
  if run:wants_lost_updates() or not optimizer.queue then
    all_backward(run, step, o)
    return optimizer:step(o.lr, { clip = o.clip })
  end
  own.unread = true
  all_backward(run, step, o)
  local total, count = unread_sums(own)
  local norm = optimizer:queue(o.lr, { clip = o.clip, divisor = count, guard = total })
  while run:made_again() do all_backward(run, step, o) end
  own.unread = nil
  if not norm then return optimizer:step(o.lr, { clip = o.clip }) end
  return optimizer:replayed(o.lr, norm, run:divisor())
end

-- The same as a graph. Its exports: `step`, the losses, the count of labels, the norm; `gradients`,
-- the norm of each gradient, for the case that a step changed nothing.
local function record(batches, o)
  return xt.graph(function(b)
    local out, count, total = {}, nil, nil
    for i, batch in ipairs(batches) do
      local ids = b:input("ids." .. i, batch.ids, { required = true })
      local labels = b:input("labels." .. i, batch.labels, { required = true })
      local sum, labels_that_count = o.loss(ids, labels, b:input("seed." .. i, 0))
      sum:backward()
      out["sum." .. i] = sum
      local wide = xt.cast(sum:detach(), "f64")
      total = total and total + wide or wide
      count = count and count + labels_that_count or labels_that_count
    end
    local norms = {}
    for _, param in ipairs(o.optimizer.params) do
      local grad = param.tensor.grad
      if grad then norms[param.name] = xt.call("grad_norm", { grad }) end
    end
    if next(norms) then b:export("gradients", norms) end
    out.count = type(count) == "number" and xt.tensor(count, { dtype = "f64" }) or count
    local lr = b:input("lr", xt.tensor(0, { dtype = "f64" }))
    out.norm = o.optimizer:step(lr, { clip = o.clip, divisor = count, step = b:input("step", 1),
      guard = total })
    b:export("step", out)
  end)
end

local function replay(run, step, o)
  local own, batches, feeds = run.own, {}, { lr = o.lr }
  for micro, ids, labels in run:micros(step, o.data) do
    local i = #batches + 1
    batches[i] = { ids = ids, labels = labels }
    feeds["ids." .. i], feeds["labels." .. i] = ids, labels
    feeds["seed." .. i] = xt.seed(run.options.seed, step, micro)
  end
  feeds.step = o.optimizer.steps + 1
  if not own.graph or own.graph_clip ~= o.clip then
    own.graph = record(batches, o)
    own.graph_of, own.graph_clip = o.optimizer, o.clip
  elseif own.graph_of ~= o.optimizer then
    fail("run:train: with graph=true a run has one optimizer: its step is in the graph")
  end
  local out = own.graph:run("step", feeds)
  for i = 1, #batches do own.sums[i] = out["sum." .. i] end
  own.backwards, own.count = #batches, out.count:item()
  finite.after_replay(run, out.norm, function(i)
    local batch = batches[i]
    return (o.loss(batch.ids, batch.labels, feeds["seed." .. i]))
  end)
  return o.optimizer:replayed(o.lr, out.norm, own.count, function()
    local norms = {}
    for name, norm in pairs(own.graph:run("gradients", feeds)) do norms[name] = norm:item() end
    return norms
  end)
end

-- train(step, {data, loss, optimizer, lr, clip = 0}): one update; returns the norm of the gradients
-- before clipping.
--   data       has batch(step, micro) -> ids, labels, or what else the loss takes
--   loss       (ids, labels, seed) -> summed loss of a micro-batch, and how many labels it sums;
--              with graph=true it is called once, while recording
--   optimizer, lr (a number), clip: as in optimizer:step(lr, {clip = clip})
local function train(run, step, given)
  local o = options.read("run:train", given, { data = options.optional, loss = options.required,
    optimizer = options.required, lr = options.number, clip = 0.0 })
  if type(o.loss) ~= "function" then
    fail("run:train: loss is a " .. type(o.loss) .. ", wanted a function (ids, labels, seed)")
  end
  if not o.data and run.options.bench == 0 then fail("run:train: option 'data' is missing") end
  if not run.options.graph then return eager(run, step, o) end
  return replay(run, step, o)
end

return train
