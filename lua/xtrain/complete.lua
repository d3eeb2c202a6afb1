-- What Tab does at the prompt: names, fields, methods, options of the call that is open, choices
-- and file names, from the text before the cursor and a scope {get(name) -> value, names() ->
-- {name = true}}. Nothing is called to find out: after a call of an op its result is taken for a
-- tensor.
local xt = require "xtrain"
local core = require "xtrain.core"
local options = require "xtrain.options"

local KEYWORDS = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat "
  .. "return then true until while"):gmatch "%S+" do
  KEYWORDS[word] = true
end

local DTYPES = { "f32", "bf16", "f16", "f64", "i32", "i64", "u8" }
local TENSOR = setmetatable({}, { __name = "a tensor that is not made yet" })

local M = {}

-- ---- where the cursor is ------------------------------------------------------------------------

local CLOSES = { ["("] = ")", ["["] = "]", ["{"] = "}" }

-- Scans the text: the open brackets as {char, at}, and the place of the quote that is open, or nil;
-- or nothing inside of a comment.
local function scan(text)
  local open, at = {}, 1
  while at <= #text do
    local char = text:sub(at, at)
    local level = text:match("^%-%-%[(=*)%[", at) or text:match("^%[(=*)%[", at)
    if level then
      local _, last = text:find("]" .. level .. "]", at, true)
      if not last then return nil end
      at = last
    elseif text:find("^%-%-", at) then
      local last = text:find("\n", at, true)
      if not last then return nil end
      at = last
    elseif char == '"' or char == "'" then
      local last = at + 1
      while last <= #text and text:sub(last, last) ~= char do
        last = last + (text:sub(last, last) == "\\" and 2 or 1)
      end
      if last > #text then return open, at end
      at = last
    elseif CLOSES[char] then
      open[#open + 1] = { char = char, at = at }
    elseif char == ")" or char == "]" or char == "}" then
      open[#open] = nil
    end
    at = at + 1
  end
  return open
end

-- The place of the bracket that the last character of the text closes, or nil.
local function opening(text)
  for first = #text, 1, -1 do
    if text:find("^[%(%[{]", first) then
      local open = scan(text:sub(first, -2))
      if open and #open == 1 and open[1].at == 1 then return first end
    end
  end
end

-- ---- what an expression is ----------------------------------------------------------------------

-- The field of a value, without raising.
local function field(value, key)
  if value == TENSOR then
    return type(key) == "number" and TENSOR or core.tensor_names[key]
  end
  local kind = type(value)
  if kind ~= "table" and kind ~= "userdata" and kind ~= "string" then return nil end
  if kind == "userdata" and type(key) == "number" then return TENSOR end
  local ok, found = pcall(function() return value[key] end)
  return ok and found or nil
end

local makers = {}
for name in ("tensor zeros ones full arange rand randn from_bytes var"):gmatch "%S+" do
  makers[name] = true
end

-- What a call of the value gives: a tensor, or nothing that is known.
local function result_of(fn)
  if core.is_op(fn) then return TENSOR end
  for name in pairs(makers) do
    if rawget(xt, name) == fn then return TENSOR end
  end
  for _, name in ipairs { "to", "clone", "detach" } do
    if fn ~= nil and core.tensor_names[name] == fn then return TENSOR end
  end
end

-- The value of the expression that ends the text, and where it begins; nil when it is not known.
local function value_of(text, scope)
  local last = text:sub(-1)
  if last == ")" or last == "}" or last == '"' or last == "'" then
    local first = opening(text)
    local is_string = last == '"' or last == "'"
    if is_string then first = text:match("()" .. last .. "[^" .. last .. "]*.$") end
    if not first then return nil end
    local before = text:sub(1, first - 1):gsub("%s+$", "")
    if not before:find "[%w_%)%]}]$" then
      if is_string then return "" end
      if last == ")" then return value_of(text:sub(first + 1, -2):gsub("%s+$", ""), scope) end
      return nil
    end
    return result_of(value_of(before, scope))
  elseif last == "]" then
    local first = opening(text)
    if not first then return nil end
    local inner = text:sub(first + 1, -2)
    local key = math.tointeger(tonumber(inner)) or inner:match "^%s*\"([^\"]*)\"%s*$"
      or inner:match "^%s*'([^']*)'%s*$"
    local of = value_of(text:sub(1, first - 1), scope)
    if key == nil then key = value_of(inner, scope) end
    if key == nil and (of == TENSOR or debug.getmetatable(of) == core.tensor_meta) then key = 1 end
    if key == nil then return nil end
    return field(of, key)
  end
  local before, name = text:match "^(.-)([%a_][%w_]*)$"
  if not name then return nil end
  local path = before:match "^(.*[^.])[.:]$"
  if path then return field(value_of(path, scope), name) end
  return scope.get(name)
end

-- Adds the names that may follow value. or value: to the set.
local function add_fields(names, value, methods)
  local function add(t)
    for key, item in next, t do
      local callable = type(item) == "function" or core.is_op(item)
        or type(debug.getmetatable(item)) == "table" and debug.getmetatable(item).__call ~= nil
      if type(key) == "string" and key:find "^[%a_][%w_]*$" and (callable or not methods) then
        names[key] = true
      end
    end
  end
  if value == TENSOR or debug.getmetatable(value) == core.tensor_meta then
    for key, item in pairs(core.tensor_names) do
      if (math.type(item) == "integer") == not methods then names[key] = true end
    end
    return
  elseif core.is_op(value) then
    for name in ("name signature doc params dtypes outputs differentiable view writes")
      :gmatch "%S+" do
      names[name] = not methods or nil
    end
    return
  end
  for _ = 1, 8 do
    if type(value) == "table" then add(value) end
    local meta = debug.getmetatable(value)
    if type(meta) ~= "table" then break end
    if type(rawget(meta, "__names")) == "table" and not methods then
      for key in pairs(meta.__names) do names[key] = true end
    end
    value = rawget(meta, "__index")
    if type(value) ~= "table" then break end
  end
end

-- ---- the call that is open ----------------------------------------------------------------------

-- The options that a comment lists: "cosine{peak, min = 0, warmup = 0, total}" and what follows.
local function options_in(text, name)
  local found, any = {}, false
  local from = name and text:find("%f[%w_]" .. name .. "%f[^%w_][^\n]*{")
  local group = text:match("%b{}", from or 1)
  if not group then return nil end
  -- One level: what lies in braces inside is the value of an option.
  local flat = group:sub(2, -2):gsub("%b{}", ""):gsub("%b()", ""):gsub("\n%s*", " ")
  for part in (flat .. ","):gmatch "([^,]*)," do
    local option = part:match "^[%s%[%]]*([%a_][%w_]*)"
    if option then
      found[option], any = true, true
    end
  end
  return any and found or nil
end

-- {name = {choices} or true} of the options that fn takes, or nil.
local function options_of(fn, name)
  if fn == nil then return nil end
  if core.is_op(fn) then
    local found, any = {}, false
    for _, param in ipairs(fn.params) do
      if param.named then
        found[param.name], any = true, true
        if param.choices then
          found[param.name] = {}
          for word in param.choices:gmatch "[^|]+" do table.insert(found[param.name], word) end
        end
      end
    end
    return any and found or nil
  end
  local ok, text = pcall(require("xtrain.help").text, fn, name)
  return ok and options_in(text, name) or nil
end

-- The function whose call is open at the innermost bracket, its name, and whether the cursor stands
-- in its table of options.
local function open_call(text, open, scope)
  local top = open[#open]
  if not top or top.char == "[" then return nil end
  local before = text:sub(1, top.at - 1):gsub("%s+$", "")
  local in_options = top.char == "{"
  if in_options and not before:find "[%w_%)%]}\"']$" then
    local outer = open[#open - 1]
    if not outer or outer.char ~= "(" then return nil end
    before = text:sub(1, outer.at - 1):gsub("%s+$", "")
  end
  local name = before:match "([%a_][%w_]*)$"
  if not name or KEYWORDS[name] then return nil end
  return value_of(before, scope), name, in_options
end

-- ---- candidates --------------------------------------------------------------------------------

local function list_of(names, prefix)
  local list = {}
  for name in pairs(names) do
    -- What begins with _ is private, unless it is asked for.
    if name:sub(1, #prefix) == prefix and (prefix ~= "" or name:sub(1, 1) ~= "_") then
      list[#list + 1] = name
    end
  end
  table.sort(list, options.by_byte)
  return list
end

local function file_names(prefix)
  local file = require "xtrain.core.file"
  local folder, name = prefix:match "^(.*/)([^/]*)$"
  if not folder then folder, name = "", prefix end
  local place = folder == "" and "." or folder
  if place:find "^~/" then place = (os.getenv "HOME" or "") .. place:sub(2) end
  local list = {}
  for _, entry in ipairs(file.list(place) or {}) do
    if entry:sub(1, #name) == name and (name ~= "" or entry:sub(1, 1) ~= ".") then
      local is_folder = file.exists(place .. "/" .. entry) == "folder"
      list[#list + 1] = folder .. entry .. (is_folder and "/" or "")
    end
  end
  table.sort(list, options.by_byte)
  return list
end

local function set(...)
  local names = {}
  for _, list in ipairs { ... } do
    for _, name in ipairs(list) do names[name] = true end
  end
  return names
end

-- What may stand in the string that begins at `quote`.
local function in_string(text, quote, open, scope)
  local prefix, before = text:sub(quote + 1), text:sub(1, quote - 1)
  local fn, name, in_options = open_call(text, open, scope)
  local option = in_options and before:match "([%a_][%w_]*)%s*=%s*$"
  local names
  if before:find "help%s*%(?%s*$" then
    names = set(require("xtrain.help").names())
  elseif option then
    local known = (options_of(fn, name) or {})[option]
    if type(known) == "table" then names = set(known) end
    if option == "dtype" then names = set(DTYPES) end
    if option == "device" then names = set(xt.devices()) end
  elseif name == "to" then
    names = set(DTYPES, xt.devices())
  elseif name == "device" then
    names = set(xt.devices())
  elseif name == "cast" then
    names = set(DTYPES)
  end
  if names then return { prefix = prefix, items = list_of(names, prefix), ending = text:sub(quote,
    quote) } end
  return { prefix = prefix, items = file_names(prefix), ending = text:sub(quote, quote),
    files = true }
end

-- at(text, scope [, words]): the text before the cursor -> {prefix = what is completed, items = the
-- whole names, ending = what follows a single one, help = text on the open call or nil}, or nil.
-- words: names that may begin an entry, such as the prompt's commands.
function M.at(text, scope, words)
  local open, quote = scan(text)
  if not open then return nil end
  if quote then return in_string(text, quote, open, scope) end
  local before, prefix = text:match "^(.-)([%a_]?[%w_]*)$"
  if prefix:find "^%d" then return nil end
  local path, separator = before:match "^(.*[^.:])([.:])$"
  if path then
    local names = {}
    add_fields(names, value_of(path, scope), separator == ":")
    return { prefix = prefix, items = list_of(names, prefix), ending = "" }
  end
  local fn, name, in_options = open_call(text, open, scope)
  local known = in_options and options_of(fn, name)
  if known and before:find "[{,;]%s*$" then
    local given = text:sub(open[#open].at)
    for option in given:gmatch "([%a_][%w_]*)%s*=" do known[option] = nil end
    local items = list_of(known, prefix)
    if #items > 0 then return { prefix = prefix, items = items, ending = " = " } end
  end
  if prefix == "" then
    local ok, help = pcall(require("xtrain.help").text, fn, name)
    return { prefix = "", items = {}, ending = "", help = fn ~= nil and ok and help or nil }
  end
  local names = scope.names()
  for word in pairs(KEYWORDS) do names[word] = true end
  if before:find "^%s*$" then
    for _, word in ipairs(words or {}) do names[word] = true end
  end
  return { prefix = prefix, items = list_of(names, prefix), ending = "" }
end

-- ---- what Tab does ------------------------------------------------------------------------------

local function common(items)
  local first, last = items[1], items[#items]
  local n = 0
  while n < #first and first:byte(n + 1) == last:byte(n + 1) do n = n + 1 end
  return first:sub(1, n)
end

-- Names in columns, down first.
function M.columns(items, width)
  local widest = 0
  for _, item in ipairs(items) do widest = math.max(widest, #item) end
  local columns = math.max(1, (width + 2) // (widest + 2))
  local rows = (#items + columns - 1) // columns
  local lines = {}
  for row = 1, rows do
    local cells = {}
    for column = 1, columns do
      local item = items[(column - 1) * rows + row]
      if item then cells[#cells + 1] = item .. (" "):rep(widest - #item) end
    end
    lines[row] = table.concat(cells, "  "):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

-- complete(text, scope, width [, words]) -> what to insert or nil, what to show or nil. On a blank
-- line Tab indents.
function M.complete(text, scope, width, words)
  if (text:match "[^\n]*$"):find "^%s*$" then return "  " end
  local found = M.at(text, scope, words)
  if not found then return nil end
  local items = found.items
  if #items == 0 then return nil, found.help end
  if #items == 1 then
    local ending = items[1]:sub(-1) == "/" and "" or found.ending
    local insert = items[1]:sub(#found.prefix + 1) .. ending
    return insert ~= "" and insert or nil
  end
  local rest = common(items):sub(#found.prefix + 1)
  if rest ~= "" then return rest end
  local shown = items
  if found.files then
    shown = {}
    for i, item in ipairs(items) do shown[i] = item:match "[^/]*/?$" end
  end
  return nil, M.columns(shown, width)
end

return M
