-- For gendocs.lua: the library's Lua functions and objects as annotations for the Lua language
-- server. Names of parameters, comments and options come from the library itself: an options table
-- is what the function hands to options.read. Only what a value is can not be seen there: it is in
-- the tables below, and whatever they do not know is `any`.
local xt = require "xtrain"
local help = require "xtrain.help"
local options = require "xtrain.options"

-- What a parameter of that name is, anywhere.
local PARAMETERS = {
  t = "xt.tensor", tensor = "xt.tensor", x = "xt.tensor", a = "xt.tensor", ids = "xt.tensor",
  labels = "xt.tensor", sum = "xt.tensor", weight = "xt.tensor", output = "xt.tensor",
  count = "integer|xt.tensor", model = "table", params = "xt.param[]", inputs = "xt.tensor[]",
  step = "integer", micro = "integer", every = "integer?", seed = "integer", max = "number",
  lr = "number|xt.tensor", norm = "xt.tensor", path = "string", dir = "string", text = "string",
  name = "string", what = "any", fn = "function", on = "boolean",
  state = "table<string, xt.tensor>",
  bytes_per_token = "number", nats = "number", share = "number", tokens = "integer[]",
  words = "string[]", tokenizer = "xt.tokenizer", data = "xt.data", values = "table<string, any>",
  schedule = "function", export = "string", feeds = "table<string, xt.tensor|number>",
  batch = "integer", shape = "integer[]", std = "number|function", level = "integer",
}

-- What a function returns, by its full name; by the start of the name where many are alike.
local RETURNS = {
  ["nn.params"] = "xt.param[]", ["nn.evaluating"] = "any", ["evaluating"] = "any",
  ["nn.linear"] = "xt.layer", ["nn.embedding"] = "xt.layer", ["nn.rmsnorm"] = "xt.layer",
  ["nn.layernorm"] = "xt.layer", ["nn.dropout"] = "xt.layer", ["nn.attention"] = "xt.layer",
  ["nn.swiglu"] = "xt.layer", ["nn.feed_dropout"] = "xt.layer",
  ["optim.adamw"] = "xt.optimizer", ["optim.sgd"] = "xt.optimizer",
  ["optim.muon"] = "xt.optimizer", ["clip_grad_norm"] = "xt.tensor",
  ["schedule.constant"] = "fun(step: integer): number",
  ["schedule.cosine"] = "fun(step: integer): number",
  ["schedule.linear"] = "fun(step: integer): number",
  ["schedule.wsd"] = "fun(step: integer): number", ["schedule.describe"] = "string|nil",
  ["data.tokens"] = "xt.data|nil, string?", ["data.evaluate"] = "number",
  ["data.bits_per_byte"] = "number",
  ["tokenizer.load"] = "xt.tokenizer|nil, string?",
  ["tokenizer.train"] = "xt.tokenizer|nil, string?", ["tokenizer.bytes"] = "xt.tokenizer",
  ["hf.load"] = "xt.model|nil, table|string", ["hf.save"] = "boolean|nil, string?",
  ["hf.state"] = "table<string, xt.tensor>", ["recipe"] = "xt.run", ["live"] = "table<string, any>",
  ["generate"] = "integer[]", ["graph"] = "xt.graph", ["graph_load"] = "xt.graph|nil, string?",
  ["gradcheck"] = "boolean, table", ["models.qwen3"] = "xt.model", ["models.llama"] = "xt.model",
  ["models.gpt2"] = "xt.model", ["memory"] = "table<string, integer>", ["isa"] = "string",
  ["threads"] = "integer", ["device"] = "xt.device", ["devices"] = "xt.device[]",
  ["ops"] = "xt.op[]", ["interrupted"] = "boolean", ["call"] = "xt.tensor",
  ["debug.here"] = "string", ["debug.tape"] = "table[]", ["debug.holders"] = "table[]",
  ["debug.compare"] = "table", ["debug.gradcheck"] = "boolean, table", ["debug.why"] = "table",
  ["debug.journal"] = "table",
  ["run:steps"] = "fun(): integer?",
  ["run:micros"] = "fun(): integer?, xt.tensor, xt.tensor",
  ["run:due"] = "boolean", ["run:train"] = "xt.tensor", ["run:attach"] = "xt.run",
  ["optimizer:step"] = "xt.tensor", ["optimizer:state"] = "table<string, xt.tensor>",
  ["layer:forward"] = "xt.tensor", ["model:forward"] = "xt.tensor",
  ["model:loss"] = "xt.tensor, integer", ["data:batch"] = "xt.tensor, xt.tensor",
  ["graph:run"] = "xt.tensor|table<string, xt.tensor>", ["graph:inputs"] = "table[]",
  ["graph:exports"] = "string[]", ["graph:state"] = "table<string, xt.tensor>",
  ["graph:describe"] = "string", ["graph:memory"] = "table", ["graph:dot"] = "string",
  ["graph:save"] = "boolean|nil, string?", ["builder:input"] = "xt.tensor",
  ["layer:train"] = "xt.layer", ["layer:eval"] = "xt.layer",
}

