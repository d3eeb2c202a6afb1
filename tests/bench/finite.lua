-- What looking for a value that is not finite costs: a step of the tiny recipe's model with the
-- default check, and with the trap on: xtrain tests/bench/finite.lua [rounds]. Times are minima of
-- interleaved rounds, on one thread and of the processor's time, since the machine may be shared.
local xt = require "xtrain"
local finite = require "xtrain.finite"
local bench = require "xtrain.bench"

local rounds = tonumber(arg[1]) or 20
xt.threads(1)

local run = xt.recipe({ name = "finite", vocab = 2048, batch = 8, seq = 128, steps = 1 << 30 },
  { "out=" .. os.tmpname() .. ".run", "bench=1" })
local model = xt.models.qwen3 { vocab = run.vocab, dim = 224, layers = 4, heads = 7, ffn = 608,
  tied = true, seed = 1 }
model:train()
local opt = xt.optim.adamw(xt.nn.params(model), {})
local data = { batch = function(_, step, micro) return bench.batch(run, step, micro) end }

local own = run.own
local checked = { 0, math.huge } -- of the last step, and least of all
local again, measure = finite.again, opt.measure
function finite.again(r)
  local start = os.clock()
  local result = again(r)
  checked[1] = os.clock() - start
  checked[2] = math.min(checked[2], checked[1])
  return result
end
local norm = math.huge
function opt:measure()
  local before = self.measured
  local start = os.clock()
  local result = measure(self)
  if self.measured ~= before then norm = math.min(norm, os.clock() - start) end
  return result
end

local step = 0
local function take()
  step = step + 1
  own.step, own.closed = step, false
  own.count, own.backwards, own.step_tokens, own.loss, own.sums = 0, 0, 0, nil, {}
  opt:zero_grad()
  xt.collect()
  local start = os.clock()
  run:train(step, { data = data, optimizer = opt, lr = 1e-3, clip = 1.0,
    loss = function(ids, labels, seed)
      return model:loss(ids, labels, { seed = seed, reduction = "sum" })
    end })
  return os.clock() - start
end

for _ = 1, 3 do take() end
local plain, trapped = math.huge, math.huge
for _ = 1, rounds do
  plain = math.min(plain, take())
  xt.debug.trap(true)
  trapped = math.min(trapped, take())
  xt.debug.trap(false)
end
print(("step %.1f ms; the check %.3f ms (%.2f %%), of which the norm, which clipping needs as "
  .. "well, %.3f ms"):format(plain * 1e3, checked[2] * 1e3, 100 * checked[2] / plain, norm * 1e3))
print(("with the trap on %.1f ms (%+.1f %%)"):format(trapped * 1e3, 100 * (trapped / plain - 1)))
