-- recipes/mlp.lua as it is run: a model, a loss and data of the recipe's own.
require "xtrain"
local file = require "xtrain.core.file"

local PROGRAM = os.getenv "XTRAIN"

describe("recipes/mlp.lua", function()
  local dir

  before_each(function()
    dir = os.tmpname()
    os.remove(dir)
  end)
  after_each(function() file.remove_tree(dir) end)

  local function test(title, fn)
    it(title, function()
      if not PROGRAM then
        pending "XTRAIN does not name the program"
        return
      end
      fn()
    end)
  end

  local function run(words)
    local pipe = assert(io.popen(("'%s' recipes/mlp.lua %s 2>&1"):format(PROGRAM, words)))
    local text = pipe:read "a"
    assert(pipe:close(), text)
    return text
  end

  test("tells the spirals apart", function()
    local right = run("out=" .. dir):match "right side for ([%d.]+) %% of 2000 unseen points"
    assert.is_true(tonumber(right) > 98, right)
  end)

  test("is timed on its own data", function()
    local row = require "xtrain".json.decode(run("bench=3"):match "{.-}")
    assert.are.equal("mlp", row.recipe)
    assert.is_true(row.step_ms > 0)
  end)

  test("stopped and resumed, ends as if it had never stopped", function()
    local words = " steps=60 save_every=20 turns=1 out=" .. dir
    local whole = run(words .. "/a")
    local function ends(name)
      return assert(file.read(dir .. "/" .. name .. "/step-00000060/model.safetensors"))
    end
    -- The learning rate is a function of all 60 steps, so a run of 40 would be another run.
    assert(file.mkdir(dir .. "/b"))
    -- Under the sanitizers their library is preloaded, and would judge cp's own leaks.
    assert(os.execute(("LD_PRELOAD= cp -r '%s/a/config.json' '%s/a/step-00000040' '%s/b/'")
      :format(dir, dir, dir)))
    local again = run(words .. "/b resume=auto")
    assert.are.equal(ends "a", ends "b")
    assert.are.equal(whole:match "right side[^\n]*", again:match "right side[^\n]*")
  end)
end)
