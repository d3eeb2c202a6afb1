-- The training step of recipes/tiny.lua's model, eager and replayed from a graph, in turn in one
-- process. The fastest of each over all rounds counts, by the clock and by the processor's time:
-- other programs only slow them down.
--
--   build/release/xtrain tests/bench/replay.lua [rounds=20] [key=value ...]
--
-- Ends with one JSON line: milliseconds of a step of both forms, the ratio of replay to eager, the
-- same of processor time, and the share of a replayed step that is spent outside kernels.
local xt = require "xtrain"
local file = require "xtrain.core.file"

local o = { rounds = 20, vocab = 2048, dim = 224, layers = 4, heads = 7, ffn = 608, batch = 8,
  seq = 128, accum = 1, dropout = 0.0, dtype = "f32", recompute = "none", threads = 1 }
for _, word in ipairs(arg) do
  local key, value = word:match "^(%w+)=(.*)$"
  if o[key] == nil then error("unknown option " .. word, 0) end
  o[key] = tonumber(value) or value
end
xt.threads(o.threads)

local function new()
  local model = xt.models.qwen3 { vocab = o.vocab, dim = o.dim, layers = o.layers, heads = o.heads,
    ffn = o.ffn, tied = true, dropout = o.dropout, dtype = o.dtype, recompute = o.recompute,
    seed = 1 }
  model:train()
  return { model = model, opt = xt.optim.adamw(xt.nn.params(model), { betas = { 0.9, 0.95 } }) }
end

local function tokens(seed)
  return xt.cast(xt.rand({ o.batch, o.seq }, { seed = seed }) * o.vocab, "i32")
end
local batches = {}
for i = 1, o.accum do batches[i] = { tokens(2 * i), tokens(2 * i + 1) } end

local function eager(side, step)
  local total = 0
  side.opt:zero_grad()
  for i, batch in ipairs(batches) do
    local loss, count = side.model:loss(batch[1], batch[2],
      { seed = xt.seed(1, step, i), reduction = "sum" })
    loss:backward()
    total = total + count
  end
  return side.opt:step(1e-3, { clip = 1.0, divisor = total }):item()
end

local replayed = new()
local graph = xt.graph(function(b)
  local total
  for i, batch in ipairs(batches) do
    local loss, count = replayed.model:loss(b:input("ids." .. i, batch[1]),
      b:input("labels." .. i, batch[2]), { seed = b:input("seed." .. i, 0), reduction = "sum" })
    loss:backward()
    total = total and total + count or count
  end
  local lr, step = b:input("lr", xt.tensor(0, { dtype = "f64" })), b:input("step", 1)
  b:export("step", { norm = replayed.opt:step(lr, { clip = 1.0, divisor = total, step = step }) })
end)

local function replay(_, step)
  local feeds = { lr = 1e-3, step = step }
  for i, batch in ipairs(batches) do
    feeds["ids." .. i], feeds["labels." .. i] = batch[1], batch[2]
    feeds["seed." .. i] = xt.seed(1, step, i)
  end
  return graph:run("step", feeds).norm:item()
end

-- ---- rounds ------------------------------------------------------------------------------------

local plain = new()
local best, norms = { math.huge, math.huge }, {}
local busy = { math.huge, math.huge }
for step = 1, o.rounds do
  for k, form in ipairs { eager, replay } do
    xt.collect()
    local start, clock = file.monotonic(), os.clock()
    norms[k] = form(plain, step)
    if step > 2 then
      best[k] = math.min(best[k], file.monotonic() - start)
      busy[k] = math.min(busy[k], os.clock() - clock)
    end
  end
  assert(norms[1] == norms[2], "eager and replay differ")
end

-- ---- time outside kernels ----------------------------------------------------------------------

local outside = math.huge
for step = o.rounds + 1, o.rounds + 5 do
  xt.core.profile(true)
  xt.collect()
  local start = file.monotonic()
  replay(nil, step)
  local took, inside = file.monotonic() - start, 0
  for _, row in ipairs(xt.core.profile()) do inside = inside + row.seconds end
  xt.core.profile(false)
  outside = math.min(outside, (took - inside) / took)
end

print(xt.json.encode { eager_ms = best[1] * 1e3, replay_ms = best[2] * 1e3,
  ratio = best[2] / best[1], busy_ratio = busy[2] / busy[1], outside_kernels = outside,
  calls = graph:memory("step").calls })
