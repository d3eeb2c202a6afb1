-- The manual page says what the program's usage says, renders, and is installed where man finds it.
local file = (require "xtrain") and require "xtrain.core.file"
local read = require("files").read
local program = os.getenv "XTRAIN"

local function capture(command)
  local pipe = assert(io.popen("LD_PRELOAD= " .. command .. " 2>&1"))
  local text = pipe:read "a"
  return text, pipe:close()
end

local page = read "docs/xtrain.1"

-- The verbs that the page has a paragraph on, and their options.
local function verbs_of(text)
  local verbs = {}
  for line in text:gmatch "[^\n]+" do
    local name = line:match '^%.B[IR] "?(%l+)'
    if name then verbs[name] = line end
  end
  return verbs
end

describe("the manual page", function()
  if program then
    it("has every verb of the usage, and no other", function()
      local usage = capture(program .. " help")
      local verbs = verbs_of(page:match "%.SH VERBS\n(.-)%.SH")
      local known = {}
      for name, rest in usage:gmatch "xtrain (%l+)([^\n]*)" do
        known[name] = true
        assert.is_truthy(verbs[name], "docs/xtrain.1 lacks the verb " .. name)
        for option in rest:gmatch "%-%-(%l+)" do
          assert.is_truthy(page:find("\\-\\-" .. option, 1, true), name .. " --" .. option)
        end
      end
      for name in pairs(verbs) do assert.is_truthy(known[name], "no such verb: " .. name) end
    end)
  end

  if not capture "man --version":find "^man" then
    pending "renders: there is no man here"
  else
    it("renders without a warning", function()
      local path = os.tmpname()
      local text = capture("MANWIDTH=80 man --warnings -E ascii -l docs/xtrain.1 > " .. path)
      local shown = read(path)
      os.remove(path)
      assert.are.equal("", text)
      assert.is_truthy(shown:find "EXIT STATUS")
    end)
  end

  local build = program and program:match "^(.*)/[^/]+$"
  if not build or not io.open(build .. "/cmake_install.cmake") then
    pending "is installed: there is no build folder here"
  else
    it("is installed with the program and the types", function()
      local dir = os.tmpname()
      os.remove(dir)
      local text = capture(("cmake --install %s --prefix %s"):format(build, dir))
      assert.is_truthy(text:find "share/man/man1/xtrain.1", text)
      assert.are.equal(page, read(dir .. "/share/man/man1/xtrain.1"))
      assert.is_truthy(read(dir .. "/share/xtrain/types/types.lua"):find "@meta xtrain")
      assert.is_truthy(capture(dir .. "/bin/xtrain --version"):find "^xtrain %d")
      if capture "man --version":find "^man" then
        assert.is_truthy(capture(("man -M %s/share/man xtrain"):format(dir)):find "train neural")
      end
      file.remove_tree(dir)
    end)
  end
end)
