-- What several specs expect in the same words.
local assert = require "luassert"

local M = {}

-- fn(...) raises an error that says `wanted`.
function M.raises(wanted, fn, ...)
  local ok, message = pcall(fn, ...)
  assert.is_false(ok, "no error that says " .. wanted)
  assert.is_truthy(tostring(message):find(wanted, 1, true), "got: " .. tostring(message))
end

-- The message of what fn raises.
function M.message_of(fn)
  local ok, message = pcall(fn)
  assert.is_false(ok)
  return message
end

-- fn raises an error that says `wanted` and names a line of that file, as the caller's.
function M.raises_in(name, wanted, fn)
  local message = M.message_of(fn)
  assert.is_truthy(message:find(wanted, 1, true), "got: " .. message)
  assert.is_truthy(message:find(name .. ":%d+: "), "no line of the caller: " .. message)
end

-- got is want within bound (1e-6); nested tables element for element.
function M.near(want, got, bound)
  if type(want) == "table" then
    assert.are.equal(#want, #got)
    for i = 1, #want do M.near(want[i], got[i], bound) end
  else
    assert.is_near(want, got, bound or 1e-6)
  end
end

return M
