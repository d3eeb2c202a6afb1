-- Every op of tests/op_rows.lua on the CPU; an op without a row fails here. tests/op_runner.lua
-- says what they must stand.
local runner = require "op_runner"
local xt = require "xtrain"
local op_rows = require "op_rows"
local rows, order = op_rows.rows, op_rows.order

describe("op", function()
  for _, name in ipairs(order) do
    describe(name, function()
      for _, check in ipairs(runner.checks) do
        it("stands the check of " .. check, function()
          local ok, message = runner[check](rows[name])
          assert(ok, message and name .. ": " .. message)
        end)
      end
    end)
  end

  it("has a row here, whichever it is", function()
    local missing = {}
    for _, op in ipairs(xt.ops()) do
      if not rows[op.name] then missing[#missing + 1] = op.name end
    end
    assert(#missing == 0, "no row for " .. table.concat(missing, ", "))
  end)
end)

-- The tester is tested: planted faults are caught, each by the check that is there for it.
describe("the op runner", function()
  local shape = { { 3, 5 } }
  local function planted(op_call, more)
    local spec = more or {}
    spec.name, spec.inputs = "planted", shape
    spec.op = setmetatable({ doc = "a planted fault, for the test of the tester",
      signature = "planted(x)" }, { __call = function(_, ...) return op_call(...) end })
    return spec
  end

  it("catches a gradient that is off by 0.1 %", function()
    local ok, message = runner.gradient(planted(function(x)
      return (x * x) * 0.999 + (x * x):detach() * 0.001
    end))
    assert(ok == false and message:find("gradient is wrong"), message)
  end)

  it("catches a gradient that is missing", function()
    assert(runner.gradient(planted(function(x) return x:detach() * 2 + x * 0 end)) == false)
  end)

  it("lets a right gradient pass", function()
    assert(runner.gradient(planted(function(x) return x * x * x end)))
  end)

  it("catches arithmetic in bf16", function()
    local ok = runner.bf16(planted(function(x)
      local y = x
      for _ = 1, 8 do y = y * 1.01 end -- each step is rounded to x's dtype
      return y
    end))
    assert(ok == false)
  end)

  it("catches arithmetic too rough for f32", function()
    assert(runner.f32(planted(function(x)
      return x.dtype == "f32" and x:to("bf16"):to("f32") or x * 1
    end)) == false)
  end)

  it("catches results that depend on the strides", function()
    local calls = 0
    local ok, message = runner.strided(planted(function(x)
      calls = calls + 1
      return x + calls
    end, { grad = false }))
    assert(ok == false and message:find("strided"), message)
  end)

  it("catches results that depend on the number of threads", function()
    local ok, message = runner.threads(planted(function(x) return x * xt.threads() end))
    assert(ok == false and message:find("threads"), message)
  end)

  it("catches an op that takes wrong shapes, and one that does not say its name", function()
    local wrong = { { { 2, 2 } } }
    assert(runner.wrong(planted(function(x) return x end, { wrong = wrong })) == false)
    local ok, message = runner.wrong(planted(function() error("no") end, { wrong = wrong }))
    assert(ok == false and message:find("does not name the op"), message)
  end)

  it("catches an op that refuses empty tensors", function()
    local ok, message = runner.empty(planted(function(x)
      if x.numel == 0 then error("empty") end
      return x * 1
    end, { empty = { { { 0 } } } }))
    assert(ok == false and message:find("empty"), message)
  end)

  it("catches a leak after a failed allocation", function()
    local kept = {}
    local ok, message = runner.allocation(planted(function(x)
      local y = x * 2
      kept[#kept + 1] = y -- survives the failure of what follows
      return y * 3
    end, { grad = false }))
    assert(ok == false and message:find("stayed alive"), message)
  end)

  it("catches missing documentation", function()
    local spec = planted(function(x) return x end)
    rawset(spec.op, "doc", "")
    assert(runner.documentation(spec) == false)
  end)
end)
