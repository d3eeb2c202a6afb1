-- Looking inside: gradients, the tape, memory, and the switches that tests throw.
local core = require "xtrain.core"
local trace = require "xtrain.trace"
local watch = require "xtrain.watch"

local tape_meta = {
  __tostring = function(records)
    local lines, total = {}, 0
    for i, r in ipairs(records) do
      total = total + r.kept_bytes
      lines[i] = ("%6d  %-20s %-28s %12d  %s"):format(r.number, r.op,
        table.concat(r.outputs, ", "), r.kept_bytes, r.where)
    end
    table.insert(lines, 1, ("%6s  %-20s %-28s %12s  %s"):format("record", "op", "results",
      "bytes kept", "line"))
    lines[#lines + 1] = ("%d records, %d bytes kept"):format(#records, total)
    return table.concat(lines, "\n")
  end,
}

-- tape([t]): the records behind t, newest first; without t, those behind the newest record that is
-- alive, such as the last loss: {number, op, where, kept_bytes, outputs}. Bytes that several keep
-- count once. Printed, a line each.
local function tape(t) return setmetatable(core.tape(t), tape_meta) end

return {
  tape = tape,
  watch = watch.watch,
  unwatch = watch.unwatch,
  step = trace.step,
  why = trace.why,
  journal = trace.journal,
  compare = require("xtrain.compare").compare,
  gradcheck = require("xtrain.gradcheck").gradcheck,
  stats = core.stats, -- stats(t): {n, finite, nans, infs, minus_infs, min, max, mean, std, text}
  trap = core.trap, -- on: the first op whose result holds a NaN or an infinity raises
  -- holders([most [, device]]): the lines that hold the most bytes: {where, bytes, storages}
  holders = core.memory_holders,
  here = core.here, -- "FILE:LINE" of the caller, as records name it
  live_count = core.live_count, -- objects and storages alive in the runtime
  fail_allocation = core.fail_allocation, -- the n-th allocation from now fails; 0: none
  poison = core.poison, -- on: new and freed blocks are filled with NaNs
  cache = core.cache, -- off: every block goes back to the system at once
  memory_limit = core.memory_limit, -- bytes the allocator may take; 0: no limit
  memory_trim = core.memory_trim, -- gives cached blocks back to the system
}
