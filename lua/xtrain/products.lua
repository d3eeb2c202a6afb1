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
  if type(rows) ~= "table" or #rows == 0 and next(rows) ~= nil then
    return nil, name .. ": is no list"
  end
  for i, row in ipairs(rows) do
    if type(row) ~= "string" then return nil, ("%s:%d: is no string"):format(name, i) end
    if row:find "\0" then return nil, ("%s:%d: has a byte of zero"):format(name, i) end
  end
  local ok, message = pcall(core.use_products, table.concat(rows, "\n"), name)
  if ok then return true end
  message = tostring(message)
  return nil, message:sub(message:find(name, 1, true) or 1) -- without the recipe's line
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
  local ok, message = pcall(function()
    local text = file.exists(path) and read_or_raise(path) or HEADER
    local written, why = file.write_atomic(path, text) -- not when all has been measured
    if not written then error(why, 0) end
    core.use_products(text, path)
  end)
  if ok then return end
  core.tune(false)
  error(message, 0)
end

-- The text of a table with the rows of `new` in it, what stands above its rows kept; how many rows
-- are new, and how many changed. Raises for a row that is none.
function M.merge(old, name, new)
  local rows, added, changed = core.merge_products(old, name, new, "tuning")
  local bare = old:gsub("/%*.-%*/", function(comment) return (" "):rep(#comment) end)
  local first = ("\n" .. bare):find("\nPRODUCT(", 1, true)
  return (first and old:sub(1, first - 1) or old) .. rows, added, changed
end

-- "8192 x 2736 x 1024 bf16 to bf16: 66.5 us, now 57.5 (0.86), of 12 algorithms"
local function told(choice)
  return ("%s%d x %d x %d %s to %s%s: %.1f us, now %.1f (%.2f), of %d algorithms"):format(
    choice.batch > 1 and ("%d of "):format(choice.batch) or "", choice.m, choice.n, choice.k,
    choice.dtype, choice.out, choice.add and ", added" or "", choice.before_us, choice.after_us,
    choice.after_us / choice.before_us, choice.measured)
end

-- Ends tuning, and puts what it found into the file. Returns a text: a line for each product that
-- takes another algorithm now than it did, and a sentence.
function M.finish_tuning(path)
  core.tune(false)
  local old = file.exists(path) and read_or_raise(path) or HEADER
  local lines, rows, products, algorithms = {}, {}, 0, 0
  for _, choice in ipairs(core.products()) do
    if choice.from == "tuned" then rows[#rows + 1] = choice.row end
    if choice.measured then
      products, algorithms = products + 1, algorithms + choice.measured
      if choice.after_us < choice.before_us then lines[#lines + 1] = told(choice) end
    end
  end
  local text, added, changed = M.merge(old, path, table.concat(rows))
  local ok, message = file.write_atomic(path, text)
  if not ok then error(message, 0) end
  lines[#lines + 1] = ("%s: %d products and %d algorithms measured, %d rows new, %d changed")
    :format(path, products, algorithms, added, changed)
  return table.concat(lines, "\n")
end

return M
