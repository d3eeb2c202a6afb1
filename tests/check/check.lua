-- The style checks: whatever of the house's rules a machine can see.
--   lua5.4 tests/check/check.lua [BUILD_DIR]      from the root of the project
-- Prints FILE:LINE: RULE for each finding, and how many checks passed at the end. A rule about
-- lines is a row with an example that it must find and one that it must let pass: the checks are
-- checked.
local build = arg[1] or "build/release"

-- ---- files -------------------------------------------------------------------------------------

local function capture(command)
  local pipe = assert(io.popen(command .. " 2>&1"))
  local output = pipe:read("a")
  return output, pipe:close()
end

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

local texts = {}
local function read(path)
  if not texts[path] then
    local file = assert(io.open(path, "rb"))
    texts[path] = file:read("a")
    file:close()
  end
  return texts[path]
end

-- Comments and the insides of strings become blanks: what is left is code, at the same lines.
local function code_of(text)
  local blank = function(s) return (s:gsub("[^\n]", " ")) end
  local out, at = {}, 1
  while at <= #text do
    local first = text:find("[/\"']", at)
    if not first then break end
    local last
    local two = text:sub(first, first + 1)
    if two == "/*" then
      last = select(2, text:find("*/", first + 2, true)) or #text
    elseif two == "//" then
      last = (text:find("\n", first, true) or #text + 1) - 1
    elseif two:sub(1, 1) == "/" then
      last = nil
    else
      last = first + 1
      while last <= #text and text:sub(last, last) ~= two:sub(1, 1) do
        last = last + (text:sub(last, last) == "\\" and 2 or 1)
      end
    end
    out[#out + 1] = text:sub(at, first - 1)
    out[#out + 1] = last and blank(text:sub(first, last)) or "/"
    at = (last or first) + 1
  end
  out[#out + 1] = text:sub(at)
  return table.concat(out)
end

local files = {}
for path in capture("find . \\( -path ./build -o -path ./runs -o -path ./.git -o -path ./.cache "
  .. "\\) -prune -o -type f -print | sort"):gmatch("%./([^\n]+)") do
  files[#files + 1] = path
end

local function matching(...)
  local found = {}
  for _, path in ipairs(files) do
    for _, pattern in ipairs { ... } do
      if path:find(pattern) then
        found[#found + 1] = path
        break
      end
    end
  end
  return found
end

local C = { "%.[ch]$", "%.def$", "%.cuh?$" }
local LUA = { "%.lua$" }
local TEXT = { "%.[ch]$", "%.def$", "%.cuh?$", "%.lua$", "%.md$", "%.txt$", "%.json$", "^dev$",
  "^%.ci/run$" }
local MADE = { ["docs/ops.md"] = true, ["lua/xtrain/types.lua"] = true } -- generated: as they come

-- ---- rules about one line ----------------------------------------------------------------------

-- Identifiers with two underscores inside. Those that begin with them belong to the compiler.
local function double_underscore(line)
  for name in line:gmatch("[%w_]+") do
    if name:find("^_*[%a%d]") and not name:find("^__") and name:find("__") then return true end
  end
  return line:find("^%s*#%s*define%s+__") ~= nil
end

local function calls(...)
  local names = { ... }
  return function(line)
    for _, name in ipairs(names) do
      if line:find("%f[%w_]" .. name .. "%s*%(") then return true end
    end
    return false
  end
end

local function width(line)
  return (utf8.len(line) or #line) > 100
end

-- rule; in: file patterns; code: comments and strings are blanked first; test(line) finds a breach
local line_rules = {
  { rule = "a line has at most 100 columns", files = { C[1], C[2], C[3], LUA[1] }, test = width,
    bad = ("x"):rep(101), good = ("é"):rep(100) },
  { rule = "blanks at the end of a line, or a tab", files = TEXT, except = { "%.md$" },
    test = function(line) return line:find("[ \t]$") ~= nil or line:find("\t") ~= nil end,
    bad = "x = 1 ", good = "  x = 1" },
  { rule = "a C name has no double underscore (a .cu file is C++)", files = C, code = true,
    test = double_underscore, bad = "int xt__x;", good = "__attribute__((x)) __m512 a_b;" },
  { rule = "lua.h and the rest of Lua's headers only in lua/bind", files = C,
    except = { "^lua/bind/" },
    test = function(line) return line:find('^%s*#%s*include%s*[<"]l[au][ua]%w*%.h[>"]') ~= nil end,
    bad = "#include <lauxlib.h>", good = '#include "xtrain.h"' },
  { rule = "the runtime includes no header of CUDA and none of the kernels",
    files = { "^runtime/" },
    test = function(line)
      local header = line:match('^%s*#%s*include%s*[<"]([^>"]+)[>"]')
      return header ~= nil and (header:find("^cu") or header:find("^nccl")
        or header:find("^kernels/") or header:find("^%.%./kernels") or header:find("^cpu/")) ~= nil
    end,
    bad = "#include <cuda_runtime.h>", good = "#include <stdio.h>" },
  { rule = "kernels include of the runtime only op.h", files = { "^kernels/.*%.[ch]u?h?$" },
    test = function(line)
      local header = line:match('^%s*#%s*include%s*"([^"]+)"')
      if not header then return false end
      header = header:gsub("^%.%./", ""):gsub("^%.%./", ""):gsub("^runtime/", "")
      return header ~= "op.h" and exists("runtime/" .. header)
    end,
    bad = '#include "xtrain.h"', good = '#include "op.h"' },
  { rule = "the binding includes of ours only xtrain.h, op.h, graph.h, io/ and its own headers",
    files = { "^lua/bind/.*%.[ch]$" },
    test = function(line)
      local header = line:match('^%s*#%s*include%s*"([^"]+)"')
      return header ~= nil and header ~= "xtrain.h" and header ~= "op.h"
        and header ~= "graph.h" and not header:find("^io/") and not exists("lua/bind/" .. header)
    end,
    bad = '#include "storage.h"', good = '#include "xtrain.h"' },
  { rule = "no exit, abort or printf in runtime and kernels: status codes",
    files = { "^runtime/.*%.[ch]$", "^kernels/.*%.[ch]u?h?$" }, code = true,
    test = calls("exit", "abort", "printf", "puts", "perror", "_exit"),
    bad = "  exit(1);", good = "  snprintf(b, n); on_exit(x);" },
  { rule = "the Lua library never requires a recipe", files = { "^lua/xtrain/.*%.lua$" },
    test = function(line)
      return line:find("require%s*%(?%s*[\"']recipes") ~= nil
        or line:find("[do]%w*file%s*%(?%s*[\"']recipes/") ~= nil
    end,
    bad = 'local r = require "recipes.v0"', good = 'local nn = require "xtrain.nn"' },
  { rule = "no absolute path of one person's machine", files = TEXT,
    except = { "^tests/check/check%.lua$" },
    test = function(line)
      return line:find("%f[%S\"'`(=:]/work/") ~= nil or line:find("/home/%l+/") ~= nil
        or line:find("%f[%S\"'`(=:]/root/") ~= nil
    end,
    bad = "see /work/notes", good = "docs/work/notes and ~/runs" },
}

local function check_lines(rule)
  assert(rule.test(rule.bad), "rule does not find its own example: " .. rule.rule)
  assert(not rule.test(rule.good), "rule finds what it should let pass: " .. rule.rule)
  local found = {}
  for _, path in ipairs(matching(table.unpack(rule.files))) do
    local excepted = MADE[path]
    for _, pattern in ipairs(rule.except or {}) do
      excepted = excepted or path:find(pattern)
    end
    if not excepted then
      local text = rule.code and code_of(read(path)) or read(path)
      local number = 0
      for line in text:gmatch("([^\n]*)\n?") do
        number = number + 1
        if rule.test(line) then found[#found + 1] = path .. ":" .. number end
      end
    end
  end
  return found
end

-- ---- checks by other programs ------------------------------------------------------------------

local function quoted(paths)
  return "'" .. table.concat(paths, "' '") .. "'"
end

-- `program` prints FILE:LINE:COLUMN: ... for what it finds.
local function check_tool(command, paths)
  local found = {}
  if #paths == 0 then return found end
  local output, ok = capture(command .. " " .. quoted(paths))
  for path, line, text in output:gmatch("([%w_./-]+):(%d+):%d+: ([^\n]*)") do
    found[#found + 1] = ("%s:%s: %s"):format(path, line, text)
  end
  if not ok and #found == 0 then found[1] = command .. " failed:\n" .. output end
  return found
end

-- One line a file: where clang-format would change things first, and how many places follow.
local function check_format()
  local found, first, more = {}, {}, {}
  for _, where in ipairs(check_tool("clang-format-14 --dry-run -Werror --fno-color-diagnostics",
    matching("%.[ch]$"))) do
    local path = where:match("^[^:]+")
    if first[path] then
      more[path] = (more[path] or 0) + 1
    else
      first[path] = where:match("^[^:]+:%d+") or where
      found[#found + 1] = path
    end
  end
  for i, path in ipairs(found) do
    found[i] = first[path] .. (more[path] and (" and %d more"):format(more[path]) or "")
  end
  return found
end

local function check_luacheck()
  return check_tool("luacheck --no-color --quiet --codes --formatter=plain",
    matching("^lua/.*%.lua$", "^recipes/.*%.lua$", "^tests/.*%.lua$"))
end

-- FILE.c.o of the archive -> the source it came from, by name alone.
local function source_of(object)
  local base = object:gsub("%.o$", "")
  local found = matching("/" .. base:gsub("%p", "%%%0") .. "$")
  return (found[1] or object) .. ":1"
end

local archive = build .. "/libxtrain_runtime.a"

local function check_prefix()
  local found = {}
  for object, name in capture("nm -A -g --defined-only " .. archive)
    :gmatch("[^\n]-:([%w_.-]+):%x+ %a ([%w_.]+)\n") do
    -- _Z and a length come before the name of a C++ function.
    local plain = name:gsub("^_Z%d+", "")
    if not plain:find("^xt_") then found[#found + 1] = source_of(object) .. ": " .. name end
  end
  return found
end

-- Variables that may be written live in .data, .bss or thread storage. Tables of constants, also
-- those with pointers in them (.data.rel.ro), do not.
local function check_state()
  local found, object = {}, "?"
  for line in capture("objdump -t " .. archive):gmatch("[^\n]+") do
    object = line:match("^([%w_.-]+%.o):") or object
    local section, name = line:match("^%x+ ......[O ] (%.%S+)%s+%x+%s+(%S+)$")
    -- CUDA's compiler has some of its own in every file.
    local compilers = name and (name:find("__cudaFatCubin") or name:find("__device_stub__"))
    if section and name ~= section and not compilers
      and (section:find("^%.data$") or section:find("^%.data%.[^r]") or section:find("^%.t?bss"))
    then
      found[#found + 1] = source_of(object) .. ": " .. name
    end
  end
  return found
end

local function check_docs()
  local output, ok = capture(build .. "/xtrain lua/gendocs.lua --check")
  if ok then return {} end
  return { "docs/ops.md:1: " .. output }
end

local function check_bash()
  local output, ok = capture("bash -n dev && bash -n .ci/run")
  return ok and {} or { output }
end

local have_archive, have_docs = exists(archive), exists("lua/gendocs.lua")
local checks = {
  { rule = "C is formatted as .clang-format says (./dev format does it)", run = check_format },
  { rule = "luacheck finds nothing", run = check_luacheck },
  { rule = "the scripts parse", run = check_bash },
  { rule = "what the runtime's library shows begins with xt_", run = check_prefix,
    skip = not have_archive and "not built" },
  { rule = "no variable outside a context: no globals, no static state", run = check_state,
    skip = not have_archive and "not built" },
  { rule = "docs/ops.md and lua/xtrain/types.lua are fresh (xtrain lua/gendocs.lua)",
    run = check_docs, skip = not have_docs and "no generator" },
}
for _, rule in ipairs(line_rules) do
  checks[#checks + 1] = { rule = rule.rule, run = function() return check_lines(rule) end }
end

local passed, failed, skipped = 0, 0, 0
for _, check in ipairs(checks) do
  if check.skip then
    skipped = skipped + 1
    print(("skipped (%s): %s"):format(check.skip, check.rule))
  else
    local ok, found = pcall(check.run)
    if not ok then found = { tostring(found) } end
    for _, where in ipairs(found) do
      print(where .. ": " .. check.rule)
    end
    if #found == 0 then passed = passed + 1 else failed = failed + 1 end
  end
end
print(("%d passed, %d failed, %d skipped"):format(passed, failed, skipped))
os.exit(failed == 0)
