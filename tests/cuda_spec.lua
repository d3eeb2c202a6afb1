-- Every op on a GPU: against the CPU, and all that tests/op_runner.lua asks of it there. Skipped
-- where there is none.
local runner = require "op_runner"
local xt = require "xtrain"
local core = require "xtrain.core"
local op_rows = require "op_rows"

local there = table.concat(xt.devices(), " "):find("cuda", 1, true) ~= nil

describe("on cuda, op", function()
  if not there then
    pending("every op: there is no GPU here")
    return
  end
  before_each(function()
    xt.device("cuda")
    core.poison(true)
  end)
  after_each(function()
    core.poison(false)
    xt.device("cpu")
  end)

  local checks = { "cuda", "gradient", "f32", "bf16", "strided", "empty", "wrong", "allocation" }
  for _, name in ipairs(op_rows.order) do
    describe(name, function()
      for _, check in ipairs(checks) do
        it("stands the check of " .. check, function()
          local ok, message = runner[check](op_rows.rows[name])
          assert(ok, message and name .. ": " .. message)
        end)
      end
    end)
  end

  -- Each width takes another kernel; the last has more rows than the blocks of backward take at
  -- once.
  for _, shape in ipairs { { 3, 5, 3, 2 }, { 3, 5, 3, 32 }, { 3, 5, 3, 34 }, { 3, 5, 3, 64 },
    { 70, 5, 3, 64 }, { 3, 5, 3, 128 }, { 3, 5, 3, 160 }, { 3, 5, 3, 256 }, { 3, 5, 3, 512 },
    { 2, 300, 32, 128 } } do
    it("rmsnorm_rope gives what the CPU gives at " .. table.concat(shape, "x"), function()
      local row = { inputs = { shape, { shape[4] } } }
      assert(runner.cuda(setmetatable(row, { __index = op_rows.rows.rmsnorm_rope })))
    end)
  end

  it("has kernels for all that the CPU has", function()
    local missing = {}
    for _, op in ipairs(xt.ops()) do
      local there_is = {}
      for _, dtype in ipairs(core.kernels(op.name, "cuda")) do there_is[dtype] = true end
      for _, dtype in ipairs(core.kernels(op.name, "cpu")) do
        if not there_is[dtype] then missing[#missing + 1] = op.name .. " " .. dtype end
      end
    end
    assert(#missing == 0, "no kernel on cuda: " .. table.concat(missing, ", "))
  end)
end)
