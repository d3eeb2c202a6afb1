-- Runs of recipes/tiny.lua as processes of their own, for specs that compare whole runs: in a
-- folder that is removed afterwards, on a text and at a size that the spec chooses.
local assert = require "luassert"
local xt = require "xtrain"
local file = require "xtrain.core.file"
local save = require "xtrain.save"

local M = { program = os.getenv "XTRAIN" }

local place = {}
place.__index = place

local function capture(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read "a"
  pipe:close()
  return text
end

local root = capture("pwd"):gsub("\n", "")
M.recipe, M.tests = root .. "/recipes/tiny.lua", root .. "/tests"

-- in_place(words, fn): fn(place) with a fresh folder; words are options that all runs in it share.
function M.in_place(words, fn)
  local dir = os.tmpname()
  os.remove(dir)
  assert(file.mkdir(dir))
  local self = setmetatable({ dir = dir, words = words }, place)
  local ok, message = xpcall(fn, debug.traceback, self)
  if self.pid then self:kill() end
  file.remove_tree(dir)
  if not ok then error(message, 0) end
end

-- Pieces of words in an order that never repeats: a text that takes a vocabulary of some hundreds.
function M.text(bytes)
  local parts = { "the ", "lord ", "said", " unto", " them", ", and", " it was", " so", ".\n",
    "of ", "land", "s ", "he", "ir ", "sea ", "wh", "o ", "ing ", "day", "ea", "rth ", "not ",
    "th", "y " }
  local out, size = {}, 0
  while size < bytes do
    local part = parts[1 + (xt.seed(7, #out) >> 1) % #parts]
    out[#out + 1] = part
    size = size + #part
  end
  return table.concat(out)
end

function place:write(name, text)
  assert(file.write_atomic(self.dir .. "/" .. name, text))
  return self.dir .. "/" .. name
end

function place:read(name) return (file.read(self.dir .. "/" .. name)) end

-- The command of a run; script: another one than the recipe.
function place:command(words, script)
  return ("cd '%s' && exec '%s' '%s' %s %s >stdout 2>stderr"):format(self.dir, M.program,
    script or M.recipe, self.words, words)
end

-- Runs to the end: exit status, standard output, standard error.
function place:run(words, prefix, script)
  local _, _, code = os.execute((prefix or "") .. self:command(words, script))
  return code, self:read "stdout", self:read "stderr"
end

-- A run that must succeed.
function place:must(words, script)
  local code, out, errors = self:run(words, nil, script)
  if code ~= 0 then error(("%s ended with %s:\n%s"):format(words, code, errors), 0) end
  return out, errors
end

-- ---- runs that go on in the background ---------------------------------------------------------

function place:start(words, script)
  os.remove(self.dir .. "/status")
  self.pid = capture(("(sh -c %s & p=$!; echo $p; exec >&- 2>&-; wait $p; echo $? >'%s/status') &")
    :format("'" .. self:command(words, script):gsub("'", "'\\''") .. "'", self.dir)):match "%d+"
end

-- Exit status, or nil while it runs.
function place:status() return tonumber(self:read "status" or "") end

function M.sleep(seconds) os.execute(("sleep %.4f"):format(seconds)) end

-- Kills the run where it is, waits for its end, and returns its status: 137 when it was alive.
function place:kill()
  os.execute("kill -9 " .. self.pid .. " 2>/dev/null")
  while not self:status() do M.sleep(0.005) end
  self.pid = nil
  return self:status()
end

-- Waits until done() is true: whether that came before the end of the run.
function place:wait(done)
  while not done() do
    if self:status() then return false end
    M.sleep(0.002)
  end
  return true
end

-- The last logged step of a run in the folder `out`.
function place:step(out)
  local text = self:read(out .. "/metrics.jsonl") or ""
  return tonumber(text:match '.*"step": ?(%d+)') or 0
end

-- ---- what a run is -----------------------------------------------------------------------------

-- The rows that the run in a folder logged: losses, norms and learning rates, and its digests; not
-- its speed, which no two runs share.
function M.rows(path)
  local list = {}
  for line in assert(file.read(path .. "/metrics.jsonl")):gmatch "[^\n]+" do
    local row = xt.json.decode(line)
    row.tokens_per_s = nil
    list[#list + 1] = row
  end
  return list
end

function place:rows(out) return M.rows(self.dir .. "/" .. out) end

-- The digests of a save: of the run, and of each parameter and moment.
function place:digests(out, step)
  local info, message = save.info(("%s/%s/%s"):format(self.dir, out, save.name(step)))
  assert(info, message)
  return { run = info.digest, tensors = info.digests }
end

-- Every one of these runs must be the first at that step: its digests. told(words, digests), or
-- nil, is called for each.
function place:all_equal(runs, step, told)
  local first
  for _, words in ipairs(runs) do
    local out = ("run " .. words):gsub("%W", "")
    self:must(words .. " out=" .. out)
    local digests = self:digests(out, step)
    first = first or digests
    assert.are.same(first, digests, words)
    if told then told(words, digests) end
  end
  return first
end

return M
