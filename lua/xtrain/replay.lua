-- Steps of a run made again, from a save of it (or from the start) and the text of its recipe: what
-- `xtrain verify` compares, and what `xtrain replay` stands in. Nothing of the run is written.
local again = require "xtrain.again"
local finite = require "xtrain.finite"
local log = require "xtrain.log"
local products = require "xtrain.products"
local save = require "xtrain.save"
local file = require "xtrain.core.file"

local M = {}

-- ---- what a run has written --------------------------------------------------------------------

-- Rows of metrics.jsonl.
function M.rows(run) return log.read(run .. "/metrics.jsonl") end

-- {step = digest} of all steps that the log tells of, and the last of them.
function M.digests(rows)
  local digests, last = {}, 0
  for _, row in ipairs(rows) do
    local list = row.digests or { row.digest }
    for i, digest in ipairs(list) do digests[row.step - #list + i] = digest end
    if #list > 0 then last = math.max(last, row.step) end
  end
  return digests, last
end

-- The saves of a run, oldest first: {step, dir, info}; or nil, message.
function M.saves(run)
  if not file.exists(run) then return nil, run .. ": there is no such folder" end
  local saves = {}
  for _, step in ipairs(save.list(run)) do
    local dir = run .. "/" .. save.name(step)
    local info, message = save.info(dir)
    if not info then return nil, message end
    if type(info.digests) ~= "table" then return nil, dir .. "/state.json: has no digests" end
    saves[#saves + 1] = { step = step, dir = dir, info = info }
  end
  return saves
end

-- ---- making steps again ------------------------------------------------------------------------

-- Makes the steps of the run in folder `run` again, up to o.last. o: {from = save or nil for the
-- start, info = of a save of the same run, last, trap = whether steps that are not finite are
-- looked into, stand = function(recipe's run, replay) called where the replay would end}. Returns
-- what active.replay says a replay leaves; or nil, message.
function M.run(run, o)
  local path = run .. "/recipe.lua"
  local recipe = o.info.recipe
  local text = recipe and recipe.text or file.read(path)
  if not text then return nil, path .. ": there is no text of the recipe to replay" end
  local chunk, message = load(text, "@" .. (recipe and recipe.path or path), "t")
  if not chunk then return nil, message end
  local known
  known, message = products.use(o.info.products, ("%s: the save of step %s"):format(run,
    tostring(o.info.step)))
  if not known then return nil, message end
  local out = os.tmpname()
  os.remove(out)
  local wanted = { out = out, save = o.from and o.from.dir, last = o.last, chain = {}, steps = {},
    options = o.info.options, run = run, trap = o.trap }
  wanted.stand = o.stand and function(stood) o.stand(stood, wanted) end
  local made
  made, message = again(chunk, path, wanted)
  file.remove_tree(out)
  if not made then return nil, "the replay failed: " .. message end
  return made
end

-- ---- xtrain replay -----------------------------------------------------------------------------

-- Where a replay of `step` starts: the newest save before it, or nil for the start of the run; and
-- the save that says how the step was made, with the options of its time. Or false, message.
local function place(run, step)
  local saves, message = M.saves(run)
  if not saves then return false, message end
  if #saves == 0 then return false, run .. ": no save here" end
  local from, how
  for _, each in ipairs(saves) do
    if each.step < step then from = each elseif not how then how = each end
  end
  return from, how or from
end

-- How the digest of a step compares with what the run has logged.
local function digest_text(run, step, digest)
  if step == 0 then return "the start of the run" end
  local logged = M.digests(M.rows(run))[step]
  if not logged then
    for _, each in ipairs(M.saves(run) or {}) do
      if each.step == step then logged = each.info.digest end
    end
  end
  if not logged then return ("digest %s, which the log does not have"):format(digest) end
  if logged == digest then return ("digest %s, as logged"):format(digest) end
  return ("digest %s, but %s in the log: the replay is not what the run was"):format(digest, logged)
end

local function figure(x)
  if not x then return "none" end
  return finite.is_finite(x) and ("%.9g"):format(x) or finite.shown(x)
end

-- Makes `step` of a run again: whether it went as it had, and a text. With enter, stands right
-- before it instead: enter(text) is called there, with the recipe's locals on the stack, and again
-- before each step after it, as long as it returns. Returns nil, message where nothing can be
-- replayed.
function M.step(run, step, enter)
  run = #run > 1 and run:gsub("/+$", "") or run
  local from, base = place(run, step)
  if from == false then return nil, base end
  if step < 1 or step > base.info.options.steps then
    return nil, ("%s: has steps 1 to %d, not %d"):format(run, base.info.options.steps, step)
  end
  local start = from and ("from the save of step %d"):format(from.step) or "from the start"
  local function stand(stood, wanted)
    local own = stood.own
    enter(("%s, %s: right before step %d; step %d: %s"):format(run, start, own.step + 1, own.step,
      digest_text(run, own.step, save.hex(own.digest))))
    if own.step < stood.options.steps then wanted.last = own.step + 1 end
  end
  local made, message = M.run(run, { from = from, info = base.info, trap = true,
    last = enter and step - 1 or step, stand = enter and stand })
  if not made then return nil, message end
  if enter then return true end
  local text, seen = digest_text(run, step, made.chain[step]), made.steps[step]
  return text:find("not what the run was", 1, true) == nil,
    ("%s, %s: step %d: loss %s, grad_norm %s, lr %s, %s"):format(run, start, step,
      figure(seen.loss), figure(seen.grad_norm), figure(seen.lr), text)
end

return M
