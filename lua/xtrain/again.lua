-- Runs a recipe in this process to make some of its steps again, or as a trial: see active.replay.
local active = require "xtrain.active"

-- again(chunk, path, wanted): calls a loaded recipe as if it were run without words. Returns
-- wanted, with `of` the run it was; or nil, message when it did not come to its last step.
return function(chunk, path, wanted)
  local before, arguments = active.run, rawget(_G, "arg")
  rawset(_G, "arg", { [0] = path })
  active.replay, active.run = wanted, nil
  local ok, raised = xpcall(chunk, function(e)
    return e == wanted and e or debug.traceback(tostring(e))
  end)
  wanted.of = active.run
  active.replay, active.run = nil, before
  rawset(_G, "arg", arguments)
  if not ok and raised == wanted then return wanted end
  if not ok then return nil, raised end
  return nil, ("the recipe ended before step %d"):format(wanted.last)
end
