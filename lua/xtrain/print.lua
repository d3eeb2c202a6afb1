-- Tensors as text: a line with dtype, shape, device, bytes, and where it comes from; a line of
-- statistics when there are many elements; then the elements, or those at the edges. Reads single
-- elements, so an expanded view of 10^12 elements costs nothing, and writes less than 60 lines.
local core = require "xtrain.core"

local MOST_ROWS, MOST_COLUMNS, EDGE = 24, 12, 3

-- One number by itself.
local function number(value, dtype)
  local format = dtype:find "^[iu]" and "%d" or dtype == "f64" and "%.15g" or "%.7g"
  return (format:format(value):gsub("^%-nan", "nan"))
end

-- The positions shown of a dimension: all of it, or `edge` at each end around false, which is
-- "...".
local function shown(size, most, edge)
  local list = {}
  if size <= most then
    for i = 1, size do list[i] = i end
    return list
  end
  for i = 1, edge do list[i] = i end
  list[#list + 1] = false
  for i = size - edge + 1, size do list[#list + 1] = i end
  return list
end

-- The positions shown of each leading dimension, chosen so that few rows come out.
local function leading(shape)
  local rows = 1
  for d = 1, #shape - 1 do rows = rows * shape[d] end
  local lists = {}
  for edge = EDGE, 0, -1 do
    local count = 1
    for d = 1, #shape - 1 do
      if rows <= MOST_ROWS then
        lists[d] = shown(shape[d], shape[d], 0)
      elseif edge > 0 then
        lists[d] = shown(shape[d], 2 * edge + 1, edge)
      else
        lists[d] = shape[d] > 1 and { 1, false } or { 1 }
      end
      count = count * #lists[d]
    end
    if count <= MOST_ROWS then break end
  end
  return lists
end

-- How all numbers shown are written.
local function format_of(values, dtype)
  if dtype:find("^[iu]") then return "%d" end
  local whole, least, largest = true, math.huge, 0
  for _, x in ipairs(values) do
    local size = math.abs(x)
    if x == x and size < math.huge then
      whole = whole and x == math.floor(x)
      if size > 0 then least = math.min(least, size) end
      largest = math.max(largest, size)
    end
  end
  if whole and largest < 1e7 then return "%.0f" end
  if largest >= 1e5 or least < 1e-4 then return "%.4e" end
  return "%.4f"
end

-- The rows shown, in order: each a list of values, false for "...", or {skipped = dimension}; and
-- all values shown. A row that begins a new matrix says so.
local function collect(t, shape, lists)
  local rows, values = {}, {}
  local at = {}
  local columns = shown(shape[#shape], MOST_COLUMNS, EDGE)
  local function walk(d)
    if d == #shape then
      local row = { begins = d > 2 and at[d - 1] == 1 }
      for _, i in ipairs(columns) do
        local value = false
        if i then
          at[d] = i
          value = core.at(t, table.unpack(at, 1, d))
          values[#values + 1] = value
        end
        row[#row + 1] = value
      end
      rows[#rows + 1] = row
      return
    end
    for _, i in ipairs(lists[d]) do
      if i then
        at[d] = i
        walk(d + 1)
      else
        rows[#rows + 1] = { skipped = d }
      end
    end
  end
  walk(1)
  return rows, values
end

local function write_rows(rows, format, depth, apart)
  local width, texts = 0, {}
  for r, row in ipairs(rows) do
    texts[r] = {}
    for i, value in ipairs(row) do
      local text = value and format:format(value):gsub("^%-nan", "nan") or "..."
      if value then width = math.max(width, #text) end
      texts[r][i] = text
    end
  end
  local lines = {}
  for r, row in ipairs(rows) do
    if row.skipped then
      lines[r] = (" "):rep(row.skipped) .. "..."
    else
      for i, text in ipairs(texts[r]) do
        texts[r][i] = (" "):rep((row[i] and width or 3) - #text) .. text
      end
      local gap = apart and row.begins and r > 1 and "\n" or ""
      lines[r] = gap .. (" "):rep(depth) .. "[" .. table.concat(texts[r], "  ") .. "]"
    end
  end
  return table.concat(lines, "\n")
end

-- ---- the line above --------------------------------------------------------------------------

local UNITS = { "bytes", "KiB", "MiB", "GiB", "TiB", "PiB" }

local function size_of(bytes)
  local unit, value = 1, bytes
  while value >= 1024 and unit < #UNITS do
    value, unit = value / 1024, unit + 1
  end
  return ((unit == 1 and "%d %s" or "%.4g %s"):format(value, UNITS[unit]))
end

local WIDTH = { f32 = 4, bf16 = 2, f16 = 2, f64 = 8, i32 = 4, i64 = 8, u8 = 1 }

-- "24 bytes"; of an expanded view, also what it really takes.
local function bytes_of(t, shape)
  local width, distinct = WIDTH[t.dtype], 1
  for d, step in ipairs(t:strides()) do
    if step ~= 0 then distinct = distinct * shape[d] end
  end
  local text = size_of(t.numel * width)
  if distinct < t.numel then text = text .. " in " .. size_of(distinct * width) end
  return text
end

-- ", variable, no gradient", ", by matmul at mine.lua:7, gradient wanted", or "".
local function history_of(t)
  if t.is_var then
    return t.grad and ", variable, has a gradient" or ", variable, no gradient"
  end
  local op, where = core.maker(t)
  if not op then return "" end
  return (", by %s at %s%s"):format(op, where, t.requires_grad and ", wants a gradient" or "")
end

local function shape_of(shape)
  return #shape == 0 and "scalar" or table.concat(shape, "x")
end

-- The line of statistics, or nil where the elements say it themselves.
local function statistics_of(t)
  if t.numel <= MOST_COLUMNS then return nil end
  local done, s = pcall(require("xtrain.statistics").of, t)
  if not done or not s then return nil end -- no kernel for it, or no memory: the elements remain
  local format = t.dtype:find "^[iu]" and "%d" or "%.4g"
  local text = {}
  if s.min then
    text[1] = ("min %s  max %s  mean %.4g  std %.4g"):format(
      format:format(s.min), format:format(s.max), s.mean, s.std)
  end
  if t.dtype:find "^[fb]" then text[#text + 1] = ("NaN %d  inf %d"):format(s.nan, s.inf) end
  return table.concat(text, "  ")
    .. (s.sampled and ("  (in a sample of %d elements)"):format(s.sampled) or "")
end

local M = {}

-- summary(t): one short line, for a tensor among other values.
function M.summary(t)
  local shape = t.shape
  local text = ("%s %s %s"):format(t.dtype, shape_of(shape), t.device)
  if #shape == 0 then return text .. ": " .. number(t:item(), t.dtype) end
  return text .. (t.is_var and (t.grad and ", variable, has a gradient" or ", variable") or "")
end

local function text_of(t)
  local shape = t.shape
  local head = ("%s %s %s"):format(t.dtype, shape_of(shape), t.device)
  if #shape == 0 then
    return head .. history_of(t) .. ": " .. number(core.at(t), t.dtype)
  end
  if t.numel == 0 then return head .. history_of(t) .. ": []" end
  local lines = { head .. ", " .. bytes_of(t, shape) .. history_of(t), statistics_of(t) }
  local rows, values = collect(t, shape, leading(shape))
  local apart = #shape > 2 and shape[#shape - 1] > 1
  lines[#lines + 1] = write_rows(rows, format_of(values, t.dtype), #shape - 1, apart)
  return table.concat(lines, "\n")
end

-- text(t): all that the prompt shows of a tensor. Nothing of it is recorded or trapped.
function M.text(t)
  if t.numel > 0 then -- what has no value yet, in a graph, says so
    local first = {}
    for d = 1, t.ndim do first[d] = 1 end
    core.at(t, table.unpack(first))
  end
  return core.quietly(text_of, t)
end

return M
