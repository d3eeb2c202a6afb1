-- Named options of the library's functions: one table in, a checked copy with defaults out.
-- An unknown name is an error at the user's line that lists the known ones.
local fail = require("xtrain").core.fail -- an error at the line of the user's code

local M = {}

-- Stand-ins for a default: must be given; may be left out and then is nil.
M.required = setmetatable({}, { __name = "required" })
M.optional = setmetatable({}, { __name = "optional" })
-- The same for sizes, integers of 0 or more, and for numbers.
M.size = setmetatable({}, { __name = "size" })
M.optional_size = setmetatable({}, { __name = "optional_size" })
M.number = setmetatable({}, { __name = "number" })

local MUST_BE_GIVEN = { [M.required] = true, [M.size] = true, [M.number] = true }
local MAY_BE_NIL = { [M.optional] = true, [M.optional_size] = true }

-- The edit distance of two names: insertions, deletions and changes.
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local corner = row[0]
    row[0] = i
    for j = 1, #b do
      local above = row[j]
      local change = a:byte(i) == b:byte(j) and 0 or 1
      row[j] = math.min(row[j] + 1, row[j - 1] + 1, corner + change)
      corner = above
    end
  end
  return row[#b]
end

-- The name of the list that is nearest to `name`, or nil when none is near.
function M.nearest(name, names)
  local best, least = nil, math.max(2, #name // 2) + 1
  for _, other in ipairs(names) do
    local d = distance(name, other)
    if d < least then
      best, least = other, d
    end
  end
  return best
end

-- Orders strings by byte, whatever the locale.
function M.by_byte(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- The string keys of a table, by byte order.
function M.names(t)
  local names = {}
  for name in pairs(t) do
    if type(name) == "string" then names[#names + 1] = name end
  end
  table.sort(names, M.by_byte)
  return names
end

-- The sentence about an unknown name.
function M.unknown(what, name, known)
  local nearest = M.nearest(tostring(name), known)
  return ("%s: unknown option '%s'%s; the options are %s"):format(what, tostring(name),
    nearest and (" (did you mean '%s'?)"):format(nearest) or "", table.concat(known, ", "))
end

-- What is wanted of a value instead, or nil when it is right.
local function wanted(value, default)
  if default == M.required or default == M.optional then return nil end
  if default == M.size or default == M.optional_size then
    if math.type(value) == "integer" and value >= 0 then return nil end
    return "an integer of 0 or more"
  end
  local kind = default == M.number and "number" or type(default)
  if type(value) ~= kind or value ~= value then return "a " .. kind end
end

local function shown(value)
  if value ~= value then return "NaN" end
  if type(value) == "string" then return ("the string '%s'"):format(value) end
  return type(value) == "number" and tostring(value) or "a " .. type(value)
end

-- given: the caller's table or nil. known: name = default or one of the stand-ins above.
function M.read(what, given, known)
  if given == nil then given = {} end
  if type(given) ~= "table" then
    fail(("%s: options are a table of named values, not a %s"):format(what, type(given)))
  end
  for name in pairs(given) do
    if known[name] == nil then fail(M.unknown(what, name, M.names(known))) end
  end
  local out = {}
  for name, default in pairs(known) do
    local value = given[name]
    if value == nil then
      if MUST_BE_GIVEN[default] then
        fail(("%s: option '%s' is missing"):format(what, name))
      end
      if not MAY_BE_NIL[default] then out[name] = default end
    else
      local instead = wanted(value, default)
      if instead then
        fail(("%s: option '%s' is %s, wanted %s"):format(what, name, shown(value), instead))
      end
      out[name] = value
    end
  end
  return out
end

-- An option that is one of a few words.
function M.choice(what, name, value, choices)
  for _, choice in ipairs(choices) do
    if value == choice then return value end
  end
  fail(("%s: option '%s' is '%s', wanted one of %s"):format(what, name, tostring(value),
    table.concat(choices, ", ")))
end

-- An option that is a probability.
function M.probability(what, name, value)
  if type(value) == "number" and value >= 0 and value <= 1 then return value end
  fail(("%s: option '%s' is %s, wanted a number from 0 to 1"):format(what, name, shown(value)))
end

-- The sentence about a field that is not there.
function M.no_field(what, name, known)
  local nearest = M.nearest(name, known)
  return ("%s has no '%s'%s"):format(what, name,
    nearest and (" (did you mean '%s'?)"):format(nearest) or "")
end

-- Makes asking a table of the library for what it does not have an error at the user's line.
function M.strict(t, what)
  return setmetatable(t, { __index = function(self, name)
    if type(name) == "string" then fail(M.no_field(what, name, M.names(self))) end
  end })
end

return M
