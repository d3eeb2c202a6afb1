-- Tensors as text: a line with dtype, shape and device, then the elements, or the edge ones when
-- there are many. Reads single elements, so an expanded view of 10^12 elements costs nothing, and
-- never more than about 50 lines.
local core = require "xtrain.core"

local MOST_ROWS, MOST_COLUMNS, EDGE = 40, 12, 3

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

-- "f32 2x3 cpu"
local function header(t)
  local shape = t.shape
  local size = #shape == 0 and "scalar" or table.concat(shape, "x")
  return ("%s %s %s%s"):format(t.dtype, size, t.device, t.is_var and " variable" or "")
end

return function(t)
  local shape = t.shape
  if #shape == 0 then
    local value = t:item()
    local format = t.dtype:find("^[iu]") and "%d" or t.dtype == "f64" and "%.15g" or "%.7g"
    return header(t) .. ": " .. format:format(value):gsub("^%-nan", "nan")
  end
  if t.numel == 0 then return header(t) .. ": []" end
  local rows, values = collect(t, shape, leading(shape))
  local apart = #shape > 2 and shape[#shape - 1] > 1
  return header(t) .. "\n" .. write_rows(rows, format_of(values, t.dtype), #shape - 1, apart)
end
