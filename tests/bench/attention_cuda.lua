-- Tiled attention on a GPU: the shapes of docs/performance.md, forward and backward, and, with
-- check=1, many small shapes against the CPU's definition on the same numbers.
--
--     xtrain tests/bench/attention_cuda.lua [check=1] [rounds=50] [row=N]
--
-- A time is that of a launch among many back to back; backward's is that of both less that of
-- forward. TFLOP/s counts the causal half; backward is 2.5 forwards.
local xt = require "xtrain"
local file = require "xtrain.core.file"

local options = {}
for _, text in ipairs(arg or {}) do
  local name, value = text:match("^(%w+)=(%d+)$")
  if name then options[name] = math.tointeger(tonumber(value)) end
end

if not pcall(xt.zeros, {}, { device = "cuda" }) then
  print("attention on a GPU: there is none here")
  return
end

-- ---- against the CPU ----------------------------------------------------------------------------

-- The largest distance, and the largest entry of the wanted.
local function apart(got, wanted)
  got, wanted = got:detach():to("cpu"):to("f64"), wanted:to("f64")
  return xt.amax(xt.abs(got - wanted)):item(), xt.amax(xt.abs(wanted)):item()
end

local function draw(shape, dtype, seed)
  return xt.randn(shape, { seed = seed, device = "cpu" }):to(dtype)
end

