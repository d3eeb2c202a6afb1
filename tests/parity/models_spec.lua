-- Against PyTorch and transformers in f32: logits, loss, every gradient, 20 AdamW steps, a greedy
-- continuation. The values are in ../shared/fixtures; without them everything here is pending.
-- Bounds: loss 2e-6 relative, logits 2e-5 and each gradient 5e-5 of its own largest entry, the 20
-- losses 1e-4 relative: f32 sums in another order, over at most 300 terms and 3 layers.
local xt = require "xtrain"

local FIXTURES = "../shared/fixtures"
local LOSS, LOGITS, GRADIENT, LOSSES = 2e-6, 2e-5, 5e-5, 1e-4

local function exists(path)
  local handle = io.open(path, "rb")
  if handle then handle:close() end
  return handle ~= nil
end

local function read_json(path)
  local handle = assert(io.open(path, "rb"))
  local text = handle:read "a"
  handle:close()
  return xt.json.decode(text)
end

-- The largest difference as a share of the largest entry of `want`.
local function difference(got, want)
  local scale = xt.amax(xt.abs(want)):item()
  return xt.amax(xt.abs(got:detach() - want)):item() / math.max(scale, 1e-30)
end

local function check_model(name, opts)
  local dir = FIXTURES .. "/" .. name
  local reference = assert(xt.safetensors.load(dir .. "/reference.safetensors"))
  local model = assert(xt.hf.load(dir .. "/model", opts))
  model:train()
  local ids, labels = reference.input_ids, reference.labels

  assert.is_true(difference(model(ids), reference.logits) <= LOGITS, "logits")
  local loss, count = model:loss(ids, labels)
  assert.are.equal(labels.numel - 3, type(count) == "number" and count or count:item())
  local want = reference.loss:item()
  assert.is_true(math.abs(loss:item() - want) <= LOSS * want, "loss " .. loss:item())
  loss:backward()
  local checked = 0
  for their_name, grad in pairs(xt.hf.state(model, "grad")) do
    local wanted = assert(reference["grad." .. their_name], their_name)
    assert.is_true(difference(grad, wanted) <= GRADIENT, their_name .. " "
      .. difference(grad, wanted))
    checked = checked + 1
  end
  local expected = 0
  for key in pairs(reference) do
    if key:find "^grad%." then expected = expected + 1 end
  end
  assert.are.equal(expected, checked)
end

local function check_steps(name, opts)
  local dir = FIXTURES .. "/" .. name
  local reference = assert(xt.safetensors.load(dir .. "/reference.safetensors"))
  local meta = read_json(dir .. "/meta.json")
  local model = assert(xt.hf.load(dir .. "/model", opts))
  model:train()
  local opt = xt.optim.adamw(xt.nn.params(model), { betas = meta.adamw.betas,
    eps = meta.adamw.eps, weight_decay = meta.adamw.weight_decay })
  local losses, norms = reference.losses:totable(), reference.grad_norms:totable()
  for step = 1, #losses do
    opt:zero_grad()
    local loss = model:loss(reference.input_ids, reference.labels)
    loss:backward()
    local norm = opt:step(meta.adamw.lr, { clip = meta.clip })
    assert.is_true(math.abs(loss:item() - losses[step]) <= LOSSES * losses[step],
      ("loss of step %d: %.9g, wanted %.9g"):format(step, loss:item(), losses[step]))
    assert.is_true(math.abs(norm:item() - norms[step]) <= 1e-3 * norms[step],
      ("norm of step %d: %.9g, wanted %.9g"):format(step, norm:item(), norms[step]))
  end
  -- Where a gradient is near 0, AdamW's first steps divide noise by noise and move by up to lr: so
  -- the mean is compared. The biases of GPT-2's keys are left out: softmax does not see what is
  -- added to all keys, and their gradient is noise alone.
  for their_name, tensor in pairs(xt.hf.state(model)) do
    local apart = xt.abs(tensor:detach() - reference["after20." .. their_name])
    if their_name:find "c_attn%.bias$" then
      local dim = model.config.dim
      apart = xt.concat { apart:slice(1, 1, dim), apart:slice(1, 2 * dim + 1, 3 * dim) }
    end
    local mean = xt.mean(apart):item()
    assert.is_true(mean <= 1e-3 * meta.adamw.lr, their_name .. " moved apart by " .. mean)
  end
end

local function check_greedy(name)
  local dir = FIXTURES .. "/" .. name
  local meta = read_json(dir .. "/meta.json")
  local model = assert(xt.hf.load(dir .. "/model"))
  local got = xt.generate(model, meta.prompt, { max = #meta.greedy, temperature = 0 })
  assert.are.equal(#meta.greedy, #got)
  for i, id in ipairs(meta.greedy) do
    if got[i] ~= id then
      assert.is_true(meta.greedy_margin[i] <= 1e-3, ("token %d is %d, wanted %d"):format(i, got[i],
        id))
      break -- another token: what follows cannot agree
    end
  end
end

for _, name in ipairs { "qwen3-mha", "qwen3-gqa", "llama-gqa", "gpt2" } do
  describe("parity with PyTorch: " .. name, function()
    local function test(title, fn)
      it(title, function()
        if not exists(FIXTURES .. "/" .. name .. "/reference.safetensors") then
          pending("there is no " .. FIXTURES .. "/" .. name)
          return
        end
        fn()
      end)
    end
    for _, attention in ipairs { "composed", "flash" } do
      for _, recompute in ipairs { "none", "block", "selective" } do
        test(("logits, loss and gradients: %s attention, recompute %s"):format(attention,
          recompute), function()
          check_model(name, { attention = attention, recompute = recompute })
        end)
      end
    end
    test("20 AdamW steps", function() check_steps(name) end)
    test("20 AdamW steps: composed attention, recompute", function()
      check_steps(name, { attention = "composed", recompute = "block" })
    end)
    test("greedy continuation", function() check_greedy(name) end)
  end)
end
