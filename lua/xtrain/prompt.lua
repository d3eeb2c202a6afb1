-- The prompt: reads an entry, which may take several lines, runs it, prints its results, and keeps
-- the first of them in `_`. An entry that ends in ? asks for help on what stands before it.
--
-- A session has a scope {get, names, env} of names; the one of a running recipe (stop.lua) shows
-- its locals. All but reading from the terminal works without one.
local core = require "xtrain.core"
local complete = require "xtrain.complete"
local inspect = require "xtrain.inspect"

local HISTORY_ENTRIES = 2000
local MOST_FRAMES = 8 -- shown of where an error came from

local M = {}

local found, terminal = pcall(require, "xtrain.core.terminal")
if not found then terminal = nil end -- a stock lua5.4: no prompt, but its parts

-- ---- entries -----------------------------------------------------------------------------------

local STATEMENTS = {}
for word in ("break do for function goto if local repeat return while"):gmatch "%S+" do
  STATEMENTS[word] = true
end

-- A local would be gone with its entry: `local x = 1` and `local function f` make names that stay.
local function without_local(text)
  local rest = text:match "^%s*local%s+(function%s.*)$"
  if rest then return rest end
  local names, value = text:match "^%s*local%s+([%a_][%w_%s,]*)(=[^=].*)$"
  if names then return names .. value end
end

