-- The Lua code of README.md and docs/ runs, and prints what its comments --> say.
local xt = require "xtrain"
local read = require("files").read

local pages = { "README.md" }
for _, name in ipairs(require "xtrain.core.file".list("docs")) do
  if name:match "%.md$" then pages[#pages + 1] = "docs/" .. name end
end

-- The ```lua blocks of a page, with blank lines in place of the rest so that error lines are right.
local function code_of(text)
  local lines, inside = {}, false
  for line in (text .. "\n"):gmatch "(.-)\n" do
    if line:match "^```" then
      inside = line == "```lua"
      line = ""
    end
    lines[#lines + 1] = inside and line or ""
  end
  return table.concat(lines, "\n")
end

describe("the code of", function()
  for _, page in ipairs(pages) do
    local code = code_of(read(page))
    if code:match "%S" then
      it(page .. " runs and prints what it says", function()
        local wanted, printed = {}, {}
        for text in code:gmatch "%-%->%s*([^\n]*)" do wanted[#wanted + 1] = text end
        local function show(...)
          local parts = table.pack(...)
          for i = 1, parts.n do parts[i] = tostring(parts[i]) end
          printed[#printed + 1] = table.concat(parts, "\t")
        end
        -- Specs in a page run as they stand, each part at once.
        local function now(_, fn) fn() end
        local env = setmetatable({ print = show, xt = xt, arg = {}, assert = assert,
          describe = now, it = now }, { __index = _G })
        assert(load(code, "@" .. page, "t", env))()
        if #wanted > 0 then assert.same(wanted, printed) end
      end)
    end
  end

  it("docs/ and README.md links to files that are there", function()
    local file = require "xtrain.core.file"
    for _, page in ipairs(pages) do
      local folder = page:match "^(.*/)" or ""
      for target in read(page):gmatch "%]%(([^)#]+)" do
        if not target:match "^%a+:" then
          assert(file.exists(folder .. target), page .. " links to " .. target)
        end
      end
    end
  end)
end)
