-- What is changed in a run while it goes on: new texts of its live files (live.lua) and values set
-- from another terminal (ctl.lua). Each change is a row of edits.jsonl, and takes place at the
-- boundary before the step that the row names; so a resumed or replayed run makes the same changes
-- at the same steps:
--   {step, path, hash, diff, text}   a live file; its first row is the text the run began with
--   {step, set = name, value}        a live value, or an option of the recipe
-- Rows for later steps than the present one are those of a run that was resumed from before them.
-- They are applied in their turn, unless something is changed before: then the run takes another
-- way, and they are dropped.
local xt = require "xtrain"
local options = require "xtrain.options"
local file = require "xtrain.core.file"
local log = require "xtrain.log"
local json = require "xtrain.core.json"

local M = {}

-- Of the options that every recipe has, those that each step reads anew.
local CHANGEABLE = { log_every = true, keep = true, lost_updates = true }

-- ---- the difference of two texts ---------------------------------------------------------------

local MOST_CELLS = 250000 -- of the table of common lines; a larger change is shown whole

local function lines_of(text)
  local lines = {}
  for line in (text:find "\n$" and text or text .. "\n"):gmatch "(.-)\n" do
    lines[#lines + 1] = line
  end
  return text == "" and {} or lines
end

-- common[i][j]: how many lines a[i..] and b[j..] have in common, in order.
local function common_lines(a, b)
  local common = {}
  for i = #a + 1, 1, -1 do
    common[i] = {}
    for j = #b + 1, 1, -1 do
      if i > #a or j > #b then
        common[i][j] = 0
      elseif a[i] == b[j] then
        common[i][j] = common[i + 1][j + 1] + 1
      else
        common[i][j] = math.max(common[i + 1][j], common[i][j + 1])
      end
    end
  end
  return common
end

-- The lines that went, after "-", and those that came, after "+"; "@ 3" names a line of the new
-- text at which that happened.
function M.diff(old, new)
  local a, b = lines_of(old), lines_of(new)
  local first, last = 1, 0 -- lines both begin with, and end with
  while a[first] and a[first] == b[first] do first = first + 1 end
  while #a - last >= first and #b - last >= first and a[#a - last] == b[#b - last] do
    last = last + 1
  end
  a = table.move(a, first, #a - last, 1, {})
  b = table.move(b, first, #b - last, 1, {})
  local out, i, j, open = {}, 1, 1, false
  local common = #a * #b <= MOST_CELLS and common_lines(a, b)
  local function put(mark, line)
    if not open then out[#out + 1] = ("@ %d"):format(first + j - 1) end
    out[#out + 1], open = mark .. line, true
  end
  while i <= #a or j <= #b do
    if i <= #a and j <= #b and a[i] == b[j] and common then
      i, j, open = i + 1, j + 1, false
    elseif i <= #a and (j > #b or not common or common[i + 1][j] >= common[i][j + 1]) then
      put("-", a[i])
      i = i + 1
    else
      put("+", b[j])
      j = j + 1
    end
  end
  return table.concat(out, "\n")
end

-- ---- the record --------------------------------------------------------------------------------

function M.hash(text) return ("0x%016x"):format(xt.core.hash(text)) end

-- The rows of a run folder.
function M.read(folder) return log.read(folder .. "/edits.jsonl") end

-- Where the rows of a run lie that is resumed or replayed; nil for a new one.
local function folder_of(run)
  local own = run.own
  if own.replay and own.replay.run then return own.replay.run end
  local dir = own.saves[1]
  if dir then return dir:match "^(.*)/[^/]+$" or "." end
  return run.options.resume == "auto" and run.out or nil
end

local function rows_of(run)
  local folder = run.options.bench == 0 and folder_of(run)
  return folder and M.read(folder) or {}
end

-- Gives a run its record: {rows, next = the first row to come, live = states of live files,
-- originals = options before they were set, started = whether steps are being made}.
function M.open(run)
  run.own.edits = { rows = rows_of(run), next = 1, live = {}, originals = {}, started = false }
end

-- The run goes on from another save than it was made with.
function M.reopen(run) run.own.edits.rows = rows_of(run) end

local function write(run)
  local lines = {}
  for i, row in ipairs(run.own.edits.rows) do lines[i] = json.encode(row) .. "\n" end
  local ok, message = file.write_atomic(run.out .. "/edits.jsonl", table.concat(lines))
  if not ok then
    run.own.progress:say("edits.jsonl cannot be written, so resume and verify will not know of "
      .. "this change: " .. tostring(message))
  end
end

-- The last row of a live file that is recorded, its text of the future included; or nil.
local function last_of(edits, path)
  for i = #edits.rows, 1, -1 do
    if edits.rows[i].path == path then return edits.rows[i] end
  end
end

function M.first_text(run, path)
  for _, row in ipairs(run.own.edits.rows) do
    if row.path == path then return row.text end
  end
end

-- Drops what was recorded for later steps: from here on it is another run.
local function drop_later(run)
  local edits, steps = run.own.edits, {}
  for i = #edits.rows, edits.next, -1 do
    steps[#steps + 1] = edits.rows[i].step
    edits.rows[i] = nil
  end
  if #steps > 0 then
    run.own.progress:say(("changes that were recorded for steps %d to %d are dropped: the run is "
      .. "changed before them"):format(steps[#steps], steps[1]))
  end
end

-- ---- values ------------------------------------------------------------------------------------

-- "weights.aux" in a table of values: the table that holds it, its key and its value; or nil.
local function find(values, name)
  local holder = values
  for key in name:gmatch "([^.]+)%." do
    holder = type(holder) == "table" and holder[key]
  end
  local last = name:match "[^.]+$"
  if last and type(holder) == "table" and holder[last] ~= nil then
    return holder, last, holder[last]
  end
end

-- What `name` means in a run: {value, put = function(value), what = "option" or the path of the
-- live file}; or nil, message.
function M.target(run, name)
  for _, state in ipairs(run.own.edits.live) do
    local holder, key, value = find(state.values, name)
    if holder then
      return { value = value, what = state.path, put = function(v)
        holder[key] = v
        state.set[#state.set + 1] = name
      end }
    end
  end
  local o, own = run.options, run.own
  if o[name] == nil then
    local known = options.names(o)
    for _, state in ipairs(own.edits.live) do
      for _, each in ipairs(options.names(state.values)) do known[#known + 1] = each end
    end
    local nearest = options.nearest(name, known)
    return nil, ("there is no live value and no option '%s'%s"):format(name,
      nearest and ("; did you mean '%s'?"):format(nearest) or "")
  end
  if own.common[name] ~= nil and not CHANGEABLE[name] then
    return nil, ("option '%s' holds for the whole run"):format(name)
  end
  return { value = o[name], what = "option", put = function(v)
    if own.edits.originals[name] == nil then own.edits.originals[name] = o[name] end
    o[name] = v
    if rawget(run, name) ~= nil then run[name] = v end
  end }
end

-- The options that the run began with.
function M.original_options(run)
  local out = {}
  for name, value in pairs(run.options) do out[name] = value end
  for name, value in pairs(run.own.edits.originals) do out[name] = value end
  return out
end

-- ---- changes -----------------------------------------------------------------------------------

local function apply(run, row)
  run.own.graph = nil -- what was recorded may hold the value as it was
  if row.path then
    for _, state in ipairs(run.own.edits.live) do
      if state.path == row.path then
        local values, message = state.load(row.text)
        if not values then
          error(("edits.jsonl: the text of %s for step %d: %s"):format(row.path, row.step, message),
            0)
        end
        state.values, state.set = values, {}
      end
    end
  else
    local target, message = M.target(run, row.set)
    if not target then error("edits.jsonl: " .. message, 0) end
    target.put(row.value)
  end
end

local function apply_due(run, step)
  local edits = run.own.edits
  while edits.rows[edits.next] and edits.rows[edits.next].step <= step do
    apply(run, edits.rows[edits.next])
    edits.next = edits.next + 1
  end
end

-- Makes the changes of all steps before the first to come once more, as after a resume.
function M.start(run)
  local own = run.own
  local edits = own.edits
  for name, value in pairs(edits.originals) do
    run.options[name] = value
    if rawget(run, name) ~= nil then run[name] = value end
  end
  edits.originals, edits.next, edits.started = {}, 1, true
  apply_due(run, own.step)
  if own.replay or run.options.bench > 0 then return end
  for _, state in ipairs(edits.live) do
    if not last_of(edits, state.path) then
      table.insert(edits.rows, edits.next, { step = own.step + 1, path = state.path,
        hash = M.hash(state.text), diff = "", text = state.text })
      edits.next = edits.next + 1
    end
  end
  if #edits.rows > 0 then
    write(run)
  else
    os.remove(run.out .. "/edits.jsonl")
  end
end

-- Records a change and makes it, for all steps from `step` on.
function M.add(run, row)
  local edits = run.own.edits
  drop_later(run)
  edits.rows[#edits.rows + 1] = row
  write(run)
  apply_due(run, row.step)
end

-- Looks whether a live file has another text; a text that is not taken is told of once.
local function look(run, state, step)
  local own = run.own
  local text = state.read()
  if not text or text == state.seen then return end
  state.seen = text
  local last = last_of(own.edits, state.path)
  if last.text == text then return end
  local values, message = state.load(text, state.values)
  if not values then
    own.progress:say(("%s is not taken, step %d goes on with the values it had: %s"):format(
      state.path, step, message))
    return
  end
  local cleared = state.set
  M.add(run, { step = step, path = state.path, hash = M.hash(text),
    diff = M.diff(last.text, text), text = text })
  own.progress:say(("%s: taken from step %d on\n%s"):format(state.path, step,
    own.edits.rows[#own.edits.rows].diff))
  if #cleared > 0 then
    own.progress:say("its values take the place of what ctl had set: "
      .. table.concat(cleared, ", "))
  end
end

-- The boundary before `step`: recorded changes in their turn, then new ones.
function M.boundary(run, step)
  local own = run.own
  apply_due(run, step)
  if own.replay or run.options.bench > 0 then return end
  for _, state in ipairs(own.edits.live) do look(run, state, step) end
end

return M
