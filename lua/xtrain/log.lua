-- What a run tells: one progress line, rewritten on a terminal and plain lines elsewhere, and
-- metrics.jsonl, one object a line, as edits.jsonl too is read.
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"

local M = {}

-- ---- the progress line -------------------------------------------------------------------------

-- 65 -> "1:05", 3700 -> "1:01:40".
function M.duration(seconds)
  local s = math.max(0, math.floor(seconds + 0.5))
  if s < 3600 then return ("%d:%02d"):format(s // 60, s % 60) end
  return ("%d:%02d:%02d"):format(s // 3600, s // 60 % 60, s % 60)
end

-- 12345 -> "12.3K".
function M.count(n)
  if n >= 1e9 then return ("%.1fB"):format(n / 1e9) end
  if n >= 1e6 then return ("%.1fM"):format(n / 1e6) end
  if n >= 1e4 then return ("%.1fK"):format(n / 1e3) end
  return ("%d"):format(math.floor(n + 0.5))
end

local progress = {}
progress.__index = progress

function M.progress()
  return setmetatable({ terminal = file.isatty(2), open = false, width = 0 }, progress)
end

-- Shows a line. On a terminal the next one takes its place.
function progress:show(text)
  if not self.terminal then
    io.stderr:write(text, "\n")
    return
  end
  text = text:sub(1, file.columns() - 1) -- a line that wraps cannot be rewritten
  local blank = (" "):rep(math.max(0, self.width - #text))
  io.stderr:write("\r", text, blank)
  io.stderr:flush()
  self.open, self.width = true, #text
end

-- Ends the line that is being rewritten, so that what follows starts on its own.
function progress:close()
  if self.open then io.stderr:write("\n") end
  self.open, self.width = false, 0
end

-- A line that stays.
function progress:say(text)
  self:close()
  io.stderr:write(text, "\n")
end

-- ---- metrics -----------------------------------------------------------------------------------

-- Appends one object. Returns true, or nil, message.
function M.append(path, row)
  local out, message = io.open(path, "ab")
  if not out then return nil, message end
  local ok
  ok, message = out:write(json.encode(row), "\n")
  if not ok then
    out:close()
    return nil, message
  end
  return out:close()
end

-- The rows of a file, those that have a step; a line cut short by a kill is left out.
function M.read(path)
  local rows = {}
  for line in (file.read(path) or ""):gmatch "[^\n]+" do
    local ok, row = pcall(json.decode, line)
    if ok and type(row) == "table" and math.type(row.step) == "integer" then
      rows[#rows + 1] = row
    end
  end
  return rows
end

-- Drops the rows after `step`, and a last line cut short by a kill. Returns true, or nil, message.
function M.cut(path, step)
  if not file.exists(path) then return true end
  local text, message = file.read(path)
  if not text then return nil, message end
  local kept = {}
  for line in text:gmatch("([^\n]*)\n") do
    local ok, row = pcall(json.decode, line)
    if ok and type(row) == "table" and type(row.step) == "number" and row.step <= step then
      kept[#kept + 1] = line .. "\n"
    end
  end
  return file.write_atomic(path, table.concat(kept))
end

return M
