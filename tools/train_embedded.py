"""Train the small Llama that ships inside the package, from text that every CPython carries.

    python tools/train_embedded.py [--minutes N | --steps N] [--out DIR]

Text (the language reference of ``pydoc`` and the docstrings of the standard library), tokenizer, weights and model card are
all made here, without network.  The result depends on the Python release (the text), the seed and the number of steps only.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import random
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

SEED, VOCABULARY, WINDOW, HELD_OUT_BYTES = 20, 2048, 512, 220_000
BATCH, RATE, DROPOUT = 8, 3e-3, 0.1
SPECIAL = ["<|bos|>", "<|eos|>"]
BOS, EOS = 0, 1
SEPARATOR = "\n\n\n"
SELECTION_TOKENS = 40 * (WINDOW - 1)  # of the calibration slice, looked at to choose the best step
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "__pycache__"}
PROMPTS = ['The "with" statement', "Return a list of", "class collections.", "Raises ValueError if", "Open the file"]
CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The embedded model of fewbits

A Llama of {parameters:,} parameters (4 layers, hidden size 256, 4 heads of 64 with 2 key/value heads, 2,048 byte-level BPE
tokens, 512 positions, tied embeddings, FP16) that the project trained from scratch.  It ships inside the package so that every
command, test and example can run on a real trained network without a download.  It writes text in the manner of Python
documentation, seldom true; it is a test object, not an assistant.

## Text and licence

The text is the language reference in `pydoc_data.topics` and the docstrings of the standard library of CPython {python},
copyright Python Software Foundation, under the PSF License Agreement; so are the two held-out slices in `../text`.
Repeated paragraphs were dropped, then whole documents (a section of the reference, or all docstrings of a module) were dealt
into three slices.  Tokenizer and weights saw the training slice only; the first {selection:,} tokens of the calibration slice chose
the step to keep; the verification slice chose nothing.  (The learning rate was set after three trial runs of 200 steps on an
earlier deal of the same documents.)  The weights are under Apache-2.0.

## Training

    python tools/train_embedded.py --steps {steps}{horizon}

{steps:,} steps of {batch} windows of 512 tokens: {seen:,} tokens, {epochs:.1f} passes over {train_tokens:,} training tokens, in
{minutes:.0f} minutes on {threads} threads of a shared CPU (torch {torch}, float32).  AdamW, peak learning rate {lr}, cosine schedule
with warm-up{landing}, weight decay 0.1, gradient clipping at 1, dropout {dropout}
on what enters the residual stream.  Kept: step {best_step:,}.

## Figures

Of the saved FP16 model, loaded back and computed in float32, over consecutive windows of `<|bos|>` and 511 tokens.

| slice | bytes | tokens | bits per byte | perplexity per token |
|---|---|---|---|---|
{rows}

## Samples

{samples}"""


def topic_sections(text: str) -> list[str]:
    """Cut a long topic at its headings, so that no single document outweighs a held-out slice."""
    sections = [""]
    for paragraph in text.strip().split("\n\n"):
        size, heading, flush = len(sections[-1]), paragraph.startswith("\n"), not paragraph.startswith((" ", "\n "))
        if (heading and size > 3000) or (flush and size > 8000):
            sections.append("")
        sections[-1] += ("\n\n" if sections[-1] else "") + paragraph
    return sections


def fresh_paragraphs(text: str, seen: set[str]) -> str:
    """Leave out the paragraphs met before: the reference repeats whole sections, which would leak across the split."""
    cache = []
    for paragraph in re.sub(r"[ \f\r]+\n", "\n", text.expandtabs()).split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) < 50 or key not in seen:
            cache.append(paragraph)
        seen.add(key)
    return "\n\n".join(cache).strip("\n")


def module_docstrings(path: Path, module: str, seen: set[str]) -> str:
    """Read a module without running it, as importing some of them has effects or needs a display."""
    pieces: list[str] = []

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = ".".join(filter(None, (name, getattr(node, "name", ""))))
            docstring = fresh_paragraphs(ast.get_docstring(node) or "", seen)
            if docstring:
                pieces.append(f"{name}\n\n{docstring}")
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(ast.parse(path.read_bytes()), module)
    return "\n\n".join(pieces)


def gather_documents() -> list[list[str]]:
    """Collect topics and docstrings in a fixed order, leaving out what is tiny, no documentation or bound to a machine."""
    seen: set[str] = set()
    sections = [fresh_paragraphs(section, seen) for name in sorted(topics) for section in topic_sections(topics[name])]
    modules = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED.intersection(parts) and not parts[0].startswith(("_sysconfigdata", "config-", "lib-dynload")):
            modules.append(module_docstrings(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), seen))
    return [[text for text in texts if len(text) >= 200 and sys.base_prefix not in text] for texts in (sections, modules)]


