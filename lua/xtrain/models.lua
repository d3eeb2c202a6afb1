-- The models that come with the library, by name.
local decoder = require "xtrain.models.decoder"
local gpt2 = require "xtrain.models.gpt2"

return { qwen3 = decoder.qwen3, llama = decoder.llama, gpt2 = gpt2.gpt2 }
