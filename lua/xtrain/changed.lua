-- Whether a file or folder may have changed since it was looked at last, by one look at its
-- times, so that looking at every step boundary costs next to nothing.
local file = require "xtrain.core.file"

local FRESH = 2 -- seconds in which a second change may leave the times as they are

-- changed(path) -> function that says so each time it is called: true at the first call, and while
-- a change is fresh. A path that is not there has not changed.
return function(path)
  local last_size, last_time
  return function()
    local size, time = file.size(path)
    if not size then return false end
    if size == last_size and time == last_time and os.time() - time > FRESH then return false end
    last_size, last_time = size, time
    return true
  end
end
