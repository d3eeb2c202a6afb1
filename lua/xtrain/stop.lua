-- The prompt inside of a program that is running: at a second Ctrl-C, and with --prompt before the
-- first step, where an error is raised, and at the end. The locals of the functions on the stack
-- are its names: to read, to change, and then to go on.
local active = require "xtrain.active"
local inspect = require "xtrain.inspect"
local options = require "xtrain.options"
local prompt = require "xtrain.prompt"

local STOPPED = 130 -- the exit status after Ctrl-C, as shells have it
local MOST_SHOWN = 40 -- variables, and frames

local M = {}

-- ---- frames ------------------------------------------------------------------------------------

-- A frame is known by its distance from the bottom of its thread's stack, which does not change
-- while the thread stands. Returns the level as the caller of this function counts it.
local function level_of(thread, height)
  local depth = 0
  while debug.getinfo(thread, depth, "") do depth = depth + 1 end
  local here = thread == coroutine.running() and 1 or 0 -- this function, which is on that stack
  return depth - 1 - here - height
end

local function is_users(info)
  return info.currentline > 0 and not info.source:find "^=xtrain%." and info.source ~= "=prompt"
    and not info.source:find "^@xtrain/"
end

-- The frames of the running thread from `level` on (1: the caller), innermost first: {height, func,
-- source, short_src, line, name, users}.
local function frames_from(level)
  local frames, depth = {}, 0
  while debug.getinfo(depth + 1, "") do depth = depth + 1 end
  for at = level + 1, depth do
    local info = debug.getinfo(at, "Slnf")
    frames[#frames + 1] = { height = depth - at, func = info.func, source = info.source,
      short_src = info.short_src, line = info.currentline, name = info.name,
      main = info.what == "main", users = is_users(info) }
  end
  return frames
end

-- ---- names -------------------------------------------------------------------------------------

local stack = {} -- the frames of a thread that stands, as names
stack.__index = stack

-- The innermost local of that name in a frame: its index, value.
function stack:find_local(frame, name)
  local level, index, value = level_of(self.thread, frame.height), nil, nil
  for i = 1, 250 do
    local known, held = debug.getlocal(self.thread, level, i)
    if not known then break end
    if known == name then index, value = i, held end
  end
  return index, value
end

local function find_upvalue(frame, name)
  for i = 1, 255 do
    local known, value = debug.getupvalue(frame.func, i)
    if not known then return nil end
    if known == name then return i, value end
  end
end

-- Where a name lives: a getter's value and a setter, or nothing. The chosen frame comes first, then
-- what its function sees, then the frames that called it.
function stack:find(name)
  if not self.standing then return nil end
  for at = self.at, #self.frames do
    local frame = self.frames[at]
    if at == self.at or frame.users then
      local index, value = self:find_local(frame, name)
      if index then
        return { value = value, set = function(new)
          debug.setlocal(self.thread, level_of(self.thread, frame.height), index, new)
        end }
      end
      index, value = find_upvalue(frame, name)
      if index then
        return { value = value, set = function(new) debug.setupvalue(frame.func, index, new) end }
      end
    end
  end
end

function stack:globals()
  local frame = self.standing and self.frames[self.at]
  local _, env = nil, nil
  if frame then _, env = find_upvalue(frame, "_ENV") end
  return type(env) == "table" and env or _G
end

-- {name = value} of the variables of a frame: its locals and what its function sees.
function stack:variables(frame)
  local locals, seen = {}, {}
  local level = level_of(self.thread, frame.height)
  for i = 1, 250 do
    local name, value = debug.getlocal(self.thread, level, i)
    if not name then break end
    if not name:find "^%(" then locals[name] = { value = value } end
  end
  for i = 1, 255 do
    local name, value = debug.getupvalue(frame.func, i)
    if not name then break end
    if name ~= "_ENV" and name ~= "" then seen[name] = { value = value } end
  end
  return locals, seen
end

