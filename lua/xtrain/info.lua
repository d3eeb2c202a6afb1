-- `xtrain info`: what this program is, and what it found on this machine.
local xt = require "xtrain"
local core = require "xtrain.core"

local function line(name, text) print(("%-12s %s"):format(name, text)) end

line("xtrain", xt.version)
line("lua", _VERSION)
line("devices", table.concat(xt.devices(), " "))
for _, device in ipairs(xt.devices()) do line(device, core.describe(device)) end
local there, why = pcall(core.describe, "cuda")
if not there then line("cuda", "not found: " .. why:match("machine: (.*)") or why) end
for _, library in ipairs(core.libraries()) do
  if library.found then
    line(library.name, (library.version .. "  " .. library.detail):gsub("^%s+", ""))
  else
    line(library.name, "not found: " .. library.detail)
  end
end
local ops = xt.ops()
line("ops", ("%d"):format(#ops))
-- Each op with the dtypes that have a kernel on each device.
for _, device in ipairs(xt.devices()) do
  line("kernels", device)
  for _, op in ipairs(ops) do
    local dtypes = core.kernels(op.name, device)
    line("", ("%-22s %s"):format(op.name, table.concat(dtypes, " ")))
  end
end