-- `x = f(); x`: statements with an expression at their end, which is the result. A chunk, or nil.
local function with_last_value(text, env)
  local places = {}
  for at in text:gmatch "()[;\n]" do places[#places + 1] = at end
  for i = #places, math.max(1, #places - 20), -1 do
    local rest = text:sub(places[i] + 1)
    local chunk = rest:find "%S"
      and load(text:sub(1, places[i]) .. "return " .. rest, "=prompt", "t", env)
    if chunk then return chunk end
  end
end

-- compile(text, env) -> function; or nil, message, and whether more lines may make it whole. An
-- expression is tried first; = before it is Lua 5.1's way to say so.
function M.compile(text, env)
  local expression = text:match "^%s*=(.*)$" or text
  local chunk, as_expression = load("return " .. expression, "=prompt", "t", env)
  if chunk then return chunk end
  local kept = without_local(text)
  local statement = kept and load(kept, "=prompt", "t", env)
  if statement then return statement end
  local as_statement
  chunk, as_statement = load(text, "=prompt", "t", env)
  if chunk then return chunk end
  chunk = with_last_value(text, env)
  if chunk then return chunk end
  -- "syntax error near <eof>" is a value that is neither called nor kept: no more lines help.
  local open = as_expression:find "<eof>$"
    or as_statement:find "<eof>$" and not as_statement:find "syntax error near <eof>$"
  local first = text:match "^%s*([%a_]*)"
  local message = as_statement
  if not STATEMENTS[first] and not text:find "^[%w_.:%[%]\"', ]+=[^=]" then message = as_expression
  end
  return nil, message, open ~= nil
end

-- ---- errors ------------------------------------------------------------------------------------

local function is_library(source) return source:find "^=xtrain%." or source:find "^@xtrain/" end

-- Line number `number` of a file, or nil.
local function line_of(path, number)
  local file = io.open(path, "r")
  if not file then return nil end
  local n = 0
  for line in file:lines() do
    n = n + 1
    if n == number then
      file:close()
      return line
    end
    if n > 100000 then break end
  end
  file:close()
end

-- source_line(source, line) -> "    7 | the line", or nil: of "@file" and of the library.
function M.source_line(source, number)
  if not number or number < 1 then return nil end
  local path, module, text = source:match "^@(.+)$", source:match "^=(xtrain%..+)$", nil
  if module then
    local n = 0
    for line in ((core.source(module) or "") .. "\n"):gmatch "([^\n]*)\n" do
      n = n + 1
      if n == number then text = line end
    end
  else
    text = path and line_of(path, number)
  end
  return text and ("%6d | %s"):format(number, text) or nil
end

-- report(message [, level]): the message; the line of the file it speaks of; the user's lines that
-- called it. For message handlers: level 1 is the caller of the handler.
function M.report(message, level)
  if type(message) ~= "string" then message = inspect.text(message) end
  local lines = { message }
  local path, number = message:match "^(.-):(%d+): "
  local frames, last = {}, nil
  for at = (level or 1) + 1, 200 do
    local info = debug.getinfo(at, "Slnf")
    if not info or info.func == M.protected then break end
    if info.currentline > 0 and not is_library(info.source)
      and info.source:sub(1, 1) ~= "[" then
      local again = last and last.func == info.func and last.currentline == info.currentline
      if not again then frames[#frames + 1] = info end -- a recursion is told once
      last = info
    end
    if info.source == "=prompt" and info.what == "main" then break end
  end
  for i, info in ipairs(frames) do
    local here = info.short_src == path and info.currentline == tonumber(number)
    if i == 1 and here then
      lines[#lines + 1] = M.source_line(info.source, info.currentline)
    elseif i > MOST_FRAMES then
      lines[#lines + 1] = "  ..."
      break
    elseif #frames > 1 or not here then
      local source = M.source_line(info.source, info.currentline)
      if not (info.what == "main" and info.source == "=prompt") then
        lines[#lines + 1] = ("  from %s:%d%s"):format(info.short_src, info.currentline,
          info.name and " in " .. info.name or "")
        lines[#lines + 1] = source
      end
    end
  end
  local trace = os.getenv "XT_TRACEBACK"
  if trace and trace ~= "" and trace ~= "0" then
    lines[#lines + 1] = debug.traceback("", (level or 1) + 1):sub(2)
  end
  return table.concat(lines, "\n")
end

-- ---- running an entry --------------------------------------------------------------------------

-- protected(fn, ...) -> true, results; or false, report. Ctrl-C stops fn.
function M.protected(fn, ...)
  local handler = function(message)
    local text = M.report(message, 2) -- no tail call: levels are counted from here
    return text
  end
  if terminal then return terminal.protected(handler, fn, ...) end
  return xpcall(fn, handler, ...)
end

-- The results of an entry as one text: side by side when they are short.
function M.results(...)
  local texts, short = table.pack(...), true
  for i = 1, texts.n do
    texts[i] = inspect.text(texts[i])
    short = short and #texts[i] < 40 and not texts[i]:find "\n"
  end
  return table.concat(texts, short and "\t" or "\n")
end

local session = {}
session.__index = session

-- session{scope = {get, names, env}, commands = {name = function(session, argument)}}
function M.session(given)
  given.scope = given.scope or M.globals()
  given.commands = given.commands or {}
  return setmetatable(given, session)
end

-- The scope of the plain prompt: the globals.
function M.globals()
  return {
    env = _G,
    get = function(name) return rawget(_G, name) end,
    names = function()
      local names = {}
      for name in pairs(_G) do
        if type(name) == "string" then names[name] = true end
      end
      return names
    end,
  }
end

-- `x?` and `?x`: what there is to say about a name or a value.
function session:help(words)
  local help = require "xtrain.help"
  if words == "" then return help.text() end
  local chunk = load("return " .. words, "=prompt", "t", self.scope.env)
  local ok, value = false, nil
  if chunk then ok, value = M.protected(chunk) end
  if not ok or value == nil then return help.text(words) end
  if type(value) == "table" or type(value) == "function" or core.is_op(value) then
    return help.text(value, words:match "([%w_]+)$")
  end
  if debug.getmetatable(value) == core.tensor_meta then
    return inspect.text(value) .. "\n\n" .. help.text "tensor methods"
  end
  return inspect.text(value)
end

-- evaluate(text) -> "done", what is to be printed or nil; "error", report; "incomplete"; or "leave"
-- and what a command has returned.
function session:evaluate(text)
  local words = text:match "^%s*(.-)%s*$"
  if words == "" then return "done" end
  local asked = words:match "^%?%s*(.-)$" or words:match "^([^\n\"']-)%s*%?$"
  if asked then return "done", self:help(asked) end
  local name, argument = words:match "^:?(%l+)%s*([%w.:]*)$"
  local command = name and self.commands[name]
  if command and (words:sub(1, 1) == ":" or self.scope.get(name) == nil) then
    local said, leave = command(self, argument)
    if leave ~= nil then return "leave", leave, said end
    return "done", said
  end
  local chunk, message, open = M.compile(text, self.scope.env)
  if not chunk then
    if open then return "incomplete", message end
    return "error", message
  end
  local out = table.pack(M.protected(chunk))
  if not out[1] then return "error", out[2] end
  if out.n == 1 then return "done" end
  if out[2] ~= nil then rawset(_G, "_", out[2]) end
  local shown = table.pack(M.protected(M.results, table.unpack(out, 2, out.n)))
  return shown[1] and "done" or "error", shown[2]
end

-- ---- history: one entry a line, newest last -----------------------------------------------------

local function escape(entry) return (entry:gsub("\\", "\\\\"):gsub("\n", "\\n")) end

local function unescape(line)
  return (line:gsub("\\(.)", function(c) return c == "n" and "\n" or c end))
end

function M.history_path()
  local path = os.getenv "XT_HISTORY"
  if path then return path ~= "" and path or nil end
  local home = os.getenv "HOME"
  return home and home ~= "" and home .. "/.xtrain_history" or nil
end

-- history(path) -> the entries kept there, oldest first. A file that has grown to twice what is
-- kept is written anew.
function M.history(path)
  local file = io.open(path, "r")
  if not file then return {} end
  local lines = {}
  for line in file:lines() do
    if not line:find "^_HiStOrY_V2_" then lines[#lines + 1] = line end
  end
  file:close()
  if #lines > 2 * HISTORY_ENTRIES then
    lines = table.move(lines, #lines - HISTORY_ENTRIES + 1, #lines, 1, {})
    require("xtrain.core.file").write_atomic(path, table.concat(lines, "\n") .. "\n")
  end
  local entries = {}
  for i = math.max(1, #lines - HISTORY_ENTRIES + 1), #lines do
    entries[#entries + 1] = unescape(lines[i])
  end
  return entries
end

-- Appended at once, so that sessions side by side lose nothing, and a crash neither.
function M.append_history(path, entry)
  local file = path and io.open(path, "a")
  if not file then return end
  file:write(escape(entry), "\n")
  file:close()
end

-- ---- the loop ----------------------------------------------------------------------------------

local history_read = false

local function read_history()
  if history_read then return end
  history_read = true
  local path = M.history_path()
  for _, entry in ipairs(path and M.history(path) or {}) do terminal.remember(entry) end
end

-- Reads one entry: text; nil at the end of the input; false when it was cancelled.
function session:read()
  local text
  local function on_tab(line, cursor)
    local before = (text and text .. "\n" or "") .. line:sub(1, cursor)
    local words = {}
    for name in pairs(self.commands) do words[#words + 1] = name end
    return complete.complete(before, self.scope, terminal.size() or 80, words)
  end
  local mark = self.mark and self.mark() or ""
  while true do
    local line, why = terminal.read(mark .. (text and ">> " or "> "), on_tab)
    if not line then
      if why == "interrupted" then
        print "^C"
        return false
      end
      if not text then return nil end
      return text
    end
    text = text and text .. "\n" .. line or line
    local plain = text:find "^%s*%?" or text:find "%?%s*$"
    if plain then return text end
    local chunk, _, open = M.compile(text, self.scope.env)
    if chunk or not open then return text end
  end
end

-- loop() -> what a command has left with, or nil at the end of the input.
function session:loop()
  read_history()
  local path = M.history_path()
  while true do
    local entry = self:read()
    if entry == nil then
      print ""
      return nil
    elseif entry and entry:find "%S" then
      terminal.remember(entry)
      M.append_history(path, entry)
      local state, text, said = self:evaluate(entry)
      if state == "leave" then
        if said then print(said) end
        return text
      end
      if text then
        local out = state == "done" and io.stdout or io.stderr
        if state == "error" and text:find "^[^\n]*interrupted" then print "" end -- after the ^C
        io.stdout:flush()
        out:write(text, "\n")
        out:flush()
      end
    end
  end
end

-- The prompt of the program, until the input ends.
function M.run()
  print(("xtrain %s  xt.help() or NAME? for help, Tab completes, Ctrl-D leaves"):format(
    require("xtrain").version))
  M.session({ commands = {
    quit = function() return nil, true end,
    exit = function() return nil, true end,
    help = function(_, about) return require("xtrain.help").text(about ~= "" and about or nil) end,
  } }):loop()
end

return M
