-- A save: the folder step-00000100/ with model.safetensors, optim.safetensors and state.json. It is
-- written beside under another name, synced and renamed, so a folder with the right name is whole.
-- The files `latest` and `best` of the run folder hold the name of a save.
local xt = require "xtrain"
local nn = require "xtrain.nn"
local hf = require "xtrain.hf"
local products = require "xtrain.products"
local file = require "xtrain.core.file"
local json = require "xtrain.core.json"
local safetensors = require "xtrain.core.safetensors"

local M = {}

local FORMAT = 1 -- of state.json

function M.name(step) return ("step-%08d"):format(step) end

local function hex(digest)
  return math.type(digest) == "integer" and ("0x%016x"):format(digest) or digest
end
M.hex = hex

-- What a comparison of digests depends on besides the recipe: where these differ, the last bits of
-- a result may. The number of threads is not among them. Of a GPU they are its name, the version of
-- the library of its products, and the table of algorithms that this program was built with.
function M.fingerprint(device)
  device = device or xt.device()
  local out = { version = xt.version, isa = xt.isa(), device = device }
  if device == "cuda" then
    local there, gpu, version, table_digest = pcall(xt.core.product_library)
    if there then
      out.gpu, out.cublaslt, out.products = gpu, ("%d"):format(version), table_digest
    end
  end
  for _, library in ipairs(xt.core.libraries()) do
    if library.found and not library.detail:find "not used" then
      out[library.name] = library.version
    end
  end
  return out
end

-- ---- writing -----------------------------------------------------------------------------------

-- Raises on failure: M.write turns that into nil, message.
local function must(value, message)
  if value == nil or value == false then error(message or "failed", 0) end
  return value
end

local function digests(tensors)
  local out = {}
  for name, t in pairs(tensors) do out[name] = hex(t:digest()) end
  return out
end

local function by_name(params)
  local model = {}
  for _, param in ipairs(params) do model[param.name] = param.tensor:detach() end
  return model
end

-- The digest of each tensor that a save holds: {model = {name = digest}, optim = ...}.
function M.digests(params, state)
  return { model = digests(by_name(params)), optim = digests(state) }
end

-- params: parameters in path order; state: of all optimizers; info: goes into state.json.
local function write_into(dir, params, state, info)
  local model = by_name(params)
  must(safetensors.save(dir .. "/model.safetensors", model, { format = "xtrain" }))
  must(safetensors.save(dir .. "/optim.safetensors", state, { format = "xtrain" }))
  info.digests = M.digests(params, state)
  info.format = FORMAT
  must(file.write_atomic(dir .. "/state.json", json.encode(info) .. "\n"))
  must(file.sync(dir))
end

-- Writes out/step-XXXXXXXX. Returns its path; or nil, message, and nothing is left behind.
function M.write(out, step, params, state, info)
  local final = out .. "/" .. M.name(step)
  local temporary = out .. "/." .. M.name(step) .. ".part"
  local ok, message = pcall(function()
    file.remove_tree(temporary)
    must(file.mkdir(temporary))
    write_into(temporary, params, state, info)
    if file.exists(final) then
      -- The same step again, after a resume from an older save. Never without a whole one.
      local old = out .. "/." .. M.name(step) .. ".old"
      file.remove_tree(old)
      must(file.rename(final, old))
      must(file.rename(temporary, final))
      file.remove_tree(old)
    else
      must(file.rename(temporary, final))
    end
    must(file.sync(out))
  end)
  if ok then return final end
  pcall(file.remove_tree, temporary)
  return nil, tostring(message)
end

-- Makes `latest` or `best` of the run folder name a save.
function M.point(out, pointer, step)
  return file.write_atomic(out .. "/" .. pointer, M.name(step) .. "\n")
end

-- ---- finding -----------------------------------------------------------------------------------

