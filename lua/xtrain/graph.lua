-- Graphs: a function recorded once, with named inputs and exports. The records are the tape's; what
-- runs them is in C. This file reads and writes names: of inputs, exports, state.
local xt = require "xtrain"
local options = require "xtrain.options"
local core = xt.core
local fail = core.fail

local M = {}

local builder = {}
builder.__index = builder

local graph = { __name = "graph" }
graph.__index = graph

local function is_tensor(value)
  return type(value) == "userdata" and getmetatable(value) == core.tensor_meta
end

local function describe(t)
  return t.dtype .. " " .. (t.ndim == 0 and "scalar" or table.concat(t.shape, "x"))
end

-- ---- recording ---------------------------------------------------------------------------------

-- input(name, default [, {required = true, lent = true}]): a tensor, an integer (0-dim i64) or a
-- number (0-dim f32). Returns what stands for it. Of a required input only shape and dtype of the
-- default count. A lent one must be fed and may be written in place: an export of it gives back the
-- tensor that was fed.
function builder:input(name, default, given)
  if type(name) ~= "string" or name == "" then fail("input: wanted a name, then a default") end
  local o = options.read("input", given, { required = false, lent = false })
  local value = default
  if math.type(default) == "integer" then
    value = xt.tensor(default, { dtype = "i64" })
  elseif type(default) == "number" then
    value = xt.tensor(default)
  elseif not is_tensor(default) then
    fail(("input '%s': the default is a %s, wanted a tensor or a number; with {required = true} "
      .. "only its shape and dtype count"):format(name, type(default)))
  end
  self.inputs[name] = core.graph_input(self.handle, name, value, o.required, o.lent)
  return self.inputs[name]
end

-- export(name, tensor or table of named tensors): a result. What was written to the state since the
-- export before it belongs to it.
function builder:export(name, outputs)
  if type(name) ~= "string" or name == "" then fail("export: wanted a name, then a tensor") end
  local names, values = {}, {}
  if is_tensor(outputs) then
    names[1], values[1] = "", outputs
  elseif type(outputs) == "table" then
    names = options.names(outputs)
    for i, each in ipairs(names) do values[i] = outputs[each] end
  else
    fail(("export '%s': given a %s, wanted a tensor or a table of named tensors"):format(name,
      type(outputs)))
  end
  if #names == 0 then fail(("export '%s': the table names no tensor"):format(name)) end
  core.graph_export(self.handle, name, names, values)
end

-- state(model): the graph calls its variables by their paths. state(name, tensor): one of them. The
-- library's models and optimizers do this themselves.
function builder:state(what, tensor)
  if is_tensor(tensor) then
    core.graph_name(self.handle, what, tensor)
  elseif type(what) == "table" then
    for _, param in ipairs(xt.nn.params(what)) do
      core.graph_name(self.handle, param.name, param.tensor)
    end
  else
    fail("state: wanted a model, or a name and a tensor")
  end
end

local current -- the builder of the graph being recorded

-- For models and optimizers: names parameters {name, tensor}; nothing outside a graph.
function M.name_params(params)
  if not current then return end
  for _, param in ipairs(params) do core.graph_name(current.handle, param.name, param.tensor) end
end

function M.name(name, tensor)
  if current then core.graph_name(current.handle, name, tensor) end
end

