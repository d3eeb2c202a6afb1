-- Files that specs read and write.
local xt = require "xtrain"

local M = {}

-- The bytes of a file that is there.
function M.read(path)
  local file = assert(io.open(path, "rb"))
  local bytes = file:read "a"
  file:close()
  return bytes
end

-- Returns the path.
function M.write(path, bytes)
  local file = assert(io.open(path, "wb"))
  file:write(bytes)
  file:close()
  return path
end

-- A new folder, which finally, busted's own, removes at the end of the test.
function M.temporary(finally)
  local path = os.tmpname()
  os.remove(path)
  finally(function() os.execute("rm -rf '" .. path .. "'") end)
  assert(os.execute("mkdir '" .. path .. "'"))
  return path
end

-- A token shard of n ids: 0, 1, 2, ...; with kinds, drawn below it, by the seed (1).
function M.shard(path, n, kinds, seed)
  local ids = {}
  for i = 1, n do ids[i] = kinds and xt.seed(seed or 1, i) % kinds or i - 1 end
  assert(xt.data.write_shard(path, ids))
end

return M
