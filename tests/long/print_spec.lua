-- Printing tensors of 2^31 elements: a few lines, and hardly any memory. Takes 4 GiB.
local xt = require "xtrain"

describe("a tensor of 2^31 elements", function()
  it("prints from a sample that says so, in less than 60 lines and 1 MiB", function()
    for _, case in ipairs { { "bf16", { 1 << 31 } }, { "u8", { 65536, 32768 } } } do
      local t = xt.zeros(case[2], { dtype = case[1] })
      local before = xt.memory()
      xt.memory_reset_peak()
      collectgarbage()
      collectgarbage "stop"
      local heap = collectgarbage "count"
      local text = tostring(t)
      heap = (collectgarbage "count" - heap) * 1024
      collectgarbage "restart"
      assert.is_true(xt.memory().peak_bytes - before.live_bytes + heap < 1 << 20)
      assert.is_true(select(2, text:gsub("\n", "")) + 1 < 60)
      assert.is_truthy(text:find("(in a sample of 4096 elements)", 1, true))
      xt.collect()
    end
  end)
end)
