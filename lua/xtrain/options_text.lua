-- Options as a person types them: key=value, read after the type of the default.
local options = require "xtrain.options"

local M = {}

local function number(text)
  local value = tonumber(text)
  if value and value == value then return value end
end

local function integer(text)
  local value = number(text)
  return value and math.tointeger(value)
end

local BOOLEANS = { ["true"] = true, ["false"] = false, ["1"] = true, ["0"] = false, yes = true,
  no = false, on = true, off = false }

-- Returns the value, or nil and what was wanted. Lists are separated by commas, each element like
-- the first of the default.
local function parse(text, default)
  local kind = math.type(default) or type(default)
  if kind == "integer" then
    local value = integer(text)
    return value, value == nil and "an integer" or nil
  elseif kind == "float" then
    local value = number(text)
    return value and value + 0.0, value == nil and "a number" or nil
  elseif kind == "boolean" then
    local value = BOOLEANS[text:lower()]
    return value, value == nil and "true or false" or nil
  elseif kind == "table" then
    local list = {}
    for part in (text .. ","):gmatch("([^,]*),") do
      local value, wanted = parse(part, default[1] == nil and "" or default[1])
      if wanted then return nil, "a list of " .. wanted end
      list[#list + 1] = value
    end
    return list
  end
  return text
end

-- Applies the words key=value to a copy of the defaults: values, or nil, message.
function M.apply(what, words, defaults)
  local values, known = {}, options.names(defaults)
  for name, default in pairs(defaults) do values[name] = default end
  for _, word in ipairs(words) do
    local name, text = word:match("^([%a_][%w_]*)=(.*)$")
    if not name then
      return nil, ("%s: '%s' is no key=value"):format(what, word)
    end
    if defaults[name] == nil then return nil, options.unknown(what, name, known) end
    local value, wanted = parse(text, defaults[name])
    if wanted then
      return nil, ("%s: option '%s' is '%s', wanted %s"):format(what, name, text, wanted)
    end
    values[name] = value
  end
  return values
end

return M
