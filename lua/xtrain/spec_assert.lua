-- The assert of specs under `xtrain test`: the part of luassert that specs use, so that the same
-- files run under busted. assert.is_not.equal, assert.are.same, assert.has_error: words in between
-- (is, are, was, has, does) mean nothing, not and no turn the meaning around.
--
-- An assertion is a row: check(arguments) -> ok, what to say when it is not as wanted, what to say
-- when it is and should not be. An argument behind those it takes is the user's message.
local core = require "xtrain.core"
local options = require "xtrain.options"

local M = {}

-- ---- what is thrown ----------------------------------------------------------------------------

local failure = { __name = "failure", __tostring = function(f) return f.message end }

-- Raises a failure: what a test ends with that is wrong, and not broken.
function M.fail(text)
  error(setmetatable({ message = ("%s: %s"):format(core.here(), text) }, failure), 0)
end

function M.is_failure(e) return getmetatable(e) == failure end

-- ---- values ------------------------------------------------------------------------------------

local DEPTH, MOST = 3, 20 -- of tables that are shown

local function shown(value, depth)
  local kind = type(value)
  if kind == "string" then return ("'%s'"):format(value) end
  if kind ~= "table" or getmetatable(value) and getmetatable(value).__tostring then
    return tostring(value)
  end
  if (depth or 0) >= DEPTH then return "{...}" end
  local parts, keys = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b)
    if type(a) == type(b) and type(a) ~= "table" and type(a) ~= "boolean" then return a < b end
    return tostring(a) < tostring(b)
  end)
  for i, key in ipairs(keys) do
    if i > MOST then
      parts[#parts + 1] = ("%d more"):format(#keys - MOST)
      break
    end
    local text = shown(value[key], (depth or 0) + 1)
    parts[#parts + 1] = key == i and text
      or ("%s = %s"):format(type(key) == "string" and key or "[" .. tostring(key) .. "]", text)
  end
  return #parts > 0 and "{ " .. table.concat(parts, ", ") .. " }" or "{}"
end
M.shown = shown

local function typed(value)
  return ("(%s) %s"):format(type(value), shown(value))
end

-- Equal in depth; metatables do not count. seen: pairs that are being compared.
local function same(a, b, seen)
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  if rawequal(a, b) then return true end
  seen = seen or {}
  if seen[a] == b then return true end
  seen[a] = b
  for key, value in pairs(a) do
    if not same(value, b[key], seen) then return false end
  end
  for key in pairs(b) do
    if a[key] == nil then return false end
  end
  return true
end

local function callable(value)
  return type(value) == "function" or (getmetatable(value) or {}).__call ~= nil
end

local function has_text(value)
  return type(value) == "string" or type(value) == "number"
    or (getmetatable(value) or {}).__tostring ~= nil
end

-- ---- assertions --------------------------------------------------------------------------------

local assertions, modifiers = {}, {}

local obj = {}

-- luassert's way to add an assertion: callback(state, arguments) returns whether it holds; what it
-- puts into state.failure_message is said.
function obj.register(_, space, name, callback)
  if space ~= "assertion" then
    M.fail("assert: only assertions can be registered, not " .. space)
  end
  assertions[name:lower()] = function(arguments)
    local state = {}
    local ok, returned = callback(state, arguments)
    return ok, state.failure_message, state.failure_message, returned
  end
end

local function want(arguments, count, name)
  if arguments.n < count then
    M.fail(("assert.%s: wanted %d arguments, got %d"):format(name, count, arguments.n))
  end
end

-- name, arguments it takes, holds(arguments), sentence about what they are and should be.
local function row(name, count, holds, positive, negative)
  assertions[name] = function(arguments)
    want(arguments, count, name)
    local ok = holds(arguments)
    arguments.message = arguments[count + 1]
    return ok, positive(arguments), (negative or positive)(arguments)
  end
end

local function both(what)
  return function(a)
    return ("Expected %s.\nPassed in:\n%s\nExpected:\n%s"):format(what, typed(a[2]), typed(a[1]))
  end
end

local function neither(what)
  return function(a)
    return ("Expected %s.\nPassed in:\n%s\nDid not expect:\n%s"):format(what, typed(a[2]),
      typed(a[1]))
  end
end

for _, name in ipairs { "equal", "equals" } do
  row(name, 2, function(a) return a[1] == a[2] end, both "objects to be equal",
    neither "objects to not be equal")
end
row("same", 2, function(a) return same(a[1], a[2]) end, both "objects to be the same",
  neither "objects to not be the same")

local function one(wanted)
  return function(a) return ("Expected %s, but value was:\n%s"):format(wanted, typed(a[1])) end
end

row("truthy", 1, function(a) return a[1] end, one "to be truthy", one "to not be truthy")
row("falsy", 1, function(a) return not a[1] end, one "to be falsy", one "to not be falsy")
row("true", 1, function(a) return a[1] == true end, one "true", one "not true")
row("false", 1, function(a) return a[1] == false end, one "false", one "not false")
for _, kind in ipairs { "nil", "boolean", "number", "string", "table", "function", "userdata",
  "thread" } do
  row(kind, 1, function(a) return type(a[1]) == kind end, one("type " .. kind),
    one("not type " .. kind))
end

row("near", 3, function(a)
  for i = 1, 3 do
    if not tonumber(a[i]) then
      M.fail(("assert.near: argument %d is %s, wanted a number"):format(i, typed(a[i])))
    end
  end
  local expected, actual, tolerance = tonumber(a[1]), tonumber(a[2]), tonumber(a[3])
  return actual >= expected - tolerance and actual <= expected + tolerance
end, function(a)
  return ("Expected values to be near.\nPassed in:\n%s\nExpected:\n%s +/- %s"):format(typed(a[2]),
    typed(a[1]), shown(a[3]))
end, function(a)
  return ("Expected values to not be near.\nPassed in:\n%s\nDid not expect:\n%s +/- %s"):format(
    typed(a[2]), typed(a[1]), shown(a[3]))
end)

-- pattern, text [, init [, plain]] [, message]: the message is what is neither number nor boolean.
local function find(name, a, text)
  local rest = {}
  for i = 3, a.n do
    if a[i] and type(a[i]) ~= "boolean" and not tonumber(a[i]) then
      a.message = a.message or a[i]
    else
      rest[#rest + 1] = a[i]
    end
  end
  if type(a[1]) ~= "string" then
    M.fail(("assert.%s: the pattern is %s, wanted a string"):format(name, typed(a[1])))
  end
  local ok = text:find(a[1], rest[1], rest[2]) ~= nil
  return ok, rest[2] and { a[1] } or { text:match(a[1], rest[1]) }
end

for _, name in ipairs { "matches", "match" } do
  assertions[name] = function(a)
    want(a, 2, name)
    if not has_text(a[2]) then
      M.fail(("assert.%s: what to look in is %s, wanted a string"):format(name, typed(a[2])))
    end
    local ok, captures = find(name, a, tostring(a[2]))
    return ok, both "strings to match"(a), neither "strings not to match"(a), ok and captures
  end
end

-- Calls fn: whether it raised, and what, without the position in front.
local function caught(name, fn)
  if not callable(fn) then
    M.fail(("assert.%s: wanted a function to call, not %s"):format(name, typed(fn)))
  end
  local ok, raised = pcall(fn)
  if type(raised) == "string" then raised = raised:gsub("^.-:%d+: ", "", 1) end
  return not ok, raised
end

local function other_error(did, raised, wanted)
  return ("Expected a different error.\nCaught:\n%s\nExpected:\n%s"):format(
    did and typed(raised) or "(no error)", wanted == nil and "(error)" or typed(wanted)),
    ("Expected no error, but caught:\n%s"):format(typed(raised))
end

for _, name in ipairs { "error", "errors" } do
  assertions[name] = function(a)
    want(a, 1, name)
    local did, raised = caught(name, a[1])
    local wanted, ok = a[2], did
    a.message = a[3]
    if did and wanted ~= nil then
      if type(wanted) == "string" and has_text(raised) then
        ok = tostring(raised) == wanted
      else
        ok = same(wanted, raised)
      end
    end
    local positive, negative = other_error(did, raised, wanted)
    return ok, positive, negative, { raised }
  end
end

for _, name in ipairs { "error_matches", "error_match", "matches_error", "match_error" } do
  assertions[name] = function(a)
    want(a, 2, name)
    local did, raised = caught(name, a[1])
    local positive, negative = other_error(did, raised, a[2])
    a[1] = a[2]
    return did and has_text(raised) and (find(name, a, tostring(raised))), positive, negative
  end
end

-- ---- the object --------------------------------------------------------------------------------

for _, word in ipairs { "is", "are", "was", "has", "does" } do modifiers[word] = "nothing" end
for _, word in ipairs { "not", "no" } do modifiers[word] = "turn" end

local chain = {}

-- The longest assertion that the words from place `first` on name.
local function longest(words, first)
  for last = #words, first, -1 do
    local name = table.concat(words, "_", first, last)
    if assertions[name] then return name, last end
  end
end

local function unknown(words)
  M.fail(("assert.%s: there is no such assertion here; there are %s (busted has more)"):format(
    table.concat(words, "_"), table.concat(options.names(assertions), ", ")))
end

function chain:__index(key)
  for word in tostring(key):lower():gmatch "[^_]+" do table.insert(self.words, word) end
  return self
end

function chain:__call(...)
  local name, positive, at = nil, true, 1
  while at <= #self.words do
    local found, last = longest(self.words, at)
    if found then
      name, at = found, last + 1
    elseif modifiers[self.words[at]] then
      positive = positive == (modifiers[self.words[at]] == "nothing")
      at = at + 1
    elseif self.words[at] == "message" and at == #self.words then
      rawset(self, "message", (...))
      rawset(self, "words", table.move(self.words, 1, at - 1, 1, {}))
      return self
    else
      unknown(self.words)
    end
  end
  if not name then unknown(self.words) end
  local arguments = table.pack(...)
  local ok, wrong, right, returned = assertions[name](arguments)
  if (not ok) == positive then
    local text = positive and wrong or right or "assertion failed!"
    local message = rawget(self, "message") or arguments.message
    if message ~= nil then
      text = (has_text(message) and tostring(message) or shown(message)) .. "\n" .. text
    end
    M.fail(text)
  end
  if returned then return table.unpack(returned) end
  return ...
end

M.assert = setmetatable(obj, {
  __call = function(_, value, message, ...)
    if not value then
      if message ~= nil and not has_text(message) then error(message, 0) end
      M.fail(tostring(message or "assertion failed!"))
    end
    return value, message, ...
  end,
  __index = function(_, key) return setmetatable({ words = {} }, chain)[key] end,
})

return M
