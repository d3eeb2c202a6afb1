-- Wrong input as a careless user would try it: each message names the thing, the value and the
-- line of the user's own file.
local xt = require "xtrain"
local training = require "training"

local LINE = 4

-- Runs code as line 4 of careless.lua; x is f32 2x3. What it raises, or returns as nil, message.
local function outcome(code)
  local text = "local xt, x, model, ids = ...\n\nlocal got =\n  " .. code .. "\nreturn got"
  local fn = assert(load(text, "@careless.lua"))
  local model = xt.models.qwen3 { vocab = 10, dim = 8, layers = 1, heads = 2, ffn = 16, seed = 1 }
  return pcall(fn, xt, xt.ones { 2, 3 }, model, xt.tensor({ { 1, 2 } }, { dtype = "i32" }))
end

-- title; code, message (a plain text, after the place)
local rows = {
  -- misspelt options
  { "xt.sum(x, {kepdim = true})", "sum: unknown option 'kepdim'; the options are 'keepdim'" },
  { "xt.relu(x, {inplace = true})", "relu: unknown option 'inplace'; it takes no options" },
  { "xt.zeros({2}, {dtpye = 'f32'})", "zeros: unknown option 'dtpye'; the options are 'dtype'" },
  { "xt.nn.linear{d_in = 3, dout = 4}",
    "nn.linear: unknown option 'dout' (did you mean 'd_out'?); the options are bias, d_in" },
  { "xt.nn.linear{d_in = 3}", "nn.linear: option 'd_out' is missing" },
  { "xt.models.qwen3{vocab = 10, dim = 8, layer = 1, heads = 2, ffn = 8}",
    "models.qwen3: unknown option 'layer' (did you mean 'layers'?)" },
  { "xt.optim.adamw(xt.nn.params(model), {beta = 1})",
    "optim.adamw: unknown option 'beta' (did you mean 'betas'?)" },
  { "xt.optim.adamw(xt.nn.params(model), {}):step(1, {clp = 1})",
    "adamw:step: unknown option 'clp' (did you mean 'clip'?)" },
  { "xt.schedule.cosine{peak = 1, warmpu = 3, total = 10}",
    "schedule.cosine: unknown option 'warmpu' (did you mean 'warmup'?)" },
  { "xt.data.tokens{file = 'a', seq = 3}",
    "data.tokens: unknown option 'file' (did you mean 'files'?)" },
  { "model:loss(ids, ids, {sed = 1})", "loss: unknown option 'sed' (did you mean 'seed'?)" },
  { "xt.recipe({name = 'r', dim = 3}, {'dmi=4'})",
    "r: unknown option 'dmi' (did you mean 'dim'?)" },
  { "xt.recipe({name = 'r', dim = 3}, {'dim=4.5'})",
    "r: option 'dim' is '4.5', wanted an integer" },
  -- options of the wrong kind
  { "xt.nn.linear{d_in = '3', d_out = 4}",
    "nn.linear: option 'd_in' is the string '3', wanted an integer of 0 or more" },
  { "xt.nn.linear{d_in = 2.5, d_out = 4}",
    "nn.linear: option 'd_in' is 2.5, wanted an integer of 0 or more" },
  { "xt.nn.linear{d_in = -2, d_out = 4}", "nn.linear: option 'd_in' is -2, wanted an integer" },
  { "xt.models.qwen3{vocab = 10, dim = '8', layers = 1, heads = 2, ffn = 8}",
    "models.qwen3: option 'dim' is the string '8', wanted an integer" },
  { "xt.models.qwen3{vocab = 10, dim = 8, layers = 1, heads = 3, ffn = 8}",
    "models.qwen3: dim 8 is no multiple of heads 3" },
  { "xt.models.qwen3{vocab = 10, dim = 8, layers = 1, heads = 0, ffn = 8}",
    "models.qwen3: option 'heads' is 0, wanted at least one" },
  { "xt.models.qwen3{vocab = 10, dim = 8, layers = 1, heads = 2, ffn = 8, dtype = 'bf32'}",
    "models.qwen3: option 'dtype' is 'bf32', wanted one of f32, bf16" },
  { "xt.schedule.cosine{peak = 1, total = '10'}",
    "schedule.cosine: option 'total' is the string '10', wanted a number" },
  { "xt.optim.adamw(model, {})", "optim.adamw: the first argument is a list of parameters" },
  { "xt.optim.adamw(xt.nn.params(model), {}):step(0/0)",
    "adamw:step: lr is NaN, wanted a finite number" },
  { "xt.generate(3, {1})", "generate: the first argument is a number, wanted a model" },
  { "xt.checkpoint(3)", "checkpoint: fn is the number 3, wanted a function" },
  { "xt.no_grad(nil)", "no_grad: fn is missing, wanted a function" },
  { "xt.relu({1, 2})", "relu: x is a table, wanted a tensor" },
  { "xt.zeros({2}, {dtype = 'float32'})", "zeros: dtype is 'float32', wanted one of f32, bf16" },
  -- shapes
  { "xt.matmul(x, x)", "matmul: a is 2x3, b is 2x3: inner sizes 3 and 2 differ" },
  { "x + xt.ones{4}", "add: a is f32 2x3, b is f32 4: sizes 3 and 4 do not broadcast" },
  { "x:reshape{4}", "reshape: shape 4 does not hold the 6 elements of x (f32 2x3)" },
  { "xt.nn.linear{d_in = 2, d_out = 2}(x)", "linear: x is 2x3, weight is 2x2" },
  { "xt.softmax(x, 5)", "softmax: dim is 5, x has 2 dimensions (f32 2x3)" },
  { "xt.softmax(x, 0)", "softmax: dim is 0: positions count from 1" },
  { "xt.tensor{{1, 2}, {3}}", "tensor: value[2] has 1 values, wanted 2" },
  { "x + x:to'bf16'", "add: a is f32 2x3, b is bf16 2x3: nothing is converted by itself" },
  { "model(xt.ones{2})", "embedding: ids" },
  -- names that are not there
  { "xt.op.sofmax(x)", "there is no op 'sofmax'; the nearest is 'softmax'" },
  { "xt.sofmax(x)", "xtrain has no 'sofmax' (did you mean 'softmax'?)" },
  { "xt.zzzzzzzzzzz", "xtrain has no 'zzzzzzzzzzz'" },
  { "x:sofmax()", "a tensor has no property or method 'sofmax' (did you mean 'softmax'?)" },
  { "x.shap", "a tensor has no property or method 'shap' (did you mean 'shape'?)" },
  { "xt.nn.lineer{}", "xt.nn has no 'lineer' (did you mean 'linear'?)" },
  { "xt.models.qwen4{}", "xt.models has no 'qwen4' (did you mean 'qwen3'?)" },
  { "xt.optim.adam{}", "xt.optim has no 'adam' (did you mean 'adamw'?)" },
  -- labels and ids out of range
  { "xt.cross_entropy(x, xt.tensor({1, 7}, {dtype = 'i64'}))",
    "cross_entropy: labels[2] is 7, there are 3 classes (0 to 2)" },
  { "model:loss(ids, xt.tensor({{1, 11}}, {dtype = 'i32'}))",
    "linear_cross_entropy: labels[1][2] is 11, there are 10 classes (0 to 9)" },
  { "model(xt.tensor({{1, 12}}, {dtype = 'i32'}))",
    "embedding: ids[1][2] is 12, the vocabulary has 10" },
  -- probabilities
  { "xt.dropout(x, 0/0, 1)", "dropout: p is nan, wanted 0 to 1" },
  { "xt.dropout(x, 1.5, 1)", "dropout: p is 1.5, wanted 0 to 1" },
  { "xt.dropout_mask({2}, -0.1, 1)", "dropout_mask: p is -0.1, wanted 0 to 1" },
  { "xt.nn.dropout{p = 0/0}", "nn.dropout: option 'p' is NaN, wanted a number" },
  { "xt.nn.dropout{p = 2}", "nn.dropout: option 'p' is 2, wanted a number from 0 to 1" },
  { "xt.models.qwen3{vocab = 10, dim = 8, layers = 1, heads = 2, ffn = 8, dropout = 1.5}",
    "models.qwen3: option 'dropout' is 1.5, wanted a number from 0 to 1" },
  { "xt.models.qwen3{vocab = 10, dim = 8, layers = 1, heads = 2, ffn = 8, dropout = 0/0}",
    "models.qwen3: option 'dropout' is NaN, wanted a number" },
  -- seeds
  { "xt.dropout(x, 0.5, 1.5)",
    "dropout: seed is the number 1.5, which is no exact 64-bit integer: write large seeds in hex" },
  { "xt.dropout(x, 0.5)", "dropout: seed is missing" },
  { "xt.seed(1e30)", "seed: argument 1 is the number 1e+30, which is no exact 64-bit integer" },
  { "xt.seed(1, 0.5)", "seed: argument 2 is the number 0.5" },
  { "xt.rand({2}, {seed = 0.5})", "rand: seed is the number 0.5" },
  { "xt.rand({2})", "rand: seed is missing; nothing is random unless a seed says so" },
  { "xt.nn.linear{d_in = 2, d_out = 2, seed = 0.5}", "seed: argument 1 is the number 0.5" },
}

