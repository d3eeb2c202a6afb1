-- The first value that is not finite. A step whose loss or gradient norm is a NaN or an infinity
-- changes nothing; its micro-batches are made again at once, with the trap of the runtime noting
-- the op that made the first such value.
--
-- The micro-batches alone: what else a recipe does in a step happens once. They come out the same
-- to the bit, since a micro-batch is a pure function of step and number; where they do not, the
-- report says so.
local xt = require "xtrain"
local core = require "xtrain.core"

local M = {}

local NAMED = 4 -- parameters that a report names

function M.is_finite(x) return x == x and x ~= math.huge and x ~= -math.huge end

-- A number as people write it: NaN, inf, -inf.
function M.shown(x)
  if x ~= x then return "NaN" end
  if M.is_finite(x) then return ("%.6g"):format(x) end
  return x > 0 and "inf" or "-inf"
end

-- What stands for all gradients as they are: other ones, or others in their place, change it.
local function bits_of(loss, norms)
  return ("<" .. ("d"):rep(#norms + 1)):pack(loss, table.unpack(norms))
end

-- The loss and the norms of the step so far: what is wrong with them (or nil), and their bits.
local function look(run)
  local own, norms = run.own, {}
  -- Norms first: a GPU then has work until they are read, and the loss is there by then.
  for i, optimizer in ipairs(own.optimizers) do norms[i] = optimizer:measure().value end
  local loss, wrong = run:mean_loss(), run:loss_fault()
  for i = 1, #norms do
    if not wrong and not M.is_finite(norms[i]) then
      wrong = "the gradient norm is " .. M.shown(norms[i])
    end
  end
  return wrong, bits_of(loss or 0.0, norms)
end

-- "a, b and 3 more" of the parameters that hold a NaN or an infinity themselves, or nil.
local function bad_parameters(own)
  local names = {}
  for _, optimizer in ipairs(own.optimizers) do
    for _, param in ipairs(optimizer.params) do
      -- The norm may overflow; to be sure, all elements come to the host.
      local norm = xt.call("grad_norm", { param.tensor:detach() }):item()
      local stats = not M.is_finite(norm) and core.stats(param.tensor)
      if stats and stats.finite < stats.n then names[#names + 1] = param.name end
    end
  end
  if #names == 0 then return nil end
  local text = table.concat(names, ", ", 1, math.min(#names, NAMED))
  return #names > NAMED and ("%s and %d more"):format(text, #names - NAMED) or text
end

-- The report of a step that was made again.
local function report(own, search, bits)
  local found = core.trap_found()
  local lines = { ("step %d: %s"):format(search.step, search.wrong) }
  if found then
    lines[1] = lines[1] .. "; the first value that is not finite:"
    lines[2] = "  " .. found
  else
    lines[2] = "  every value that forward and backward made is finite: the sum itself overflowed"
  end
  local bad = bad_parameters(own)
  if bad then lines[#lines + 1] = "  not finite before the step: " .. bad end
  if bits ~= search.bits then
    lines[#lines + 1] = "  made again, the step came out differently: it depends on something "
      .. "besides step and micro-batch, and this may be another fault"
  end
  return table.concat(lines, "\n"), found
end

-- Whether a step that is not finite shall be made again; and remembers that it was one. Where one
-- step after the other is not finite, the first tells why.
local function is_searched(run)
  local own = run.own
  local before = own.nonfinite
  own.nonfinite = own.step
  return before ~= own.step - 1 and not run.options.trap and (not own.replay or own.replay.trap)
end

-- Called when a step has no more micro-batches. Returns whether they shall be made again.
function M.again(run)
  local own = run.own
  if own.search then
    local _, bits = look(run)
    local text, found = report(own, own.search, bits)
    core.trap_note(false)
    own.search = nil
    run:note_nonfinite(text, found)
    return false
  end
  if own.backwards == 0 then return false end
  local wrong, bits = look(run)
  if not wrong or not is_searched(run) then return false end
  own.search = { step = own.step, wrong = wrong, bits = bits }
  core.trap_note(true)
  return true
end

-- The same for a step that a graph has made, with that norm: loss_of(i) makes the loss of
-- micro-batch i eagerly, which has the same bits.
function M.after_replay(run, norm, loss_of)
  local own, wrong = run.own, run:loss_fault()
  if not wrong and not M.is_finite(norm:item()) then
    wrong = "the gradient norm is " .. M.shown(norm:item())
  end
  if not wrong or not is_searched(run) then return end
  local before, after = {}, {}
  for i, sum in ipairs(own.sums) do before[i] = sum:item() end
  core.trap_note(true)
  local ok, message = pcall(function()
    for i = 1, #own.sums do
      local sum = loss_of(i)
      sum:backward()
      after[i] = sum:item()
    end
  end)
  local text, found = report(own, { step = own.step, wrong = wrong, bits = bits_of(0.0, before) },
    bits_of(0.0, after))
  core.trap_note(false)
  for _, optimizer in ipairs(own.optimizers) do optimizer:zero_grad() end
  run:note_nonfinite(ok and text or text .. "\n  " .. tostring(message), found)
end

return M