-- The steps saved in a run folder, ascending.
function M.list(out)
  local steps = {}
  for _, name in ipairs(file.list(out) or {}) do
    local step = name:match("^step%-(%d+)$")
    if step and file.exists(out .. "/" .. name .. "/state.json") then
      steps[#steps + 1] = math.tointeger(tonumber(step))
    end
  end
  table.sort(steps)
  return steps
end

-- The save that `latest` or `best` names, or nil.
function M.pointed(out, pointer)
  if not file.exists(out .. "/" .. pointer) then return nil end
  local name = (file.read(out .. "/" .. pointer) or ""):match("^(step%-%d+)")
  if name and file.exists(out .. "/" .. name .. "/state.json") then return out .. "/" .. name end
end

-- A save, a run folder or a pointer file -> the folder of a save; or nil, message.
function M.find(path)
  path = path:gsub("/+$", "")
  if file.exists(path .. "/state.json") then return path end
  local parent, pointer = path:match("^(.*)/(%w+)$")
  if pointer == "latest" or pointer == "best" then
    local found = M.pointed(parent, pointer)
    if found then return found end
  end
  local found = M.pointed(path, "latest")
  if found then return found end
  local steps = M.list(path)
  if #steps > 0 then return path .. "/" .. M.name(steps[#steps]) end
  return nil, path .. ": no save here"
end

-- Removes all saves but the newest `keep` and the best one, and what killed saves left.
function M.prune(out, keep)
  local steps = M.list(out)
  local best = M.pointed(out, "best")
  for i = 1, #steps - math.max(keep, 1) do
    local dir = out .. "/" .. M.name(steps[i])
    if dir ~= best then file.remove_tree(dir) end
  end
  for _, name in ipairs(file.list(out) or {}) do
    if name:find("^%.step%-%d+%.%a+$") then file.remove_tree(out .. "/" .. name) end
  end
end

-- ---- reading -----------------------------------------------------------------------------------

function M.info(dir) return hf.read_json(dir .. "/state.json") end

local function same(name) return name end

-- What state.json must say for a run to go on from it; nil, or what is wrong.
local function broken(info)
  for _, name in ipairs { "step", "digest_bits", "tokens", "skips" } do
    if math.type(info[name]) ~= "integer" then return name .. " is no integer" end
  end
  if info.best ~= nil and type(info.best) ~= "number" then return "best is no number" end
  local lists = info.digests
  if type(lists) ~= "table" or type(lists.model) ~= "table" or type(lists.optim) ~= "table" then
    return "the digests are missing"
  end
end

-- Copies a save into parameters and optimizers, after checking all digests that the save lists.
-- The algorithms that its products took are taken again from here on.
-- Returns its info; or nil, message.
function M.read(dir, params, optimizers)
  local info, message = M.info(dir)
  if not info then return nil, message end
  if info.format ~= FORMAT then
    return nil, ("%s: format %s, this program reads %d"):format(dir, tostring(info.format), FORMAT)
  end
  local wrong = broken(info)
  if wrong then return nil, ("%s/state.json: %s"):format(dir, wrong) end
  local ok
  local files = {}
  for _, part in ipairs { "model", "optim" } do
    local path = ("%s/%s.safetensors"):format(dir, part)
    files[part], message = safetensors.load(path)
    if not files[part] then return nil, message end
    for name, digest in pairs(info.digests[part]) do
      local t = files[part][name]
      if not t or hex(t:digest()) ~= digest then
        return nil, ("%s: tensor %s is not what was saved"):format(path, name)
      end
    end
  end
  ok, message = products.use(info.products, dir .. "/state.json")
  if not ok then return nil, message end
  ok, message = hf.copy_into(params, files.model, same)
  if not ok then return nil, ("%s/model.safetensors: %s"):format(dir, message) end
  for _, optimizer in ipairs(optimizers) do
    ok, message = optimizer:load(files.optim)
    if not ok then return nil, ("%s/optim.safetensors: %s"):format(dir, message) end
  end
  return info
end

-- A model from a save alone: model, info; or nil, message. opts as in hf.load.
function M.load_model(path, opts)
  local dir, message = M.find(path)
  if not dir then return nil, message end
  local info
  info, message = M.info(dir)
  if not info then return nil, message end
  local described = type(info.model) == "table" and info.model or {}
  local make = described.kind and rawget(require "xtrain.models", described.kind)
  local config = described.config
  if not make or type(config) ~= "table" then
    return nil, dir .. ": the recipe's model is its own; only its recipe can load it"
  end
  for name, value in pairs(opts or {}) do config[name] = value end
  config.seed = false
  local tensors, model
  tensors, message = safetensors.load(dir .. "/model.safetensors")
  if not tensors then return nil, message end
  model, message = hf.model_for(described.kind, config, tensors)
  if not model then return nil, ("%s/state.json: %s"):format(dir, message) end
  local ok
  ok, message = hf.copy_into(nn.params(model), tensors, same)
  if not ok then return nil, ("%s/model.safetensors: %s"):format(dir, message) end
  return model, info, dir
end

return M
