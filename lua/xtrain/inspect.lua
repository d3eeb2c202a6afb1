-- Any Lua value as a text that a person can read at a glance: tensors with their statistics at the
-- top, in one line inside of tables; tables sorted, nested a few levels deep, on few lines.
local xt = require "xtrain"
local core = require "xtrain.core"
local options = require "xtrain.options"
local print_tensor = require "xtrain.print"

local WIDTH = 80 -- columns of a table on one line
local MOST_LINES, MOST_DEPTH, MOST_ITEMS, MOST_STRING = 50, 4, 24, 200

local M = {}

local function is_tensor(value) return debug.getmetatable(value) == core.tensor_meta end

-- "function at mine.lua:3", "function of C", "op softmax(x [, dim = -1])", or a schedule as it
-- was made.
local function callable_text(value)
  if type(value) ~= "function" then return "op " .. value.signature end
  local schedule = require("xtrain.schedule").describe(value)
  if schedule then return schedule end
  local info = debug.getinfo(value, "S")
  if info.what == "C" then return "function of C" end
  return ("function at %s:%d"):format(info.short_src, info.linedefined)
end

local function quoted(text)
  if #text > MOST_STRING then
    return ("%q"):format(text:sub(1, MOST_STRING)):gsub("\\\n", "\\n")
      .. (" .. (%d bytes)"):format(#text)
  end
  return (("%q"):format(text):gsub("\\\n", "\\n"))
end

-- What is no table to be opened.
local function plain_text(value)
  local kind = type(value)
  if kind == "string" then return quoted(value) end
  if is_tensor(value) then return print_tensor.summary(value) end
  if core.is_op(value) or kind == "function" then return callable_text(value) end
  return tostring(value)
end

-- What a value says of itself; has_text(value) is true.
local function own_text(value)
  if value == xt then return "xtrain " .. xt.version .. "; xt.help() tells what is in it" end
  return tostring(value)
end

local function has_text(value)
  if value == xt then return true end
  local meta = debug.getmetatable(value)
  return type(meta) == "table" and rawget(meta, "__tostring") ~= nil
end

-- The keys of a table in order: integers, then strings by byte, then the rest as it comes.
local function keys_of(t)
  local numbers, strings, others = {}, {}, {}
  for key in next, t do
    local kind = math.type(key) == "integer" and numbers or type(key) == "string" and strings
      or others
    kind[#kind + 1] = key
  end
  table.sort(numbers)
  table.sort(strings, options.by_byte)
  for _, list in ipairs { strings, others } do table.move(list, 1, #list, #numbers + 1, numbers) end
  return numbers
end

local function key_text(key)
  if type(key) == "string" and key:find "^[%a_][%w_]*$" then return key end
  return "[" .. plain_text(key) .. "]"
end

local write

-- The parts of a table as texts, each of one or several lines.
local function parts_of(t, depth, above)
  local parts, position, shown = {}, 1, 0
  local keys = keys_of(t)
  for _, key in ipairs(keys) do
    if shown == MOST_ITEMS then
      parts[#parts + 1] = ("... %d more"):format(#keys - shown)
      break
    end
    shown = shown + 1
    local text = write(rawget(t, key), depth + 1, above)
    if key == position then
      position = position + 1
    else
      text = key_text(key) .. " = " .. text
    end
    parts[#parts + 1] = text
  end
  return parts
end

function write(value, depth, above, open)
  if type(value) ~= "table" then return plain_text(value) end
  if has_text(value) and not open then return (own_text(value):gsub("\n.*", " ...")) end
  if above[value] then return "{ the table above }" end
  if next(value) == nil then return "{}" end
  if depth > MOST_DEPTH then return "{ ... }" end
  above[value] = true
  local parts = parts_of(value, depth, above)
  above[value] = nil
  local line = "{ " .. table.concat(parts, ", ") .. " }"
  if utf8.len(line, 1, -1, true) and utf8.len(line, 1, -1, true) + 2 * depth <= WIDTH
    and not line:find "\n" then
    return line
  end
  return "{\n" .. ("  "):rep(depth + 1)
    .. table.concat(parts, ",\n" .. ("  "):rep(depth + 1)) .. ",\n" .. ("  "):rep(depth) .. "}"
end

local function cut(text)
  local lines = 0
  for at in text:gmatch "()\n" do
    lines = lines + 1
    if lines == MOST_LINES then
      local rest = select(2, text:sub(at + 1):gsub("\n", "\n")) + 1
      return text:sub(1, at) .. ("... %d more lines"):format(rest)
    end
  end
  return text
end

-- text(value): what the prompt shows of a result. A string shows itself.
function M.text(value)
  if type(value) == "string" then return value end
  if is_tensor(value) then return tostring(value) end
  local head = ""
  if has_text(value) then
    local text = own_text(value)
    if type(value) ~= "table" or value == xt or text:find "\n" or next(value) == nil then
      return text
    end
    head = text .. " " -- a layer says its name and size; what it holds follows
  end
  if type(value) ~= "table" then return plain_text(value) end
  return cut(head .. write(value, 0, {}, true))
end

-- line(value): the same in one line, for lists of variables.
function M.line(value)
  if type(value) ~= "table" then return plain_text(value) end
  if has_text(value) then return (own_text(value):gsub("\n.*", " ...")) end
  local text = "{ " .. table.concat(parts_of(value, MOST_DEPTH, {}), ", ") .. " }"
  text = text:gsub("%s*\n%s*", " ")
  if #text > WIDTH - 16 then text = text:sub(1, utf8.offset(text, 0, WIDTH - 19) - 1) .. "..." end
  return text
end

return M
