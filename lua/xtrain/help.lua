-- Offline help: xt.help() lists topics, xt.help "softmax" or xt.help(xt.nn.linear) explains one.
-- What the library says of a function is the comment above it; ops speak for themselves.
local xt = require "xtrain"
local core = require "xtrain.core"
local options = require "xtrain.options"

local M = {}

-- What is written in C: name = {signature, text}.
M.builtin = {
  tensor = { "tensor(value [, {dtype = \"f32\", device}])",
    "A tensor of a number or of nested tables of numbers." },
  zeros = { "zeros(shape [, {dtype = \"f32\", device}])", "All elements 0. xt.zeros{2, 3}" },
  ones = { "ones(shape [, {dtype = \"f32\", device}])", "All elements 1." },
  full = { "full(shape, value [, {dtype = \"f32\", device}])", "All elements the same." },
  arange = { "arange(n [, {dtype = \"i64\", device}])", "0, 1, ..., n - 1." },
  rand = { "rand(shape, {seed = s [, dtype, device]})",
    "Uniform in [0, 1). The same bits for the same seed, on every device." },
  randn = { "randn(shape, {seed = s [, dtype, device]})",
    "Normal, mean 0 and deviation 1. The same bits for the same seed." },
  from_bytes = { "from_bytes(string, dtype, shape)",
    "A tensor of little-endian row-major bytes; t:bytes() is the way back." },
  device = { "device([name])", "The default device of constructors; given a name, sets it." },
  devices = { "devices()", "The devices of this machine." },
  ops = { "ops()", "All ops, in order of declaration." },
  var = { "var(t)", "A leaf that shares t's bytes and whose gradient is wanted: after a backward\n"
    .. "  it is in .grad." },
  grad = { "grad(output, {inputs} [, seed] [, {retain = true}])",
    "A table of d output / d input in the order of the inputs; .grad stays untouched." },
  no_grad = { "no_grad(fn, ...)", "Calls fn(...) without recording; returns what it returns." },
  checkpoint = { "checkpoint([{selective, verify},] fn, ...)",
    "Calls fn(...) once and keeps only its results: backward replays what it recorded. selective\n"
    .. "  keeps the results of matmul and attention, verify compares digests at the replay." },
  seed = { "seed(base, ...)", "Mixes integers and strings into a 64-bit seed." },
  threads = { "threads([n])", "How many threads the CPU uses; results do not depend on it." },
  memory = { "memory([device])",
    "{live_bytes, peak_bytes, reserved_bytes, made_bytes, live_storages, system_allocs}" },
  memory_reset_peak = { "memory_reset_peak([device])", "peak_bytes starts again from live_bytes." },
  collect = { "collect()", "A full collection, which frees the tensors nobody holds." },
  interrupted = { "interrupted()", "Whether Ctrl-C was pressed; a loop that asks ends itself." },
  isa = { "isa()", "The instruction set of the CPU kernels in use: v1, v3 or v4." },
  call = { "call(name, ...)", "Any op by name." },
}

local methods = {
  item = "The one element as a number.",
  totable = "Nested tables of numbers.",
  bytes = "Row-major bytes as a string.",
  digest = "A hash of bytes, dtype and shape, as 16 hexadecimal digits.",
  to = "In another dtype or on another device; a variable's half-width copy is its compute copy.",
  clone = "A copy with its own bytes.",
  detach = "The same bytes without their history.",
  backward = "Adds the gradients into .grad of every variable behind it. ([seed] [, {retain}])",
  zero_grad = "Makes .grad nil.",
  strides = "Steps between elements of each dimension, in elements.",
  is_contiguous = "Whether the elements lie in row-major order without gaps.",
  shares_storage = "Whether another tensor shares these bytes.",
}

local overview = [[
xt.tensor{1, 2, 3}   zeros ones full arange rand randn from_bytes     constructors
t.shape .ndim .numel .dtype .device .grad .is_var                     properties of a tensor
t:item() :totable() :to(dtype) :reshape{2, -1} t[1]                   methods; every op is one, too
xt.var(t)  y:backward()  xt.grad  xt.no_grad  xt.checkpoint           gradients
xt.nn  xt.models  xt.optim  xt.schedule  xt.data  xt.tokenizer        the library
xt.recipe  xt.hf  xt.safetensors  xt.json  xt.debug

NAME?                help on it, in the prompt; Tab completes names, fields, options, files
xt.help "ops"        all ops with a line each
xt.help "softmax"    one op, function or module by its name; also xt.help(xt.nn.linear)]]

-- ---- texts -------------------------------------------------------------------------------------

