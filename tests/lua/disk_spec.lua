-- A disk that is full and a folder that may not be written while a run saves: it says so, trains
-- on, and the save before still loads.
require "xtrain"
local file = require "xtrain.core.file"
local save = require "xtrain.save"
local training = require "training"

local STEPS = 12
local SMALL = "text=text.txt vocab=300 dim=32 heads=2 layers=2 ffn=64 batch=2 seq=32 save_every=4 "
  .. "eval_every=0 log_every=1 steps=" .. STEPS

local function succeeds(command) return (os.execute(command .. " 2>/dev/null")) == true end

-- Runs fn on a place with the digests of a run that nothing went wrong with.
local function test(title, fn)
  it(title, function()
    if not training.program then
      pending "XTRAIN does not name the program"
      return
    end
    training.in_place(SMALL, function(place)
      place:write("text.txt", training.text(20000))
      place:must "out=whole"
      fn(place, place:digests("whole", STEPS))
    end)
  end)
end

-- What all of these runs must be: ended well, and every save that was not refused is sound.
local function trained_on(place, out, whole, errors, refused)
  for _, step in ipairs(refused) do
    assert.matches(("save of step %d failed, training goes on: cannot [^\n]*"):format(step), errors)
  end
  assert.matches("step 12/12", errors)
  local folder = place.dir .. "/" .. out
  for _, name in ipairs(file.list(folder)) do assert.is_nil(name:find "%.part") end
  for _, step in ipairs(save.list(folder)) do
    place:must(("steps=%d resume=%s/%s out=again%d"):format(STEPS, folder, save.name(step), step))
    if step < STEPS then
      assert.are.same(whole, place:digests("again" .. step, STEPS), "from step " .. step)
    end
  end
end

describe("a save", function()
  -- The file-size limit is the full disk that every user can have: writing fails all the same.
  test("that does not fit leaves the one before, and training goes on", function(place, whole)
    place:must "steps=4 out=run"
    local code, _, errors = place:run("resume=auto out=run", "trap '' XFSZ; ulimit -f 40; ")
    assert.are.equal(0, code, errors)
    assert.are.same({ 4 }, save.list(place.dir .. "/run"))
    assert.are.equal("step-00000004\n", place:read "run/latest")
    trained_on(place, "run", whole, errors, { 8, 12 })
  end)

  test("on a full disk leaves the one before, and training goes on", function(place, whole)
    local disk = place.dir .. "/disk"
    assert(file.mkdir(disk))
    if not succeeds("mount -t tmpfs -o size=900k tmpfs '" .. disk .. "'") then
      pending "a disk can be mounted by root alone"
      return
    end
    local ok, message = pcall(function()
      place:must "steps=4 keep=9 out=disk/run" -- the model and its moments take a third of it
      local used = assert(io.popen("du -k -s '" .. disk .. "/run/step-00000004'")):read "n"
      local free = assert(io.popen("df -k --output=avail '" .. disk .. "' | tail -1")):read "n"
      os.execute(("head -c %d /dev/zero >'%s/ballast'"):format((free - used // 2) * 1024, disk))
      local code, _, errors = place:run "resume=auto keep=9 out=disk/run"
      assert.are.equal(0, code, errors)
      assert.matches("No space left on device", errors)
      assert.are.same({ 4 }, save.list(disk .. "/run"))
      os.remove(disk .. "/ballast")
      trained_on(place, "disk/run", whole, errors, { 8, 12 })
    end)
    os.execute("umount '" .. disk .. "'")
    if not ok then error(message, 0) end
  end)

  -- The tiny recipe, and what the variable MEANWHILE says before the save of step 8.
  local MEANWHILE = [[
local xt = require "xtrain"
local make = xt.recipe
xt.recipe = function(given)
  local run = make(given)
  local methods = getmetatable(run).__index
  run.save = function(self, step)
    if step == 8 then os.execute(os.getenv "MEANWHILE") end
    return methods.save(self, step)
  end
  return run
end
dofile "%s"
]]

  test("in a folder that became read-only is refused, and training goes on", function(place, whole)
    local disk = place.dir .. "/disk"
    assert(file.mkdir(disk))
    -- Root writes where nobody may: for root the folder is mounted read-only.
    local root = succeeds "test \"$(id -u)\" = 0"
    local protect = ("chmod a-w '%s/run'"):format(disk)
    local unprotect = ("chmod u+w '%s/run'"):format(disk)
    if root then
      protect = ("mount -o remount,ro '%s'"):format(disk)
      unprotect = ("mount -o remount,rw '%s'"):format(disk)
      if not succeeds(("mount -t tmpfs tmpfs '%s'"):format(disk)) then
        pending "root needs to be able to mount a folder"
        return
      end
    end
    local ok, message = pcall(function()
      local script = place:write("meanwhile.lua", MEANWHILE:format(training.recipe))
      local code, _, errors = place:run("out=disk/run", ('export MEANWHILE="%s"; '):format(protect),
        script)
      os.execute(unprotect)
      assert.are.equal(0, code, errors)
      assert.matches("metrics cannot be written, training goes on", errors)
      assert.are.same({ 4 }, save.list(disk .. "/run"))
      trained_on(place, "disk/run", whole, errors, { 8, 12 })
    end)
    if root then os.execute(("umount '%s'"):format(disk)) end
    if not ok then error(message, 0) end
  end)
end)
