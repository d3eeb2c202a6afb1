#!/usr/bin/env python3
"""20 steps of each optimizer here and in PyTorch, on the same problem in f64: the largest difference.

Usage: python optimizers.py [XTRAIN] [--lua]

Needs PyTorch, which the product itself does not. The problem is the one of tests/lua/optim_spec.lua:
matrix w (3, 4) and vector b (4), each pulled to a target, so that gradients depend on weights. --lua
prints PyTorch's last weights as the table that the spec holds.
"""
import argparse, json, subprocess

import torch

parser = argparse.ArgumentParser()
parser.add_argument("xtrain", nargs="?", default="build/release/xtrain")
parser.add_argument("--lua", action="store_true")
args = parser.parse_args()

CASES = {
    "adamw": ("AdamW", dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
              "adamw", "betas = {0.9, 0.95}, eps = 1e-8, weight_decay = 0.1"),
    "sgd": ("SGD", dict(weight_decay=0.1), "sgd", "weight_decay = 0.1"),
    "sgd_momentum": ("SGD", dict(momentum=0.9, dampening=0.5), "sgd",
                     "momentum = 0.9, dampening = 0.5"),
    "sgd_nesterov": ("SGD", dict(momentum=0.9, nesterov=True, weight_decay=0.1), "sgd",
                     "momentum = 0.9, nesterov = true, weight_decay = 0.1"),
}

LUA = """
local xt = require "xtrain"
local f64 = {dtype = "f64"}
local function numbers(n, fn)
  local t = {}
  for i = 0, n - 1 do t[i + 1] = fn(i) end
  return xt.tensor(t, f64)
end
local function parameter(n, shape, k)
  local w = xt.var(numbers(n, function(i) return (i * 7 + k) %% 11 / 4 - 1.25 end):reshape(shape))
  local target = numbers(n, function(i) return (i * 5 + k) %% 13 / 8 - 0.75 end):reshape(shape)
  local pull = numbers(n, function(i) return (i + k) %% 3 + 1 end):reshape(shape)
  return w, function() return xt.sum((w - target) ^ 2 * pull) end
end
local w, pull_w = parameter(12, {3, 4}, 0)
local b, pull_b = parameter(4, {4}, 1)
local params = {{name = "w", tensor = w}, {name = "b", tensor = b}}
local opt = xt.optim.%s(params, {%s})
for step = 1, 20 do
  opt:zero_grad();
  (pull_w() + pull_b()):backward()
  opt:step(0.02, {clip = 5})
end
print(xt.json.encode {w = w:reshape{12}:totable(), b = b:totable()})
"""


def ours(name, options):
    done = subprocess.run([args.xtrain, "-e", LUA % (name, options)], text=True,
                          capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def theirs(kind, options):
    def parameter(n, shape, k):
        i = torch.arange(n)
        w = ((i * 7 + k) % 11 / 4.0 - 1.25).double().reshape(shape).requires_grad_()
        target = ((i * 5 + k) % 13 / 8.0 - 0.75).double().reshape(shape)
        pull = ((i + k) % 3 + 1).double().reshape(shape)
        return w, lambda: ((w - target) ** 2 * pull).sum()

    w, pull_w = parameter(12, (3, 4), 0)
    b, pull_b = parameter(4, (4,), 1)
    groups = [dict(params=[w]), dict(params=[b], weight_decay=0.0)]
    opt = getattr(torch.optim, kind)(groups, lr=0.02, **options)
    for _ in range(20):
        opt.zero_grad()
        (pull_w() + pull_b()).backward()
        torch.nn.utils.clip_grad_norm_([w, b], 5)
        opt.step()
    return dict(w=w.detach().flatten().tolist(), b=b.detach().tolist())


for case, (kind, options, name, lua_options) in CASES.items():
    want = theirs(kind, options)
    if args.lua:
        for part in ("w", "b"):
            print("    %s_%s = { %s }," % (case, part, ", ".join("%.16g" % x for x in want[part])))
        continue
    got = ours(name, lua_options)
    apart = max(abs(x - y) for part in got for x, y in zip(got[part], want[part]))
    print("%-14s largest difference of 16 weights after 20 steps: %.2e" % (case, apart))