-- c: B, sq, sk, h, kv, d, dtype, opts (device tensors named in opts are copied), view
local function compare(c)
  local q_shape, k_shape = { c.B, c.sq, c.h, c.d }, { c.B, c.sk, c.kv, c.d }
  local q, k, v = draw(q_shape, c.dtype, 1), draw(k_shape, c.dtype, 2), draw(k_shape, c.dtype, 3)
  local g = draw(q_shape, c.dtype, 4)
  if c.view then -- inner strides of a wider tensor, as of a joint projection
    local wide = draw({ c.B, c.sk, c.kv, 2 * c.d + c.view }, c.dtype, 5)
    k, v = wide:slice(4, 1, c.d), wide:slice(4, c.d + 1, 2 * c.d)
  end
  local function both(device)
    local opts = {}
    for name, value in pairs(c.opts or {}) do
      opts[name] = type(value) == "userdata" and value:to(device) or value
    end
    local a, b, w = xt.var(q:to(device)), k, v
    if c.view and device == "cuda" then
      local wide = draw({ c.B, c.sk, c.kv, 2 * c.d + c.view }, c.dtype, 5):to(device)
      b, w = xt.var(wide):slice(4, 1, c.d), xt.var(wide):slice(4, c.d + 1, 2 * c.d)
    else
      b, w = xt.var(b:to(device)), xt.var(w:to(device))
    end
    local out = xt.attention(a, b, w, opts)
    local grads = xt.grad(out, { a, b, w }, g:to(device))
    return out, table.unpack(grads)
  end
  local wanted, got, again = { both("cpu") }, { both("cuda") }, { both("cuda") }
  local names, words, bad = { "out", "dq", "dk", "dv" }, {}, false
  for i, name in ipairs(names) do
    local far, most = apart(got[i], wanted[i])
    -- bf16: p and ds are rounded before they are multiplied, and the answer once more.
    local allowed = (c.dtype == "bf16" and 2 ^ -6 or c.dtype == "f32" and 2 ^ -16 or 2 ^ -42)
      * math.max(most, 1e-3)
    local mark = ""
    if far > allowed or far ~= far then
      mark, bad = "!", true
    end
    if got[i]:digest() ~= again[i]:digest() then
      mark, bad = mark .. " differs from run to run", true
    end
    words[#words + 1] = ("%s %.2g/%.2g%s"):format(name, far, most, mark)
  end
  print((bad and "BAD  " or "ok   ") .. c.name .. ": " .. table.concat(words, ", "))
  return not bad
end

local function all_checks()
  local cases = {}
  local function add(name, B, sq, sk, h, kv, d, dtype, opts, view)
    cases[#cases + 1] = { name = name, B = B, sq = sq, sk = sk, h = h, kv = kv, d = d,
      dtype = dtype, opts = opts, view = view }
  end
  local function ints(...)
    return xt.tensor({ ... }, { dtype = "i32", device = "cpu" })
  end
  for _, dtype in ipairs { "bf16", "f32", "f64" } do
    for _, d in ipairs { 16, 32, 64, 96, 128, 256 } do
      add(dtype .. " D" .. d, 2, 200, 200, 4, 2, d, dtype, {})
      add(dtype .. " D" .. d .. " causal", 2, 333, 333, 4, 2, d, dtype, { causal = true })
    end
    for _, d in ipairs { 1, 8, 20, 33, 72, 192, 250 } do
      add(dtype .. " D" .. d .. " causal", 1, 130, 130, 2, 1, d, dtype, { causal = true })
    end
    for _, d in ipairs(dtype == "bf16" and { 20, 32, 64, 96, 128, 256 } or { 32, 64, 128 }) do
      local name = dtype .. " D" .. d
      add(name .. " 64x64", 1, 64, 64, 1, 1, d, dtype, {})
      add(name .. " few queries", 2, 70, 300, 2, 2, d, dtype, { causal = true })
      add(name .. " one query", 2, 1, 300, 2, 2, d, dtype, { causal = true })
      add(name .. " few keys", 2, 300, 70, 2, 2, d, dtype, { causal = true })
      local lengths = ints(0, 77, 150)
      add(name .. " lengths", 3, 150, 150, 2, 1, d, dtype, { causal = true, lengths = lengths })
      add(name .. " lengths, not causal", 3, 150, 150, 2, 1, d, dtype, { lengths = lengths })
      local documents = {}
      for i = 1, 150 do documents[i] = i // 40 end
      add(name .. " documents", 2, 150, 150, 2, 1, d, dtype,
        { causal = true, documents = ints(documents, documents) })
      local mask = xt.lt(xt.rand({ 2, 1, 150, 150 }, { seed = 6, device = "cpu" }), 0.5):to("u8")
      add(name .. " mask", 2, 150, 150, 2, 1, d, dtype, { mask = mask })
      add(name .. " dropout", 2, 150, 150, 2, 1, d, dtype,
        { causal = true, dropout = 0.3, seed = 9 })
      add(name .. " scale", 2, 150, 150, 2, 1, d, dtype, { scale = -0.3 })
      add(name .. " view", 2, 150, 150, 4, 2, d, dtype, { causal = true }, 8)
      add(name .. " odd view", 2, 150, 150, 4, 2, d, dtype, { causal = true }, 3)
      add(name .. " dropout of all", 2, 70, 70, 2, 1, d, dtype,
        { causal = true, dropout = 1, seed = 9 })
      add(name .. " scale, causal", 1, 150, 150, 8, 1, d, dtype, { causal = true, scale = -0.3 })
      local rows = mask:clone()
      rows:slice(3, 40, 80):fill_(0) -- these queries see nothing
      add(name .. " mask of whole rows", 2, 150, 150, 2, 1, d, dtype, { mask = rows })
    end
  end
  -- More items than a device has blocks: each takes several, some with nothing to meet.
  local cycle = { 0, 1, 77, 300, 64, 0, 150, 299 }
  local many, few = {}, {}
  for b = 1, 24 do many[b], few[b] = cycle[b % #cycle + 1], cycle[b % #cycle + 1] % 71 end
  for _, d in ipairs { 32, 64, 96, 128, 256 } do
    add("bf16 D" .. d .. " many items", 24, 300, 300, 16, 4, d, "bf16",
      { causal = true, lengths = xt.tensor(many, { dtype = "i32", device = "cpu" }) })
    add("bf16 D" .. d .. " many items, few keys", 24, 300, 70, 16, 4, d, "bf16",
      { causal = true, lengths = xt.tensor(few, { dtype = "i32", device = "cpu" }) })
  end
  local good = 0
  for _, c in ipairs(cases) do
    local ok, answer = pcall(compare, c)
    if not ok then print("FAIL " .. c.name .. ": " .. tostring(answer)) end
    if ok and answer then good = good + 1 end
  end
  print(("%d of %d"):format(good, #cases))
end

-- ---- times --------------------------------------------------------------------------------------

local rows = {
  { B = 32, h = 32, kv = 32, s = 256, d = 32, flash = { 66, 234 } },
  { B = 32, h = 16, kv = 16, s = 1024, d = 64, flash = { 317, 1114 } },
  { B = 64, h = 12, kv = 12, s = 1024, d = 64, flash = { 463, 1652 } },
  { B = 8, h = 16, kv = 8, s = 2048, d = 128, flash = { 481, 1743 } },
  { B = 2, h = 16, kv = 8, s = 8192, d = 128, flash = { 1726, 5053 } },
  { B = 16, h = 48, kv = 12, s = 1024, d = 32, flash = { 372, 1232 } },
}

local function wait(t) t:select(1, 1):select(1, 1):select(1, 1):select(1, 1):item() end

-- Microseconds of one of many calls of fn, which returns a tensor; the best of three.
local function microseconds(rounds, fn)
  local best = math.huge
  wait(fn())
  for _ = 1, 3 do
    wait(fn())
    local start, last = file.monotonic(), nil
    for _ = 1, rounds do last = fn() end
    wait(last)
    best = math.min(best, (file.monotonic() - start) / rounds * 1e6)
  end
  return best
end

-- Numbers of the size of real ones, a head repeated: the times do not depend on it.
local function inputs(r)
  local function one(heads, seed)
    local x = xt.randn({ 1, r.s, heads, r.d }, { seed = seed, device = "cpu" }):to("bf16")
    return x:expand({ r.B, r.s, heads, r.d }):contiguous():to("cuda")
  end
  return one(r.h, 1), one(r.kv, 2), one(r.kv, 3), one(r.h, 4)
end

local function time_row(r)
  local q, k, v, g = inputs(r)
  local causal = { causal = true }
  local rounds = options.rounds or 50
  local forward = microseconds(rounds, function() return xt.attention(q, k, v, causal) end)
  local a, b, c = xt.var(q), xt.var(k), xt.var(v)
  local kept = microseconds(rounds, function() return xt.attention(a, b, c, causal):detach() end)
  local both = microseconds(rounds, function()
    return xt.grad(xt.attention(a, b, c, causal), { a, b, c }, g)[1]
  end)
  local flop = 2.0 * r.B * r.h * r.s * r.s * r.d
  local text = "B%d H%d/%d S%d D%d: forward %.1f us (%.0f TFLOP/s), backward %.1f us (%.0f); "
    .. "flash %d / %d"
  print(text:format(r.B, r.h, r.kv, r.s, r.d, forward, flop / forward / 1e6, both - kept,
      2.5 * flop / (both - kept) / 1e6, r.flash[1], r.flash[2]))
end

if options.check == 1 then all_checks() end
for i, r in ipairs(rows) do
  if not options.row or options.row == i then time_row(r) end
end
