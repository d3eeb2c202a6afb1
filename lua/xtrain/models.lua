-- The models that come with the library, by name.
local decoder = require "xtrain.models.decoder"

return { qwen3 = decoder.qwen3, llama = decoder.llama }
