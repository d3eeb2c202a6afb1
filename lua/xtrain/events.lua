-- TensorBoard's event files, written: what a run logs, as scalars.
--
-- A file is a row of records: length (u64), its masked CRC-32C, the bytes, their masked CRC-32C.
-- The bytes are protocol buffers: Event{wall_time = 1 double, step = 2 int64, file_version = 3
-- string, summary = 5}, Summary{value = 1}, Value{tag = 1 string, simple_value = 2 float}.
local options = require "xtrain.options"
local file = require "xtrain.core.file"

local M = {}

M.NAME = "events.out.tfevents.xtrain" -- in the run folder; TensorBoard looks for "tfevents"

-- ---- records -----------------------------------------------------------------------------------

local POLYNOMIAL = 0x82F63B78 -- Castagnoli's, reflected

local crc_of_byte = {}
for byte = 0, 255 do
  local crc = byte
  for _ = 1, 8 do crc = crc & 1 == 1 and crc >> 1 ~ POLYNOMIAL or crc >> 1 end
  crc_of_byte[byte] = crc
end

function M.crc32c(text)
  local crc = 0xFFFFFFFF
  for i = 1, #text do crc = crc >> 8 ~ crc_of_byte[(crc ~ text:byte(i)) & 0xFF] end
  return crc ~ 0xFFFFFFFF
end

-- As the format masks it, so that the CRC of a text with CRCs in it is no trap.
local function masked(text)
  local crc = M.crc32c(text)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
end

local function record(bytes)
  local length = ("<I8"):pack(#bytes)
  return length .. ("<I4"):pack(masked(length)) .. bytes .. ("<I4"):pack(masked(bytes))
end

-- ---- events ------------------------------------------------------------------------------------

local function varint(n)
  local bytes = {}
  while n >= 0x80 do
    bytes[#bytes + 1] = string.char(n & 0x7F | 0x80)
    n = n >> 7
  end
  return table.concat(bytes) .. string.char(n)
end

-- A field that holds bytes: a string or a message.
local function field(number, bytes)
  return varint(number << 3 | 2) .. varint(#bytes) .. bytes
end

local function event(step, rest)
  return record("\x09" .. ("<d"):pack(os.time()) .. "\x10" .. varint(step) .. rest)
end

local FIRST = field(3, "brain.Event:2") -- what every file begins with

-- The event of one row of metrics.jsonl: all its numbers but the step.
local function scalars(row)
  local values = {}
  for _, name in ipairs(options.names(row)) do
    if type(row[name]) == "number" and name ~= "step" then
      values[#values + 1] = field(1, field(1, name) .. "\x15" .. ("<f"):pack(row[name]))
    end
  end
  return event(row.step, field(5, table.concat(values)))
end

-- Appends a row to the file of a run folder. Returns true, or nil, message.
function M.append(folder, row)
  local path = folder .. "/" .. M.NAME
  local out, message = io.open(path, "ab")
  if not out then return nil, message end
  local text = out:seek "end" == 0 and event(0, FIRST) .. scalars(row) or scalars(row)
  local ok
  ok, message = out:write(text)
  if not ok then
    out:close()
    return nil, message
  end
  return out:close()
end

-- ---- cutting -----------------------------------------------------------------------------------

-- The records of a file: for first, last, step in ... A record that is cut short or damaged ends
-- them.
local function records(text)
  local at = 1
  return function()
    if at + 11 > #text then return nil end
    local length = ("<I8"):unpack(text, at)
    if length < 0 or length > #text - at - 15 then return nil end
    local bytes = text:sub(at + 12, at + 11 + length)
    if ("<I4"):unpack(text, at + 8) ~= masked(text:sub(at, at + 7))
      or ("<I4"):unpack(text, at + 12 + length) ~= masked(bytes)
    then
      return nil
    end
    local step, shift, i = 0, 0, 11 -- behind the wall time and the tag of the step
    repeat
      local byte = bytes:byte(i) or 0
      step = step | (byte & 0x7F) << shift
      shift, i = shift + 7, i + 1
    until byte < 0x80
    local first = at
    at = at + 16 + length
    return first, at - 1, step
  end
end

-- Drops the events after `step`, and one cut short by a kill. Returns true, or nil, message.
function M.cut(folder, step)
  local path = folder .. "/" .. M.NAME
  if not file.exists(path) then return true end
  local text, message = file.read(path)
  if not text then return nil, message end
  local kept = {}
  for first, last, of in records(text) do
    if of <= step then kept[#kept + 1] = text:sub(first, last) end
  end
  return file.write_atomic(path, table.concat(kept))
end

return M
