-- A recipe's run: its options, its loop over steps and micro-batches, its log, saves and digest.
--
--   local run = xt.recipe{ name = "v8", dim = 1024, steps = 36000 }
--   for step in run:steps() do
--     for micro, ids, labels in run:micros(step, data) do ... run:backward(sum, count) end
--     local norm = opt:step(lr(step), {clip = 1.0})
--     run:log(step, {lr = lr(step), grad_norm = norm})
--   end
--
-- Options are fields of the run (run.dim), except those with the name of a method, which are in
-- run.options (run.options.steps). All that is private is in run.own.
local xt = require "xtrain"
local nn = require "xtrain.nn"
local active = require "xtrain.active"
local bench = require "xtrain.bench"
local ctl = require "xtrain.ctl"
local edits = require "xtrain.edits"
local events = require "xtrain.events"
local finite = require "xtrain.finite"
local log = require "xtrain.log"
local options = require "xtrain.options"
local options_text = require "xtrain.options_text"
local products = require "xtrain.products"
local profile = require "xtrain.profile"
local save = require "xtrain.save"
local train = require "xtrain.train"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"
local fail = xt.core.fail

-- The options that every recipe understands. Names of folders are "" when the run shall choose.
local COMMON = {
  device = "", -- "cpu" or "cuda"; the default device when ""
  dtype = "f32", -- of the arithmetic; masters are f32
  seed = 1,
  out = "", -- the run folder; runs/NAME, or the next free NAME-2, NAME-3 when ""
  steps = 1000,
  accum = 1, -- micro-batches a step
  graph = false, -- run:train records its first step, and replays it
  resume = "", -- "auto", or a save or run folder
  keep = 2, -- saves
  log_every = 10, -- steps
  bench = 0, -- timed steps
  tune = "", -- with bench: the table that the fastest algorithms of the products go into
  smoke = false, -- three steps, to see that the recipe works
  trap = false, -- stop at the first op whose output is not finite
  lost_updates = false, -- log the share of bf16 weights whose update rounds to nothing
  profile = 0, -- steps whose time is told op by op
  threads = 0, -- of the CPU; all when 0
}

local SMOKE_STEPS = 3
local MOST_DIGESTS = 4096 -- kept from one log line to the next
local STOPPED = 130 -- exit status after Ctrl-C, as shells have it

local run = {}

-- ---- making a run ------------------------------------------------------------------------------

local RESERVED = { name = true, own = true, options = true }

local function holds_run(path)
  return file.exists(path .. "/config.json") or #save.list(path) > 0
end

-- runs/NAME, runs/NAME-2, ...: the first free one, and the last one taken (or nil).
local function default_folders(name)
  local base, taken = "runs/" .. name, nil
  local path, number = base, 1
  while holds_run(path) do
    taken = path
    number = number + 1
    path = ("%s-%d"):format(base, number)
  end
  return path, taken
end

-- The run folder, and the saves to resume from (newest first; empty: start anew); or nil, message.
local function choose_folder(name, o)
  if o.resume == "" then
    if o.smoke and o.out == "" then
      local path = "runs/" .. name .. "-smoke"
      if holds_run(path) then file.remove_tree(path) end
      return path, {}
    end
    if o.out == "" then return default_folders(name), {} end
    if holds_run(o.out) then
      return nil, ("out=%s holds a run already: resume=auto goes on with it, another out= starts "
        .. "a new one"):format(o.out)
    end
    return o.out, {}
  end
  if o.resume == "auto" then
    local free, taken = default_folders(name)
    local path = o.out ~= "" and o.out or taken or free
    local saves = {}
    for _, step in ipairs(save.list(path)) do
      table.insert(saves, 1, path .. "/" .. save.name(step))
    end
    return path, saves
  end
  local found, message = save.find(o.resume)
  if not found then return nil, "resume: " .. message end
  return o.out ~= "" and o.out or found:match("^(.*)/[^/]+$") or ".", { found }
end

-- The recipe's own text: of the file that called xt.recipe.
local function recipe_text(level)
  local source = debug.getinfo(level + 1, "S").source
  if source:sub(1, 1) ~= "@" then return nil end
  local handle = io.open(source:sub(2), "rb")
  if not handle then return nil end
  local text = handle:read("a")
  handle:close()
  return text, source:sub(2)
