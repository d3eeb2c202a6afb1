-- Every recipe and every way of starting one: dropout is live in training and absent in evaluation.
-- Nothing is listed here: recipes are the files of recipes/, and ways of starting are the lines of
-- the usage texts that take a recipe or its key=value.
local xt = require "xtrain"
local file = require "xtrain.core.file"
local training = require "training"

local ROOT = io.popen("pwd"):read "l"

-- Sizes are made small where a recipe has an option of that name.
local SMALL = { vocab = 300, dim = 32, heads = 2, kv_heads = 2, head_dim = 16,
  layers = 2, ffn = 48, hidden = 32, batch = 4, seq = 32, steps = 8, warmup = 1, log_every = 1,
  eval_every = 0, save_every = 0, prompt = "the " }

-- Under the sanitizers their library is preloaded, and would judge the leaks of other programs.
local function lines_of(command)
  local pipe, list = assert(io.popen("LD_PRELOAD= " .. command)), {}
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

local function recipes() return lines_of(("ls '%s'/recipes/*.lua"):format(ROOT)) end

-- ---- ways of starting --------------------------------------------------------------------------

-- A copy of ./dev beside the program that is tested: nothing is installed or built.
local function dev_folder(place)
  local dir = place.dir .. "/clone"
  local stubs = { ninja = "exit 0", cmake = "exit 0",
    ["dpkg-query"] = [[shift 2; for p in "$@"; do echo "ii  $p"; done]] }
  for _, each in ipairs { "", "/stubs", "/build", "/build/release", "/build/data" } do
    assert(file.mkdir(dir .. each))
  end
  for name, text in pairs(stubs) do
    place:write("clone/stubs/" .. name, "#!/bin/sh\n" .. text .. "\n")
  end
  place:write("clone/build/release/build.ninja", "# configured\n")
  place:write("clone/build/data/bible.txt", training.text(20000))
  assert(os.execute(([[
    export LD_PRELOAD=
    cd '%s' && chmod +x stubs/* && cp '%s/dev' . && ln -s '%s/recipes' . &&
      ln -s '%s' build/release/xtrain]]):format(dir, ROOT, ROOT, training.program)))
  return dir
end

-- {name, command(place, recipe, words)}; own: it chooses the recipe itself.
local function launchers()
  local list = {}
  local function add(name, command, own)
    list[#list + 1] = { name = name, command = command, own = own }
  end
  for _, line in ipairs(lines_of(("'%s' help"):format(training.program))) do
    local usage = line:match "xtrain (.*FILE%.lua.*)"
    if usage then
      usage = usage:gsub("   *.*", ""):gsub(" *%[.-%]", ""):gsub("%.%.%.", "")
      usage = usage:gsub("%-n N", "-n 1")
      add("xtrain " .. usage, function(_, recipe, words)
        return ("'%s' %s %s"):format(training.program, usage:gsub("FILE%.lua", function()
          return "'" .. recipe .. "'"
        end), words)
      end)
    end
  end
  for _, line in ipairs(lines_of(("'%s/dev' help"):format(ROOT))) do
    local verb = line:match "^%./dev ([%w-]+) .*key=value"
    if verb then
      add("./dev " .. verb, function(place, _, words)
        local dir = dev_folder(place)
        return ("LD_PRELOAD= PATH='%s/stubs':$PATH '%s/dev' %s %s"):format(dir, dir, verb, words)
      end, true)
    end
  end
  add("lua5.4 FILE.lua", function(_, recipe, words)
    return ("lua5.4 '%s' %s"):format(recipe, words)
  end)
  -- What mpirun, srun and torchrun tell the one process of a run.
  for name, variables in pairs {
    mpirun = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_SIZE=1",
    srun = "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1",
    torchrun = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
  } do
    add(name, function(_, recipe, words)
      return ("%s '%s' '%s' %s"):format(variables, training.program, recipe, words)
    end)
  end
  return list
end

-- ---- running -----------------------------------------------------------------------------------

local plain = { name = "xtrain FILE.lua", command = function(_, recipe, words)
  return ("'%s' '%s' %s"):format(training.program, recipe, words)
end }

-- Exit status, standard output, standard error.
local function start(place, launcher, recipe, words)
  local _, _, code = os.execute(("cd '%s' && %s >stdout 2>stderr"):format(place.dir,
    launcher.command(place, recipe, words)))
  return code, place:read "stdout", place:read "stderr"
end

-- What a recipe can be told: {name = true}; words that make it small, and that keep its weights.
local function options_of(place, launcher, recipe)
  -- The error about an option that there is not lists those that there are.
  local _, _, errors = start(place, launcher, recipe, "no_such_option=1")
  local known, words, still = {}, {}, {}
  for name in errors:match("the options are ([%w_, ]+)"):gmatch "[%w_]+" do
    known[name] = true
    local value = name == "text" and place.dir .. "/text.txt" or SMALL[name]
    if value then words[#words + 1] = ("%s='%s'"):format(name, value) end
    if name == "lr" or name:find "_lr$" then still[#still + 1] = name .. "=0" end
  end
  return known, table.concat(words, " "), table.concat(still, " ")
end

-- The losses of a run, its standard output, the name of the recipe that it was, the logged rates.
local function run(place, launcher, recipe, words)
  local dir = place.dir .. "/run"
  file.remove_tree(dir)
  file.remove_tree(place.dir .. "/clone")
  local code, out, errors = start(place, launcher, recipe, ("%s out='%s'"):format(words, dir))
  if code ~= 0 then error(("%s, %s: %s\n%s"):format(launcher.name, recipe, words, errors), 0) end
  local losses, rates = {}, {}
  for line in place:read("run/metrics.jsonl"):gmatch "[^\n]+" do
    local row = xt.json.decode(line)
    if row.loss then
      losses[#losses + 1] = row.loss
      rates[#rates + 1] = row.lr
    end
  end
  return losses, out, xt.json.decode(place:read "run/config.json").name, rates
end

local function largest_difference(a, b)
  assert.are.equal(#a, #b)
  local largest = 0
  for i, loss in ipairs(a) do largest = math.max(largest, math.abs(loss - b[i])) end
  return largest
end

-- Raises unless dropout is 0 unless asked for, live in training, and absent in evaluation.
local function check(place, recipe)
  local known, words, still = options_of(place, plain, recipe)
  assert.is_true(known.dropout, recipe .. " has no option dropout")
  local function with(more) return run(place, plain, recipe, words .. " " .. more) end
  local default, _, _, rates = with ""
  local without, live = with "dropout=0", with "dropout=0.1"
  assert.are.equal(#default, #rates, "each loss is logged with its learning rate")
  for step = 1, #rates - 1 do assert.is_true(rates[step] > 0, "the rate of step " .. step) end
  assert.are.same(default, without, "the default of dropout is not 0")
  local apart = largest_difference(without, live)
  assert.is_true(apart > 1e-3, ("%s: the losses differ by %g"):format(recipe, apart))
  -- The weights stay, so that what is printed at the end can differ by dropout alone.
  local still_losses, printed = with(still .. " dropout=0")
  local dropped_losses, dropped = with(still .. " dropout=0.9")
  assert.are_not.same(still_losses, dropped_losses)
  assert.are.equal(printed, dropped, recipe .. ": what is printed at the end")
  -- A graph of the step drops the same elements, where the recipe can be one.
  local code, _, errors = start(place, plain, recipe, words .. " graph=true out=graph")
  if code ~= 0 then
    assert.matches("graph=true", errors)
  else
    assert.are.same(live, (with "graph=true dropout=0.1"))
  end
end

local function test(title, fn)
  it(title, function()
    if not training.program then return pending "XTRAIN does not name the program" end
    training.in_place("", function(place)
      place:write("text.txt", training.text(20000))
      fn(place)
    end)
  end)
end

-- ---- the tests ---------------------------------------------------------------------------------

describe("every recipe", function()
  for _, path in ipairs(recipes()) do
    test("drops in training and not in evaluation: " .. path:match "[^/]+$", function(place)
      check(place, path)
    end)
  end

  -- recipes/tiny.lua with its dropout disconnected, or never switched off.
  local function changed(place, from, to)
    local text = assert(file.read(ROOT .. "/recipes/tiny.lua"))
    local first, last = text:find(from, 1, true)
    assert(first, from)
    place:write("new.lua", text:sub(1, first - 1) .. to .. text:sub(last + 1))
    return pcall(check, place, place.dir .. "/new.lua")
  end

  test("of which dropout is not wired would be found", function(place)
    local ok, message = changed(place, "dropout = run.dropout, ", "")
    assert.is_false(ok)
    assert.matches("the losses differ by 0", tostring(message))
  end)

  test("that evaluates in training mode would be found", function(place)
    local ok, message = changed(place, "local loss = xt.data.evaluate(model, held_out)", [[
      local x, y = held_out:batch(1)
      local loss = xt.no_grad(function() return (model:loss(x, y, { seed = 1 })):item() end)]])
    assert.is_false(ok)
    assert.matches("what is printed at the end", tostring(message))
  end)
end)

describe("every way of starting", function()
  it("is found in the usage texts", function()
    if not training.program then return pending "XTRAIN does not name the program" end
    local names = {}
    for _, each in ipairs(launchers()) do names[each.name] = true end
    assert.is_true(names["xtrain FILE.lua"] and names["./dev train"])
  end)

  for _, launcher in ipairs(training.program and launchers() or {}) do
    test("drops what the plain start drops: " .. launcher.name, function(place)
      for _, path in ipairs(launcher.own and { "its own" } or recipes()) do
        local _, words = options_of(place, launcher, path)
        words = words .. " dropout=0.1"
        local got, out, name = run(place, launcher, path, words)
        local want, printed = run(place, plain, ("%s/recipes/%s.lua"):format(ROOT, name), words)
        assert.are.same(want, got, path)
        for line in printed:gmatch "[^\n]+" do
          assert.is_truthy(out:find(line, 1, true), line .. " is not in\n" .. out)
        end
      end
    end)
  end
end)
