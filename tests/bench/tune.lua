-- Measures the algorithms of matrix products on a GPU, over the training steps of the models in
-- docs/performance.md, and puts the fastest into a table: what `./dev tune` runs.
--
--     xtrain tests/bench/tune.lua kernels/products.def
--
-- A line a model. Two layers each: all layers of a model have the same products.
local xt = require "xtrain"
local file = require "xtrain.core.file"

local MODELS = {
  { "v8, 32 x 256 tokens", "batch=32 global_batch=32" },
  { "v8, 128 x 256 tokens", "batch=128 global_batch=128" },
  { "v8 with heads of 64, 32 x 1024 tokens",
    "heads=16 ffn=2816 vocab=50304 batch=32 global_batch=32 seq=1024" },
  { "GPT-2-small, 64 x 1024 tokens",
    "dim=768 heads=12 ffn=2048 vocab=50257 tied=true batch=64 global_batch=64 seq=1024" },
  { "Qwen3-0.6B, 8 x 2048 tokens",
    "heads=16 kv_heads=8 head_dim=128 ffn=3072 vocab=151936 tied=true batch=8 global_batch=8 "
      .. "seq=2048" },
}

local path = arg and arg[1]
if not path then
  print("tuning: no table is named: xtrain tests/bench/tune.lua kernels/products.def")
  return
end
local there, why = pcall(xt.core.product_library)
if not there then
  print("tuning: no GPU here: " .. tostring(why))
  os.exit(1, true)
end

-- The program that runs this: the shell's parent.
local pipe = assert(io.popen("readlink /proc/$PPID/exe"))
local program = pipe:read("l")
pipe:close()

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local recipe = (arg[0]:match("^(.*)tests/bench/[^/]*$") or "") .. "recipes/v8.lua"
for _, model in ipairs(MODELS) do
  local name, words = table.unpack(model)
  local start = file.monotonic()
  print(name)
  io.stdout:flush()
  local ok = os.execute(("%s %s device=cuda recompute=none bench=1 layers=2 %s tune=%s"):format(
    quoted(program), quoted(recipe), words, quoted(path)))
  if not ok then
    print("tuning: that failed; the table has what came before")
    os.exit(1, true)
  end
  print(("%.0f s"):format(file.monotonic() - start))
end
