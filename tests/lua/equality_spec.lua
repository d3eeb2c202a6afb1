-- A run is its digest: what must not show in it does not. On recipes/tiny.lua, small; the same at
-- its full size is in tests/long.
local training = require "training"

local STEPS = 24
local SMALL = "text=text.txt vocab=300 dim=64 heads=2 layers=2 ffn=96 batch=4 seq=96 steps="
  .. STEPS
  .. " dropout=0.1 save_every=5 eval_every=10 log_every=1"

local function test(title, fn)
  it(title, function()
    if not training.program then
      pending "XTRAIN does not name the program"
      return
    end
    training.in_place(SMALL, function(place)
      place:write("text.txt", training.text(40000))
      fn(place)
    end)
  end)
end

describe("a run of the tiny recipe", function()
  test("is the same twice, and another with another seed", function(place)
    local first = place:all_equal({ "", " keep=2" }, STEPS)
    place:must "seed=2 out=other"
    local other = place:digests("other", STEPS)
    assert.are_not.equal(first.run, other.run)
    assert.are_not.equal(first.tensors.model["blocks.1.attn.wq"],
      other.tensors.model["blocks.1.attn.wq"])
  end)

  test("killed at some moment and resumed is the run that was never killed", function(place)
    place:must "out=whole"
    for _, step in ipairs { 3, 12, 20 } do
      local out, killed = "killed" .. step, false
      for _ = 1, 5 do -- a machine under load may let the run end before the kill
        os.execute(("rm -rf '%s/%s'"):format(place.dir, out))
        place:start("out=" .. out)
        place:wait(function() return place:step(out) >= step end)
        killed = place:kill() == 137
        if killed then break end
      end
      assert.is_true(killed, "the run ended before it could be killed")
      local _, errors = place:must("resume=auto out=" .. out)
      assert.matches(step > 5 and "resumed from" or "tiny", errors)
      assert.are.same(place:digests("whole", STEPS), place:digests(out, STEPS), out)
    end
  end)

  for _, dtype in ipairs { "f32", "bf16" } do
    test("does not depend on what is recomputed, in " .. dtype, function(place)
      place:all_equal({ "recompute=none dtype=" .. dtype, "recompute=block dtype=" .. dtype,
        "recompute=selective dtype=" .. dtype }, STEPS)
    end)
  end

  test("does not depend on how often it is evaluated or logged", function(place)
    place:all_equal({ "eval_every=0", "eval_every=1", "eval_every=5 log_every=7" }, STEPS)
  end)

  test("does not depend on the number of threads", function(place)
    place:all_equal({ "threads=1", "threads=2", "threads=3", "threads=4" }, STEPS)
    place:all_equal({ "dtype=bf16 threads=1", "dtype=bf16 threads=4" }, STEPS)
  end)
end)
