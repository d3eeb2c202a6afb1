-- profile=N: times by op, which change nothing.
local xt = require "xtrain"
local core = require "xtrain.core"
local file = require "xtrain.core.file"
local text_of = require("xtrain.profile").text
local training = require "training"

local function by_op(rows)
  local found = {}
  for _, row in ipairs(rows) do found[row.op] = row end
  return found
end

describe("profiling", function()
  after_each(function() core.profile() end)

  it("counts launches, their bytes and their time by op, inner ones once", function()
    local x = xt.ones { 30, 40 }
    local began = file.monotonic()
    core.profile(true)
    local y = x + x
    y = (y * 2):transpose(1, 2) -- a view is no launch
    xt.softmax(y:slice(2, 1, 7), 1):totable() -- copies what is not contiguous, inside
    local rows = core.profile()
    local wall, sum = file.monotonic() - began, 0.0
    local found = by_op(rows)
    assert.are.equal(1, found.add.calls)
    assert.are.equal(3 * 1200 * 4, found.add.bytes)
    assert.are.equal(1, found.softmax.calls)
    assert.is_nil(found.transpose)
    for _, row in ipairs(rows) do
      assert.is_true(row.seconds >= 0)
      sum = sum + row.seconds
    end
    assert.is_true(sum <= wall)
    assert.are.same({}, core.profile())
  end)

  it("counts backward and replays of a graph", function()
    local w = xt.var(xt.ones { 4, 4 })
    core.profile(true)
    xt.matmul(w, w):sum():backward()
    assert.is_true(by_op(core.profile()).matmul.calls >= 1)
    local g = xt.graph(function(b) b:export("y", xt.exp(b:input("x", xt.ones { 3 }))) end)
    core.profile(true)
    for _ = 1, 3 do g:run("y", { x = xt.zeros { 3 } }) end
    assert.are.equal(3, by_op(core.profile()).exp.calls)
  end)

  it("goes on after a launch that fails", function()
    core.profile(true)
    assert.is_false(pcall(xt.embedding, xt.ones { 3, 2 }, xt.tensor({ 7 }, { dtype = "i32" })))
    local y = xt.ones { 2 } + 1
    local rows = by_op(core.profile())
    assert.is_nil(rows.embedding)
    assert.are.same({ 2, 2 }, y:totable())
  end)

  it("is told as a table, the largest first, of one step each", function()
    local text = text_of({ { op = "add", calls = 8, seconds = 0.002, bytes = 4096 },
      { op = "matmul", calls = 4, seconds = 0.004, bytes = 8e9 } }, 4, 0.008)
    local lines = {}
    for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
    assert.are.equal("4 steps of 2.000 ms:", lines[1])
    assert.matches("^matmul +1 +1.000 +50.0%% +1.863 GiB +2000.00$", lines[3])
    assert.matches("^add +2 +0.500 +25.0%% +1 KiB +0.00$", lines[4])
    assert.matches("^between launches +0.500 +25.0%% *$", lines[5])
  end)

  it("of a run changes nothing in it, and is told once", function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("steps=12 save_every=0 log_every=5", function(place)
      local script = training.recipe:gsub("tiny", "mlp")
      local _, errors = place:must("out=a profile=4", script)
      local _, count = errors:gsub("4 steps of %d", "")
      assert.are.equal(1, count, errors)
      assert.matches("\nadamw +1 ", errors)
      assert.matches("^4 steps of ", place:read "a/profile.txt")
      place:must("out=b", script)
      local function digest(out)
        return place:read(out .. "/metrics.jsonl"):match '.*"digest": ?"(0x%x+)"'
      end
      assert.are.equal(digest "b", digest "a")
      _, errors = place:must("out=c profile=100", script) -- more than there are
      assert.matches("9 steps of ", errors)
      _, errors = place:must("out=d steps=2 profile=1", script)
      assert.matches("no more than 3 steps, all to warm up", errors)
    end)
  end)
end)
