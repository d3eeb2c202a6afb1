-- Every recipe with smoke=true: as it is, in the other dtype, as a graph and with dropout. Recipes
-- are found by being in recipes/.
local xt = require "xtrain"
local training = require "training"

local ROOT = training.tests:match "^(.*)/tests$"

-- In an empty folder, on a text of its own: one that a recipe has no option for would be refused.
local function check(place, path)
  local _, _, errors = place:run("no_such_option=1", nil, path)
  local known = {}
  for name in errors:match("the options are ([%w_, ]+)"):gmatch "[%w_]+" do known[name] = true end
  local words = "smoke=true out=run"
  if known.text then
    place:write("text.txt", training.text(20000))
    words = words .. " text=text.txt"
  end
  local ways = { "", "dtype=f32", "dtype=bf16", "dropout=0.1" }
  if known.recompute then ways[#ways + 1] = "recompute=block dropout=0.1" end
  if place:run(words:gsub("out=run", "graph=true"), nil, path) == 0 then
    ways[#ways + 1] = "graph=true"
  end
  for _, way in ipairs(ways) do
    os.execute(("rm -rf '%s/run'"):format(place.dir))
    place:must(words .. " " .. way, path)
    local step = 0
    for line in place:read("run/metrics.jsonl"):gmatch "[^\n]+" do
      local row = xt.json.decode(line)
      if row.loss then
        step = step + 1
        assert.are.equal(step, row.step)
        assert.is_true(row.loss > 0 and row.loss < math.huge, path .. " " .. way)
      end
    end
    assert.are.equal(3, step)
  end
end

describe("a smoke run of", function()
  local list = assert(io.popen(("LD_PRELOAD= ls '%s'/recipes/*.lua"):format(ROOT)))
  for path in list:lines() do
    it(path:match "[^/]+$", function()
      if not training.program then return pending "XTRAIN does not name the program" end
      training.in_place("", function(place) check(place, path) end)
    end)
  end
  list:close()
end)