-- What is asked for again and again, read once.
local function finish(handle)
  local self = setmetatable({ handle = handle, input_list = {}, input_at = {}, state_list = {},
    state_at = {}, export_list = core.graph_exports(handle), export_at = {} }, graph)
  for number, root in ipairs(core.graph_roots(handle)) do
    root.number = number
    if root.kind == "input" then
      self.input_list[#self.input_list + 1] = root
      self.input_at[root.name] = root
    elseif root.kind == "state" and root.used then
      self.state_list[#self.state_list + 1] = root
      self.state_at[root.name] = root
    end
  end
  for i, export in ipairs(self.export_list) do
    export.number = i
    self.export_at[export.name] = export
  end
  return self
end

-- graph(fn [, {frozen = true}]) -> graph: fn(b) is called once. Frozen: variables are constants, no
-- gradient is taken, and what depends on no input is computed once, here.
function M.graph(fn, given)
  local o = options.read("graph", given, { frozen = false })
  if type(fn) ~= "function" then fail("graph: wanted a function: xt.graph(function(b) ... end)") end
  local before = current
  local ok, handle = pcall(core.graph_record, function(handle)
    current = setmetatable({ handle = handle, inputs = {} }, builder)
    fn(current)
  end, o.frozen)
  current = before
  if not ok then error(handle, 0) end
  local self = finish(handle)
  if #self.export_list == 0 then fail("graph: it exports nothing: b:export(name, tensor)") end
  return self
end

-- ---- running -----------------------------------------------------------------------------------

local function keys(list)
  local names = {}
  for i, each in ipairs(list) do names[i] = each.name end
  return names
end

local function unknown(what, name, list)
  local names = keys(list)
  local nearest = options.nearest(tostring(name), names)
  fail(("unknown %s '%s'%s; the %ss are %s"):format(what, tostring(name),
    nearest and (" (did you mean '%s'?)"):format(nearest) or "", what,
    #names > 0 and table.concat(names, ", ") or "none"))
end

local function find_export(self, name)
  return self.export_at[name] or unknown("export", name, self.export_list)
end

-- A number takes the dtype of the input it is for.
local function as_tensor(root, value)
  if is_tensor(value) then return value end
  if type(value) ~= "number" then
    fail(("input '%s' (%s:%d): given a %s, wanted %s"):format(root.name, root.file, root.line,
      type(value), describe(root.tensor)))
  end
  local dtype = root.tensor.dtype
  if not dtype:find "f" and not math.tointeger(value) then
    fail(("input '%s' (%s:%d): given %s, wanted %s"):format(root.name, root.file, root.line, value,
      describe(root.tensor)))
  end
  return xt.tensor(value, { dtype = dtype, device = root.tensor.device })
end

-- feeds: {name = value}, or a list of such tables. -> place -> tensor
local function read_feeds(self, feeds)
  local out = {}
  local function read(t)
    for name, value in pairs(t) do
      local root = self.input_at[name]
      if not root then unknown("input", name, self.input_list) end
      if out[root.place] then
        fail(("input '%s' (%s:%d) is given twice"):format(name, root.file, root.line))
      end
      out[root.place] = as_tensor(root, value)
    end
  end
  if feeds == nil then return out end
  if type(feeds) ~= "table" then
    fail(("feeds are a %s, wanted a table of named tensors"):format(type(feeds)))
  end
  if #feeds == 0 then
    read(feeds)
  else
    for _, each in ipairs(feeds) do read(each) end
  end
  return out
end

local function read_state(self, state, export, fed)
  local out, needed = {}, {}
  for name, t in pairs(state) do
    local root = self.state_at[name]
    if not root then unknown("state", name, self.state_list) end
    out[root.place] = t
  end
  for _, number in ipairs(core.graph_plan(self.handle, export.number, fed).roots) do
    needed[number] = true
  end
  for _, root in ipairs(self.state_list) do
    if needed[root.number] and not out[root.place] then
      fail(("state '%s' is not in the table: it needs %s"):format(root.name,
        table.concat(keys(self.state_list), ", ")))
    end
  end
  return out
end

-- run(export [, feeds [, {state = table}]]): feeds is {name = tensor or number}, or a list of such
-- tables. Unfed inputs take their defaults. Returns a tensor, or a table as the export has it.
function graph:run(name, feeds, given)
  local export = find_export(self, name)
  local fed = read_feeds(self, feeds)
  local state
  if given ~= nil then
    local o = options.read("run", given, { state = options.optional })
    if o.state then state = read_state(self, o.state, export, fed) end
  end
  local list = core.graph_run(self.handle, export.number, fed, state)
  if export.names[1] == "" then return list[1] end
  local out = {}
  for i, each in ipairs(export.names) do out[each] = list[i] end
  return out
end

-- ---- looking -----------------------------------------------------------------------------------

-- inputs(): an array of {name, shape, dtype, default, required, line}, in order of declaration.
function graph:inputs()
  local list = {}
  for i, root in ipairs(self.input_list) do
    list[i] = { name = root.name, shape = root.tensor.shape, dtype = root.tensor.dtype,
      default = not root.required and root.tensor or nil, required = root.required,
      where = root.file .. ":" .. root.line }
  end
  return list
end

-- exports(): their names, in order.
function graph:exports() return keys(self.export_list) end

-- state(): the tensors captured, by name; they share their bytes.
function graph:state()
  local out = {}
  for _, root in ipairs(self.state_list) do out[root.name] = root.tensor end
  return out
end

local function fed_set(self, fed)
  local set = {}
  for _, name in ipairs(fed or {}) do
    local root = self.input_at[name]
    if not root then unknown("input", name, self.input_list) end
    set[root.place] = true
  end
  return set
end

-- records([export [, fed]]): what was recorded; with an export, what a run of it launches, in
-- order, when the inputs listed in `fed` are fed. Each is {op, outputs = {"f32 2x3"}, file,
-- line, bytes}.
function graph:records(name, fed)
  local nodes, values = core.graph_nodes(self.handle), core.graph_values(self.handle)
  local order = {}
  if name then
    order = core.graph_plan(self.handle, find_export(self, name).number, fed_set(self, fed)).records
  else
    for i in ipairs(nodes) do order[i] = i end
  end
  local sizes = { f64 = 8, i64 = 8, f32 = 4, i32 = 4, bf16 = 2, f16 = 2, u8 = 1 }
  local list = {}
  for i, number in ipairs(order) do
    local node = nodes[number]
    local record = { op = node.op, file = node.file, line = node.line, outputs = {}, bytes = 0,
      number = number, updates = node.updates }
    for _, v in ipairs(node.outputs) do
      local value = values[v]
      if value then
        local count = 1
        for _, n in ipairs(value.shape) do count = count * n end
        record.outputs[#record.outputs + 1] = describe { dtype = value.dtype, ndim = #value.shape,
          shape = value.shape }
        if not node.view then record.bytes = record.bytes + count * sizes[value.dtype] end
      end
    end
    list[i] = record
  end
  return list
end

local function signature(self, export, fed)
  local plan = core.graph_plan(self.handle, export.number, fed)
  local needed, parts, results, state = {}, {}, {}, 0
  for _, number in ipairs(plan.roots) do needed[number] = true end
  for _, root in ipairs(self.input_list) do
    if needed[root.number] then
      parts[#parts + 1] = ("%s: %s%s"):format(root.name, describe(root.tensor),
        root.required and "" or root.ones and " = ones" or " = default")
    end
  end
  for _, root in ipairs(self.state_list) do
    if needed[root.number] then state = state + 1 end
  end
  local values = core.graph_values(self.handle)
  for i, name in ipairs(export.names) do
    local value = values[export.values[i]]
    local text = describe { dtype = value.dtype, ndim = #value.shape, shape = value.shape }
    results[i] = name == "" and text or name .. ": " .. text
  end
  return ("%s(%s)%s -> %s"):format(export.name, table.concat(parts, ", "),
    state > 0 and (" with %d of state"):format(state) or "", table.concat(results, ", "))
end

-- describe([export [, fed]]): the signature of every export, or of one with its records. Without
-- `fed` all inputs count as fed, so that masks show among the arguments.
function graph:describe(name, fed)
  local all = {}
  for _, root in ipairs(self.input_list) do all[#all + 1] = root.name end
  local lines = {}
  if not name then
    for _, export in ipairs(self.export_list) do
      lines[#lines + 1] = signature(self, export, fed_set(self, fed or all))
    end
    return table.concat(lines, "\n")
  end
  lines[1] = signature(self, find_export(self, name), fed_set(self, fed or all))
  for _, record in ipairs(self:records(name, fed or all)) do
    lines[#lines + 1] = ("%6d  %-20s %-24s %12d bytes  %s:%d"):format(record.number, record.op,
      table.concat(record.outputs, ", "), record.bytes, record.file, record.line)
  end
  return table.concat(lines, "\n")
end

-- A run on stand-ins: defaults, and copies of the state and of what is lent. It shows how much
-- scratch each kernel takes, which then gets its place among the values.
local function try(self, export, set)
  local feeds, state = {}, {}
  for _, root in ipairs(self.input_list) do
    if root.lent then
      feeds[root.place] = root.tensor:clone()
    elseif set[root.place] or root.required then
      feeds[root.place] = root.tensor
    end
  end
  for _, root in ipairs(self.state_list) do state[root.place] = root.tensor:clone() end
  pcall(core.graph_run, self.handle, export.number, feeds, state) -- defaults may be refused
  xt.collect()
end

-- memory([export [, fed [, {measure = true}]]]): bytes of a run: `values`, all that lives in it
-- alone, kernels' scratch included; outputs; copies that kernels need of inputs that do not lie as
-- they want; a backup of state that could not be written last; and the peak, their sum. Scratch is
-- known after a run: unless there was one, or measure is false, one is made on stand-ins, and
-- nothing is changed by it. Without an export: of each, and without such a run.
function graph:memory(name, fed, given)
  local o = options.read("memory", given, { measure = name ~= nil })
  if not name then
    local out = {}
    for _, export in ipairs(self.export_list) do out[export.name] = self:memory(export.name) end
    return out
  end
  local export, set = find_export(self, name), fed_set(self, fed)
  local plan = core.graph_plan(self.handle, export.number, set)
  if o.measure and not plan.placed then
    try(self, export, set)
    plan = core.graph_plan(self.handle, export.number, set)
  end
  return { values = plan.arena, outputs = plan.outputs, copies = plan.copies,
    scratch = plan.scratch, backup = plan.backup,
    peak = plan.arena + plan.outputs + plan.backup + plan.copies, calls = plan.calls,
    elided = plan.elided }
end

-- dot(): the records as a graph for Graphviz.
function graph:dot()
  local nodes, values, roots = core.graph_nodes(self.handle), core.graph_values(self.handle),
    core.graph_roots(self.handle)
  local lines, maker = { "digraph xtrain {", "  rankdir = TB; node [shape = box]" }, {}
  local function line(format, ...) lines[#lines + 1] = "  " .. format:format(...) end
  for i, root in ipairs(roots) do
    if root.name and root.used then
      line('r%d [label = "%s", shape = %s]', i, root.name,
        root.kind == "input" and "ellipse" or "cylinder")
    end
  end
  for i, node in ipairs(nodes) do
    line('n%d [label = "%s\\nline %d"]', i, node.op, node.line)
    for _, v in ipairs(node.inputs) do
      local root = values[v] and roots[values[v].root]
      if maker[v] then
        line("n%d -> n%d", maker[v], i)
      elseif root and root.name then
        line("r%d -> n%d", values[v].root, i)
      end
    end
    for _, v in ipairs(node.outputs) do maker[v] = i end
  end
  for e, export in ipairs(self.export_list) do
    line('e%d [label = "%s", shape = doubleoctagon]', e, export.name)
    for _, v in ipairs(export.values) do
      if maker[v] then line("n%d -> e%d", maker[v], e) end
    end
  end
  lines[#lines + 1] = "}"
  return table.concat(lines, "\n")
end

-- ---- files -------------------------------------------------------------------------------------

local FORMAT = 1

-- save(path): records as JSON in the metadata of a safetensors file, whose tensors are defaults,
-- constants and state. Returns true, or nil, message.
function graph:save(path)
  local tensors = {}
  local roots = core.graph_roots(self.handle)
  for i, root in ipairs(roots) do
    if root.tensor then tensors[("root.%d"):format(i)] = root.tensor end
    root.tensor = nil
  end
  local text = xt.json.encode { format = FORMAT, roots = roots,
    values = core.graph_values(self.handle), nodes = core.graph_nodes(self.handle),
    exports = core.graph_exports(self.handle) }
  return xt.safetensors.save(path, tensors, { xtrain_graph = text })
end

-- graph_load(path) -> graph; or nil, message.
function M.load(path)
  local tensors, metadata = xt.safetensors.load(path)
  if not tensors then return nil, metadata end
  local text = metadata and metadata.xtrain_graph
  local parts = text and xt.json.decode(text)
  if type(parts) ~= "table" or parts.format ~= FORMAT then
    return nil, path .. ": this is no graph that xtrain has saved"
  end
  local handle = core.graph_blank()
  local ok, message = pcall(function()
    for i, root in ipairs(parts.roots) do
      root.tensor = tensors[("root.%d"):format(i)]
      core.graph_add_root(handle, root)
    end
    for _, value in ipairs(parts.values) do core.graph_add_value(handle, value) end
    for _, node in ipairs(parts.nodes) do core.graph_add_node(handle, node) end
    for _, export in ipairs(parts.exports) do core.graph_add_export(handle, export) end
  end)
  if not ok then return nil, ("%s: %s"):format(path, message) end
  return finish(handle)
end

return M
