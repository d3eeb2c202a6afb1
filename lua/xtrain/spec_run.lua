-- `xtrain test`: runs spec files as busted does: describe and it, setup and teardown, before_each
-- and after_each, pending, finally. A describe's function runs when its turn comes; each file has
-- globals of its own.
local options = require "xtrain.options"
local spec_assert = require "xtrain.spec_assert"
local file = require "xtrain.core.file"

local M = {}

local pending_meta = { __name = "pending", __tostring = function(p) return p.message end }

-- A block: {kind = "file", "describe", "it" or "pending", name, fn, parent, children = {}, and
-- lists of functions: setup, teardown, lazy_setup, lazy_teardown, before_each, after_each}.
local function block(kind, name, fn, parent)
  return { kind = kind, name = name, fn = fn, parent = parent, children = {} }
end

local runner = {}
runner.__index = runner

-- ---- what specs call ---------------------------------------------------------------------------

local BLOCKS = { describe = "describe", context = "describe", insulate = "describe",
  expose = "describe", it = "it", spec = "it", test = "it" }
local HOOKS = { setup = "setup", strict_setup = "setup", teardown = "teardown",
  strict_teardown = "teardown", lazy_setup = "lazy_setup", lazy_teardown = "lazy_teardown",
  before_each = "before_each", after_each = "after_each" }

-- Puts the words of specs into a table of globals.
function runner:words_into(env)
  local function inside(word)
    if not self.block then
      error(("'%s' not supported inside current context block"):format(word), 3)
    end
    return self.block
  end
  local function add(kind, name, fn)
    table.insert(self.block.children, block(kind, tostring(name), fn, self.block))
  end
  for word, kind in pairs(BLOCKS) do
    env[word] = function(name, fn)
      inside(word)
      if fn == nil then
        return function(body) add(kind, name, body) end
      end
      add(kind, name, fn)
    end
  end
  for word, list in pairs(HOOKS) do
    env[word] = function(name, fn)
      local into = inside(word)
      into[list] = into[list] or {}
      table.insert(into[list], fn or name)
    end
  end
  function env.pending(name)
    if self.block then return add("pending", name) end
    error(setmetatable({ message = tostring(name or "") }, pending_meta), 0)
  end
  function env.finally(fn)
    if not self.test then error("'finally' not supported inside current context block", 2) end
    self.test.finally = fn
  end
  for _, word in ipairs { "spy", "stub", "mock", "match" } do
    local function refuse()
      error(word .. ": xtrain test has none; run this file with busted", 2)
    end
    env[word] = setmetatable({}, { __index = refuse, __call = refuse })
  end
  env.assert = spec_assert.assert
end

-- ---- counting ----------------------------------------------------------------------------------

local function full_name(each)
  local names = {}
  while each and each.kind ~= "file" do
    table.insert(names, 1, each.name)
    each = each.parent
  end
  return table.concat(names, " ")
end

function runner:count(kind, each, message)
  self.counts[kind] = self.counts[kind] + 1
  if message then
    self.told[#self.told + 1] = { kind = kind, name = full_name(each), message = message,
      path = self.path }
  end
end

-- Calls fn in the name of a block. Returns "passed", "failed", "error" or "pending", and a text.
function runner:call(fn)
  local ok, raised = xpcall(fn, function(e)
    if spec_assert.is_failure(e) or getmetatable(e) == pending_meta then return e end
    local text = type(e) == "string" and e or spec_assert.shown(e)
    return { text = text, interrupted = text:find "interrupted$" ~= nil,
      traceback = os.getenv "XT_TRACEBACK" and debug.traceback(text, 2) }
  end)
  if ok then return "passed" end
  if getmetatable(raised) == pending_meta then return "pending", raised.message end
  if spec_assert.is_failure(raised) then return "failed", raised.message end
  self.interrupted = self.interrupted or raised.interrupted
  return "error", raised.traceback or raised.text
end

-- A function that is no test: what is wrong in it is an error. Returns whether it went well.
function runner:support(fn, each)
  local status, message = self:call(fn)
  if status == "passed" then return true end
  self:count("error", each, message)
  return false
end

function runner:all(each, list)
  local ok = true
  for _, fn in ipairs(each[list] or {}) do ok = self:support(fn, each) and ok end
  return ok
end

-- ---- running -----------------------------------------------------------------------------------

-- Once for each block, when its first test comes, the outermost first.
function runner:lazy(each)
  if not each then return true end
  if not self:lazy(each.parent) then return false end
  if each.lazy_done == nil then each.lazy_done = self:all(each, "lazy_setup") end
  return each.lazy_done
end

-- before_each from the outermost block in. Returns whether all went well, and the block reached.
function runner:before(each)
  if each.parent then
    local ok, reached = self:before(each.parent)
    if not ok then return false, reached end
  end
  return self:all(each, "before_each"), each
end

