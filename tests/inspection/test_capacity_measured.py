"""What a model really takes beyond an idle process, in llama.cpp and in `fewbits run`, against the estimate: SmolLM2 135M's shape,
random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from fewbits import artifact, formats, planning, targets
from fewbits import model as models
from fewbits.devices import processor
from fewbits.formats.runtime import kv
from fewbits.planning import footprint
from fewbits.planning.footprint import Use
from fewbits.progress import silent
from fewbits.verification import runtimes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is asked of /proc")
CONTEXT, FORMAT, VOCABULARY = 768, "q8_0", 49152  # llama.cpp rearranges q8_0 on no x86 processor: the mapped file is all there is

# RssAnon and what is resident of a mapped file; the most of the former is looked for 500 times a second
WATCH = """
import json, re, sys, threading
from pathlib import Path

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open('/proc/self/status') if line.startswith('RssAnon'))

def mapped(name):
    total, own = 0, False
    for line in open('/proc/self/smaps'):
        if re.match('[0-9a-f]+-[0-9a-f]+ ', line):
            own = name in line
        elif own and line.startswith('Rss:'):
            total += int(line.split()[1]) << 10
    return total

most, ended = [0], threading.Event()
def watch():
    while not ended.wait(0.002):
        most[0] = max(most[0], anonymous())

def start():
    threading.Thread(target=watch, daemon=True).start()
    return anonymous()
"""
LLAMA_CPP = """
import torch
from fewbits.verification.runtimes import llamacpp
path, context = Path(sys.argv[1]), int(sys.argv[2])
llamacpp._library()  # its code is part of the idle process
idle = start()
session = llamacpp.RUNTIME.open(path, context)
tokens = [7 * i % 40000 + 5 for i in range(context)]
for first in range(0, context, llamacpp.PART):
    session.decode(tokens[first : first + llamacpp.PART], first, every=False)
ended.set()
print(json.dumps({'grown': max(most[0], anonymous()) - idle + mapped(path.name)}))
"""
FEWBITS = """
import ctypes, gc, torch, transformers
from fewbits import embedded
from fewbits.devices import processor
from fewbits.artifact import Artifact
from fewbits.inference import engine as inference
from transformers.models.llama import modeling_llama
path, context = Path(sys.argv[1]), int(sys.argv[2])
processor.native()
transformers.AutoTokenizer.from_pretrained(embedded.MODEL)  # the code behind it is loaded at first use
idle, found = start(), {}
for kv in sys.argv[3:]:
    gc.collect(), ctypes.CDLL(None).malloc_trim(0)
    most[0] = 0
    made = inference.run(path, '7' * (context - 34), max_tokens=32, raw=True, context=context, kv=kv)
    found[kv] = {'grown': most[0] - idle, 'engine': made.stats.engine, 'cache': made.stats.cache_bytes}
ended.set()
engine, _ = inference.open_engine(Artifact(path), 'float', context, lambda items, *_: iter(items))
before = mapped('weights-')
for line in open('/proc/self/maps'):  # the system may take these pages whenever it wants memory: take them now, and go on
    if 'weights-' in line:
        first, last = (int(text, 16) for text in line.split()[0].split('-'))
        assert ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 4) == 0
for token in range(8):
    engine.step(5000 * token)
print(json.dumps(found | {'mapped': [before, mapped('weights-')]}))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an artifact and a GGUF of it."""
    folder = tmp_path_factory.mktemp("smollm2")
    source = folder / "source"
    source.mkdir()
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=VOCABULARY,
        max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(source)
    save_tokenizer(source)
    with torch.device("meta"):
        skeleton = transformers.LlamaForCausalLM(config)
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    tensors = {}
    for name, parameter in skeleton.named_parameters():
        if name != "lm_head.weight":
            count = parameter.numel()
            random = noise.repeat(-(-count // len(noise)))[:count].view(parameter.shape)
            tensors[name] = random.clone() if parameter.ndim > 1 else torch.ones(parameter.shape, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    opened = models.open(source)
    gguf = targets.get("gguf")
    made = artifact.quantize(opened, planning.uniform(opened.weights, gguf, formats.get(FORMAT)), folder / "artifact", silent)
    gguf.write(made, folder / "model.gguf", silent)
    return folder


def save_tokenizer(folder: Path) -> None:
    """As many tokens and merges as SmolLM2's has: they are a good part of what grows."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    known = {"<|bos|>": 0, "<|eos|>": 1} | {letter: number + 2 for number, letter in enumerate(alphabet)}
    pairs = [(a, b) for a, b in product(letters, letters)]
    merges = [*pairs, *((a + b, c) for (a, b), c in product(pairs, letters))][: VOCABULARY - len(known)]
    for a, b in merges:
        known[a + b] = len(known)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=known, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>").save_pretrained(folder)


def estimate(folder: Path, use: Use) -> footprint.Memory:
    opened = artifact.Artifact(folder / "artifact")
    kept = sum(4 * opened.tensor(name).numel() for name in opened.rest)
    return footprint.memory(footprint.shape(opened.config), opened.plan.nbytes + kept, use)


def measured(code: str, *words: object) -> Any:
    command = [sys.executable, "-c", WATCH + code, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.skipif(runtimes.get("llama.cpp").missing() is not None, reason="llama.cpp is not installed")
def test_llama_cpp_grows_by_what_is_estimated(written: Path) -> None:
    grown = measured(LLAMA_CPP, written / "model.gguf", CONTEXT)["grown"]
    counted = estimate(written, Use(CONTEXT, reserved=False))
    assert grown == pytest.approx(counted.total, rel=0.1), counted


@pytest.mark.skipif(processor.native_missing() is not None, reason="no native module")
@pytest.mark.slow
def test_fewbits_run_grows_by_what_is_estimated(written: Path) -> None:
    caches = ("float", "int8")
    found: Any = measured(FEWBITS, written / "artifact", CONTEXT, *caches)
    for cache in caches:
        assert found[cache]["engine"] == "native"
        counted = estimate(written, Use(CONTEXT, kv=kv.get(cache), runtime=footprint.FEWBITS))
        assert found[cache]["grown"] == pytest.approx(counted.total, rel=0.1), (cache, counted)
        assert found[cache]["cache"] == pytest.approx(counted.kv_cache, rel=0.05)  # whole groups and lanes
    # but for the rows that were looked up, and what the system maps around them, the file is not needed once it is laid out
    before, after = found["mapped"]
    assert before > 0.9 * counted.weights and after < 0.2 * before