def split_documents(kinds: list[list[str]]) -> dict[str, list[str]]:
    """Deal whole documents into the slices, each kind in proportion to its share of all bytes."""
    rng = random.Random(SEED)
    total = sum(len(text.encode()) for texts in kinds for text in texts)
    slices: dict[str, list[str]] = {"verification": [], "calibration": [], "training": []}
    for kind in kinds:
        texts = list(kind)
        rng.shuffle(texts)
        room = HELD_OUT_BYTES * sum(len(text.encode()) for text in texts) / total
        for name in ("verification", "calibration"):
            left = room
            for text in list(texts):
                if len(text.encode()) <= min(left, room / 10):  # one huge module would speak for the whole slice
                    left -= len(text.encode())
                    slices[name].append(text)
                    texts.remove(text)
        slices["training"] += texts
    for texts in slices.values():
        rng.shuffle(texts)
    return slices


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Fit a byte-level BPE whose pre-tokenizer is the one llama.cpp calls "gpt-2", on training text only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens")
    return tokenizer


@torch.no_grad()
def bits_of(model: Any, ids: list[int]) -> float:
    """Measure held-out tokens in windows as training shows them: <|bos|> (itself not counted), then 511 tokens."""
    model.eval()
    total = 0.0
    for start in range(0, len(ids), WINDOW - 1):
        window = torch.tensor([BOS, *ids[start : start + WINDOW - 1]])
        logits = model(input_ids=window[None]).logits[0, :-1]
        total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
    return total / math.log(2)


def new_model() -> Any:
    """Build the network, with dropout hooked on what enters the residual stream (active in training mode only)."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=WINDOW, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=BOS, eos_token_id=EOS, dtype="float32",
    )  # fmt: skip
    build: Any = LlamaForCausalLM
    model = build(config)

    def drop(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, DROPOUT, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return model


def rate_at(step: int, steps: int, horizon: int) -> float:
    """Warm up linearly, then follow a half cosine down to 2 % of the peak; a run cut short of its horizon lands over its last 30 %."""
    warmup = min(100, max(1, horizon // 10))
    landing = min(1.0, (steps - step) / (0.3 * steps)) if steps < horizon else 1.0
    if step < warmup:
        return RATE * (step + 1) / warmup * landing
    return RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, horizon - warmup)))) * landing


def loss_of(model: Any, stream: torch.Tensor) -> torch.Tensor:
    """Draw random stretches of the packed stream, each behind a <|bos|>, and score them."""
    begins = torch.randint(len(stream) - WINDOW + 2, (BATCH, 1))
    targets = stream[begins + torch.arange(WINDOW - 1)]
    logits = model(input_ids=functional.pad(targets, (1, 0), value=BOS)[:, :-1]).logits
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def steps_for(minutes: float, stream: torch.Tensor) -> int:
    """Turn a time budget into a number of steps by timing a few on this machine."""
    model = new_model()
    torch.autograd.backward(loss_of(model, stream))
    start = time.monotonic()
    for _ in range(8):
        torch.autograd.backward(loss_of(model, stream))
    return max(20, int(minutes * 60 / ((time.monotonic() - start) / 8 * 1.1)))


def train(args: argparse.Namespace, stream: torch.Tensor, selection: list[int], size: int) -> tuple[Any, dict[str, Any]]:
    """Optimise, keeping the weights that do best on the selection; resume from a checkpoint of the same settings."""
    model, steps = new_model(), args.steps
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    settings = {"horizon": args.horizon, "lr": RATE, "dropout": DROPOUT, "batch": BATCH, "stream": int(stream.sum())}
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "best": math.inf, "settings": settings}
    checkpoint = args.work / "checkpoint.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else state
    if saved["settings"] == settings and saved["step"]:
        state = saved
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        print(f"resuming after step {state['step']}", flush=True)
    before, first, start = state["seconds"], state["step"], time.monotonic()
    every = max(1, min(100, steps // 10))
    for step in range(first, steps):
        torch.manual_seed(SEED * 1_000_003 + step)  # of the step, so that a resumed run draws the same windows and dropout
        model.train()
        loss = loss_of(model, stream)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, args.horizon)
        optimizer.step()
        done = step + 1
        if done % every == 0 or done == steps:
            bits = bits_of(model, selection) / size
            if bits < state["best"]:
                state |= {"best": bits, "best_step": done, "best_model": {k: v.clone() for k, v in model.state_dict().items()}}
            spent = time.monotonic() - start
            state |= {"step": done, "seconds": before + spent, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            left = spent / (done - first) * (steps - done) / 60
            print(f"step {done}/{steps}  loss {loss.item():.3f}  held-out {bits:.4f} bits/byte  {left:.1f} min left", flush=True)
    model.load_state_dict(state["best_model"])
    return model, state


def write_model(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """Write weights and tokenizer settings by hand, so that neither depends on the release of transformers."""
    model.config.dtype = torch.float16
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    generation: Any = GenerationConfig
    generation(bos_token_id=BOS, eos_token_id=EOS).save_pretrained(folder)
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS]}
    settings |= {"model_max_length": WINDOW, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def samples_of(model: Any, tokenizer: Any) -> str:
    """Let the saved model speak, once greedily and then by seeded sampling."""
    blocks = []
    for number, prompt in enumerate(PROMPTS):
        torch.manual_seed(SEED)
        sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 40} if number else {"do_sample": False}
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=90, pad_token_id=EOS, **sampling)
        text = tokenizer.decode(ids[0], skip_special_tokens=True).rstrip()
        blocks.append(f"Prompt `{prompt}`, {'temperature 0.7, top-k 40' if number else 'greedy'}:\n\n~~~text\n{text}\n~~~\n")
    return "\n".join(blocks)


def write_card(folder: Path, texts: dict[str, str], args: argparse.Namespace, state: dict[str, Any], train_tokens: int) -> None:
    """Measure the files as a user would load them, and state only what was measured."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = []
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.decode(ids) != text:
            raise RuntimeError(f"the tokenizer does not give the {name} text back")
        size, bits = len(text.encode()), bits_of(model, ids)
        rows.append(f"| {name} | {size:,} | {len(ids):,} | {bits / size:.4f} | {2 ** (bits / len(ids)):.2f} |")
    seen = BATCH * (WINDOW - 1) * args.steps
    figures: dict[str, Any] = {"steps": args.steps, "threads": args.threads, "batch": BATCH, "lr": RATE, "dropout": DROPOUT}
    figures |= {"parameters": sum(p.numel() for p in model.parameters()), "selection": SELECTION_TOKENS, "best_step": state["best_step"]}
    cut = args.horizon > args.steps
    figures["horizon"] = f" --horizon {args.horizon}" if cut else ""
    figures["landing"] = f" over {args.horizon:,} steps, cut short by a linear landing over the last 30 % of the run" if cut else ""
    figures |= {"seen": seen, "train_tokens": train_tokens, "epochs": seen / train_tokens, "minutes": state["seconds"] / 60}
    figures |= {"python": platform.python_version(), "torch": torch.__version__, "rows": "\n".join(rows)}
    (folder / "README.md").write_text(CARD.format(samples=samples_of(model, tokenizer), **figures), encoding="utf-8")
    print("\n".join(rows))


