-- Whether a run is what its recipe makes it: `xtrain verify` replays the interval between the two
-- newest saves and compares digests; `xtrain diff` finds the step at which two runs part.
--
-- The digest of a step links it to all before (recipe.lua), so the first step whose digests differ
-- is the first that was not the same. Under another fingerprint (processor, device, libraries,
-- version) the last bits of a sum may differ, so that nothing follows from other digests.
local options = require "xtrain.options"
local replay = require "xtrain.replay"
local save = require "xtrain.save"
local json = require "xtrain.core.json"
local safetensors = require "xtrain.core.safetensors"

local M = {}

local PARTS = { "model", "optim" }
local NAMED = 3 -- tensors that a sentence names; the rest are counted

-- "a, b, c and 4 more"
local function some(names)
  local shown = table.concat(names, ", ", 1, math.min(#names, NAMED))
  return #names > NAMED and ("%s and %d more"):format(shown, #names - NAMED) or shown
end

-- The names under which two tables of strings do not hold the same, by byte.
local function unlike(a, b)
  local all, names = {}, {}
  for name in pairs(a) do all[name] = true end
  for name in pairs(b) do all[name] = true end
  for _, name in ipairs(options.names(all)) do
    if a[name] ~= b[name] then names[#names + 1] = name end
  end
  return names
end

-- "model blocks.1.attn.wq, optim blocks.1.attn.wq.m", or nil where all digests agree.
local function unlike_tensors(a, b)
  local names = {}
  for _, part in ipairs(PARTS) do
    for _, name in ipairs(unlike(a[part], b[part])) do names[#names + 1] = part .. " " .. name end
  end
  return #names > 0 and some(names) or nil
end

-- A sentence where results under two fingerprints cannot be compared, or nil.
local function not_comparable(a, b, name_a, name_b)
  local parts = {}
  for _, name in ipairs(unlike(a, b)) do
    parts[#parts + 1] = ("%s is %s for %s and %s for %s"):format(name, a[name] or "none", name_a,
      b[name] or "none", name_b)
  end
  if #parts > 0 then return "not comparable: " .. table.concat(parts, "; ") end
end

-- ---- what a run has written --------------------------------------------------------------------

-- A sentence about the first tensor of a save that is not what was saved, or nil.
local function damage(each)
  for _, part in ipairs(PARTS) do
    local path = ("%s/%s.safetensors"):format(each.dir, part)
    local tensors, message = safetensors.load(path)
    if not tensors then return ("step %d: %s"):format(each.step, message) end
    local found, wanted = {}, each.info.digests[part]
    for name, t in pairs(tensors) do found[name] = save.hex(t:digest()) end
    local names = unlike(found, wanted)
    if #names > 0 then
      return ("step %d: %s: not what was saved: %s"):format(each.step, path, some(names))
    end
  end
end

-- ---- verify ------------------------------------------------------------------------------------

-- Compares a replay with what the run wrote: nil, or a sentence.
local function compare(run, from, to, made)
  local logged = replay.digests(replay.rows(run))
  logged[to.step] = to.info.digest
  local parted
  for step = from and from.step + 1 or 1, to.step do
    if logged[step] and logged[step] ~= made.chain[step] then
      parted = ("step %d: the replay has digest %s, the run %s"):format(step, made.chain[step],
        logged[step])
      break
    end
  end
  local tensors = unlike_tensors(to.info.digests, made.digests)
  if tensors then
    tensors = ("step %d: the replay has other values of %s"):format(to.step, tensors)
  end
  return parted and tensors and parted .. "\n" .. tensors or parted or tensors
end

-- Checks every tensor of a run's saves, makes the steps between the two newest again (from the
-- start where there is one save), and compares. Returns whether all is as it should be, and a text.
function M.verify(run)
  run = #run > 1 and run:gsub("/+$", "") or run
  local saves, message = replay.saves(run)
  if not saves then return false, message end
  if #saves == 0 then return false, run .. ": no save here" end
  for _, each in ipairs(saves) do
    message = damage(each)
    if message then return false, message end
  end
  local from, to = saves[#saves - 1], saves[#saves]
  -- The replay runs where the run did, and its products take the algorithms that the saves keep.
  local here = save.fingerprint((to.info.fingerprint or {}).device)
  local own_table = here.products
  for _, each in ipairs { from or to, to } do
    local there = each.info.fingerprint or {}
    here.products = each.info.products and there.products or own_table
    message = not_comparable(there, here, each.dir, "this program")
    if message then return false, message end
  end
  local made
  made, message = replay.run(run, { from = from, info = to.info, last = to.step })
  if not made then return false, message end
  message = compare(run, from, to, made)
  if message then return false, message end
  local count = 0
  for _, part in ipairs(PARTS) do
    for _ in pairs(to.info.digests[part]) do count = count + 1 end
  end
  return true, ("%s: %d saves are whole; steps %d to %d made again: digest %s and all %d tensors "
    .. "are the same"):format(run, #saves, from and from.step + 1 or 1, to.step, to.info.digest,
    count)
end

-- ---- diff --------------------------------------------------------------------------------------

local IGNORED = { out = true, resume = true, keep = true, threads = true } -- may not change a run

local function shown(value)
  if type(value) == "table" then return json.encode(value) end
  return tostring(value)
end

-- "lr 0.003 / 0.001, seed 1 / 2", or nil where the options agree.
local function unlike_options(a, b)
  local parts = {}
  for _, name in ipairs(unlike(a, b)) do
    local left, right = shown(a[name]), shown(b[name])
    if not IGNORED[name] and left ~= right then
      parts[#parts + 1] = ("%s %s / %s"):format(name, left, right)
    end
  end
  return #parts > 0 and table.concat(parts, ", ") or nil
end

local function read_run(run)
  run = #run > 1 and run:gsub("/+$", "") or run
  local config, message = require("xtrain.hf").read_json(run .. "/config.json")
  if not config then return nil, message end
  local rows = replay.rows(run)
  local digests, last = replay.digests(rows)
  if last == 0 then return nil, run .. "/metrics.jsonl: no step is logged" end
  local by_step = {}
  for _, row in ipairs(rows) do by_step[row.step] = by_step[row.step] or row end
  return { path = run, config = config, digests = digests, last = last, rows = by_step,
    saves = replay.saves(run) or {} }
end

-- What the log lines of the step at which two runs part say about it.
local function figures(a, b)
  local parts = {}
  for _, name in ipairs { "loss", "grad_norm", "lr" } do
    local x, y = a and a[name], b and b[name]
    if x and y then
      parts[#parts + 1] = x == y and ("the same %s"):format(name)
        or ("%s %.9g / %.9g"):format(name, x, y)
    end
  end
  return #parts > 0 and ": " .. table.concat(parts, ", ") or ""
end

-- The first save both have in which a tensor differs: a sentence, or nil.
local function unlike_saves(a, b)
  local others = {}
  for _, each in ipairs(b.saves) do others[each.step] = each end
  for _, each in ipairs(a.saves) do
    local other = others[each.step]
    local tensors = other and unlike_tensors(each.info.digests, other.info.digests)
    if tensors then return ("the saves of step %d differ in %s"):format(each.step, tensors) end
  end
end

-- Compares two run folders: whether they are the same as far as both go, and a text.
function M.diff(left, right)
  local a, b, message
  a, message = read_run(left)
  if not a then return false, message end
  b, message = read_run(right)
  if not b then return false, message end
  message = not_comparable(a.config.fingerprint or {}, b.config.fingerprint or {}, a.path, b.path)
  if message then return false, message end
  local common = math.min(a.last, b.last)
  local agreed, parted, compared = 0, nil, 0
  for step = 1, common do
    if a.digests[step] and b.digests[step] then
      compared = compared + 1
      if a.digests[step] ~= b.digests[step] then
        parted = step
        break
      end
      agreed = step
    end
  end
  local lines = {}
  local function add(text) lines[#lines + 1] = text end
  if parted then
    -- Digests that are missing in between leave more than one step.
    local where = agreed + 1 == parted and ("at step %d"):format(parted)
      or ("between steps %d and %d"):format(agreed + 1, parted)
    add("the runs part " .. where .. figures(a.rows[parted], b.rows[parted]))
  elseif compared == 0 then
    return false, "the logs have no step in common"
  end
  local tensors = unlike_saves(a, b)
  if tensors then add(tensors) end
  if #lines > 0 then
    local differing = unlike_options(a.config.options, b.config.options)
    if differing then add("options: " .. differing) end
    return false, table.concat(lines, "\n")
  end
  add(("the same up to step %d, digest %s"):format(common, a.digests[common] or "of no log line"))
  if a.last ~= b.last then
    add(("%s goes on to step %d"):format(a.last > b.last and a.path or b.path,
      math.max(a.last, b.last)))
  end
  return true, table.concat(lines, "\n")
end

return M
