#!/usr/bin/env python3
"""How far gradients in bf16 lie from those in f32, here and in PyTorch, on the same models and batches.

Usage: python bf16.py [XTRAIN] [--seeds N]

Needs PyTorch and transformers, which the product itself does not. The models are those of the gate in
tests/parity/gates_spec.lua. Each line has three distances from the f32 gradients, for this runtime, for
PyTorch with bf16 weights and for PyTorch under autocast (f32 weights): that of the whole gradient
(|difference| / |gradient|, all entries as one vector), the same of the worst parameter, and the largest
difference of an entry as a share of its parameter's largest entry, for the worst parameter.
"""
import argparse, subprocess, tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("xtrain", nargs="?", default="build/release/xtrain")
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()

LUA = """
local xt = require "xtrain"
local dir, kind, seed = "%s", "%s", %d
local o = { vocab = 200, dim = 128, layers = 2, heads = 4, ffn = 256, seed = seed }
local function draw(name)
  return xt.cast(xt.rand({ 4, 48 }, { seed = xt.seed(seed, name) }) * 200, "i32")
end
local ids, labels = draw "ids", draw "labels"
for _, dtype in ipairs { "f32", "bf16" } do
  o.dtype = dtype
  local model = xt.models[kind](o)
  model:train()
  model:loss(ids, labels):backward()
  if dtype == "f32" then assert(xt.hf.save(dir, model)) end
  assert(xt.safetensors.save(dir .. "/" .. dtype .. ".st", xt.hf.state(model, "grad")))
end
assert(xt.safetensors.save(dir .. "/batch.st", { ids = ids, labels = labels }))
"""


def gradients(folder, batch, dtype, autocast=False):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=batch["ids"].long()).logits
    torch.nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]),
                                      batch["labels"].long().view(-1)).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def distances(got, want):
    whole, square, worst, worst_entry = 0.0, 0.0, 0.0, 0.0
    for name, g in want.items():
        if name.endswith("c_attn.bias"):  # the key part's gradient is noise alone
            continue
        d = (got[name] - g).double()
        whole, square = whole + d.square().sum(), square + g.double().square().sum()
        worst = max(worst, (d.norm() / g.double().norm()).item())
        worst_entry = max(worst_entry, (d.abs().max() / g.abs().max()).item())
    return "%.2e %.2e %.2e" % ((whole / square).sqrt(), worst, worst_entry)


print("model, seed | of: whole, worst parameter, worst entry | xtrain | PyTorch bf16 | PyTorch autocast")
for kind in ("qwen3", "llama", "gpt2"):
    for seed in range(7, 7 + args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([args.xtrain, "-e", LUA % (folder, kind, seed)], check=True)
            batch = load_file(folder + "/batch.st")
            full, ours = load_file(folder + "/f32.st"), load_file(folder + "/bf16.st")
            want = gradients(folder, batch, torch.float32)
            apart = max(((full[n] - g).abs().max() / g.abs().max()).item() for n, g in want.items()
                        if not n.endswith("c_attn.bias"))
            assert apart < 5e-5, apart  # the f32 gradients are the same
            print(f"{kind} {seed} | {distances(ours, full)}",
                  f"| {distances(gradients(folder, batch, torch.bfloat16), want)}",
                  f"| {distances(gradients(folder, batch, torch.float32, True), want)}", flush=True)