-- What functions of C say for themselves; and methods that need no comment where they are.
local TEXTS = {
  ["debug.cache"] = "Off: every block goes back to the system at once.",
  ["debug.fail_allocation"] = "The n-th allocation from now fails; 0: none.",
  ["debug.here"] = "FILE:LINE of the caller, as records name it.",
  ["debug.holders"] = "The lines that hold the most bytes: {where, bytes, storages}.",
  ["debug.live_count"] = "Objects and storages alive in the runtime.",
  ["debug.memory_limit"] = "Bytes the allocator may take; 0: no limit.",
  ["debug.memory_trim"] = "Gives cached blocks back to the system.",
  ["debug.poison"] = "On: new and freed blocks are filled with NaNs.",
  ["debug.stats"] = "Counts and statistics of the elements of a tensor.",
  ["debug.trap"] = "On: the first op whose result holds a NaN or an infinity raises.",
  ["init.dropout"] = "init.dropout(seed, keep) -> function(shape) -> mask of 0 and 1/keep.",
  ["json.array"] = "A table that is encoded as an array, also when it is empty.",
  ["json.decode"] = "The value of a JSON text; integers stay integers. Raises for what is none.",
  ["json.encode"] = "The JSON text of a value.",
  ["safetensors.list"] = "safetensors.list(path) -> what the file holds, without reading it.",
  ["safetensors.load"] = "safetensors.load(path [, names]) -> {name = tensor}, metadata; or nil, "
    .. "message.",
  ["safetensors.save"] = "safetensors.save(path, tensors [, metadata]) -> true; or nil, message.",
  ["layer:train"] = "Dropout drops from here on.", ["layer:eval"] = "Nothing is dropped.",
  ["model:train"] = "Dropout drops from here on.", ["model:eval"] = "Nothing is dropped.",
  ["layer:forward"] = "What calling the layer runs.",
}

-- What an option of that name is, where its default does not say.
local OPTIONS = {
  seed = "integer", device = "xt.device", dtype = "xt.dtype", files = "string|string[]",
  decay = "fun(name: string, tensor: xt.tensor): boolean",
  group = "fun(name: string, tensor: xt.tensor): table?",
  matrices = "fun(name: string, tensor: xt.tensor): boolean", adamw = "table",
  on_token = "fun(id: integer): boolean?", stop = "integer|integer[]", top_k = "integer",
  top_p = "number", min_p = "number", kv_heads = "integer", head_dim = "integer",
  tokenizer = "string|xt.tokenizer", model = "table", loss = "function", data = "xt.data",
  optimizer = "xt.optimizer", lr = "number", bytes_per_token = "number", divisor = "number",
  step = "integer|xt.tensor", guard = "xt.tensor", special_ids = "table",
}

-- The last parameter of these is a function of what is named, so that its own parameters are known.
local CALLBACKS = { ["graph.fn"] = "fun(b: xt.builder)",
  ["evaluating.fn"] = "fun(model: table): any",
  ["nn.evaluating.fn"] = "fun(model: table): any" }

local keywords = { ["end"] = true, ["repeat"] = true, ["in"] = true }

-- ---- options -----------------------------------------------------------------------------------

local function kind_of(default)
  if default == options.size or default == options.optional_size then return "integer" end
  if default == options.number then return "number" end
  if default == options.required or default == options.optional then return "any" end
  local kind = math.type(default) == "integer" and "number" or type(default)
  return kind
end

local function option_type(name, default)
  local kind = kind_of(default)
  local vague = kind == "any" or name == "dtype" or name == "device"
  return vague and OPTIONS[name] or kind
end

