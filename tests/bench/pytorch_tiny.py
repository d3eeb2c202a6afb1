#!/usr/bin/env python3
"""The training step of recipes/tiny.lua's model, here and in PyTorch, in turn on the same machine.

Usage: python pytorch_tiny.py [XTRAIN] [--threads N] [--rounds N] [--steps N] [--compile] [key=value ...]

Needs PyTorch, which the product itself does not. Both sides: the same shapes, f32, random tokens,
dropout off, gradient clipping, AdamW, median step time. Prints one line a round and the median ratio.
"""
import argparse, json, statistics, subprocess, time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("xtrain", nargs="?", default="build/release/xtrain")
parser.add_argument("options", nargs="*", help="key=value, for both sides")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()
size = dict(vocab=2048, dim=224, layers=4, heads=7, ffn=608, batch=8, seq=128)
for option in args.options:
    key, value = option.split("=")
    size[key] = int(value)
V, D, L, H, E, B, S = (size[k] for k in ("vocab", "dim", "layers", "heads", "ffn", "batch", "seq"))
HD = D // H


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(D, E, bias=False) for _ in range(2))
        self.down = nn.Linear(E, D, bias=False)
        self.n1, self.n2, self.qn, self.kn = Norm(D), Norm(D), Norm(HD), Norm(HD)

    def forward(self, x, cos, sin):
        h = self.n1(x)
        q, k, v = (f(h).view(B, S, H, HD) for f in (self.q, self.k, self.v))
        q, k = rotate(self.qn(q), cos, sin), rotate(self.kn(k), cos, sin)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, S, D))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = Norm(D)
        angle = torch.outer(torch.arange(S).float(), 1e4 ** (-torch.arange(0, HD, 2).float() / HD))
        angle = torch.cat((angle, angle), -1)[:, None, :]
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


torch.set_num_threads(args.threads)
torch.manual_seed(0)
model = Model()
step_model = torch.compile(model) if args.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def torch_step():
    ids, labels = torch.randint(0, V, (B, S)), torch.randint(0, V, (B, S))
    start = time.perf_counter()
    step_model(ids, labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def torch_ms():
    for _ in range(3):
        torch_step()
    return 1e3 * statistics.median(torch_step() for _ in range(args.steps))


def xtrain_ms():
    command = [args.xtrain, "recipes/tiny.lua", f"bench={args.steps}", f"threads={args.threads}"]
    command += [f"{k}={v}" for k, v in size.items()]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])["step_ms"]


print(f"PyTorch {torch.__version__}{' compiled' if args.compile else ''}, {args.threads} threads,",
      f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {B} x {S} tokens")
ratios = []
for _ in range(args.rounds):
    theirs, ours = torch_ms(), xtrain_ms()
    ratios.append(theirs / ours)
    print(f"PyTorch {theirs:.1f} ms, xtrain {ours:.1f} ms, ratio {ratios[-1]:.2f}", flush=True)
print(f"median ratio {statistics.median(ratios):.2f}")
