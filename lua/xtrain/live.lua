-- Values that may be edited while a run goes on: a Lua file that returns a table.
--
--   live.lua:   return { lr = 3e-4, clip = 1.0, eval_every = 250, weights = { aux = 0.1 } }
--   recipe:     local live = xt.live "live.lua"
--               ... opt:step(live.lr, { clip = live.clip })
--
-- The file is read again at each step boundary and replaced whole; a text that does not load, that
-- raises, or that lacks a value it had or gives it another type, changes nothing and is told of
-- once. edits.lua records what was taken.
local xt = require "xtrain"
local active = require "xtrain.active"
local changed = require "xtrain.changed"
local edits = require "xtrain.edits"
local options = require "xtrain.options"
local file = require "xtrain.core.file"
local fail = xt.core.fail

-- ---- reading -----------------------------------------------------------------------------------

-- What is wrong with new values beside those they replace (nil: none), or nil.
local function wrong(new, old, prefix)
  for _, name in ipairs(options.names(old or {})) do
    local value, before = new[name], old[name]
    if value == nil then return prefix .. name .. " is missing" end
    if type(value) ~= type(before) then
      return ("%s%s is a %s, it was a %s"):format(prefix, name, type(value), type(before))
    end
  end
  for _, name in ipairs(options.names(new)) do
    local value, before = new[name], old and old[name]
    if value ~= value then return prefix .. name .. " is NaN" end
    if type(value) == "table" then
      local message = wrong(value, before, prefix .. name .. ".")
      if message then return message end
    end
  end
end

-- The table that a text returns; or nil, message. What it assigns to globals stays with it.
local function loader(path)
  return function(text, before)
    local env = setmetatable({ xt = xt }, { __index = _G })
    local chunk, message = load(text, "@" .. path, "t", env)
    if not chunk then return nil, message end
    local ok, values = pcall(chunk)
    if not ok then return nil, tostring(values) end
    if type(values) ~= "table" then
      return nil, ("%s returned %s, wanted a table: return { lr = 3e-4 }"):format(path,
        values == nil and "nothing" or "a " .. type(values))
    end
    message = wrong(values, before, "")
    if message then return nil, message end
    return values
  end
end

-- ---- the object --------------------------------------------------------------------------------

local function proxy(state)
  return setmetatable({}, {
    __name = "live",
    __index = function(_, name)
      local value = state.once[name]
      if value == nil then value = state.values[name] end
      if value == nil and type(name) == "string" then
        fail(options.no_field(state.path, name, options.names(state.values)))
      end
      return value
    end,
    __newindex = function()
      fail(("%s holds the live values: edit it, or set one with xtrain ctl"):format(state.path))
    end,
    __pairs = function() return next, state.values end,
    __tostring = function() return ("live values of %s"):format(state.path) end,
  })
end

-- live(path): the values of a file, as of the step that is being made. Wants a run (xt.recipe), and
-- to be called before its first step. Raises when the file cannot be used to begin with.
local function live(path)
  local run = active.run
  if type(path) ~= "string" then
    fail("live: wanted the path of a Lua file, not a " .. type(path))
  end
  if not run then fail("live: wanted a run to belong to: call xt.recipe{...} first") end
  local own = run.own
  if own.edits.started then
    fail("live: call it before run:steps(), so that every step knows it")
  end
  for _, other in ipairs(own.edits.live) do
    if other.path == path then return other.proxy end
  end
  -- once: values for one step alone; set: names that ctl has set since the text was read.
  local state = { path = path, load = loader(path), once = {}, set = {} }
  local has_changed = changed(path)
  function state.read() -- the text, or nil where it is as it was
    return has_changed() and file.read(path) or nil
  end
  state.text = edits.first_text(run, path)
  if not state.text then
    if own.replay and own.replay.run then
      fail(("live: %s/edits.jsonl does not tell the text of %s"):format(own.replay.run, path))
    end
    local message
    state.text, message = file.read(path)
    if not state.text then fail("live: " .. message) end
    state.seen = state.text
  end
  local values, message = state.load(state.text)
  if not values then fail("live: " .. message) end
  state.values, state.proxy = values, proxy(state)
  table.insert(own.edits.live, state)
  return state.proxy
end

return { live = live }
