-- The op runner: what every op must stand, from one row (tests/op_rows.lua).
--
-- A row is a table:
--   name     the op
--   call     function(op, inputs...) -> tensor: how it is called; the default passes the inputs on
--   inputs   a list of shapes, or {shape = , low = , high = , kind = "int"|"u8"|"f32", below = }
--   also     more lists of shapes for the same call: broadcasts, sizes of 1 ... (gradient checked)
--   empty    lists of shapes with zero-length dimensions; false when the op refuses nothing
--   wrong    {{shapes..., says = "part of the message"}, ...}: must fail, and say so
--   grad     false when the op has no gradient
--   bf16     how many bf16 roundings of the largest entry its result may be off; false: no bf16
--   exact    true: integer results, compared exactly
-- Each check below takes the row and returns true, or false and a sentence.
local xt = require "xtrain"
local core = require "xtrain.core"

local M = {}

-- One rounding to bf16 is 2^-9 relative; to f32, 2^-24.
local BF16_ROUNDING, F32_ROUNDING = 2 ^ -9, 2 ^ -24

local function shape_of(spec)
  return spec.shape or spec
end

-- Values spread over [low, high], different for every seed, the same on every machine.
local function draw(spec, dtype, seed)
  local shape = shape_of(spec)
  local u = xt.rand(shape, { seed = seed })
  if spec.kind == "int" or spec.kind == "u8" then
    return xt.mul(u, spec.below):to(spec.kind == "u8" and "u8" or "i64")
  end
  local low, high = spec.low or -2, spec.high or 2
  local x = u * (high - low) + low
  if spec.away then -- from a kink at zero
    x = xt.where(xt.lt(xt.abs(x), spec.away), xt.full(shape, 2 * spec.away), x)
  end
  return x:to(spec.kind == "f32" and "f32" or dtype)
end

local function draw_all(specs, dtype, seed)
  local inputs = {}
  for i, spec in ipairs(specs) do inputs[i] = draw(spec, dtype, xt.seed(seed, i)) end
  return inputs
end

-- The specs of a row with other shapes put in.
local function with_shapes(row, shapes)
  local specs = {}
  for i, spec in ipairs(row.inputs) do
    local copy = {}
    for key, value in pairs(spec) do
      if type(key) == "string" then copy[key] = value end
    end
    copy.shape = shapes[i]
    specs[i] = copy
  end
  return specs
end

local function op_of(row)
  return row.op or xt.op[row.name]
end

local function run(row, inputs)
  if row.call then return row.call(op_of(row), table.unpack(inputs)) end
  return op_of(row)(table.unpack(inputs))
end

local function is_float(t)
  return t.dtype == "f32" or t.dtype == "f64" or t.dtype == "bf16" or t.dtype == "f16"
end

