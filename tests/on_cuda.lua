-- A helper for busted: every spec that follows runs on the GPU.
--   lua5.4 /usr/bin/busted --helper=tests/on_cuda.lua tests/lua/segment_spec.lua
require("xtrain").device("cuda")