function stack:scope()
  local env = setmetatable({}, {
    __index = function(_, name)
      local place = self:find(name)
      if place then return place.value end
      local value = self:globals()[name]
      if value == nil and name == "xt" then return require "xtrain" end
      return value
    end,
    __newindex = function(_, name, value)
      local place = self:find(name)
      if place then return place.set(value) end
      self:globals()[name] = value
    end,
  })
  return {
    env = env,
    get = function(name) return env[name] end,
    names = function()
      local names = prompt.globals().names()
      names.xt = true
      for at = self.at, #self.frames do
        if at == self.at or self.frames[at].users then
          for _, set in ipairs { self:variables(self.frames[at]) } do
            for name in pairs(set) do names[name] = true end
          end
        end
      end
      return names
    end,
  }
end

-- ---- what is shown -----------------------------------------------------------------------------

local function frame_name(frame)
  local what = frame.main and "the file" or frame.name and "function " .. frame.name
    or "a function"
  if frame.line > 0 then return ("%s:%d  %s"):format(frame.short_src, frame.line, what) end
  return what .. " of C"
end

-- The stack with an arrow at the chosen frame; what is the library's or C is left out, unless it
-- was chosen, or `all` is wanted.
function stack:where(all)
  local lines = {}
  for at, frame in ipairs(self.frames) do
    if (all or frame.users or at == self.at) and #lines < MOST_SHOWN then
      lines[#lines + 1] = ("%s %d  %s"):format(at == self.at and "->" or "  ", at,
        frame_name(frame))
      if at == self.at then lines[#lines + 1] = prompt.source_line(frame.source, frame.line) end
    end
  end
  return table.concat(lines, "\n")
end

function stack:locals()
  local frame, lines = self.frames[self.at], {}
  local function add(set, title)
    local names = options.names(set)
    if #names == 0 then return end
    if title then lines[#lines + 1] = title end
    for i, name in ipairs(names) do
      if i > MOST_SHOWN then
        lines[#lines + 1] = ("  ... %d more"):format(#names - MOST_SHOWN)
        break
      end
      lines[#lines + 1] = ("  %s = %s"):format(name, inspect.line(set[name].value))
    end
  end
  local locals, seen = self:variables(frame)
  add(locals)
  add(seen, "from around the function:")
  return #lines > 0 and table.concat(lines, "\n") or "no variables here"
end

-- Chooses the next frame of the user's in a direction.
function stack:move(step)
  local at = self.at + step
  while self.frames[at] and not self.frames[at].users do at = at + step end
  if not self.frames[at] then
    return step > 0 and "this is the outermost frame" or "this is the innermost frame"
  end
  self.at = at
  return self:where()
end

-- ---- the prompt --------------------------------------------------------------------------------

local HELP = [[
where [all]      the stack, and the line that runs next; all: with the library's functions
up, down         choose another of your frames; frame N any one, the library's too
locals           the variables of the frame; any name shows or changes one:  lr = 1e-4
continue [N]     go on; with N, stop again after N steps
quit             end the program
NAME?  xt.help() help on anything; Tab completes]]

local CANNOT = "after an error there is no way on: quit leaves, and the status is 1"

local function commands(self, ended)
  return {
    where = function(_, which) return self:where(which == "all") end,
    up = function() return self:move(1) end,
    down = function() return self:move(-1) end,
    locals = function() return self:locals() end,
    frame = function(_, number)
      local at = math.tointeger(tonumber(number))
      if not self.frames[at or 0] then
        return ("frame '%s': wanted a number of those that `where` shows"):format(number)
      end
      self.at = at
      return self:where()
    end,
    continue = function(_, number)
      if ended then return CANNOT end
      if number ~= "" then
        local steps = math.tointeger(tonumber(number))
        if not steps or steps < 1 then
          return ("continue '%s': wanted a number of steps, or nothing"):format(number)
        end
        if not active.run then return "continue N counts the steps of a recipe: there is none" end
        M.steps_left = steps
      end
      return nil, "continue"
    end,
    quit = function() return nil, "quit" end,
    exit = function() return nil, "quit" end,
    help = function(_, about)
      return about == "" and HELP or require("xtrain.help").text(about)
    end,
  }
end

-- What there is to know before leaving a run.
local function farewell()
  local own = active.run and active.run.own
  if not own or active.replay or not own.recipe_path or not active.run.out then return end
  if own.saved then
    io.stderr:write(("the last save is of step %d; to go on: xtrain %s out=%s resume=auto\n")
      :format(own.saved, own.recipe_path, active.run.out))
  else
    io.stderr:write("nothing was saved yet\n")
  end
end

-- open(reason [, opts]): the prompt, in the frames of whoever calls; returns when the person goes
-- on, and ends the program when not. opts: level (1: the caller of open), ended (there is no way
-- on: returns in any case), at_end (leaving is no break-off), status (of the exit; 130).
function M.open(reason, opts)
  opts = opts or {}
  local self = setmetatable({ thread = coroutine.running(), at = 1, standing = true,
    frames = frames_from((opts.level or 1) + 1) }, stack)
  for at, frame in ipairs(self.frames) do
    if frame.users then
      self.at = at
      break
    end
  end
  M.steps_left = nil
  local session = prompt.session {
    scope = self:scope(), commands = commands(self, opts.ended),
    mark = function()
      local frame = self.frames[self.at]
      if not frame or frame.line <= 0 then return "" end
      return ("%s:%d"):format(frame.short_src:match "[^/]*$", frame.line)
    end,
  }
  io.stdout:flush()
  print(("\n%s\n%s\n%s"):format(reason, self:where(), opts.ended and "quit leaves (Ctrl-D); help"
    or "continue goes on, quit leaves (Ctrl-D); help"))
  local how = session:loop()
  self.standing = false
  if how == "continue" or opts.ended or opts.at_end then return end
  farewell()
  os.exit(opts.status or STOPPED, true)
end

-- ---- when it opens -----------------------------------------------------------------------------

-- At a Ctrl-C, between two instructions of Lua.
function M.interrupted() M.open("interrupted", { level = 2 }) end

-- The message handler of a program run with --prompt.
function M.failed(message)
  local text = type(message) == "string" and message or inspect.text(message)
  if not text:find "stack overflow" and not text:find "not enough memory" then
    local ok, trouble = pcall(M.open, text, { level = 3, ended = true })
    if not ok then text = text .. "\n(the prompt failed: " .. tostring(trouble) .. ")" end
  end
  return text
end

-- Whether `continue N` has steps left; one of them begins.
local function passes()
  local left = M.steps_left and M.steps_left - 1
  M.steps_left = left
  return left, left ~= nil and left > 0
end

-- For a replay, before each step that it stands at.
function M.stand(text)
  local _, on = passes()
  if not on then M.open(text, { level = 2, status = 0 }) end
end

-- Before each step of a run.
local function before_step(run, step)
  local left = passes()
  if M.first_done and left ~= 0 then return end
  M.first_done = true
  M.open(("%s, before step %d of %d"):format(run.name, step, run.options.steps), { level = 3 })
end

local function at_end(path)
  M.open("the end of " .. path, { level = 2, at_end = true })
end

-- load(path): the file as a function that ends in the prompt, with its locals there; or nil,
-- message. Makes the prompt open before the first step, too.
function M.load(path)
  local file, message = io.open(path, "rb")
  if not file then return nil, message end
  local text = file:read "a"
  file:close()
  active.before_step = before_step
  local shebang = text:match "^#[^\n]*"
  if shebang then text = "--" .. text:sub(#shebang + 1) end
  package.loaded["xtrain.stop.at_end"] = at_end
  -- A file that ends in `return` has no place for more: it ends as it does.
  local chunk = load(('%s\nrequire "xtrain.stop.at_end" %q'):format(text, path), "@" .. path)
  if chunk then return chunk end
  return load(text, "@" .. path)
end

return M
