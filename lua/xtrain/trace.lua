-- One backward, record by record: xt.debug.step walks through it, xt.debug.journal keeps the last
-- one's statistics, xt.debug.why reads them from a gradient back to the loss.
local core = require "xtrain.core"
local options = require "xtrain.options"
local observe = require "xtrain.observe"
local xt = require "xtrain"

local M = {}

-- ---- a trace -----------------------------------------------------------------------------------

-- A trace has
--   steps      in the order of the backward: {op, where, number, names, from, into = {stats},
--              out = {stats}, n_in}; into: of the gradients of its inputs, out: of its outputs
--   storages   {[number of a storage] = {{step, input}, ...}}: which gradients lie where
--   leaves     {[leaf] = {{step, input}, ...}}
--   where      the line of the backward

local function new_trace() return { steps = {}, storages = {}, leaves = {}, where = "?" } end

local function note(map, key, step, input)
  if key == nil then return end
  map[key] = map[key] or {}
  table.insert(map[key], { step = step, input = input })
end

local function stats_of(list, n)
  local out = {}
  for i = 1, n do
    local t = list and list[i]
    if t and t.dtype:find "^[fb]" then
      out[i] = core.stats(t)
      out[i].shape = observe.shape_text(t)
    end
  end
  return out
end

-- Adds a record to a trace; keep: the tensors themselves as well.
local function add(trace, e, keep)
  local step = { op = e.op, where = e.where, number = e.number, names = e.names, from = e.from,
    n_in = e.n_in, n_out = e.n_out, into = stats_of(e.grads_in, e.n_in),
    out = stats_of(e.grads_out, e.n_out) }
  if keep then
    step.inputs, step.outputs = e.inputs, e.outputs
    step.grads_in, step.grads_out = e.grads_in, e.grads_out
  end
  trace.steps[#trace.steps + 1] = step
  for i = 1, e.n_in do
    local t = e.grads_in[i]
    if t then
      note(trace.storages, core.storage(t), step, i)
      note(trace.leaves, e.from[i].leaf, step, i)
    end
  end
end

-- The gradients of variables may have been moved to buffers of their own.
local function finish(trace, e)
  trace.where = e.where
  if e.as_values then return end
  for leaf, places in pairs(trace.leaves) do
    local number = core.leaf_storage(leaf)
    if number then trace.storages[number] = places end
  end
end

-- ---- the journal -------------------------------------------------------------------------------

local journal = { last = nil, growing = nil }

local function on_event(e)
  if e.kind == "record" then
    journal.growing = journal.growing or new_trace()
    add(journal.growing, e, false)
  elseif e.kind == "end" then
    local trace = journal.growing or new_trace()
    finish(trace, e)
    journal.last, journal.growing = trace, nil
  end
end

-- journal(on): whether statistics of every gradient of the last backward are kept, for why. They
-- cost a pass over each gradient.
function M.journal(on)
  observe.remove(on_event)
  journal.growing = nil
  if on then observe.add(on_event) else journal.last = nil end
end

-- ---- step --------------------------------------------------------------------------------------

local function add_stats(lines, what, stats)
  if stats then lines[#lines + 1] = ("    %-24s %s: %s"):format(what, stats.shape, stats.text) end
end

local step_meta = {
  __tostring = function(s)
    local lines = { ("%d of %d  %s at %s"):format(s.position, s.of, s.op, s.where) }
    for k = 1, s.n_out do
      add_stats(lines, s.n_out == 1 and "gradient of the result" or "gradient of result " .. k,
        s.out[k])
    end
    for i = 1, s.n_in do
      local name = s.names[i] or "input " .. i
      if s.paths[i] then name = name .. " = " .. s.paths[i] end
      add_stats(lines, "gives " .. name, s.into[i])
    end
    return table.concat(lines, "\n")
  end,
}

local walk = {}
walk.__index = walk

-- The next step, or nil after the last.
function walk:next()
  if self.position >= #self.steps then return nil end
  self.position = self.position + 1
  return self.steps[self.position]
end

-- The step before, or nil.
function walk:back()
  if self.position <= 1 then return nil end
  self.position = self.position - 1
  return self.steps[self.position]
end

-- The next step that test(step) is true of; a string is the name of an op, or a part of its line.
function walk:find(test)
  local function is(s)
    if type(test) == "function" then return test(s) end
    return s.op == test or s.where:find(test, 1, true) ~= nil
  end
  for position = self.position + 1, #self.steps do
    if is(self.steps[position]) then
      self.position = position
      return self.steps[position]
    end
  end
end

local function is_finite(stats) return not stats or stats.finite == stats.n end

local function all_finite(s, list, n)
  for i = 1, n do
    if not is_finite(s[list][i]) then return false end
  end
  return true
end

-- The next step that makes a NaN or an infinity of gradients that were finite.
function walk:bad()
  return self:find(function(s)
    return all_finite(s, "out", s.n_out) and not all_finite(s, "into", s.n_in)
  end)
end

-- For a loop: for s in xt.debug.step{loss} do print(s) end
walk.__call = walk.next

function walk:__tostring()
  return ("backward of %d steps, at step %d; w:next() w:back() w:find(op or line) w:bad()"):format(
    #self.steps, self.position)
end

-- Which parameters the inputs of a step are.
local function paths_of(s, names)
  local paths = {}
  for i, from in pairs(s.from) do
    local param = from.leaf and names[from.leaf]
    paths[i] = param and param.name
  end
  return paths
end

-- step{loss [, seed = gradient of it, retain = true, model]}: runs the backward of loss, which
-- leaves gradients in .grad as ever, and keeps every step of it to walk through, forwards and back:
--   for s in xt.debug.step{loss} do print(s) end
--   w = xt.debug.step{loss}; w:next() w:back() w:find "softmax" w:bad()
-- A step has op, where (the line that made it), grads_out and grads_in (the gradients of results
-- and inputs), outputs and inputs (what was kept of forward), out and into (statistics of the
-- gradients), paths (of the inputs that are parameters of the model, or of the run in progress).
-- All gradients live as long as the walk does.
function M.step(given)
  if type(given) ~= "table" or type(given[1]) ~= "userdata" then
    core.fail("step: wanted a table with the value to go back from: xt.debug.step{loss}")
  end
  local o = { retain = true }
  for name, value in pairs(given) do
    if name ~= 1 then o[name] = value end
  end
  o = options.read("step", o, { seed = options.optional, retain = true, model = options.optional })
  local trace = new_trace()
  observe.during(function(e)
    if e.kind == "record" then add(trace, e, true) end
  end, function()
    given[1]:backward(o.seed, { retain = o.retain })
  end)
  local names = observe.parameters(o.model)
  for position, s in ipairs(trace.steps) do
    s.position, s.of, s.paths = position, #trace.steps, paths_of(s, names)
    setmetatable(s, step_meta)
  end
  return setmetatable({ steps = trace.steps, position = 0 }, walk)
end

-- ---- why ---------------------------------------------------------------------------------------

local function size_of(stats)
  if not is_finite(stats) then return math.huge end
  local n = stats.n > 0 and stats.n or 1
  return math.sqrt((stats.mean ^ 2 + stats.std ^ 2) * n) -- its norm
end

-- Of several gradients that were added up, the one that weighs most.
local function heaviest(places)
  local best, most = places[1], -1
  for _, place in ipairs(places) do
    local size = size_of(place.step.into[place.input])
    if size > most then best, most = place, size end
  end
  return best
end

-- {[number of a record] = {{step, input}, ...}}: which steps gave it gradients.
local function givers(trace)
  local by_number = {}
  for _, s in ipairs(trace.steps) do
    for i = 1, s.n_in do
      if s.into[i] and s.from[i].number > 0 then note(by_number, s.from[i].number, s, i) end
    end
  end
  return by_number
end

local function hop_text(hop)
  local s = hop.step
  local text = ("%s at %s, as its %s: %s: %s"):format(s.op, s.where,
    s.names[hop.input] or "input " .. hop.input, s.into[hop.input].shape,
    s.into[hop.input].text)
  if hop.others > 0 then
    text = text .. (" (the largest of %d that were added up)"):format(hop.others + 1)
  end
  if hop.begins then text = text .. "  <-- here it stops being finite" end
  return text
end

local report_meta = {
  __tostring = function(r)
    local lines = { r.title }
    for i, hop in ipairs(r.hops) do lines[i + 1] = "  from " .. hop_text(hop) end
    lines[#lines + 1] = "  from the backward at " .. r.where
    return table.concat(lines, "\n")
  end,
}

-- The way from the places where a gradient was made to the value that the backward began with.
local function trail(trace, places)
  local by_number, hops = givers(trace), {}
  while places do
    local place = heaviest(places)
    local s = place.step
    hops[#hops + 1] = { step = s, input = place.input, others = #places - 1, op = s.op,
      where = s.where, stats = s.into[place.input],
      begins = not is_finite(s.into[place.input]) and all_finite(s, "out", s.n_out) }
    places = by_number[s.number]
  end
  return hops
end

-- A trace of its own: of the gradient of `output` by t, which leaves .grad alone.
local function trace_between(t, output)
  local trace = new_trace()
  observe.during(function(e)
    if e.kind == "record" then
      add(trace, e, false)
    elseif e.kind == "end" then
      finish(trace, e)
    end
  end, function()
    if #xt.grad(output, { t }, { retain = true }) == 0 then
      core.fail("why: the value does not depend on that variable")
    end
  end)
  return trace
end

-- why(t [, output]): from a gradient back to what made it: the steps of the backward, each with its
-- op, its line and statistics, up to the value that the backward began with; where several
-- gradients were added up, along the largest, and along one that is not finite before all others.
-- t is a gradient or its variable, and the backward the last one that ran under
-- xt.debug.journal(true); or t is a variable, and output the value to go back from, whose records
-- must still be there. Printed, the result is a line a step; r.hops has them, and r.begins the hop
-- at which the gradient stops being finite.
function M.why(t, output)
  if type(t) ~= "userdata" then
    core.fail("why: wanted a gradient or a variable, not a " .. type(t))
  end
  local trace = output and trace_between(t, output) or journal.last
  if not trace then
    core.fail("why: no backward was written down: xt.debug.journal(true) before it, or "
      .. "xt.debug.why(variable, loss)")
  end
  local leaf = core.leaf(t)
  local places = leaf and trace.leaves[leaf] or trace.storages[(core.storage(t))]
  if not places then
    core.fail("why: the last backward did not make this tensor, which is no gradient, or an "
      .. "older one")
  end
  local value = leaf and not output and t.grad or t
  local hops = trail(trace, places)
  local report = setmetatable({ hops = hops, where = trace.where,
    title = ("gradient %s"):format(output and hops[1].stats.shape .. ": " .. hops[1].stats.text
      or observe.describe(value)) }, report_meta)
  for _, hop in ipairs(hops) do
    if hop.begins then report.begins = hop end
  end
  return report
end

return M
