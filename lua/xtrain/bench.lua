-- What bench=N measures: the median time of a step on made-up tokens, and the share that it reaches
-- of the matrix products that this machine can do, measured in the same process.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"
local products = require "xtrain.products"
local profile = require "xtrain.profile"

local M = {}

M.WARMUP = 3 -- steps before those that count

local function median(list)
  local sorted = table.move(list, 1, #list, 1, {})
  table.sort(sorted)
  local n = #sorted
  if n % 2 == 1 then return sorted[(n + 1) // 2] end
  return (sorted[n // 2] + sorted[n // 2 + 1]) / 2
end

-- ids or labels out of nothing, (batch, seq) i32 below vocab.
function M.tokens(batch, seq, vocab, seed)
  local x = xt.rand({ batch, seq }, { seed = seed }) * vocab
  return xt.cast(xt.clamp(x, 0, vocab - 1), "i32")
end

local LARGEST, SECOND = 8192, 1.0

-- FLOP/s of a square matrix product: the largest that takes at most a second, best of three.
local function matmul_flops(dtype)
  return xt.no_grad(function()
    local function seconds(n)
      local a = xt.randn({ n, n }, { seed = 1 }):to(dtype)
      local b = xt.randn({ n, n }, { seed = 2 }):to(dtype)
      local best = math.huge
      for _ = 1, 3 do
        local start = file.monotonic()
        xt.matmul(a, b):select(1, 1):select(1, 1):item() -- reading waits for the device
        best = math.min(best, file.monotonic() - start)
      end
      return best
    end
    local n = 512
    local took = seconds(n)
    while took * 8 < SECOND and 2 * n <= LARGEST do
      n = 2 * n
      took = seconds(n)
    end
    return 2.0 * n ^ 3 / took
  end)
end

-- Floating-point operations a token, forward and backward.
local function model_flops(model, seq)
  local c = model.config
  return 6.0 * model:matmul_weights() + 6.0 * c.layers * c.heads * c.head_dim * seq
end

-- The JSON line. run: the recipe's; seconds: of each timed step; model: nil when it is the recipe's
-- own; allocs: what the system was asked for meanwhile.
function M.line(run, seconds, tokens, model, allocs)
  local o = run.options
  local step = median(seconds)
  local dtype = o.dtype
  local row = { recipe = run.name, device = run.device, dtype = dtype, batch = o.batch,
    seq = o.seq, step_ms = step * 1e3, tokens_per_s = tokens / step,
    peak_bytes = xt.memory(run.device).peak_bytes, allocs_per_step = allocs / #seconds }
  if model and model.matmul_weights then
    local matmul = matmul_flops(dtype)
    local rate = model_flops(model, o.seq) * tokens / step
    row.model_tflops, row.matmul_tflops = rate / 1e12, matmul / 1e12
    row.share = rate / matmul
  end
  return json.encode(row)
end

-- The loop of a run with bench=N: some steps to warm up, N that are timed, the JSON line, and the
-- end of the program. begin(run, step) counts a step as begun.
function M.steps(run, begin)
  local own, timed = run.own, run.options.bench
  local seconds, step, started, allocs = {}, 0, nil, 0
  return function()
    if own.norm then own.norm:item() end -- waits for the device
    local now = file.monotonic()
    profile.boundary(run, #seconds < timed and step + 1 or nil)
    if step > M.WARMUP then seconds[#seconds + 1] = now - started end
    if #seconds == timed then
      local tokens = own.step_tokens * own.world
      if run.options.tune ~= "" then print(products.finish_tuning(run.options.tune)) end
      allocs = xt.memory(run.device).system_allocs - allocs
      io.stdout:write(M.line(run, seconds, tokens, own.models[1], allocs), "\n")
      io.stdout:flush()
      os.exit(0, true)
    end
    xt.collect()
    step = step + 1
    if step == M.WARMUP + 1 then allocs = xt.memory(run.device).system_allocs end
    started = file.monotonic()
    begin(run, step)
    return step
  end
end

-- A micro-batch of made-up tokens: of the recipe's options batch and seq and the model's
-- vocabulary.
function M.batch(run, step, micro)
  local o, model = run.options, run.own.models[1]
  local vocab = model and model.config and model.config.vocab or o.vocab
  if not (o.batch and o.seq and vocab) then
    error("bench: the recipe has no options batch and seq (and vocab, for a model of its own)", 0)
  end
  return M.tokens(o.batch, o.seq, vocab, xt.seed(o.seed, "ids", step, micro)),
    M.tokens(o.batch, o.seq, vocab, xt.seed(o.seed, "labels", step, micro))
end

return M
