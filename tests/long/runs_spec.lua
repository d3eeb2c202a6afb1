-- Whole runs of the tiny recipe: killed at random moments, over many steps, at its full size.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local training = require "training"


-- Numbers from [0, 1), the same in every run of the tests; what a moment hits is the machine's.
local function drawing(base)
  local count = 0
  return function()
    count = count + 1
    return (xt.seed(base, count) >> 11) * 2.0 ^ -53
  end
end

local function describe_runs(title, words, text, fn)
  it(title, function()
    training.in_place(words, function(place)
      place:write("text.txt", text)
      fn(place)
    end)
  end)
end

-- ---- kills -------------------------------------------------------------------------------------

local SMALL = "text=text.txt vocab=300 dim=64 heads=2 layers=2 ffn=96 batch=4 seq=96 dropout=0.1"
local KILLS, STEPS = 20, 200

-- Whether a save is being written now.
local function in_save(place, out)
  for _, name in ipairs(file.list(place.dir .. "/" .. out) or {}) do
    if name:find "%.part$" then return true end
  end
  return false
end

describe("a run", function()
  local title = "killed at 20 moments, one during a save, ends as the run that was never killed"
  local options = SMALL .. " save_every=10 eval_every=50 log_every=1 steps=" .. STEPS
  describe_runs(title, options, training.text(40000), function(place)
    local draw = drawing "kills"
    local began = file.monotonic()
    place:must "out=whole"
    local seconds = file.monotonic() - began
    local whole = place:digests("whole", STEPS)
    local killed, at, in_saves = 0, {}, 0
    for attempt = 1, 10 * KILLS do
      if killed == KILLS then break end
      local out = "killed" .. attempt
      place:start("out=" .. out)
      if killed == 0 then -- the first one during a save
        local step = math.floor(draw() * STEPS * 0.8)
        place:wait(function() return place:step(out) >= step end)
        os.execute(("cd '%s' && until [ -e %s/.step-*.part ] || [ -e status ]; do :; done; "
          .. "kill -9 %s"):format(place.dir, out, place.pid))
      else
        training.sleep(draw() * seconds)
      end
      local status = place:kill()
      local during = in_save(place, out)
      if status == 137 and (killed > 0 or during) then
        killed = killed + 1
        at[killed] = place:step(out)
        if during then in_saves = in_saves + 1 end
        place:must("resume=auto out=" .. out)
        assert.are.same(whole, place:digests(out, STEPS), "killed at step " .. at[killed])
        assert.is_false(in_save(place, out))
      end
      file.remove_tree(place.dir .. "/" .. out)
    end
    assert.are.equal(KILLS, killed)
    assert.is_true(in_saves >= 1)
    print(("%d kills after the steps %s, %d of them during a save"):format(killed,
      table.concat(at, " "), in_saves))
  end)

  -- ---- memory ----------------------------------------------------------------------------------

  -- Prints what is held when step 11 begins, and when the last step is done.
  local WATCH = [[
package.path = "%s/?.lua;" .. package.path
local xt = require "xtrain"
local file = require "xtrain.core.file"
local heap = require "heap"
local make = xt.recipe
xt.recipe = function(given)
  local run = make(given)
  local methods = getmetatable(run).__index
  run.steps = function(self)
    local next_step = methods.steps(self)
    return function()
      local step = next_step()
      if step == 11 or step == nil then
        local objects, by_kind = heap.count()
        print("held", file.resident(), xt.memory().system_allocs, objects,
          collectgarbage "count" // 1, by_kind)
      end
      return step
    end
  end
  return run
end
dofile "%s"
]]

  describe_runs("holds no more after 1000 steps than after 10",
    SMALL .. " save_every=5 eval_every=5 log_every=5 steps=1000", training.text(40000),
    function(place)
      local script = place:write("watch.lua", WATCH:format(training.tests,
        training.recipe))
      local out = place:must("out=run", script)
      local held = {}
      for resident, allocs, objects, kib, kinds in
        out:gmatch "held%s+(%d+)%s+(%d+)%s+(%d+)%s+([%d.]+)%s+([^\n]+)" do
        held[#held + 1] = { resident = tonumber(resident), allocs = tonumber(allocs),
          objects = tonumber(objects), kib = tonumber(kib), kinds = kinds }
      end
      local first, last = held[1], held[2]
      print(("anonymous memory %.2f MiB, grown by %d KiB; %d system allocations, grown by %d; "
        .. "%d Lua objects, %d before (%s; %d KiB)"):format(last.resident / 2 ^ 20,
        (last.resident - first.resident) // 1024, last.allocs, last.allocs - first.allocs,
        last.objects, first.objects, last.kinds, last.kib))
      assert.is_true(last.resident - first.resident <= 2 ^ 20)
      assert.are.equal(first.allocs, last.allocs)
      assert.is_true(last.objects < 20000)
    end)

  -- ---- equalities at full size -----------------------------------------------------------------

  local FULL = 30
  local text = file.read "build/data/bible.txt" or training.text(4000000)
  local full = "text=text.txt dropout=0.1 save_every=10 eval_every=20 log_every=1 steps=" .. FULL

  local function all_equal(place, runs)
    return place:all_equal(runs, FULL, function(words, digests)
      print(("%-28s %s"):format(words, digests.run))
    end)
  end

  describe_runs("at full size is the same twice, with any number of threads, and resumed", full,
    text, function(place)
      local whole = all_equal(place, { "threads=2", "keep=3", "threads=1", "threads=3",
        "threads=4" })
      place:start "out=killed"
      assert.is_true(place:wait(function() return place:step "killed" >= 17 end))
      assert.are.equal(137, place:kill())
      place:must "resume=auto out=killed"
      assert.are.same(whole, place:digests("killed", FULL))
    end)

  for _, dtype in ipairs { "f32", "bf16" } do
    describe_runs("at full size does not depend on what is recomputed, in " .. dtype,
      full .. " dtype=" .. dtype, text, function(place)
        all_equal(place, { "recompute=none", "recompute=block", "recompute=selective",
          "recompute=block threads=3" })
      end)
  end
end)
