-- Counts what the Lua state holds: tables, functions, userdata, threads and distinct strings that
-- can be reached from the registry.
local M = {}

-- count() -> objects, "tables 12, functions 34, ...". Weak tables count like others.
function M.count()
  local seen, kinds, total = {}, {}, 0
  local todo = { debug.getregistry() }
  local function push(value)
    local kind = type(value)
    if kind == "nil" or kind == "number" or kind == "boolean" or seen[value]
      or value == seen or value == todo or value == kinds then
      return
    end
    seen[value] = true
    kinds[kind] = (kinds[kind] or 0) + 1
    total = total + 1
    if kind ~= "string" then todo[#todo + 1] = value end
  end
  local function push_thread(thread)
    for level = 0, 200 do
      local info = debug.getinfo(thread, level, "f")
      if not info then break end
      push(info.func)
      for i = 1, 250 do
        local name, value = debug.getlocal(thread, level, i)
        if not name then break end
        push(value)
      end
    end
  end
  push(coroutine.running())
  while #todo > 0 do
    local value = table.remove(todo)
    local kind = type(value)
    push(debug.getmetatable(value))
    if kind == "table" then
      for key, field in next, value do
        push(key)
        push(field)
      end
    elseif kind == "function" then
      for i = 1, 255 do
        local name, upvalue = debug.getupvalue(value, i)
        if not name then break end
        push(upvalue)
      end
    elseif kind == "userdata" then
      for i = 1, 8 do push((debug.getuservalue(value, i))) end
    elseif kind == "thread" then
      push_thread(value)
    end
  end
  local parts = {}
  for kind, n in pairs(kinds) do parts[#parts + 1] = ("%d %ss"):format(n, kind) end
  table.sort(parts)
  return total, table.concat(parts, ", ")
end

return M
