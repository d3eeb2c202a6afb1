-- Speaking to a run from another terminal: xtrain ctl RUN eval|save|stop|set KEY VALUE.
--
-- The run's folder has a folder .ctl while the run goes on. `running` in it says which process that
-- is; NAME.request holds a wish, which the run reads at its next step boundary, and NAME.reply what
-- came of it. All are written beside and renamed, so none is ever seen in part.
local changed = require "xtrain.changed"
local edits = require "xtrain.edits"
local options_text = require "xtrain.options_text"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"

local M = {}

local FOLDER = "/.ctl"

local function contents(path)
  local handle = io.open(path, "rb")
  if not handle then return nil end
  local text = handle:read "a"
  handle:close()
  return text
end

local function decoded(path)
  local ok, value = pcall(json.decode, contents(path) or "")
  return ok and type(value) == "table" and value or nil
end

-- ---- which process -----------------------------------------------------------------------------

-- When a process began, in ticks since the machine did; nil when it is gone.
local function started(pid)
  local fields = (contents(("/proc/%d/stat"):format(pid)) or ""):match ".*%)(.*)"
  if not fields then return nil end
  local number = 2
  for field in fields:gmatch "%S+" do
    number = number + 1
    if number == 22 then return field end
  end
end

local function line(path) return (contents(path) or ""):match "[^\n]*" end

local function myself()
  return { pid = file.pid(), started = started(file.pid()),
    host = line "/proc/sys/kernel/hostname", boot = line "/proc/sys/kernel/random/boot_id" }
end

-- Whether the process goes on: true, false, or nil where this machine cannot know.
local function alive(process)
  local here = myself()
  if process.host ~= here.host then return nil end
  return process.boot == here.boot and started(process.pid) == process.started
end

-- ---- the run's side ----------------------------------------------------------------------------

-- Each command returns {text = what was done}, or {problem = why not}; with stop where the run
-- shall end, with undo where the answer comes after the next step and this ends what was for it.
local commands = {}

function commands.save(run)
  local own = run.own
  if own.step == 0 then return { problem = "no step is made yet, so there is nothing to save" } end
  local path, message = run:save(own.step)
  return { text = path and "saved " .. path, problem = message }
end

-- Stops like Ctrl-C; a save that fails stops nothing.
function commands.stop(run)
  local own = run.own
  if own.step == 0 then return { text = "stopped before the first step", stop = true } end
  if own.saved ~= own.step then
    local path, message = run:save(own.step)
    if not path then return { problem = "not stopped, for the save failed: " .. message } end
  end
  return { text = ("stopped after step %d, saved in %s"):format(own.step, run.out), stop = true }
end

-- For one step, eval_every is 1.
function commands.eval(run)
  for _, state in ipairs(run.own.edits.live) do
    if state.values.eval_every then
      state.once.eval_every = 1
      return { undo = function() state.once.eval_every = nil end }
    end
  end
  local every = rawget(run, "eval_every")
  if not every then
    return { problem = "the recipe has no option and no live value eval_every, which says when "
      .. "it evaluates" }
  end
  run.eval_every = 1
  return { undo = function()
    if run.eval_every == 1 then run.eval_every = every end
  end }
end

local function shown(value)
  return type(value) == "table" and json.encode(value) or tostring(value)
end

-- The value that a word means in place of `old`; or nil, what was wanted. An option keeps its type;
-- a live number may become one that is no integer.
local function value_of(text, old, live)
  local number = live and type(old) == "number"
  local read, message = options_text.apply("set", { "value=" .. text },
    { value = number and 0.0 or old })
  local value = read and read.value
  if value == nil then return nil, message:match "wanted (.*)" end
  if value == math.huge or value == -math.huge then return nil, "a finite number" end
  return number and tonumber(text) or value
end

function commands.set(run, request)
  local name, text, step = tostring(request.key), tostring(request.value), run.own.step + 1
  local target, message = edits.target(run, name)
  if not target then return { problem = message } end
  local kind, live = type(target.value), target.what ~= "option"
  if kind == "function" or kind == "table" and live then
    return { problem = ("%s is a %s: edit %s"):format(name, kind, target.what) }
  end
  local value, wanted = value_of(text, target.value, live)
  if value == nil then
    return { problem = ("%s is '%s', wanted %s"):format(name, text, wanted) }
  end
  edits.add(run, { step = step, set = name, value = value })
  return { text = ("%s was %s and is %s from step %d on"):format(name, shown(target.value),
    shown(value), step) }
end

local function answer(run, name, ok, message)
  local folder = run.out .. FOLDER
  os.remove(("%s/%s.request"):format(folder, name))
  local reply = json.encode { ok = ok, message = message }
  file.write_atomic(("%s/%s.reply"):format(folder, name), reply)
