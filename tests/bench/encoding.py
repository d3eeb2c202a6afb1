#!/usr/bin/env python3
"""Encoding speed here and in the `tokenizers` package, in turn on the same machine and text.

Usage: python encoding.py TOKENIZER.json TEXT [XTRAIN] [--rounds N] [--megabytes N]

Needs the `tokenizers` package, which the product itself does not. One thread on both sides; all
ids are compared. Text is repeated, its lines shifted, up to the size asked for. `encode` makes a
list of ids in the script's language; `bulk` is encode_bytes, which `xtrain tokenize` uses. Times
are CPU time, so that other programs matter less; the median over rounds, in MB/s.
"""
import argparse, os, statistics, subprocess, tempfile, time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tokenizers  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("tokenizer")
parser.add_argument("text")
parser.add_argument("xtrain", nargs="?", default="build/release/xtrain")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--megabytes", type=float, default=1.0)
args = parser.parse_args()

LUA = """
local xt = require "xtrain"
local tok = assert(xt.tokenizer.load(arg[1]))
local f = assert(io.open(arg[2], "rb"))
local text = f:read("a")
local out = assert(io.open(arg[3], "wb"))
local began = os.clock()
local packed, width = tok:encode_bytes(text)
local bulk = os.clock() - began
out:write(string.pack("<I4", width), packed)
out:close()
collectgarbage()
began = os.clock()
local ids = tok:encode(text)
print(bulk, os.clock() - began, #ids)
"""


def ours(path):
    with tempfile.NamedTemporaryFile() as out:
        done = subprocess.run([args.xtrain, "-e", LUA, args.tokenizer, path, out.name], text=True,
                              capture_output=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        with open(out.name, "rb") as made:
            data = made.read()
    width = int.from_bytes(data[:4], "little")
    ids = memoryview(data[4:]).cast("H" if width == 2 else "I").tolist()
    bulk, encode, count = done.stdout.split()
    assert int(count) == len(ids)
    return float(bulk), float(encode), ids


def timed(fn):
    began = time.process_time()
    result = fn()
    return time.process_time() - began, result


def fresh():  # its cache of words is empty, as ours is
    return tokenizers.Tokenizer.from_file(args.tokenizer)


with open(args.text, encoding="utf-8") as source:
    lines = source.read().splitlines(keepends=True)
size = int(args.megabytes * 1e6)
parts, total, shift = [], 0, 0
while total < size:
    part = "".join(lines[shift:] + lines[:shift])
    parts.append(part)
    total += len(part.encode())
    shift = (shift + 997) % len(lines)
text = "".join(parts).encode()[:size].decode(errors="ignore")
total = len(text.encode())
rows = text.splitlines(keepends=True)

with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt", newline="") as file:
    file.write(text)
    file.flush()
    times = []
    for _ in range(args.rounds):
        bulk, encode, ids = ours(file.name)
        tok = fresh()
        whole, encoding = timed(lambda: tok.encode(text, add_special_tokens=False))
        if encoding.ids != ids:
            raise SystemExit("the ids differ")
        tok = fresh()
        batch, _ = timed(lambda: tok.encode_batch_fast(rows, add_special_tokens=False))
        times.append((bulk, encode, whole, batch))

median = [statistics.median(column) for column in zip(*times)]
print("%.1f MB of %s, %d ids equal, tokenizers %s" % (total / 1e6, os.path.basename(args.text),
                                                     len(ids), tokenizers.__version__))
names = ("xtrain bulk", "xtrain encode", "tokenizers encode", "tokenizers batch of lines")
for name, seconds in zip(names, median):
    print("  %-26s %7.2f MB/s" % (name, total / 1e6 / seconds))
print("  bulk against the faster of theirs: %.1f times" % (min(median[2:]) / median[0]))
