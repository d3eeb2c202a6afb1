-- What looking for a value that is not finite costs: a step with the default check, without
-- it, and with the trap on: xtrain tests/bench/finite.lua [rounds] [cpu|cuda]. On the CPU the model
-- is the tiny recipe's, on one thread, and times are of the processor, since the machine may be
-- shared; on a GPU it is v3's, and times are from the first call of a step to the device's last.
-- Times are minima of interleaved rounds.
local xt = require "xtrain"
local core = require "xtrain.core"
local finite = require "xtrain.finite"
local bench = require "xtrain.bench"
local file = require "xtrain.core.file"

local rounds, device = tonumber(arg[1]) or 20, arg[2] or "cpu"
local on_gpu = device == "cuda"
xt.device(device)
xt.threads(1)

local SIZES = {
  cpu = { vocab = 2048, batch = 8, seq = 128, dim = 224, layers = 4, heads = 7, ffn = 608,
    tied = true },
  cuda = { vocab = 50257, batch = 32, seq = 256, dim = 512, layers = 16, heads = 16, ffn = 2048,
    tied = false },
}
local size = assert(SIZES[device], "wanted cpu or cuda")
local run = xt.recipe({ name = "finite", vocab = size.vocab, batch = size.batch, seq = size.seq,
  device = device, steps = 1 << 30 }, { "out=" .. os.tmpname() .. ".run", "bench=1" })
local model = xt.models.qwen3 { vocab = size.vocab, dim = size.dim, layers = size.layers,
  heads = size.heads, ffn = size.ffn, tied = size.tied, seed = 1 }
model:train()
local opt = xt.optim.adamw(xt.nn.params(model), {})
local data = { batch = function(_, step, micro) return bench.batch(run, step, micro) end }

local function now()
  if not on_gpu then return os.clock() end
  core.finish()
  return file.monotonic()
end

local own = run.own
local checked = math.huge -- the least that the check took
local again, measure = finite.again, opt.measure
local function look(r)
  local start = os.clock()
  local result = again(r)
  checked = math.min(checked, os.clock() - start)
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
  own.counts = {}
  opt:zero_grad()
  xt.collect()
  local start = now()
  run:train(step, { data = data, optimizer = opt, lr = 1e-3, clip = 1.0,
    loss = function(ids, labels, seed)
      return model:loss(ids, labels, { seed = seed, reduction = "sum" })
    end })
  return now() - start
end

local MODES = {
  { name = "check", least = math.huge, run = function() finite.again = look return take() end },
  { name = "none", least = math.huge, run = function()
    finite.again = function() return false end
    return take()
  end },
  { name = "trap", least = math.huge, run = function()
    finite.again = look
    xt.debug.trap(true)
    local took = take()
    xt.debug.trap(false)
    return took
  end },
}
for _ = 1, 3 do MODES[1].run() end
for _ = 1, rounds do
  for _, mode in ipairs(MODES) do mode.least = math.min(mode.least, mode.run()) end
end
local check, none, trap = MODES[1].least, MODES[2].least, MODES[3].least
print(("step %.2f ms; without the check %.2f ms: %+.2f %%"):format(check * 1e3, none * 1e3,
  100 * (check / none - 1)))
if not on_gpu then
  print(("the check %.3f ms (%.2f %%), of which the norm, which clipping needs as well, %.3f ms")
    :format(checked * 1e3, 100 * checked / check, norm * 1e3))
end
print(("with the trap on %.2f ms (%+.1f %%)"):format(trap * 1e3, 100 * (trap / check - 1)))
