#!/usr/bin/env python3
"""Training steps of a small Qwen3 with grouped heads and of a small GPT-2, here and in PyTorch, in turn.

Usage: python pytorch_models.py [XTRAIN] [--model qwen3-gqa|gpt2] [--threads N] [--rounds N] [--steps N] [--compile]

Needs PyTorch, which the product itself does not. Both sides: the same shapes, f32, random tokens, dropout
off, loss over all tokens, gradient clipping, AdamW. Each round has a few steps of one side and then of the
other. Where others use the machine too, what counts is the fastest step that each side has had, or with one
thread the processor time, which waiting does not count into; both are printed, the latter as a median.
"""
import argparse, os, statistics, subprocess, time

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as xtrain has it: waiting threads soon leave the core to others
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("xtrain", nargs="?", default="build/release/xtrain")
parser.add_argument("--model", choices=["qwen3-gqa", "gpt2"])
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

V, D, L, B, S = 2048, 256, 4, 8, 128
QWEN = dict(heads=8, kv_heads=2, head_dim=32, ffn=704)
GPT2 = dict(heads=4, ffn=4 * D)

LUA = """
local xt = require "xtrain"
xt.threads(%d)
local model = xt.models.%s { vocab = %d, dim = %d, layers = %d, %s, seed = 1 }
model:train()
local opt = xt.optim.adamw(xt.nn.params(model), { betas = { 0.9, 0.95 }, weight_decay = 0.1 })
local clock = require("xtrain.core.file").monotonic
local step = 0
for line in io.lines() do -- how many steps
  for _ = 1, tonumber(line) do
    step = step + 1
    local ids = xt.cast(xt.rand({ %d, %d }, { seed = xt.seed(step, "ids") }) * %d, "i32")
    local labels = xt.cast(xt.rand({ %d, %d }, { seed = xt.seed(step, "labels") }) * %d, "i32")
    xt.collect()
    local began, busy = clock(), os.clock()
    model:loss(ids, labels):backward()
    opt:step(1e-3, { clip = 1.0 })
    opt:zero_grad()
    print(clock() - began, os.clock() - busy)
  end
  io.stdout:flush()
end
"""


class QwenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        h, k, d, e = (QWEN[n] for n in ("heads", "kv_heads", "head_dim", "ffn"))
        self.q, self.k, self.v = nn.Linear(D, h * d, False), nn.Linear(D, k * d, False), nn.Linear(D, k * d, False)
        self.o, self.down = nn.Linear(h * d, D, False), nn.Linear(e, D, False)
        self.gate, self.up = nn.Linear(D, e, False), nn.Linear(D, e, False)
        self.n1, self.n2, self.qn, self.kn = (nn.RMSNorm(n, eps=1e-6) for n in (D, D, d, d))

    def forward(self, x, cos, sin):
        def rotate(t):
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        y = self.n1(x)
        q, k, v = (f(y).view(B, S, -1, QWEN["head_dim"]) for f in (self.q, self.k, self.v))
        q, k = rotate(self.qn(q)), rotate(self.kn(k))
        group = QWEN["heads"] // QWEN["kv_heads"]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, S, -1))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Qwen(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(QwenBlock() for _ in range(L))
        self.norm = nn.RMSNorm(D, eps=1e-6)
        d = QWEN["head_dim"]
        angle = torch.outer(torch.arange(S).float(), 1e4 ** (-torch.arange(0, d, 2).float() / d))
        angle = torch.cat((angle, angle), -1)[:, None, :]
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, GPT2["ffn"]), nn.Linear(GPT2["ffn"], D)
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x):
        q, k, v = (t.view(B, S, GPT2["heads"], -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(V, D), nn.Embedding(S, D)
        self.blocks = nn.ModuleList(GPTBlock() for _ in range(L))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids, labels):
        x = self.embed(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def options(table, **more):
    return ", ".join(f"{k} = {v}" for k, v in {**table, **more, "tied": "true"}.items())


# steps(n) of either side: what each took, by the wall clock and in processor time, in seconds.
class Theirs:
    def __init__(self, kind):
        torch.manual_seed(0)
        self.model = kind()
        self.call = torch.compile(self.model) if args.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=True)

    def steps(self, n):
        pairs = []
        for _ in range(n):
            ids, labels = torch.randint(0, V, (B, S)), torch.randint(0, V, (B, S))
            began, busy = time.perf_counter(), time.process_time()
            self.call(ids, labels).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            pairs.append((time.perf_counter() - began, time.process_time() - busy))
        return pairs


class Ours:
    def __init__(self, kind, text):
        lua = LUA % (args.threads, kind, V, D, L, text, B, S, V, B, S, V)
        self.process = subprocess.Popen([args.xtrain, "-e", lua], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def steps(self, n):
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        return [tuple(map(float, self.process.stdout.readline().split())) for _ in range(n)]


torch.set_num_threads(args.threads)
print(f"PyTorch {torch.__version__}{' compiled' if args.compile else ''}, {args.threads} threads, vocabulary {V},",
      f"{L} layers of {D}, {B} x {S} tokens; milliseconds a step")
for name, kind, ours in (("qwen3-gqa", Qwen, ("qwen3", options(QWEN))),
                         ("gpt2", GPT, ("gpt2", options(GPT2, context=S)))):
    if args.model not in (None, name):
        continue
    sides = (Theirs(kind), Ours(*ours))
    for side in sides:
        side.steps(3)
    seconds = ([], [])
    for _ in range(args.rounds):
        for side, list_of in zip(sides, seconds):
            list_of += side.steps(args.steps)
    (wall, busy), (our_wall, our_busy) = ((1e3 * min(t[0] for t in pairs),
                                           1e3 * statistics.median(t[1] for t in pairs)) for pairs in seconds)
    print(f"{name}: fastest: PyTorch {wall:.1f}, xtrain {our_wall:.1f}, ratio {wall / our_wall:.2f};",
          f"processor: PyTorch {busy:.1f}, xtrain {our_busy:.1f}, ratio {busy / our_busy:.2f}", flush=True)
    sides[1].process.stdin.close()
    sides[1].process.wait()
