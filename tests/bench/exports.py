#!/usr/bin/env python3
"""What is exported here, read by the packages safetensors and transformers.

Usage: python exports.py [XTRAIN] [FOLDER...]

Needs PyTorch and transformers, which the product itself does not. FOLDER is a Hugging Face folder that is
loaded here and written again: the tensors' bytes and the ids that begin and end texts must be those it
had. Besides them a small fresh model of each family goes through. For all: transformers must find every
tensor and no other, take no default where config.json says null, and give the logits that are given here.
"""
import argparse, json, os, subprocess, tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("xtrain", nargs="?", default="build/release/xtrain")
parser.add_argument("folders", nargs="*")
args = parser.parse_args()

LUA = """
local xt = require "xtrain"
local source, out = arg[1], arg[2]
local model = source:find "/" and assert(xt.hf.load(source)) or xt.models[source] { vocab = 70,
  dim = 32, layers = 2, heads = 4, ffn = 48, tied = arg[3] == "tied", context = 64, seed = 5,
  rope_scaling = ({ linear = { rope_type = "linear", factor = 4.0 }, llama3 = { rope_type = "llama3",
    factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0,
    original_max_position_embeddings = 16 } })[arg[3]] }
assert(xt.hf.save(out, model, nil, { dtype = arg[4] }))
local again = assert(xt.hf.load(out))
local vocab = model.config.vocab
local ids = xt.cast(xt.rand({ 2, 20 }, { seed = 1 }) * vocab, "i32")
assert(xt.safetensors.save(out .. "/answer", { ids = ids, logits = again(ids):detach() }))
"""


def bytes_of(path):
    return {name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
            for name, t in load_file(path).items()}


def check(source, variant, dtype):
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([args.xtrain, "-e", LUA, source, out, variant, dtype], check=True)
        answer = load_file(out + "/answer")
        with safe_open(out + "/model.safetensors", "pt") as f:
            assert f.metadata() == {"format": "pt"}
            names = set(f.keys())
        model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32,
                                                           output_loading_info=True)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not info[what], (what, info[what])
        ids = {k: getattr(model.config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        written = json.load(open(out + "/config.json"))
        assert all(written[k] == v for k, v in ids.items()), (ids, written)
        logits = model.eval()(input_ids=answer["ids"].long()).logits
        apart = ((logits - answer["logits"]).abs().max() / logits.abs().max()).item()
        assert apart < 2e-5, apart
        if os.path.isdir(source):
            before = json.load(open(source + "/config.json"))
            for k, v in ids.items():
                assert before.get(k) == v, (k, before.get(k), v)
            if dtype == "f32":
                assert bytes_of(source + "/model.safetensors") == bytes_of(out + "/model.safetensors")
        print(f"{source} {variant} {dtype}: {len(names)} tensors, {ids}, logits apart by {apart:.1e}",
              flush=True)


for kind in ("qwen3", "llama", "gpt2"):
    for tied in ("tied", "untied"):
        for dtype in ("f32", "bf16", "f16"):
            check(kind, tied, dtype)
for kind in ("qwen3", "llama"):
    for scaling in ("linear", "llama3"):
        check(kind, scaling, "f32")
for folder in args.folders:
    for dtype in ("f32", "bf16"):
        check(folder, "", dtype)