function runner:it(each)
  if not self:lazy(each.parent) then return end
  local ok, reached = self:before(each.parent)
  if ok then
    self.test = each
    local status, message = self:call(each.fn)
    if each.finally then
      local last, text = self:call(each.finally)
      if last ~= "passed" and status == "passed" then status, message = last, text end
    end
    self.test = nil
    self:count(status, each, message)
  end
  while reached do
    self:all(reached, "after_each")
    reached = reached.parent
  end
end

function runner:execute(each)
  self.block = each
  local ok = self:support(each.fn, each)
  self.block = nil
  if not ok then return end
  if self:all(each, "setup") then
    for _, child in ipairs(each.children) do
      if self.interrupted then break end
      local wanted = not self.filter or full_name(child):find(self.filter)
      if child.kind == "describe" then
        self:execute(child)
      elseif wanted and child.kind == "pending" then
        self:count("pending", child, "")
      elseif wanted then
        self:it(child)
      end
    end
  end
  if each.lazy_done then self:all(each, "lazy_teardown") end
  self:all(each, "teardown")
end

-- Runs one file; what it makes global or requires is forgotten after it, the library's own parts
-- aside.
function runner:file(path)
  local globals, loaded = {}, {}
  for name, value in pairs(_G) do globals[name] = value end
  for name in pairs(package.loaded) do loaded[name] = true end
  self.path = path
  self:words_into(_G)
  local env = setmetatable({}, { __index = _G })
  local chunk, message = loadfile(path, "t", env)
  local top = block("file", path, chunk)
  if chunk then
    self:execute(top)
  else
    self:count("error", top, message)
  end
  for name in pairs(_G) do _G[name] = globals[name] end
  for name in pairs(package.loaded) do
    if not loaded[name] and not name:find "^xtrain" then package.loaded[name] = nil end
  end
end

-- ---- files and telling -------------------------------------------------------------------------

-- The spec files of a path, in order: a folder's are those whose name ends in _spec.lua.
local function collect(path, into)
  if file.exists(path) == "folder" then
    for _, name in ipairs(file.list(path) or {}) do
      local inner = path:gsub("/+$", "") .. "/" .. name
      local folder = file.exists(inner) == "folder"
      if folder and name:sub(1, 1) ~= "." or not folder and name:find "_spec%.lua$" then
        collect(inner, into)
      end
    end
  else
    into[#into + 1] = path
  end
  return into
end

local DEFAULTS = { "spec", "recipes/spec" } -- where specs are looked for when no path is given

-- The spec files that words name; or nil, message.
function M.files(words)
  local paths = words
  if #words == 0 then
    paths = {}
    for _, path in ipairs(DEFAULTS) do
      if file.exists(path) then paths[#paths + 1] = path end
    end
    if #paths == 0 then
      return nil, ("no path is given, and there is no folder %s here"):format(
        table.concat(DEFAULTS, " or "))
    end
  end
  local found = {}
  for _, path in ipairs(paths) do
    if not file.exists(path) then return nil, path .. ": there is no such file" end
    collect(path, found)
  end
  if #found == 0 then
    return nil, ("no spec in %s: their names end in _spec.lua"):format(table.concat(paths, ", "))
  end
  return found
end

local TITLES = { failed = "FAILED", error = "ERROR", pending = "pending" }

local function counts_text(counts)
  return ("%d passed, %d failed, %d errors, %d pending"):format(counts.passed, counts.failed,
    counts.error, counts.pending)
end

-- run(files [, filter]): runs them and tells about it on standard output. Returns whether all
-- passed, and the counts {passed, failed, error, pending}. filter: a pattern that a test's whole
-- name holds.
function M.run(files, filter)
  local began = file.monotonic()
  local totals = { passed = 0, failed = 0, error = 0, pending = 0 }
  local path = package.path
  package.path = "./src/?.lua;./src/?/?.lua;./src/?/init.lua;" .. path -- as busted does
  for _, each in ipairs(files) do
    local self = setmetatable({ counts = { passed = 0, failed = 0, error = 0, pending = 0 },
      told = {}, filter = filter }, runner)
    self:file(each)
    print(("%s: %s"):format(each, counts_text(self.counts)))
    for _, one in ipairs(self.told) do
      print(("%s %s"):format(TITLES[one.kind], one.name ~= "" and one.name or one.path))
      if one.message ~= "" then print(("  " .. one.message:gsub("\n", "\n  "))) end
    end
    for _, kind in ipairs(options.names(totals)) do
      totals[kind] = totals[kind] + self.counts[kind]
    end
    io.stdout:flush()
    if self.interrupted then
      print "interrupted: what follows is not run"
      break
    end
  end
  package.path = path
  if #files > 1 then print(("%d files: %s"):format(#files, counts_text(totals))) end
  print(("%.2f seconds"):format(file.monotonic() - began))
  return totals.failed == 0 and totals.error == 0, totals
end

return M