-- Which inputs a gradient is checked for.
local function float_inputs(inputs)
  local floats, places = {}, {}
  for i, t in ipairs(inputs) do
    if is_float(t) then
      floats[#floats + 1] = t
      places[#places + 1] = i
    end
  end
  return floats, places
end

local function largest(t)
  if t.numel == 0 then return 0 end
  return xt.abs(t:to("f64")):amax():item()
end

local function show(shapes)
  local texts = {}
  for i, spec in ipairs(shapes) do
    texts[i] = "{" .. table.concat(shape_of(spec), ", ") .. "}"
  end
  return table.concat(texts, " ")
end

local function gradient_at(row, specs)
  local inputs = draw_all(specs, "f64", 11)
  local floats, places = float_inputs(inputs)
  if #floats == 0 then return true end
  local function fn(...)
    local all = { table.unpack(inputs) }
    for k, t in ipairs({ ... }) do all[places[k]] = t end
    return (run(row, all))
  end
  local ok, report = xt.gradcheck(fn, floats, { seed = 5 })
  if ok then return true end
  return false, ("the gradient is wrong at %s: %s"):format(show(specs), tostring(report))
end

-- The analytic gradient against differences, in f64 along a random direction.
function M.gradient(row)
  if row.grad == false then return true end
  local ok, message = gradient_at(row, row.inputs)
  for _, shapes in ipairs(row.also or {}) do
    if not ok then break end
    ok, message = gradient_at(row, with_shapes(row, shapes))
  end
  return ok, message
end

local function compare(name, got, want, bound)
  if got.numel == 0 then return true end
  local off = largest(got:to("f64") - want:to("f64"))
  if off <= bound then return true end
  return false, ("%s is off by %g, at most %g was expected"):format(name, off, bound)
end

-- f32 against f64 on the same numbers. The bound: each of the k terms of the longest sum (here the
-- largest input) may be rounded once, and the result a few times.
function M.f32(row)
  local inputs32 = draw_all(row.inputs, "f32", 21)
  local inputs64, longest = {}, 1
  for i, t in ipairs(inputs32) do
    inputs64[i] = is_float(t) and row.inputs[i].kind ~= "f32" and t:to("f64") or t
    longest = math.max(longest, t.numel)
  end
  local y32, y64 = run(row, inputs32), run(row, inputs64)
  if row.exact or not is_float(y32) then
    if y32:digest() == y64:digest() then return true end
    return false, "f32 and f64 inputs give other integers"
  end
  local scale = math.max(largest(y64), row.scale or 1)
  return compare("f32 against f64", y32, y64, (row.f32 or 8 + longest) * F32_ROUNDING * scale)
end

-- bf16 against f32 on the same (bf16) numbers: arithmetic is f32, so few roundings show.
function M.bf16(row)
  if row.bf16 == false then return true end
  local inputs16 = draw_all(row.inputs, "bf16", 31)
  local inputs32 = {}
  for i, t in ipairs(inputs16) do inputs32[i] = t.dtype == "bf16" and t:to("f32") or t end
  local y16, y32 = run(row, inputs16), run(row, inputs32)
  if not is_float(y16) then
    if y16:digest() == y32:digest() then return true end
    return false, "bf16 and f32 inputs give other integers"
  end
  local scale = math.max(largest(y32), row.scale or 0)
  return compare("bf16 against f32", y16, y32, (row.bf16 or 2) * BF16_ROUNDING * scale)
end

local function longest_of(inputs)
  local longest = 1
  for _, t in ipairs(inputs) do longest = math.max(longest, t.numel) end
  return longest
end

-- A tensor of the same values that is a view with a gap after every element.
local function strided(t)
  local last = t.ndim + 1
  return xt.stack({ t, t }, last):select(last, 1)
end

-- The result and the gradients of every float input.
local function forward_and_gradients(row, inputs, make_view)
  local vars, all = {}, { table.unpack(inputs) }
  for i, t in ipairs(inputs) do
    if is_float(t) and row.grad ~= false then
      local v = xt.var(t)
      vars[#vars + 1] = v
      all[i] = v
    end
    if make_view then all[i] = make_view(all[i]) end
  end
  local y = run(row, all)
  local results = { y }
  if #vars > 0 and is_float(y) then
    local seed = xt.rand(y.shape, { seed = 77 }):to(y.dtype)
    local grads = xt.grad(y, vars, seed)
    for i = 1, #vars do results[i + 1] = grads[i] or xt.zeros({ 99 }) end -- never a shape asked for
  end
  return results
end

local function same_results(a, b, what)
  for i = 1, math.max(#a, #b) do
    local x, y = a[i], b[i]
    if (x == nil) ~= (y == nil) or (x and x:digest() ~= y:digest()) then
      return false, ("%s: %s differs"):format(what, i == 1 and "the result"
        or "the gradient of input " .. i - 1)
    end
  end
  return true
end

-- Strided inputs give the bits of contiguous ones, forward and backward; on a GPU they may be
-- rounded otherwise by what the library multiplies (row.library), which goes by the layout.
function M.strided(row)
  for _, dtype in ipairs { "f32", "bf16" } do
    if dtype == "f32" or row.bf16 ~= false then
      local inputs = draw_all(row.inputs, dtype, 41)
      local a = forward_and_gradients(row, inputs)
      local b = forward_and_gradients(row, inputs, strided)
      local ok, message
      if row.library and xt.device() == "cuda" then
        for i = 1, #a do
          local units = dtype == "f32" and (8 + longest_of(inputs)) * F32_ROUNDING
            or 4 * BF16_ROUNDING
          ok, message = compare("strided " .. dtype, b[i], a[i], units * largest(a[i]))
          if not ok then break end
        end
      else
        ok, message = same_results(a, b, "strided " .. dtype)
      end
      if not ok then return false, message end
    end
  end
  return true
end

-- The same call on the CPU and on the GPU, forward and backward, from the same numbers. The bound
-- of f32 and f64: each of the k terms of the longest sum may be rounded once on either side and the
-- result a few times; of bf16: its own roundings, of which gradients have some more.
function M.cuda(row)
  local given = { f64 = 2 ^ -52, f32 = F32_ROUNDING, bf16 = BF16_ROUNDING }
  local before = xt.device()
  for _, dtype in ipairs { "f64", "f32", "bf16" } do
    if dtype ~= "bf16" or row.bf16 ~= false then
      xt.device("cpu")
      local inputs = draw_all(row.inputs, dtype, 91)
      local on_gpu, longest = {}, 1
      for i, t in ipairs(inputs) do
        on_gpu[i] = t:to("cuda")
        longest = math.max(longest, t.numel)
      end
      local ok, want, got = pcall(forward_and_gradients, row, inputs)
      xt.device("cuda")
      if ok then ok, got = pcall(forward_and_gradients, row, on_gpu) end
      xt.device(before)
      if not ok then return false, ("%s: %s"):format(dtype, tostring(got or want)) end
      for i = 1, math.max(#want, #got) do
        local what = ("%s: %s"):format(dtype, i == 1 and "the result"
          or "the gradient of input " .. i - 1)
        local w, g = want[i], got[i] and got[i]:detach():to("cpu")
        if not w or not g then return false, what .. " is missing" end
        if row.exact or not is_float(w) then
          if w:digest() ~= g:digest() then return false, what .. " differs" end
        else
          local units = dtype == "bf16" and 2 * (row.bf16 or 2) + 4 or 4 * (row.f32 or 8 + longest)
          local bound = units * given[dtype] * math.max(largest(w), row.scale or 1)
          local fine, message = compare(what, g, w, bound)
          if not fine then return false, message end
        end
      end
    end
  end
  return true
end

-- One thread and three give the same bits.
function M.threads(row)
  local before = xt.threads()
  local inputs = draw_all(row.inputs, "f32", 51)
  xt.threads(1)
  local one = forward_and_gradients(row, inputs)
  xt.threads(3)
  local three = forward_and_gradients(row, inputs)
  xt.threads(before)
  return same_results(one, three, "1 and 3 threads")
end

-- Zero-length dimensions run forward and backward, and gradients have their inputs' shapes.
function M.empty(row)
  for _, shapes in ipairs(row.empty or {}) do
    local specs = with_shapes(row, shapes)
    local inputs = draw_all(specs, "f32", 61)
    local ok, results = pcall(forward_and_gradients, row, inputs)
    if not ok then return false, ("empty %s: %s"):format(show(specs), tostring(results)) end
    local k = 1
    for i, t in ipairs(inputs) do
      if is_float(t) and row.grad ~= false and is_float(results[1]) then
        k = k + 1
        local g = results[k]
        if g and table.concat(g.shape, "x") ~= table.concat(shape_of(specs[i]), "x") then
          return false, ("empty %s: the gradient of input %d has shape {%s}"):format(show(specs), i,
            table.concat(g.shape, ", "))
        end
      end
    end
  end
  return true
end

-- Wrong shapes are refused with a sentence that begins with the op's name.
function M.wrong(row)
  for _, case in ipairs(row.wrong or {}) do
    local specs = with_shapes(row, case)
    local inputs = draw_all(specs, "f32", 71)
    local ok, message = pcall(function()
      run(row, inputs)
      core.finish() -- a GPU finds values out of range later
    end)
    if ok then return false, "took wrong shapes " .. show(specs) end
    message = tostring(message)
    if not message:find(row.name .. ": ", 1, true) then
      return false, "the error does not name the op: " .. message
    end
    if case.says and not message:find(case.says, 1, true) then
      return false, ("the error does not say '%s': %s"):format(case.says, message)
    end
  end
  return true
end

-- Every allocation fails once; after each failure nothing more is alive than before, and the same
-- call then works.
function M.allocation(row)
  local inputs = draw_all(row.inputs, "f32", 81)
  local function everything()
    forward_and_gradients(row, inputs)
  end
  everything()
  for n = 1, 2000 do
    xt.collect()
    local before = xt.debug.live_count()
    xt.debug.fail_allocation(n)
    local ok, message = pcall(everything)
    xt.debug.fail_allocation(0)
    xt.collect()
    local after = xt.debug.live_count()
    if after ~= before then
      return false, ("allocation %d failed and %d objects stayed alive"):format(n, after - before)
    end
    if ok then return true end
    if not tostring(message):find("out of memory", 1, true) then
      return false, ("allocation %d failed and the error says: %s"):format(n, tostring(message))
    end
  end
  return false, "2000 allocations failed and the call never came to its end"
end

-- The row of the op itself: one line of documentation and a signature that names it.
function M.documentation(row)
  local op = op_of(row)
  if type(op.doc) ~= "string" or #op.doc < 3 then return false, "there is no documentation" end
  if not op.signature:find(row.name, 1, true) then
    return false, "the signature does not name the op: " .. op.signature
  end
  return true
end

-- In the order they are run.
M.checks = { "documentation", "gradient", "f32", "bf16", "strided", "threads", "empty", "wrong",
  "allocation" }

return M
