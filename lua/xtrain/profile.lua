-- profile=N: where the time of N steps goes, op by op. A step is watched from boundary to boundary,
-- after some that warm up; the table goes to standard error and to profile.txt of the run folder.
local core = require "xtrain.core"
local file = require "xtrain.core.file"

local M = {}

local WARMUP = 3 -- steps before those that count
local MOST = 25 -- ops that the table names

-- A size in the unit that suits it.
local function bytes_text(bytes)
  for _, unit in ipairs { "B", "KiB", "MiB", "GiB" } do
    if bytes < 1024 or unit == "GiB" then return ("%.4g %s"):format(bytes, unit) end
    bytes = bytes / 1024
  end
end

-- rows as core.profile gives them; steps and the seconds they took -> the table as text.
function M.text(rows, steps, seconds)
  table.sort(rows, function(a, b)
    if a.seconds ~= b.seconds then return a.seconds > b.seconds end
    return a.op < b.op
  end)
  local inside = 0.0
  for _, row in ipairs(rows) do inside = inside + row.seconds end
  local out = { ("%d steps of %.3f ms:"):format(steps, 1e3 * seconds / steps),
    ("%-22s %9s %10s %7s %12s %9s"):format("op", "calls", "ms", "share", "bytes", "GB/s") }
  local function add(name, calls, time, bytes)
    out[#out + 1] = ("%-22s %9s %10.3f %6.1f%% %12s %9s"):format(name, calls, 1e3 * time / steps,
      100 * time / seconds, bytes and bytes_text(bytes / steps) or "",
      bytes and time > 0 and ("%.2f"):format(bytes / time / 1e9) or "")
  end
  local others = { calls = 0, seconds = 0.0, bytes = 0 }
  for i, row in ipairs(rows) do
    if i <= MOST then
      add(row.op, ("%g"):format(row.calls / steps), row.seconds, row.bytes)
    else
      for name in pairs(others) do others[name] = others[name] + row[name] end
    end
  end
  if #rows > MOST then
    add(("%d others"):format(#rows - MOST), ("%g"):format(others.calls / steps), others.seconds,
      others.bytes)
  end
  add("between launches", "", seconds - inside)
  out[#out + 1] = "calls, ms and bytes are of one step; bytes are those of inputs and outputs"
  return table.concat(out, "\n")
end

-- The boundary before step `next` (nil: there is none). Called at every boundary of a run.
function M.boundary(run, next)
  local own, steps = run.own, run.options.profile
  if steps <= 0 or own.replay or own.profiled then return end
  local p = own.profile
  if not p then
    p = { first = own.step + WARMUP + 1 } -- the first step that counts
    own.profile = p
  end
  if p.began and (not next or next == p.first + steps) then
    if own.norm and type(own.norm) == "userdata" then own.norm:item() end -- waits for the device
    local seconds, count = file.monotonic() - p.began, (next or own.step + 1) - p.first
    local text = M.text(core.profile(), count, seconds)
    own.profiled = true
    own.progress:say(text)
    if run.out then file.write_atomic(run.out .. "/profile.txt", text .. "\n") end
  elseif not next and not p.began then
    own.profiled = true
    own.progress:say(("profile: there were no more than %d steps, all to warm up"):format(WARMUP))
  elseif next == p.first then
    core.profile(true)
    p.began = file.monotonic()
  end
end

return M