end

-- recipe{name = ..., options with their defaults} [, words]: words are the overrides key=value, by
-- default those of the command line. Raises for an unknown key or a value of the wrong kind.
-- smoke = {option = value} are the defaults of a run with smoke=true.
local function recipe(given, words)
  if type(given) ~= "table" or type(given.name) ~= "string" then
    fail("recipe: wanted a table of options with a name: xt.recipe{name = \"mine\", ...}")
  end
  local name, defaults, small = given.name, {}, {}
  for key, value in pairs(COMMON) do defaults[key] = value end
  for key, value in pairs(given) do
    if key == "smoke" and type(value) == "table" then
      small = value
    elseif key ~= "name" then
      if type(key) ~= "string" or RESERVED[key] then
        fail(("recipe: an option cannot be called '%s'"):format(tostring(key)))
      end
      local common = COMMON[key]
      if common ~= nil and type(common) ~= type(value) then
        fail(("recipe: option '%s' is a %s everywhere, not a %s"):format(key, type(common),
          type(value)))
      end
      defaults[key] = value
    end
  end
  local replay = active.replay
  words = replay and (replay.words or {}) or words or rawget(_G, "arg") or {}
  local o, message = options_text.apply(name, words, defaults)
  if o and o.smoke then
    for key, value in pairs(small) do
      if type(value) ~= type(defaults[key]) then
        fail(("recipe: smoke sets '%s' to a %s, and as an option it is a %s"):format(key,
          type(value), type(defaults[key])))
      end
      defaults[key] = value
    end
    o, message = options_text.apply(name, words, defaults)
  end
  if not o then fail(message) end
  for key in pairs(replay and o or {}) do
    if replay.options[key] ~= nil then o[key] = replay.options[key] end
  end
  if o.smoke then o.steps, o.log_every = math.min(o.steps, SMOKE_STEPS), 1 end
  local self = setmetatable({ name = name, options = o }, { __index = run, __name = "run" })
  for key, value in pairs(o) do
    if run[key] == nil then self[key] = value end
  end
  local own = { models = {}, optimizers = {}, saves = {}, sums = {}, step = 0, digest = 0,
    tokens = 0, skips = 0, found = {}, best = math.huge, busy = 0.0, busy_tokens = 0,
    busy_steps = 0, rank = 0, world = 1, seconds = {}, chain = {}, replay = replay,
    progress = log.progress(), common = COMMON }
  self.own = own
  own.recipe_text, own.recipe_path = recipe_text(2)
  if o.device ~= "" then xt.device(o.device) end
  self.device = xt.device()
  if o.threads > 0 then xt.threads(o.threads) end
  if o.trap then xt.core.trap(true) end
  if o.graph and o.lost_updates then
    fail("recipe: graph=true has no lost_updates: leave one of them out")
  end
  if not replay then xt.core.forget_products() end -- a replay has taken its run's
  if o.tune ~= "" then
    if o.bench == 0 or o.graph or self.device ~= "cuda" then
      fail("recipe: tune=FILE measures products, and goes with device=cuda bench=1 graph=false: a "
        .. "run never chooses by timing")
    end
    products.start_tuning(o.tune)
  end
  if replay then
    self.out, own.saves = replay.out, { replay.save }
  elseif o.bench == 0 then
    self.out, own.saves = choose_folder(name, o)
    if not self.out then fail(own.saves) end
  end
  edits.open(self)
  active.run = self
  if replay and replay.last == 0 and not replay.stand then
    error(replay, 0) -- of interest were the options alone
  end
  return self
end

-- ---- what the run holds ------------------------------------------------------------------------