def main() -> None:
    """Run everything, moving the files into place only once all of them are complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="time budget, turned into a number of steps")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, overriding --minutes; makes the run reproducible")
    parser.add_argument("--horizon", type=int, default=0, help="length of the cosine if longer than the run: cuts a planned run short")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "src" / "fewbits" / "embedded")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fewbits-train", help="where the checkpoint lives")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    slices = split_documents(gather_documents())
    texts = {name: SEPARATOR.join(slices[name]) + "\n" for name in ("calibration", "verification")}
    tokenizer = train_tokenizer(slices["training"])
    encoded = tokenizer.encode_batch(slices["training"], add_special_tokens=False)
    stream = torch.tensor([token for document in encoded for token in (*document.ids, EOS)])
    selection = tokenizer.encode(texts["calibration"], add_special_tokens=False).ids[:SELECTION_TOKENS]
    sizes = {name: f"{len(parts)} documents, {len(SEPARATOR.join(parts).encode()):,} bytes" for name, parts in slices.items()}
    print(sizes, f"{len(stream):,} training tokens", flush=True)
    args.steps = args.steps or steps_for(args.minutes, stream)
    args.horizon = max(args.steps, args.horizon)
    model, state = train(args, stream, selection, len(tokenizer.decode(selection).encode()))

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".embedded-") as made:
        for name in ("model", "text"):
            (Path(made) / name).mkdir()
            (args.out / name).mkdir(exist_ok=True)
        for name, text in texts.items():
            (Path(made) / "text" / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
        write_model(Path(made) / "model", model, tokenizer)
        write_card(Path(made) / "model", texts, args, state, len(stream))
        for path in sorted(Path(made).rglob("*.*")):
            path.chmod(0o644)
            path.replace(args.out / path.relative_to(made))


if __name__ == "__main__":
    main()
