-- Learning-rate schedules: functions of the step alone, so a resumed run needs nothing restored.
-- Steps count from 1. Warm-up is linear and reaches the peak at step `warmup`; step 1 is never 0.
local options = require "xtrain.options"

local M = {}

-- function -> its text; a schedule that nobody holds is forgotten.
local texts = setmetatable({}, { __mode = "k" })

local function checked(name, given, known)
  local o = options.read("schedule." .. name, given, known)
  local parts = {}
  for _, key in ipairs(options.names(o)) do parts[#parts + 1] = key .. " = " .. o[key] end
  o.text = ("%s{%s}"):format(name, table.concat(parts, ", "))
  if o.warmup then o.warmup = math.max(o.warmup, 1) end
  return o
end

-- "cosine{min = 0, peak = 1, total = 5, warmup = 1}"; nil for a function that is no schedule of
-- these. The options as they were given, with defaults.
function M.describe(schedule) return texts[schedule] end

local function named(o, fn)
  texts[fn] = o.text
  return fn
end

-- The share of the peak that warm-up allows at this step, or nil after it.
local function warming(o, step)
  if step < o.warmup then return step / o.warmup end
end

-- How far step lies between the end of warm-up (0) and the last step (1).
local function progress(o, step)
  if step >= o.total then return 1 end
  return math.max(0, (step - o.warmup) / (o.total - o.warmup))
end

-- constant{peak, warmup = 0}: the peak, after warm-up. constant(3e-4) is the same without one.
function M.constant(given)
  if type(given) == "number" then given = { peak = given } end
  local o = checked("constant", given, { peak = options.number, warmup = 0 })
  return named(o, function(step)
    return o.peak * (warming(o, step) or 1)
  end)
end

-- cosine{peak, min = 0, warmup = 0, total}: half a cosine from the peak to min at step total.
function M.cosine(given)
  local o = checked("cosine", given,
    { peak = options.number, min = 0, warmup = 0, total = options.number })
  return named(o, function(step)
    local warm = warming(o, step)
    if warm then return o.peak * warm end
    local p = progress(o, step)
    if p == 1 then return o.min + 0.0 end
    return o.min + (o.peak - o.min) * 0.5 * (1 + math.cos(math.pi * p))
  end)
end

-- linear{peak, min = 0, warmup = 0, total}: a straight line from the peak to min at step total.
function M.linear(given)
  local o = checked("linear", given,
    { peak = options.number, min = 0, warmup = 0, total = options.number })
  return named(o, function(step)
    local warm = warming(o, step)
    if warm then return o.peak * warm end
    return o.min + (o.peak - o.min) * (1 - progress(o, step))
  end)
end

-- wsd{peak, min = 0, warmup = 0, total, decay = 0}: warm up, stay, and over the last `decay` steps
-- fall in a line: the first of them still has the peak, the last is one `decay`-th above min.
function M.wsd(given)
  local o = checked("wsd", given,
    { peak = options.number, min = 0, warmup = 0, total = options.number, decay = 0 })
  return named(o, function(step)
    local warm = warming(o, step)
    if warm then return o.peak * warm end
    local left = o.total - step + 1
    if o.decay <= 0 or left > o.decay then return o.peak end
    return o.min + (o.peak - o.min) * math.max(left, 0) / o.decay
  end)
end

return M