end

-- Calls fn(name, request) for what waits.
local function each_request(run, fn)
  local folder = run.out .. FOLDER
  for _, entry in ipairs(file.list(folder) or {}) do
    local name = entry:match "^([%w-]+)%.request$"
    if name then fn(name, decoded(("%s/%s"):format(folder, entry)) or {}) end
  end
end

-- The run's folder is open: requests are heard from now on.
function M.open(run)
  local folder = run.out .. FOLDER
  file.remove_tree(folder)
  file.mkdir(folder)
  file.write_atomic(folder .. "/running", json.encode(myself()))
  run.own.heard, run.own.asked = {}, changed(folder)
end

-- The run ends. Answers stay until they are read.
function M.close(run)
  if not run.own.heard then return end
  run.own.heard = nil
  each_request(run, function(name) answer(run, name, false, "the run has ended") end)
  os.remove(run.out .. FOLDER .. "/running")
  os.remove(run.out .. FOLDER)
end

-- Ends what was for one step alone, and answers those who waited for it.
local function finish(run)
  local own = run.own
  for i, each in ipairs(own.heard) do
    each.undo()
    own.heard[i] = nil
    if own.held_out_step == own.step then
      answer(run, each.name, true, ("step %d: held-out loss %.4f"):format(own.step, own.held_out))
    else
      answer(run, each.name, false, ("step %d came to no held-out loss: does the recipe ask "
        .. "run:due(step, run.eval_every) and log held_out?"):format(own.step))
    end
  end
end

-- The boundary after a step: does what was asked for. Returns whether the run shall stop.
function M.boundary(run)
  local own, stop = run.own, false
  if not own.heard then return false end
  finish(run)
  if not own.asked() then return false end
  each_request(run, function(name, request)
    local command, result = commands[request.command]
    if not command then
      result = { problem = ("the run knows no '%s'"):format(tostring(request.command)) }
    elseif own.step >= run.options.steps and request.command ~= "save" then
      result = { problem = ("step %d was the last"):format(own.step) }
    else
      result = command(run, request)
    end
    if result.undo then
      own.heard[#own.heard + 1] = { name = name, undo = result.undo }
      os.remove(("%s%s/%s.request"):format(run.out, FOLDER, name))
      return
    end
    own.progress:say(("ctl %s: %s"):format(tostring(request.command),
      result.text or result.problem))
    answer(run, name, result.text ~= nil, result.text or result.problem)
    stop = stop or result.stop
  end)
  return stop
end

-- ---- the other side ----------------------------------------------------------------------------

local PATIENCE = 0.02 -- seconds between two looks
local FAR = 60 -- seconds to wait for a run of another machine, which may be gone

-- ask(folder, request [, say]): what the run answers; or nil, message. say(text) is called once
-- when the answer takes its time.
function M.ask(out, request, say)
  local folder = out .. FOLDER
  if file.exists(out) ~= "folder" then return nil, out .. ": there is no such folder" end
  local process = decoded(folder .. "/running")
  if not process then
    return nil, file.exists(out .. "/config.json") and out .. ": this run is not going on"
      or out .. ": no run folder"
  end
  local here = alive(process)
  local gone = ("%s: this run is not going on: its process %s is gone (resume=auto goes on from "
    .. "its last save)"):format(out, tostring(process.pid))
  if here == false then return nil, gone end
  local name = ("%s/%d-%d"):format(folder, file.pid(), file.monotonic() * 1e6 // 1)
  local ok, message = file.write_atomic(name .. ".request", json.encode(request))
  if not ok then return nil, tostring(message) end
  local began, told = file.monotonic(), false
  local function wait()
    while true do
      local reply = decoded(name .. ".reply")
      if reply then return reply end
      local now = file.monotonic() - began
      if here and not alive(process) or decoded(folder .. "/running") == nil then
        reply = decoded(name .. ".reply")
        return reply or { message = out .. ": the run ended before it answered" }
      end
      if here == nil and now > FAR then
        return { message = ("%s: no answer in %d s; the run belongs to the machine %s"):format(out,
          FAR, tostring(process.host)) }
      end
      if say and not told and now > 1 then
        told = true
        say "waiting for the end of a step"
      end
      file.sleep(PATIENCE)
    end
  end
  local fine, reply = pcall(wait)
  os.remove(name .. ".request")
  os.remove(name .. ".reply")
  os.remove(folder) -- where the run has ended, the last one to go
  if not fine then error(reply, 0) end
  if reply.ok then return reply.message end
  return nil, reply.message
end

return M
