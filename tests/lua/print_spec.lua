-- Tensors as text: what the lines say, exactly, and at what cost for the largest.
local xt = require "xtrain"
local near = require("expect").near

local function lines_of(text)
  local lines = {}
  for line in (text .. "\n"):gmatch "(.-)\n" do lines[#lines + 1] = line end
  return lines
end

-- Statistics by the definition, of Lua numbers.
local function of_numbers(values)
  local n, sum, square = 0, 0.0, 0.0
  local out = { nan = 0, inf = 0, min = math.huge, max = -math.huge }
  for _, x in ipairs(values) do
    if x ~= x then
      out.nan = out.nan + 1
    elseif math.abs(x) == math.huge then
      out.inf = out.inf + 1
    else
      n, sum = n + 1, sum + x
      out.min, out.max = math.min(out.min, x), math.max(out.max, x)
    end
  end
  for _, x in ipairs(values) do
    if x - x == 0 then square = square + (x - sum / n) ^ 2 end
  end
  out.mean, out.std = sum / n, math.sqrt(square / n)
  return out
end

local function statistics(t)
  return xt.core.quietly(require("xtrain.statistics").of, t)
end

-- Sums in f64 in another order, of up to 2^17 terms about 1: 1e-16 times 2^17 at the worst.
local function same_statistics(want, got)
  for _, key in ipairs { "nan", "inf", "min", "max" } do assert.are.equal(want[key], got[key]) end
  near(want.mean, got.mean, 2e-11)
  near(want.std, got.std, 2e-11)
end

describe("the statistics of a tensor", function()
  it("are those of its numbers, in one piece or many, few or all elements read", function()
    for _, shape in ipairs { { 5 }, { 3, 7 }, { 300 }, { 40, 50 }, { 3, 50000 }, { 70000, 2 } } do
      local t = xt.randn(shape, { seed = 1 })
      same_statistics(of_numbers(t:reshape({ -1 }):totable()), statistics(t))
    end
  end)

  it("count NaNs and infinities, and leave them out of the rest", function()
    for _, n in ipairs { 12, 1000, 100000 } do
      local t = xt.randn({ n }, { seed = 2 })
      t[1], t[3], t[7] = 0 / 0, math.huge, -math.huge
      t[n] = 0 / 0
      local got = statistics(t)
      same_statistics(of_numbers(t:totable()), got)
      assert.are.equal(2, got.nan)
      assert.are.equal(2, got.inf)
    end
    local none = statistics(xt.full({ 300 }, 0 / 0))
    assert.are.equal(300, none.nan)
    assert.is_nil(none.mean)
    assert.is_nil(statistics(xt.zeros { 0, 3 }))
  end)

  it("of views are those of the copies", function()
    local base = xt.randn({ 60, 40, 50 }, { seed = 3 })
    for _, view in ipairs { base:transpose(1, 3), base:slice(2, 3, 30), base:select(3, 7),
      base:permute { 2, 3, 1 }:slice(1, 2, 9), base:slice(3, 2, 3):transpose(1, 2) } do
      same_statistics(of_numbers(view:contiguous():reshape({ -1 }):totable()), statistics(view))
    end
  end)

  it("of expanded dimensions are exact, and nothing is sampled", function()
    local t = xt.tensor { { 1 }, { 2 }, { 0 / 0 }, { 5 } }:expand { 4, 1000000000 }
    local got = statistics(t)
    assert.are.same({ 1, 5, 1000000000, 0 }, { got.min, got.max, got.nan, got.inf })
    near(8 / 3, got.mean)
    assert.is_nil(got.sampled)
  end)

  it("of huge tensors are of a sample that says so, the same each time", function()
    local t = xt.rand({ 3000, 2000 }, { seed = 4 })
    local got = statistics(t)
    assert.are.equal(4096, got.sampled)
    near(0.5, got.mean, 0.05) -- ten times 1 / sqrt(12 * 4096)
    near(math.sqrt(1 / 12), got.std, 0.05)
    assert.are.same(got, statistics(t))
    assert.is_truthy(tostring(t):find("(in a sample of 4096 elements)", 1, true))
    assert.are.equal(4096, statistics(t:transpose(1, 2):slice(1, 2, 1999)).sampled)
    local gaps = xt.zeros({ 3000000, 2, 2 }):slice(3, 1, 1)
    assert.are.equal(2048, statistics(gaps).sampled) -- 1024 blocks of two neighbours
  end)

  it("of integers are whole", function()
    local t = xt.arange(1000):reshape { 10, 100 }
    local line = lines_of(tostring(t))[2]
    assert.are.equal("min 0  max 999  mean 499.5  std 288.7", line)
    local large = xt.full({ 300 }, 1 << 52, { dtype = "i64" })
    assert.is_truthy(tostring(large):find("max 4503599627370496 ", 1, true))
    local ends = {}
    for i = 0, 19 do ends[i + 1] = i % 2 == 0 and math.maxinteger - i or math.mininteger + i end
    line = lines_of(tostring(xt.tensor(ends, { dtype = "i64" })))[2]
    assert.is_truthy(line:find("min -9223372036854775807  max 9223372036854775807 ", 1, true))
  end)

  it("of every dtype are there", function()
    for _, dtype in ipairs { "f32", "bf16", "f16", "f64", "i32", "i64", "u8" } do
      local got = statistics(xt.arange(400, { dtype = "i64" }):reshape({ 20, 20 })
        :select(1, 3):expand { 20, 20 }:contiguous():to(dtype))
      assert.are.same({ 40, 59, 49.5 }, { got.min, got.max, got.mean }, dtype)
    end
  end)
end)

describe("a printed tensor", function()
  it("says what it is, how large, and what is in it", function()
    local t = xt.arange(4000):to("f32"):reshape { 50, 80 }
    local lines = lines_of(tostring(t))
    assert.are.equal("f32 50x80 cpu, 15.62 KiB", lines[1])
    assert.are.equal("min 0  max 3999  mean 2000  std 1155  NaN 0  inf 0", lines[2])
    assert.are.equal(" [   0     1     2  ...    77    78    79]", lines[3])
    assert.are.equal(" ...", lines[6])
    assert.are.equal(" [3920  3921  3922  ...  3997  3998  3999]", lines[9])
    assert.are.equal(9, #lines)
  end)

  it("says where it comes from, and whether it has a gradient", function()
    local x = xt.var(xt.ones { 2 })
    assert.is_truthy(tostring(x):find("f32 2 cpu, 8 bytes, variable, no gradient\n", 1, true))
    local y = (x * 3):sum()
    assert.is_truthy(tostring(y):find(
      "^f32 scalar cpu, by sum at %S*tests/lua/print_spec.lua:%d+, wants a gradient: 6$"),
      tostring(y))
    y:backward()
    assert.is_truthy(tostring(x):find("variable, has a gradient", 1, true))
    assert.are.equal("f32 2 cpu, 8 bytes\n[3  3]", tostring(x.grad))
  end)

  it("of 10^12 elements allocates nothing", function()
    local t = xt.zeros({ 1 }):expand { 1000000, 1000000 }
    tostring(t)
    local made, live = xt.memory().made_bytes, xt.core.live_count()
    collectgarbage()
    collectgarbage "stop"
    local before = collectgarbage "count"
    local text = tostring(t)
    local heap = collectgarbage "count" - before
    collectgarbage "restart"
    assert.are.equal(made, xt.memory().made_bytes)
    assert.is_true(heap < 256, heap .. " KiB")
    local lines = lines_of(text)
    assert.is_true(#lines < 60)
    assert.are.equal("f32 1000000x1000000 cpu, 3.638 TiB in 4 bytes", lines[1])
    assert.are.equal("min 0  max 0  mean 0  std 0  NaN 0  inf 0", lines[2])
    collectgarbage()
    assert.is_true(xt.core.live_count() <= live)
  end)

  it("of many elements takes less than 1 MiB", function()
    local t = xt.zeros({ 5000, 1000 })
    xt.collect()
    collectgarbage "stop"
    local made = xt.memory().made_bytes
    local text = tostring(t)
    collectgarbage "restart"
    assert.is_true(xt.memory().made_bytes - made < 1 << 20)
    assert.is_truthy(text:find "sample")
  end)

  it("is not recorded and not trapped, in a segment neither", function()
    local x = xt.var(xt.randn({ 40, 40 }, { seed = 1 }))
    local function f(print_it)
      return xt.checkpoint(function(v)
        local y = xt.exp(v)
        if print_it then assert(#tostring(y) > 100) end
        return y:sum()
      end, x)
    end
    local plain = #xt.debug.tape(f(false))
    assert.are.equal(plain, #xt.debug.tape(f(true)))
    local bad = xt.full({ 400 }, 0 / 0)
    xt.core.trap(true)
    local ok, text = pcall(tostring, bad)
    local caught = not pcall(xt.mul, bad, 2)
    xt.core.trap(false)
    assert.is_true(ok, text)
    assert.is_truthy(text:find("NaN 400", 1, true))
    assert.is_true(caught, "the trap was left off")
  end)

  if #xt.devices() == 1 then
    pending "on another device: there is only one here"
  else
    it("on another device shows the same values", function()
      for _, dtype in ipairs { "f32", "bf16", "f64", "i32", "u8" } do
        local t = (xt.rand({ 90, 70 }, { seed = 5 }) * 100):to(dtype)
        for _, view in ipairs { t, t:transpose(1, 2), t:slice(2, 3, 9) } do
          local there = view:to(xt.devices()[2])
          same_statistics(statistics(view), statistics(there))
          local want, got = lines_of(tostring(view)), lines_of(tostring(there))
          for i = 3, #want do assert.are.equal(want[i], got[i]) end
        end
      end
    end)
  end
end)