describe("misuse raises at the user's line:", function()
  for _, row in ipairs(rows) do
    local code, message = row[1], row[2]
    it(code, function()
      local ok, raised = outcome(code)
      assert.is_false(ok, "nothing was raised")
      local wanted = ("careless.lua:%d: %s"):format(LINE, message)
      assert.are.equal(wanted, tostring(raised):sub(1, #wanted))
    end)
  end
end)

describe("what may fail in ordinary life", function()
  local function refused(message, ok, value, why)
    assert.is_true(ok, value)
    assert.is_nil(value)
    assert.is_truthy(tostring(why):find(message, 1, true), why)
  end

  it("returns nil and a message that names the file", function()
    for _, call in ipairs { "safetensors.load", "tokenizer.load", "hf.load" } do
      local library, name = call:match "(%w+)%.(%w+)"
      refused("none/there", pcall(xt[library][name], "none/there"))
    end
    refused("none/there", pcall(xt.data.tokens, { files = "none/there", seq = 3 }))
  end)

  it("a truncated safetensors file says so, wherever it is cut", function()
    local path = os.tmpname()
    assert(xt.safetensors.save(path, { a = xt.ones { 3, 4 }, b = xt.zeros { 5 } }))
    local handle = assert(io.open(path, "rb"))
    local text = handle:read "a"
    handle:close()
    for _, bytes in ipairs { 0, 4, 8, 20, #text - 1 } do
      handle = assert(io.open(path, "wb"))
      handle:write(text:sub(1, bytes))
      handle:close()
      refused(path, pcall(xt.safetensors.load, path))
    end
    os.remove(path)
  end)
end)

describe("a recipe that is used wrongly ends with its own file and line:", function()
  local function test(title, words, message)
    it(title, function()
      if not training.program then
        pending "XTRAIN does not name the program"
        return
      end
      training.in_place("text=text.txt vocab=300 dim=16 heads=2 layers=1 ffn=16 batch=1 seq=8 "
        .. "steps=1", function(place)
        place:write("text.txt", training.text(20000))
        local code, _, errors = place:run(words)
        assert.are.equal(1, code)
        assert.matches("recipes/tiny.lua:%d+: ", errors)
        assert.is_truthy(errors:find(message, 1, true), errors)
      end)
    end)
  end

  test("a misspelt option", "leyers=3", "unknown option 'leyers' (did you mean 'layers'?)")
  test("a text that is not there, which is not made up", "text=none.txt",
    "there is no file none.txt")
  test("an option that does not fit the others", "heads=3", "dim 16 is no multiple of heads 3")
  test("a folder that cannot be made", "out=text.txt/run", "cannot make the folder text.txt/run")
  test("a save to resume from that is not there", "resume=none", "resume: none: no save here")
  test("a wrong probability", "dropout=nan", "option 'dropout' is 'nan', wanted a number")
  test("a text that is too short for one window", "seq=100000", "too few for one window")
end)