-- Called by models and optimizers when they are made.
function run:enter_model(model) self.own.models[#self.own.models + 1] = model end

function run:enter_optimizer(optimizer)
  self.own.optimizers[#self.own.optimizers + 1] = optimizer
end

-- attach{model = table, tokenizer = path or tokenizer, bytes_per_token = number}: the model that is
-- saved, where it is not one of the library's; the tokenizer that belongs to it, kept in the run
-- folder; and what turns a loss into bits a byte.
function run:attach(given)
  local o = options.read("run:attach", given, { model = options.optional,
    tokenizer = options.optional, bytes_per_token = options.optional })
  local own = self.own
  if o.model then own.models = { o.model } end
  own.tokenizer = o.tokenizer or own.tokenizer
  own.bytes_per_token = o.bytes_per_token or own.bytes_per_token
  return self
end

-- The parameters that a save holds: of the models, or of the optimizers where there is no model.
local function saved_params(own)
  local params, seen = {}, {}
  local function add(list)
    for _, param in ipairs(list) do
      if not seen[param.name] then
        seen[param.name] = true
        params[#params + 1] = param
      elseif seen[param.name] and #own.models > 1 then
        fail("run: two models have a parameter " .. param.name
          .. ": put them into one table and give it to run:attach{model = ...}")
      end
    end
  end
  for _, model in ipairs(own.models) do add(nn.params(model)) end
  if #own.models == 0 then
    for _, optimizer in ipairs(own.optimizers) do add(optimizer.params) end
  end
  return params
end

local function saved_state(own)
  local state = {}
  for _, optimizer in ipairs(own.optimizers) do
    for name, tensor in pairs(optimizer:state()) do state[name] = tensor end
  end
  return state
end

-- ---- the loop ----------------------------------------------------------------------------------

-- Counts anew what the micro-batches of a step add up to, and forgets their gradients.
local function begin_micros(own)
  own.count, own.backwards, own.step_tokens = 0, 0, 0
  own.counts = {} -- 0-dim tensors that count has not taken in yet
  own.loss = nil
  for i = #own.sums, 1, -1 do own.sums[i] = nil end
  for _, optimizer in ipairs(own.optimizers) do optimizer:zero_grad() end
end

local function begin_step(self, step)
  local own = self.own
  own.step, own.closed = step, false
  own.norm, own.lr, own.lost, own.unread = nil, nil, nil, nil
  begin_micros(own)
  own.began = file.monotonic()
end

local function number_of(value)
  if type(value) == "userdata" then return value:item() end
  return value
end

-- The labels of the step's micro-batches so far. On a GPU this waits for them.
local function count_of(own)
  for i = #own.counts, 1, -1 do
    own.count = own.count + own.counts[i]:item()
    own.counts[i] = nil
  end
  return own.count
end

-- The mean loss of the step, read once; nil before any backward.
local function loss_of(own)
  if own.loss == nil and own.backwards > 0 then
    local sum, count = 0.0, count_of(own)
    for _, each in ipairs(own.sums) do sum = sum + each:item() end
    own.loss = count > 0 and sum / count or 0.0
  end
  return own.loss
end

-- One link of the run's digest: XXH3-64 of 40 little-endian bytes: the digest before, the step, and
-- the bits of loss, gradient norm and learning rate as f64.
local function close_step(self)
  local own = self.own
  if own.closed or own.step == 0 then return end
  own.closed = true
  own.norm = number_of(own.norm)
  own.digest = xt.core.hash(("<i8i8ddd"):pack(own.digest, own.step, loss_of(own) or 0.0,
    own.norm or 0.0, number_of(own.lr) or 0.0))
  if #own.chain == MOST_DIGESTS then own.chain = {} end -- of a recipe that does not log
  own.chain[#own.chain + 1] = save.hex(own.digest)
  if own.replay then
    own.replay.chain[own.step] = save.hex(own.digest)
    if own.replay.steps then
      own.replay.steps[own.step] = { loss = loss_of(own), grad_norm = own.norm,
        lr = number_of(own.lr) }
    end
  end
  own.tokens = own.tokens + own.step_tokens
end

local function open_folder(self)
  local own = self.own
  local function must(ok, message)
    if not ok then fail("run: " .. tostring(message)) end
  end
  must(file.mkdir(self.out))
  must(file.write_atomic(self.out .. "/config.json",
    json.encode { name = self.name, options = self.options, version = xt.version,
      fingerprint = save.fingerprint() } .. "\n"))
  if own.recipe_text then
    must(file.write_atomic(self.out .. "/recipe.lua", own.recipe_text))
  end
  if type(own.tokenizer) == "string" then
    local text, message = file.read(own.tokenizer)
    must(text, message)
    must(file.write_atomic(self.out .. "/tokenizer.json", text))
  elseif own.tokenizer then
    must(own.tokenizer:save(self.out))
  end
  ctl.open(self)
end

local function cut_logs(self, step)
  log.cut(self.out .. "/metrics.jsonl", step)
  events.cut(self.out, step)
end

-- Goes on from the newest save that can be read. Raises when there are saves and none can be.
local function restore(self)
  local own = self.own
  if #own.saves == 0 then
    if self.options.resume == "auto" then
      own.progress:say(("%s: no save in %s yet, starting anew"):format(self.name, self.out))
    end
    return cut_logs(self, 0)
  end
  local failures = {}
  for _, dir in ipairs(own.saves) do
    local info, message = save.read(dir, saved_params(own), own.optimizers)
    if info then
      own.step, own.closed, own.digest = info.step, true, math.tointeger(info.digest_bits)
      own.tokens, own.best, own.skips = info.tokens, info.best or math.huge, info.skips
      own.saved, own.chain = info.step, info.chain or {}
      if own.replay then return end
      cut_logs(self, info.step)
      own.progress:say(("%s: resumed from %s"):format(self.name, dir))
      return
    end
    own.progress:say("cannot resume: " .. message)
    failures[#failures + 1] = message
  end
  fail("resume: " .. table.concat(failures, "\n"))
end

-- After Ctrl-C: a save, and the way back.
local function stop(self)
  local own = self.own
  if own.step > 0 and own.saved ~= own.step then self:save(own.step) end
  own.progress:say(("stopped after step %d; to go on: xtrain %s out=%s resume=auto")
    :format(own.step, own.recipe_path or "RECIPE.lua", self.out))
  ctl.close(self)
  os.exit(STOPPED, true)
end

-- At the last step of a replay: raises its table, unless whoever stands there goes on.
local function end_replay(self)
  local own = self.own
  local replay = own.replay
  if replay.stand then replay.stand(self) end
  if own.step < replay.last then return end
  replay.digests = save.digests(saved_params(own), saved_state(own))
  error(replay, 0)
end

-- The numbers of all steps that are left. Between two of them lies the step boundary: digest, full
-- collection, Ctrl-C.
function run:steps()
  local own, last = self.own, self.options.steps
  if self.options.bench > 0 and not own.replay then return bench.steps(self, begin_step) end
  if not own.replay then open_folder(self) end
  restore(self)
  edits.start(self)
  return function()
    close_step(self)
    xt.collect()
    if own.replay then
      if own.step >= own.replay.last then
        end_replay(self)
      end
    elseif ctl.boundary(self) or xt.interrupted() then
      stop(self)
    end
    profile.boundary(self, own.step < last and own.step + 1 or nil)
    if own.step >= last then
      own.progress:close()
      xt.core.polling(false) -- from here on a Ctrl-C stops what runs
      ctl.close(self)
      return nil
    end
    edits.boundary(self, own.step + 1)
    begin_step(self, own.step + 1)
    if active.before_step then active.before_step(self, own.step) end
    return own.step
  end
end

-- Looks at loss and gradients of the step's micro-batches; whether they shall come once more, since
-- something is not finite (finite.lua).
function run:made_again()
  if not finite.again(self) then return false end
  begin_micros(self.own)
  return true
end

-- The micro-batches of a step: their global number (from 0, over all ranks), ids, labels. A
-- benchmark makes up tokens; a recipe without an option seq brings its own data to it as well.
-- Where their loss or gradient is not finite, they come a second time (finite.lua).
function run:micros(step, data)
  local own = self.own
  if own.step ~= step then begin_step(self, step) end
  local accum, micro = self.options.accum, -1
  return function()
    micro = micro + 1
    if micro >= accum then
      if own.unread or not self:made_again() then return nil end
      micro = 0
    end
    local ids, labels
    if self.options.bench > 0 and (self.options.seq or not data) then
      ids, labels = bench.batch(self, step, micro)
    else
      ids, labels = data:batch(step, micro)
    end
    own.step_tokens = own.step_tokens + ids.numel
    return own.rank * accum + micro, ids, labels
  end
end

-- Backward of the summed loss of one micro-batch, and its count of labels: the optimizer divides
-- once, by the labels of all micro-batches.
function run:backward(sum, count)
  local own = self.own
  if self.options.graph then
    fail("run:backward: graph=true replays steps that are taken by run:train; this recipe's loop "
      .. "takes them itself")
  end
  sum:backward()
  own.sums[#own.sums + 1] = sum:detach()
  own.loss = nil
  if type(count) == "userdata" then
    own.counts[#own.counts + 1] = count
  else
    own.count = own.count + count
  end
  own.backwards = own.backwards + 1
end

-- One whole update, by the above or, with graph=true, by replay: see xtrain/train.lua.
run.train = train

-- For optimizers: what the gradients of this step are divided by; nil outside of run:backward.
function run:divisor()
  if (self.own.backwards or 0) > 0 then return count_of(self.own) end
end

-- The mean loss of the step so far; nil before any backward. Reading it waits for the device.
function run:mean_loss() return loss_of(self.own) end

-- What is wrong with it, or nil.
function run:loss_fault()
  local loss = loss_of(self.own)
  if loss and not finite.is_finite(loss) then return "the loss is " .. finite.shown(loss) end
end

function run:note_step(lr, norm)
  self.own.lr, self.own.norm = lr, norm
end

-- Whether the optimizer shall count, at this step, the updates that bf16 loses.
function run:wants_lost_updates()
  local o, step = self.options, self.own.step
  return o.lost_updates and not self.own.replay and (step == 1 or step % o.log_every == 0)
end

function run:note_lost_updates(share) self.own.lost = share end

function run:note_skip(reason)
  local own = self.own
  own.skips = own.skips + 1
  local loss = loss_of(own)
  own.progress:say(("step %d skipped, nothing changed: %s; loss %s"):format(own.step, reason,
    loss and finite.shown(loss) or "unknown"))
end

-- Tells, on the terminal and in the log, where a step's first value that is not finite came from.
function run:note_nonfinite(text, found)
  local own = self.own
  own.progress:say(text)
  own.found[#own.found + 1] = ("step %d: %s"):format(own.step, found or "a sum overflowed")
end

-- Whether something that happens every so many steps happens now. The last step is always due.
function run:due(step, every)
  if not every or every <= 0 or self.options.bench > 0 then return false end
  return step % every == 0 or step == self.options.steps
end

-- ---- the log -----------------------------------------------------------------------------------

local function progress_text(self, row, step_seconds)
  local parts = { ("step %d/%d"):format(row.step, self.options.steps) }
  local function add(format, value)
    if type(value) == "number" and not finite.is_finite(value) then
      format, value = format:gsub("%%[.%d]*%a", "%%s", 1), finite.shown(value)
    end
    parts[#parts + 1] = format:format(value)
  end
  if row.loss then add("loss %.4f", row.loss) end
  if row.bits_per_byte then add("%.3f bits/byte", row.bits_per_byte) end
  if row.held_out then add("held-out %.4f", row.held_out) end
  if row.lr then add("lr %.2e", row.lr) end
  if row.grad_norm then add("norm %.3f", row.grad_norm) end
  if row.lost_updates then add("lost %.1f %%", 100 * row.lost_updates) end
  if row.tokens_per_s then add("%s tokens/s", log.count(row.tokens_per_s)) end
  if step_seconds then
    add("%s left", log.duration((self.options.steps - row.step) * step_seconds))
  end
  return table.concat(parts, "  ") .. (row.sample and "\n" .. row.sample or "")
end

local function write_row(self, row)
  local ok, message = log.append(self.out .. "/metrics.jsonl", row)
  if ok then ok, message = events.append(self.out, row) end
  if not ok and not self.own.log_failed then
    self.own.log_failed = true -- said once; training goes on
    self.own.progress:say("metrics cannot be written, training goes on: " .. tostring(message))
  end
end

-- A line about this step: values are numbers or 0-dim tensors. The loss, tokens/s and digest are
-- known to the run. The first call of a step counts as its log line, shown every log_every steps; a
-- later one, such as {held_out = loss, sample = text}, is always written.
function run:log(step, values)
  local own, o = self.own, self.options
  if o.bench > 0 then return end
  local row = { step = step }
  for name, value in pairs(values or {}) do row[name] = number_of(value) end
  if row.held_out then own.held_out, own.held_out_step = row.held_out, step end
  if own.bytes_per_token and row.held_out and not row.bits_per_byte then
    row.bits_per_byte = row.held_out / math.log(2) / own.bytes_per_token
  end
  if own.logged == step then
    if own.replay then return end
    write_row(self, row)
    own.progress:say(progress_text(self, row))
    return
  end
  own.logged = step
  close_step(self)
  own.busy = own.busy + file.monotonic() - own.began
  own.busy_tokens = own.busy_tokens + own.step_tokens * own.world
  own.busy_steps = own.busy_steps + 1
  if step ~= 1 and step % o.log_every ~= 0 and step ~= o.steps then return end
  if own.replay then return end
  row.loss, row.lost_updates = loss_of(own), own.lost
  -- Of the steps since the line before; nothing that the digest of this step does not say alone.
  row.digests = #own.chain > 1 and own.chain or nil
  own.chain = {}
  row.tokens, row.digest = own.tokens, save.hex(own.digest)
  row.tokens_per_s = own.busy_tokens / own.busy
  if own.skips > 0 then row.skipped = own.skips end
  if #own.found > 0 then
    row.nonfinite, own.found = own.found, {}
  end
  if own.bytes_per_token and row.loss then
    row.bits_per_byte = row.loss / math.log(2) / own.bytes_per_token
  end
  write_row(self, row)
  own.progress:show(progress_text(self, row, own.busy / own.busy_steps))
  own.busy, own.busy_tokens, own.busy_steps = 0.0, 0, 0
end

-- ---- saves -------------------------------------------------------------------------------------

local function model_of(own)
  local model = #own.models == 1 and own.models[1]
  if not model or not model.config or not model.kind then return nil end
  return { kind = model.kind, config = model.config }
end

local function info_of(self, step)
  local own = self.own
  return { step = step, seed = self.options.seed, tokens = own.tokens, skips = own.skips,
    digest = save.hex(own.digest), digest_bits = own.digest, chain = own.chain,
    best = own.best < math.huge and own.best or nil,
    bytes_per_token = own.bytes_per_token, name = self.name,
    options = edits.original_options(self),
    model = model_of(own), version = xt.version, fingerprint = save.fingerprint(),
    products = products.rows(),
    recipe = own.recipe_text and { text = own.recipe_text, path = own.recipe_path,
      hash = save.hex(xt.core.hash(own.recipe_text)) } or nil }
end

-- Writes step-XXXXXXXX and makes `latest` point at it, and `best` when this step's held-out loss is
-- the lowest that a save has. Returns its path; or nil, message after saying so: training goes on.
function run:save(step)
  local own, o = self.own, self.options
  if o.bench > 0 or own.replay then return true end
  close_step(self)
  local best = own.held_out_step == step and own.held_out < own.best
  local before = own.best
  if best then own.best = own.held_out end
  local path, message = save.write(self.out, step, saved_params(own), saved_state(own),
    info_of(self, step))
  if not path then
    own.best = before
    own.progress:say(("save of step %d failed, training goes on: %s"):format(step, message))
    return nil, message
  end
  own.saved = step
  local ok
  ok, message = save.point(self.out, "latest", step)
  if ok and best then ok, message = save.point(self.out, "best", step) end
  if not ok then own.progress:say("save: " .. tostring(message)) end
  save.prune(self.out, o.keep)
  return path
end

-- Goes on from a save (or the newest of a run folder) at once: returns the step it was made at; or
-- nil, message. resume=auto|PATH on the command line does this when run:steps() begins.
function run:resume(path)
  local dir, message = save.find(path)
  if not dir then return nil, message end
  self.own.saves = { dir }
  edits.reopen(self)
  restore(self)
  if self.own.edits.started then edits.start(self) end
  self.own.saves = { dir }
  return self.own.step
end

return recipe