local function lines_of(text)
  local lines = {}
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do lines[#lines + 1] = line end
  return lines
end

-- The comment that ends above line `first`, without its dashes; nil when there is none.
local function comment_above(lines, first)
  local text = {}
  for i = first - 1, 1, -1 do
    local words = lines[i]:match("^%s*%-%-+ ?(.*)$")
    if not words or words:find("^%-%-") then break end
    table.insert(text, 1, "  " .. words)
  end
  return #text > 0 and table.concat(text, "\n") or nil
end

-- The comment at the head of a module.
local function head_of(module)
  local source = core.source(module)
  if not source then return nil end
  local text = {}
  for _, line in ipairs(lines_of(source)) do
    local words = line:match("^%-%- ?(.*)$")
    if not words then break end
    text[#text + 1] = "  " .. words
  end
  return table.concat(text, "\n")
end

local function of_function(fn, name)
  local info = debug.getinfo(fn, "S")
  local source = core.source((info.source:gsub("^=", "")))
  if not source then return name and (name .. ": a function") or "a function" end
  local lines = lines_of(source)
  local signature = (lines[info.linedefined] or ""):gsub("^%s+", ""):gsub("^local ", "")
  local comment = comment_above(lines, info.linedefined)
  return (name and name .. ": " or "") .. signature .. (comment and "\n" .. comment or "")
end

-- The comment above a function of the library, or nil.
function M.comment(fn)
  local info = debug.getinfo(fn, "S")
  local source = core.source((info.source:gsub("^=", "")))
  return source and comment_above(lines_of(source), info.linedefined)
end

local function of_op(op)
  local text = { tostring(op) }
  local dtypes = table.concat(op.dtypes, " ")
  text[#text + 1] = "  dtypes of the first argument: " .. dtypes
  if not op.differentiable then text[#text + 1] = "  not differentiable" end
  return table.concat(text, "\n")
end

local function of_ops()
  local text = {}
  for _, op in ipairs(xt.ops()) do
    text[#text + 1] = ("%-18s %s"):format(op.name, op.doc)
  end
  return table.concat(text, "\n")
end

local function of_table(t, name)
  local text = { name and head_of("xtrain." .. name) }
  local fields = {}
  for key in pairs(t) do
    if type(key) == "string" then fields[#fields + 1] = key end
  end
  table.sort(fields)
  text[#text + 1] = "  fields: " .. table.concat(fields, ", ")
  return (name and "xt." .. name .. "\n" or "") .. table.concat(text, "\n")
end

local function of_value(value, name)
  if core.is_op(value) then return of_op(value) end
  if type(value) == "function" then return of_function(value, name) end
  if type(value) == "table" then return of_table(value, name) end
  return tostring(value)
end

-- The value at a path such as "nn.linear", with or without "xt." before it.
local function at_path(path)
  local value = xt
  for name in path:gsub("^xt%.", ""):gmatch("[^.:]+") do
    if type(value) ~= "table" then return nil end
    local found, field = pcall(function(key) return value[key] end, name)
    value = found and field or nil -- a name that is not there raises
  end
  return value
end

local function all_names()
  local names = options.names(M.builtin)
  for _, op in ipairs(xt.ops()) do names[#names + 1] = op.name end
  for _, name in ipairs(options.names(getmetatable(xt).__names)) do names[#names + 1] = name end
  for _, name in ipairs(options.names(methods)) do names[#names + 1] = name end
  return names
end

-- All that xt.help knows by name.
function M.names()
  local names = all_names()
  names[#names + 1] = "ops"
  return names
end

local function of_name(name)
  local short = name:gsub("^xt%.", ""):gsub("^op%.", "")
  if short == "ops" then return of_ops() end
  local known = M.builtin[short]
  if known then return known[1] .. "\n  " .. known[2] end
  local value = at_path(short)
  if value ~= nil and value ~= xt then return of_value(value, short) end
  local method = short:gsub("^t[.:]", "")
  if methods[method] then return ("t:%s()\n  %s"):format(method, methods[method]) end
  local nearest = options.nearest(short, all_names())
  return ("there is no help on '%s'%s"):format(name,
    nearest and ("; did you mean '%s'?"):format(nearest) or "")
end

-- The help on a name or a value, as a text. name: what a function is called where it was found.
function M.text(what, name)
  if what == nil or what == xt then return overview end
  if type(what) == "string" then return of_name(what) end
  for known in pairs(M.builtin) do
    if rawget(xt, known) == what then return of_name(known) end
  end
  return of_value(what, name)
end

-- xt.help([name or value]) prints what there is to say.
function M.help(what) print(M.text(what)) end

return M
