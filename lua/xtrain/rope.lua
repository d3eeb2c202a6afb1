-- Rotations whose frequencies are not the powers of theta alone, as models have them that were
-- taught longer texts later: composed of ops, where xt.rope is one.
--
--   linear: every frequency divided by factor
--   llama3 (Llama 3.1): with w = original_max_position_embeddings / wavelength, the turns that a
--     frequency makes within the texts of before: divided by factor where w < low_freq_factor, as
--     it was where w > high_freq_factor, and a straight line in w between the two
local xt = require "xtrain"
local options = require "xtrain.options"

local M = {}

local KINDS = {
  linear = { "factor" },
  llama3 = { "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings" },
}

-- The scaling of a config.json or of an option, {rope_type = ..., numbers} -> the same with what
-- belongs to its rope_type alone; or nil, message.
function M.scaling(given)
  local names = KINDS[given.rope_type]
  if not names then
    return nil, ("rope_type is '%s', wanted %s"):format(tostring(given.rope_type),
      table.concat(options.names(KINDS), " or "))
  end
  local scaling = { rope_type = given.rope_type }
  for _, name in ipairs(names) do
    local value = given[name]
    if type(value) ~= "number" or not (value > 0 and value < math.huge) then
      return nil, ("%s is %s, wanted a number above 0 for the rope_type %s"):format(name,
        tostring(value), given.rope_type)
    end
    scaling[name] = value
  end
  if scaling.low_freq_factor and scaling.low_freq_factor >= scaling.high_freq_factor then
    return nil, ("low_freq_factor is %s, wanted less than high_freq_factor, which is %s"):format(
      scaling.low_freq_factor, scaling.high_freq_factor)
  end
  return scaling
end

-- The dim / 2 frequencies of a head.
function M.frequencies(theta, dim, scaling)
  local list = {}
  for i = 0, dim // 2 - 1 do
    local frequency = theta ^ (-2 * i / dim)
    local slow = frequency / scaling.factor
    if scaling.rope_type == "llama3" then
      local turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
      local low, high = scaling.low_freq_factor, scaling.high_freq_factor
      local share = math.min(1, math.max(0, (turns - low) / (high - low)))
      frequency = (1 - share) * slow + share * frequency
    else
      frequency = slow
    end
    list[i + 1] = frequency
  end
  return list
end

-- x (B, S, H, D) turned by its places (S), integers; frequencies (D / 2) f64. As xt.rope does it:
-- layout "half" or "interleaved", angles and products in f32 (f64 for x in f64).
function M.turn(x, frequencies, places, layout)
  local batch, seq, heads, dim = table.unpack(x.shape)
  local half = dim // 2
  local dtype = x.dtype == "f64" and "f64" or "f32"
  local angles = xt.cast(places, dtype):reshape { 1, seq, 1, 1 } * xt.cast(frequencies, dtype)
  local cosine, sine = xt.cos(angles), xt.sin(angles)
  local wide = xt.cast(x, dtype)
  local interleaved = layout == "interleaved"
  local a, b
  if interleaved then
    local pairs_of = wide:reshape { batch, seq, heads, half, 2 }
    a, b = pairs_of:select(5, 1), pairs_of:select(5, 2)
  else
    a, b = wide:slice(4, 1, half), wide:slice(4, half + 1, dim)
  end
  a, b = a * cosine - b * sine, b * cosine + a * sine
  local turned = interleaved and xt.stack({ a, b }, 5) or xt.concat({ a, b }, 4)
  return xt.cast(turned:reshape(x.shape), x.dtype)
end

return M
