-- Counts the tests in ctest's JUnit file and appends "N passed, N failed, N skipped" to a file.
--   lua5.4 sum.lua JUNIT.xml COUNTS
-- A ctest test holds many tests: a cmocka program or a busted spec, each of which prints how many
-- at its end. One that ended without saying so has crashed, and counts as one failure.
local junit, counts = arg[1], arg[2]
local sum = { passed = 0, failed = 0, skipped = 0 }

local function busted(output)
  local passed, failed, errors, pending =
    output:match("(%d+) success%a* / (%d+) failures? / (%d+) errors? / (%d+) pending")
  if passed then return tonumber(passed), failed + errors, tonumber(pending) end
end

local function cmocka(output)
  -- A program may run several groups, and each closes with its own lines.
  if not output:find("%[  PASSED  %] %d+ test") then return nil end
  local function total(word)
    local n = 0
    for count in output:gmatch("%[%s+" .. word .. "%s+%] (%d+) test%(s%)[^\n]*") do
      n = n + tonumber(count)
    end
    return n
  end
  return total("PASSED"), total("FAILED"), total("SKIPPED")
end

local function plain(xml)
  return (xml:gsub("&#27;%[[%d;]*m", ""):gsub("\27%[[%d;]*m", ""))
end

local file = assert(io.open(junit, "rb"))
local xml = file:read("a")
file:close()
for name, attributes, body in xml:gmatch('<testcase name="([^"]*)"(.-)>(.-)</testcase>') do
  local status = attributes:match('status="(%a+)"')
  local output = plain(body:match("<system%-out>(.*)</system%-out>") or "")
  local passed, failed, skipped = busted(output)
  if not passed then passed, failed, skipped = cmocka(output) end
  if not passed then
    print(name .. ": ended without its closing line")
    passed, failed, skipped = 0, 1, 0
  elseif status ~= "run" and failed == 0 then
    print(name .. ": all its tests passed, and then it failed")
    failed = 1
  end
  sum.passed = sum.passed + passed
  sum.failed = sum.failed + failed
  sum.skipped = sum.skipped + skipped
end

file = assert(io.open(counts, "a"))
file:write(("%d passed, %d failed, %d skipped\n"):format(sum.passed, sum.failed, sum.skipped))
file:close()
