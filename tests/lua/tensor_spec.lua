-- Tensors as Lua sees them: constructors, properties, indexing, printing, errors, arguments of ops.
local expect = require "expect"
local xt = require "xtrain"

local message_of = expect.message_of
local function raises(wanted, fn) expect.raises_in("tensor_spec.lua", wanted, fn) end

describe("constructors", function()
  it("make a tensor of nested tables", function()
    local t = xt.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
    assert.are.same({ 2, 3 }, t.shape)
    assert.are.equal(2, t.ndim)
    assert.are.equal(6, t.numel)
    assert.are.equal("f32", t.dtype)
    assert.are.equal("cpu", t.device)
    assert.are.same({ { 1, 2, 3 }, { 4, 5, 6 } }, t:totable())
  end)

  it("make a scalar of a number", function()
    local t = xt.tensor(2.5)
    assert.are.same({}, t.shape)
    assert.are.equal(2.5, t:item())
    assert.are.equal(2.5, t:totable())
  end)

  it("make integers only when the options say so", function()
    assert.are.equal("f32", xt.tensor({ 1, 2 }).dtype)
    local t = xt.tensor({ 1, 9007199254740993 }, { dtype = "i64" })
    assert.are.same({ 1, 9007199254740993 }, t:totable())
    assert.are.equal("integer", math.type(t[1]:item()))
  end)

  it("take zero-length dimensions", function()
    assert.are.same({ 0 }, xt.tensor({}).shape)
    assert.are.same({ 2, 0 }, xt.tensor({ {}, {} }).shape)
    assert.are.same({ {}, {} }, xt.zeros({ 2, 0 }):totable())
    assert.are.equal(0, xt.zeros({ 0, 3 }):sum():item())
  end)

  it("name the place where tables are ragged", function()
    raises("value[2] has 1 values, wanted 2", function() xt.tensor { { 1, 2 }, { 3 } } end)
    raises("value[2] is the number 3, wanted a table", function() xt.tensor { { 1, 2 }, 3 } end)
    raises("value[1][2] is the string 'x'", function() xt.tensor { { 1, "x" } } end)
    raises("value[2] is a table, wanted a number", function() xt.tensor { 1, { 2 } } end)
  end)

  it("refuse values that do not fit an integer dtype", function()
    raises("does not fit in u8", function() xt.tensor({ 256 }, { dtype = "u8" }) end)
    raises("does not fit in i32", function() xt.tensor({ 1.5 }, { dtype = "i32" }) end)
  end)

  it("fill, count and convert bytes", function()
    assert.are.same({ 7, 7 }, xt.full({ 2 }, 7):totable())
    assert.are.same({ 0, 1, 2 }, xt.arange(3):totable())
    assert.are.equal("i64", xt.arange(3).dtype)
    assert.are.equal("f32", xt.arange(3, { dtype = "f32" }).dtype)
    local t = xt.tensor { 1, -2, 0.5 }
    assert.are.same(t:totable(), xt.from_bytes(t:bytes(), "f32", { 3 }):totable())
    assert.are.equal(12, #t:bytes())
    raises("from_bytes: f32 4 takes 16 bytes, given 12", function()
      xt.from_bytes(t:bytes(), "f32", { 4 })
    end)
  end)

  it("draw the same numbers for the same seed, and none without one", function()
    local a, b = xt.randn({ 8 }, { seed = 1 }), xt.randn({ 8 }, { seed = 1 })
    assert.are.equal(a:digest(), b:digest())
    assert.are_not.equal(a:digest(), xt.randn({ 8 }, { seed = 2 }):digest())
    local message = message_of(function() xt.rand({ 2 }) end)
    assert.is_truthy(message:find("seed is missing", 1, true))
  end)

  it("list the options they know", function()
    raises("zeros: unknown option 'dtipe'; the options are 'dtype', 'device'", function()
      xt.zeros({ 2 }, { dtipe = "f32" })
    end)
    raises("dtype is 'f31', wanted one of f32, bf16", function()
      xt.zeros({ 2 }, { dtype = "f31" })
    end)
  end)
end)

describe("a tensor", function()
  local t = xt.tensor { { 1, 2, 3 }, { 4, 5, 6 } }

  it("is indexed from 1, or from the end", function()
    assert.are.same({ 1, 2, 3 }, t[1]:totable())
    assert.are.same({ 4, 5, 6 }, t[-1]:totable())
    assert.are.equal(6, t[2][3]:item())
    assert.are.equal(2, #t)
    raises("position 0 is outside 1..2", function() return t[0].shape end)
    raises("position 5 is outside 1..2", function() return t[5].shape end)
  end)

  it("ends ipairs", function()
    local n = 0
    for i, row in ipairs(t) do
      n = n + 1
      assert.are.equal(3 * i - 2, row[1]:item())
    end
    assert.are.equal(2, n)
  end)

  it("is written in place by position", function()
    local x = xt.zeros { 2, 3 }
    x[1] = 5
    x[2] = xt.tensor { 1, 2, 3 }
    assert.are.same({ { 5, 5, 5 }, { 1, 2, 3 } }, x:totable())
  end)

  it("reads strided views as their copies", function()
    local y = t:transpose(1, 2)
    assert.are.same({ { 1, 4 }, { 2, 5 }, { 3, 6 } }, y:totable())
    assert.are.equal(y:clone():bytes(), y:bytes())
    assert.are.equal(y:contiguous():digest(), y:digest())
    assert.is_true(xt.zeros({ 1, 13 }):is_contiguous())
  end)

  it("computes with numbers, which take its dtype", function()
    assert.are.same({ 2, 3 }, (xt.tensor { 1, 2 } + 1):totable())
    assert.are.same({ 0, -1 }, (1 - xt.tensor { 1, 2 }):totable())
    assert.are.same({ 2, 4 }, (2 ^ xt.tensor { 1, 2 }):totable())
    local i = xt.tensor({ 7, 8 }, { dtype = "i32" }) * 2
    assert.are.equal("i32", i.dtype)
    assert.are.same({ 14, 16 }, i:totable())
    assert.are.equal("bf16", (xt.ones({ 2 }, { dtype = "bf16" }) * 0.5).dtype)
    raises("mul: the number 2.5 does not fit in i32", function() return i * 2.5, 0 end)
    local big = xt.tensor(9007199254740992, { dtype = "i64" }) + 1
    assert.are.equal(9007199254740993, big:item())
  end)

  it("is equal to itself alone", function()
    local a = xt.tensor { 1 }
    assert.is_true(a == a)
    assert.is_false(a == xt.tensor { 1 })
  end)

  it("has read-only properties and says what it does not have", function()
    raises("'shape' of a tensor is read-only", function() t.shape = {} end)
    raises("no property or method 'size'", function() return t.size, 0 end)
    raises("write t:name(), not t.name()", function() t.item() end)
  end)

  it("is converted, and stays itself when nothing changes", function()
    assert.are.equal("f64", t:to("f64").dtype)
    assert.is_true(t:to("f32") == t)
    assert.is_true(t:to("cpu") == t)
    if #xt.devices() == 1 then
      raises("there is no device cuda", function() t:to("cuda") end)
    end
  end)
end)

describe("printing", function()
  local function lines_of(text) return select(2, text:gsub("\n", "\n")) + 1 end

  it("shows dtype, shape, device and elements", function()
    assert.are.equal("f32 2x2 cpu, 16 bytes\n [1  2]\n [3  4]",
      tostring(xt.tensor { { 1, 2 }, { 3, 4 } }))
    assert.are.equal("f32 scalar cpu: 2.5", tostring(xt.tensor(2.5)))
    assert.are.equal("i64 0x3 cpu: []", tostring(xt.zeros({ 0, 3 }, { dtype = "i64" })))
  end)

  it("of 10^12 elements makes no copy and few lines", function()
    local t = xt.zeros({ 1 }):expand { 1000000, 1000000 }
    local made, began = xt.memory().made_bytes, os.clock()
    local text = tostring(t)
    assert.is_true(os.clock() - began < 1)
    assert.are.equal(made, xt.memory().made_bytes)
    assert.is_true(lines_of(text) <= 60)
    assert.is_truthy(text:find("f32 1000000x1000000 cpu", 1, true))
  end)

  it("stays below 60 lines in any shape", function()
    for _, shape in ipairs { { 1000 }, { 41, 2 }, { 20, 2, 3 }, { 40, 1, 3 }, { 9, 9, 9 },
      { 3, 3, 3, 3, 3, 3, 3 }, { 50, 50, 2, 50 }, { 2, 2, 2, 2, 2, 2, 2, 2 } } do
      local n = lines_of(tostring(xt.zeros(shape)))
      assert.is_true(n <= 60, table.concat(shape, "x") .. ": " .. n)
    end
  end)
end)

describe("an op", function()
  it("has a name, a signature and a line of documentation", function()
    assert.are.equal("softmax", xt.softmax.name)
    assert.are.equal("softmax(x [, dim = -1])", xt.softmax.signature)
    assert.is_truthy(#xt.softmax.doc > 10)
    assert.are.equal(xt.softmax.signature .. "\n  " .. xt.softmax.doc, tostring(xt.softmax))
    assert.is_true(xt.op.softmax == xt.softmax)
    assert.are.equal("userdata", type(xt.op.softmax))
  end)

  it("is listed by xt.ops and documented", function()
    local seen = {}
    for _, op in ipairs(xt.ops()) do
      assert.is_nil(seen[op.name], "twice: " .. op.name)
      seen[op.name] = true
      assert.is_true(#op.doc > 0 and #op.signature > 0, op.name)
    end
    for name in ([[add sub mul div pow neg exp log sqrt rsqrt abs sin cos tanh sigmoid relu silu erf
      minimum maximum eq lt gt gelu clamp where masked_fill cast sum mean amax amin norm argmax
      cumsum softmax log_softmax logsumexp topk matmul concat stack index_select gather embedding
      cross_entropy linear_cross_entropy rmsnorm layernorm swiglu repeat_kv rope attention dropout
      dropout_mask multinomial rmsnorm_rope]]):gmatch("%S+") do
      assert.is_true(seen[name], "missing: " .. name)
    end
  end)

  it("takes positional arguments, and the rest by name", function()
    local x = xt.tensor { { 1, 2 }, { 3, 4 } }
    assert.are.same({ 4, 6 }, x:sum(1):totable())
    assert.are.same({ 4, 6 }, x:sum({ 1 }):totable())
    assert.are.same({ 4, 6 }, x:sum({ dims = 1 }):totable())
    assert.are.same({ { 3 }, { 7 } }, x:sum(-1, { keepdim = true }):totable())
    assert.are.same({ { 10 } }, xt.sum(x, { keepdim = true }):totable())
    assert.are.equal(10, x:sum():item())
    assert.are.same({ 4 }, x:reshape({ -1 }).shape)
    assert.are.same({ 1, 4 }, x:reshape(1, 4).shape)
  end)

  it("counts dimensions and positions from 1", function()
    local x = xt.arange(24, { dtype = "f32" }):reshape { 2, 3, 4 }
    assert.are.same({ 4, 2, 3 }, x:permute({ 3, 1, 2 }).shape)
    assert.are.same({ 2, 2, 4 }, x:slice(2, 2, 3).shape)
    assert.are.equal(4, x:slice(2, 2, 3)[1][1][1]:item())
    assert.are.same({ 2, 1, 4 }, x:slice(2, -1).shape)
    assert.are.equal(23, x:select(3, -1)[2][3]:item())
    raises("dim is 0: positions count from 1", function() x:softmax(0) end)
    raises("softmax: dim is 4, x has 3 dimensions (f32 2x3x4)", function() x:softmax(4) end)
  end)

  it("says what is wrong with its arguments", function()
    local x = xt.ones { 2, 3 }
    raises("add: b is missing; the signature is add(a, b)", function() xt.add(x) end)
    raises("add: given 3 arguments, at most 2 are taken", function() xt.add(x, x, x) end)
    raises("add: b is the string 'x', wanted a tensor", function() xt.add(x, "x") end)
    raises("sum: unknown option 'keepdims'; the options are 'keepdim'", function()
      x:sum { keepdims = true }
    end)
    raises("gelu: approx is the string 'tan', wanted one of 'tanh', 'none'", function()
      x:gelu { approx = "tan" }
    end)
    raises("matmul: ", function() x:matmul(x) end)
    raises("sizes 2 and 5 do not broadcast", function() return x + xt.ones { 5, 3 }, 0 end)
    raises("the nearest is 'softmax'", function() return xt.op.sofmax, 0 end)
  end)

  it("takes seeds that are exact integers", function()
    local x = xt.ones { 4 }
    assert.are.same(xt.dropout(x, 0.5, 3):totable(), xt.dropout(x, 0.5, 3.0):totable())
    assert.are.same(xt.dropout(x, 0.5, 3):totable(),
      xt.dropout(x, 0.5, xt.tensor(3, { dtype = "i64" })):totable())
    raises("write large seeds in hex", function() xt.dropout(x, 0.5, 1.5) end)
    raises("write large seeds in hex", function() xt.dropout(x, 0.5, 9223372036854775813) end)
  end)

  it("returns several values when it has several outputs", function()
    local values, indices = xt.topk(xt.tensor { 3, 1, 2 }, 2)
    assert.are.same({ 3, 2 }, values:totable())
    assert.are.same({ 0, 2 }, indices:totable())
  end)

  it("takes lists of tensors of any length", function()
    local list = {}
    for i = 1, 100 do list[i] = xt.full({ 1 }, i) end
    assert.are.equal(5050, xt.concat(list):sum():item())
    raises("tensors[2] is the number 3, wanted a tensor", function()
      xt.concat { xt.ones { 1 }, 3 }
    end)
  end)
end)

describe("seeds", function()
  it("mix to the golden values", function()
    assert.are.equal(0xf34fe9248c9342e5, xt.seed(42, 1))
    assert.are.equal(0xfcee76b4159be538, xt.seed(42, 1, 2))
    assert.are.equal(0x6d8c53aa725bea28, xt.seed(42, 1, 1, 1, 0xA77))
    assert.are.equal(xt.seed(5, 6, 7), xt.seed(xt.seed(5, 6), 7))
    assert.are_not.equal(xt.seed(1, "a"), xt.seed(1, "b"))
    raises("write large seeds in hex", function() return xt.seed(1.5), 0 end)
  end)

  it("give the golden masks", function()
    local function keeps(p, seed, n)
      local text = {}
      for i, x in ipairs(xt.dropout_mask({ n }, p, seed):totable()) do
        text[i] = x > 0 and "1" or "0"
      end
      return table.concat(text, " ")
    end
    assert.are.equal("1 0 1 1 0 0 0 1 1 0 1 1 1 1 1 1", keeps(0.3, 42, 16))
    assert.are.equal("1 0 0 0 0 0 0 1 1 0 0 1 1 1 1 1", keeps(0.5, 42, 16))
    assert.are.equal("1 1 1 1 1 1 1 1 1 0 1 1 1 1 1 0 1 0 1 1 1 1 1 1",
      keeps(0.1, 0x8000000000000005, 24))
  end)

  it("draw the golden stream on the host, which goes on", function()
    local draw = xt.init.dropout(7, 0.5)
    assert.are.same({ 2, 2, 0, 0, 2, 2 }, draw({ 6 }):totable())
    local again = xt.init.dropout(7, 0.5)
    assert.are.same({ 2, 2 }, again({ 2 }):totable())
    assert.are.same({ { 0, 0 }, { 2, 2 } }, again({ 2, 2 }):totable())
    raises("keep is the number 1.5", function() xt.init.dropout(7, 1.5) end)
  end)
end)

describe("memory", function()
  it("of tensors that nobody holds is found without collectgarbage", function()
    xt.collect()
    xt.memory_reset_peak()
    local before = xt.memory().live_bytes
    for _ = 1, 200 do
      local _ = xt.zeros { 1048576 } -- 4 MiB
    end
    local peak = xt.memory().peak_bytes - before
    assert.is_true(peak <= 80 * 1048576, "peak " .. peak)
  end)

  it("of a loop of small ops does not pile up", function()
    xt.collect()
    local a, before = xt.ones { 16 }, xt.debug.live_count()
    for _ = 1, 100000 do
      local _ = a + a
    end
    assert.is_true(xt.debug.live_count() - before < 40000, xt.debug.live_count() - before)
  end)

  it("that runs out is named with its biggest holders, and the state stays usable", function()
    xt.collect()
    local held = xt.zeros { 262144 }
    xt.debug.memory_limit(xt.memory().reserved_bytes + 1048576)
    local ok, message = pcall(function() return xt.zeros { 1 << 26 } end)
    xt.debug.memory_limit(0)
    assert.is_false(ok)
    assert.is_truthy(message:find("out of memory on cpu", 1, true), message)
    assert.is_truthy(message:find("tensor_spec.lua:%d+", 1), message)
    assert.are.equal(262144, held.numel)
  end)

  it("is given back by calls that fail at any allocation", function()
    local x, y = xt.rand({ 4, 4 }, { seed = 1 }), xt.rand({ 4, 4 }, { seed = 2 })
    local calls = {
      function() return x + y end,
      function() return x * 2 end,
      function() return x:matmul(y:transpose(1, 2)) end,
      function() return xt.concat { x, y } end,
      function() return x:softmax(1) end,
      function() return xt.tensor({ 1, 2 }, { dtype = "bf16" }) end,
      function() return x:to("f64"):totable() end,
      function() return xt.topk(x, 2) end,
    }
    for k, call in ipairs(calls) do
      call()
      xt.collect()
      local before = xt.debug.live_count()
      for n = 1, 40 do
        xt.debug.fail_allocation(n)
        local ok, message = pcall(call)
        xt.debug.fail_allocation(0)
        if ok then break end
        xt.collect()
        assert.are.equal(before, xt.debug.live_count(), ("call %d, allocation %d"):format(k, n))
        assert.is_truthy(message:find("memory"), message)
      end
      call()
    end
  end)
end)

describe("xt.help", function()
  local help = require "xtrain.help"

  it("explains ops, functions, modules and methods, and suggests names", function()
    assert.is_truthy(help.text("softmax"):find("softmax(x [, dim = -1])", 1, true))
    assert.is_truthy(help.text(xt.softmax):find("softmax(x", 1, true))
    assert.is_truthy(help.text("zeros"):find("All elements 0", 1, true))
    assert.is_truthy(help.text("ops"):find("softmax", 1, true))
    assert.is_truthy(help.text("t:item"):find("one element", 1, true))
    assert.is_truthy(help.text("softmx"):find("did you mean 'softmax'", 1, true))
    assert.is_truthy(help.text():find("constructors", 1, true))
  end)
end)
