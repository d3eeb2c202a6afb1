-- Which algorithms a run's matrix products take on a GPU: its saves keep them, and resume, verify
-- and replay take them again, whatever the program's own table has become; and the file that
-- tuning writes. A CPU has none of this. runtime/choice.c says what a row is.
local core = require "xtrain.core"
local file = require "xtrain.core.file"

local M = {}

local HEADER = "/* Algorithms of matrix products, as kernels/products.def has them. */\n"

-- ---- of a run ----------------------------------------------------------------------------------

-- Those in use, for a save: a row each as a string; nil where there are none.
function M.rows()
  local rows = {}
  for i, choice in ipairs(core.products()) do
    rows[i] = choice.row:gsub("\n%s*", " "):gsub(" $", "")
  end
  return #rows > 0 and rows or nil
end

-- Takes the rows of a save before all others, from here on: true; or nil, message.
function M.use(rows, path)
  if rows == nil then return true end
  local name = path .. ", products"
  if type(rows) ~= "table" then return nil, name .. ": is no list" end
  for i, row in ipairs(rows) do
    if type(row) ~= "string" then return nil, ("%s:%d: is no string"):format(name, i) end
  end
  local ok, message = pcall(core.use_products, table.concat(rows, "\n"), name)
  if not ok then return nil, tostring(message) end
  return true
end

-- ---- tuning ------------------------------------------------------------------------------------

local function read_or_raise(path)
  local text, message = file.read(path)
  if not text then error(message, 0) end
  return text
end

-- From here on each product is measured when it is first met. What the file has is what another
-- algorithm must beat. Raises without a GPU, and for a file that is no table.
function M.start_tuning(path)
  core.tune(true)
  if file.exists(path) then core.use_products(read_or_raise(path), path) end
end

-- The text of a table with the rows of `new` in it, what stands above its rows kept; how many rows
-- are new, and how many changed. Raises for a row that is none.
function M.merge(old, name, new)
  local rows, added, changed = core.merge_products(old, name, new, "tuning")
  local first = ("\n" .. old):find("\nPRODUCT(", 1, true)
  return (first and old:sub(1, first - 1) or old) .. rows, added, changed
end

-- Ends tuning, and puts what it found into the file. Returns a sentence.
function M.finish_tuning(path)
  core.tune(false)
  local old = file.exists(path) and read_or_raise(path) or HEADER
  local measured, rows = core.products(), {}
  for _, choice in ipairs(measured) do
    if choice.from == "tuned" then rows[#rows + 1] = choice.row end
  end
  local text, added, changed = M.merge(old, path, table.concat(rows))
  local ok, message = file.write_atomic(path, text)
  if not ok then error(message, 0) end
  return ("%s: %d products measured, %d rows new, %d changed"):format(path, #measured, added,
    changed)
end

return M
