-- lua/xtrain/types.lua, what editors read: every function of the library is in it, with parameters
-- and a text, and every type that it names is defined.
local xt = require "xtrain"
local read = require("files").read

local text = read "lua/xtrain/types.lua"

-- name -> the lines of annotation above it, of "function NAME(...) end".
local annotated = {}
do
  local above = {}
  for line in text:gmatch "[^\n]*" do
    local name, parameters = line:match "^function ([%w_.:]+)(%b()) end$"
    if name then
      annotated[name] = { parameters = parameters, lines = above }
      above = {}
    elseif line:find "^%-%-%-" then
      above[#above + 1] = line
    elseif line ~= "" then
      above = {}
    end
  end
end

local parts = { "nn", "models", "optim", "schedule", "data", "tokenizer", "hf", "safetensors",
  "json", "debug" }

describe("the editor types", function()
  it("are Lua that loads and returns the library's table", function()
    local types = assert(loadfile "lua/xtrain/types.lua")()
    assert.are.equal("function", type(types.softmax))
    assert.are.equal("function", type(types.nn.linear))
  end)

  it("have every op, as a function and as a method, with its options", function()
    for _, op in ipairs(xt.ops()) do
      local stub = annotated["xt." .. op.name]
      assert.is_truthy(stub, op.name)
      for _, param in ipairs(op.params) do
        assert.is_truthy(table.concat(stub.lines, "\n"):find(param.name, 1, true),
          op.name .. ": " .. param.name)
      end
      if op.params[1] and op.params[1].kind == "tensor" then
        assert.is_truthy(annotated["tensor:" .. op.name], op.name)
      end
    end
  end)

  it("have every function of xt and of its parts", function()
    for name, value in pairs(xt) do
      if type(value) == "function" then assert.is_truthy(annotated["xt." .. name], name) end
    end
    for _, name in ipairs { "recipe", "graph", "graph_load", "live", "generate", "evaluating",
      "clip_grad_norm", "gradcheck", "help" } do
      assert.is_truthy(annotated["xt." .. name], name)
    end
    for _, part in ipairs(parts) do
      for name, value in pairs(xt[part]) do
        if type(value) == "function" and not name:find "^_" then
          assert.is_truthy(annotated["xt." .. part .. "." .. name], part .. "." .. name)
        end
      end
    end
  end)

  it("know the options of layers, models, optimizers and schedules", function()
    for name, wanted in pairs { ["nn.linear"] = "d_in: integer",
      ["models.qwen3"] = "vocab: integer",
      ["optim.adamw"] = "weight_decay?: number", ["schedule.wsd"] = "decay?: number",
      ["data.tokens"] = "files: string|string[]", ["generate"] = "temperature?: number" } do
      local lines = table.concat(annotated["xt." .. name].lines, "\n")
      assert.is_truthy(lines:find(wanted, 1, true), name .. ": " .. lines)
    end
  end)

  it("have the methods that recipes call", function()
    for name in ("run:steps run:micros run:backward run:log run:due run:save run:attach run:train "
      .. "optimizer:step optimizer:zero_grad optimizer:state optimizer:load model:loss "
      .. "layer:train layer:eval data:batch graph:run graph:inputs graph:save builder:input "
      .. "builder:export tokenizer:encode tokenizer:decode tensor:backward tensor:item "
      .. "tensor:strides tensor:is_contiguous tensor:shares_storage"):gmatch "%S+" do
      assert.is_truthy(annotated[name], name)
    end
  end)

  it("name no type that is not there, and document what they can", function()
    local defined = { ["xt"] = true }
    for name in text:gmatch "%-%-%-@class ([%w_.]+)" do defined[name] = true end
    for name in text:gmatch "%-%-%-@alias ([%w_.]+)" do defined[name] = true end
    for line in text:gmatch "%-%-%-@[pr][^\n]+" do
      for name in line:gmatch "%f[%w_.]xt%.[%w_]+" do assert.is_true(defined[name], line) end
    end
    local silent, all = {}, 0
    for name, stub in pairs(annotated) do
      all = all + 1
      if not table.concat(stub.lines, "\n"):find "%-%-%- " then silent[#silent + 1] = name end
    end
    table.sort(silent)
    assert.is_true(#silent < all / 10, table.concat(silent, " "))
  end)
end)