-- What fn hands to options.read when it is called like this, as a type; nil when it does not.
local function options_type(fn, ...)
  local read, seen = options.read, nil
  options.read = function(_, _, known)
    seen = known
    error "seen"
  end
  pcall(fn, ...)
  options.read = read
  if not seen then return nil end
  local fields, every = {}, true
  for _, name in ipairs(options.names(seen)) do
    local default = seen[name]
    local must = default == options.required or default == options.size
      or default == options.number
    every = every and not must
    fields[#fields + 1] = ("%s%s: %s"):format(keywords[name] and ('["' .. name .. '"]') or name,
      must and "" or "?", option_type(name, default))
  end
  return "{" .. table.concat(fields, ", ") .. "}", every
end

-- ---- stubs -------------------------------------------------------------------------------------

local function comment_lines(out, comment)
  for line in (comment .. "\n"):gmatch "([^\n]*)\n" do
    out[#out + 1] = "--- " .. line:gsub("^%s%s", ""):gsub("%s+$", "")
  end
end

-- A function of the library. prefix: "xt.nn."; key: its name in the tables above; self: whether its
-- first parameter is the object.
local function stub(out, prefix, name, key, fn, self)
  local info = debug.getinfo(fn, "Su")
  local comment = help.comment(fn) or TEXTS[key] and "  " .. TEXTS[key]
  local body, names = {}, {}
  for i = self and 2 or 1, info.nparams do
    local param = debug.getlocal(fn, i)
    local kind, optional = PARAMETERS[param], false
    if param == "given" or param == "o" or param == "opts" then
      param = "options"
      local dummies = {}
      for n = 1, info.nparams do dummies[n] = {} end
      local known, every = options_type(fn, table.unpack(dummies, 1, info.nparams))
      kind, optional = known or "table", not known or every
    end
    kind = CALLBACKS[key .. "." .. param] or kind or "any"
    if kind:find "%?$" then kind, optional = kind:sub(1, -2), true end
    if keywords[param] then param = param .. "_" end
    names[#names + 1] = param
    body[#body + 1] = ("---@param %s%s %s"):format(param, (optional or kind == "any") and "?" or "",
      kind)
  end
  if info.isvararg then
    names[#names + 1] = "..."
    body[#body + 1] = "---@param ... any"
  end
  if comment then comment_lines(out, comment) end
  table.move(body, 1, #body, #out + 1, out)
  if RETURNS[key] then out[#out + 1] = "---@return " .. RETURNS[key] end
  out[#out + 1] = ("function %s%s(%s) end"):format(prefix, name, table.concat(names, ", "))
  out[#out + 1] = ""
end

-- A function of C, by what help says of it: "memory_reset_peak([device])".
local function builtin_stub(out, prefix, name, key, signature, text)
  local arguments = signature:match "%((.*)%)$" or ""
  local rest, names = arguments:gsub("%b{}", "options"), {}
  if text then comment_lines(out, "  " .. text) end
  local optional = false
  for bracket, param in rest:gmatch "(%[?)[%s,]*([%w_.]+)" do
    optional = optional or bracket == "["
    if param == "..." then
      out[#out + 1] = "---@param ... any"
    else
      out[#out + 1] = ("---@param %s%s %s"):format(param, optional and "?" or "",
        PARAMETERS[param] or param == "device" and "xt.device" or param == "n" and "integer"
        or param == "options" and "table" or "any")
    end
    names[#names + 1] = param
  end
  if RETURNS[key] then out[#out + 1] = "---@return " .. RETURNS[key] end
  out[#out + 1] = ("function %s%s(%s) end"):format(prefix, name, table.concat(names, ", "))
  out[#out + 1] = ""
end

-- All functions of a module, by name. skip: names that are annotated elsewhere.
local function module(out, path, t, skip)
  for _, name in ipairs(options.names(t)) do
    local value, key = rawget(t, name), path == "" and name or path .. "." .. name
    if type(value) == "function" and not name:find "^_" and not skip[name] then
      local known = help.builtin[key]
      if debug.getinfo(value, "S").what ~= "C" then
        stub(out, "xt." .. (path == "" and "" or path .. "."), name, key, value)
      else
        builtin_stub(out, "xt." .. (path == "" and "" or path .. "."), name, key,
          known and known[1] or name .. "(...)", known and known[2] or TEXTS[key])
      end
    end
  end
end

-- The methods of an object, its class's and those it inherits.
local function class(out, name, object, skip)
  local short, seen = name:match "[%w_]+$", {}
  local meta = debug.getmetatable(object)
  local methods = meta and rawget(meta, "__index")
  while type(methods) == "table" do
    for _, key in ipairs(options.names(methods)) do
      local fn = rawget(methods, key)
      if type(fn) == "function" and not key:find "^_" and not seen[key]
        and not (skip and skip[key]) and debug.getinfo(fn, "S").what ~= "C" then
        seen[key] = true
        stub(out, short .. ":", key, short .. ":" .. key, fn, true)
      end
    end
    meta = debug.getmetatable(methods)
    methods = meta and rawget(meta, "__index")
  end
end

-- ---- the whole ---------------------------------------------------------------------------------

local CLASSES = [[
---@class xt.param
---@field name string such as "blocks.3.attn.wq"
---@field tensor xt.tensor

---@class xt.op
---@field name string
---@field signature string
---@field doc string
---@field params table[] name, kind, optional, named, choices
---@field dtypes xt.dtype[] of the first argument
---@field outputs integer
---@field differentiable boolean
---@field view boolean
---@field writes boolean
---@overload fun(...): xt.tensor

--- A plain table of tensors and sub-layers; calling it runs its `forward`.
---@class xt.layer
---@field training boolean
---@field kind string
---@field weight xt.tensor
---@field bias xt.tensor|nil
---@field [string|integer] any
---@overload fun(x: xt.tensor, ...): xt.tensor
local layer = {}

--- A language model: model(ids) -> logits (B, S, V).
---@class xt.model: xt.layer
---@field config table
---@field blocks xt.layer[]
---@overload fun(ids: xt.tensor, ...): xt.tensor
local model = {}

---@class xt.optimizer
---@field steps integer updates made
---@field skipped integer updates that were not finite
---@field params xt.param[]
local optimizer = {}

--- A run of a recipe. Its options are fields, but those with a method's name: run.options.steps.
---@class xt.run
---@field name string
---@field options table<string, any> as resolved
---@field out string the run folder
---@field device xt.device
---@field dtype xt.dtype
---@field seed integer
---@field accum integer micro-batches a step
---@field bench integer
---@field smoke boolean
---@field log_every integer
---@field [string] any
local run = {}

---@class xt.data
local data = {}

---@class xt.graph
local graph = {}

--- What the function of xt.graph gets.
---@class xt.builder
local builder = {}

---@class xt.tokenizer
---@field vocab_size integer
local tokenizer = {}

--- The ids of a text. special: whether words such as <|endoftext|> in it are tokens.
---@param text string
---@param options? {special?: boolean}
---@return integer[]
function tokenizer:encode(text, options) end

--- The text of ids.
---@param ids integer[]
---@return string
function tokenizer:decode(ids) end

--- An incremental decoder: stream:add(id) gives the text that is certain, stream:finish() the rest.
---@return table
function tokenizer:stream() end

--- Writes tokenizer.json into a folder.
---@param dir string
---@return boolean|nil, string?
function tokenizer:save(dir) end
]]

-- types(skip) -> lines. skip: names of xt that are annotated by hand or are ops.
return function(skip)
  local out = { CLASSES }
  local parts = { "nn", "models", "optim", "schedule", "data", "tokenizer", "hf", "safetensors",
    "json", "save", "debug", "init" }
  for _, part in ipairs(options.names(getmetatable(xt).__names)) do
    -- All parts are loaded: functions of them become fields of xt. A part may be for specs alone.
    pcall(function() return xt[part] end)
  end
  module(out, "", xt, skip)
  for _, part in ipairs(parts) do
    out[#out + 1] = ("xt.%s = {}\n"):format(part)
    module(out, part, xt[part], {})
  end
  local run = xt.recipe({ name = "types" }, { "out=/nonexistent/types" })
  class(out, "xt.run", run)
  require("xtrain.active").run = nil
  local layer = xt.nn.linear { d_in = 1, d_out = 1 }
  class(out, "xt.layer", layer)
  class(out, "xt.model", xt.models.qwen3 { vocab = 2, dim = 2, layers = 1, heads = 1, ffn = 2 })
  class(out, "xt.optimizer", xt.optim.sgd(xt.nn.params(layer), {}))
  class(out, "xt.graph", xt.graph(function(b)
    class(out, "xt.builder", b)
    b:export("x", b:input("x", xt.zeros { 1 }) + 1)
  end))
  local shard = os.tmpname()
  assert(xt.data.write_shard(shard, { 1, 2, 3, 4 }))
  class(out, "xt.data", assert(xt.data.tokens { files = shard, seq = 1, batch = 1 }))
  os.remove(shard)
  return out
end
