"""The honest files that hostile ones are made of, or are given beside: a random Llama of two blocks and what the verbs make of it."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path

import onnx
import tokenizers
import torch
import transformers

import fewbits
from fewbits import pipeline
from fewbits.targets import export

TEXT = "Return a copy of the list with each item lower-cased. If x is None, raise ValueError('no x').\n\nNew in version 3.12.\n"


@dataclass(frozen=True)
class Benign:
    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def gguf(self) -> Path:
        return self.root / "model.gguf"

    @property
    def artifact(self) -> Path:
        return self.root / "model.fewbits"

    @property
    def plan(self) -> Path:
        return self.artifact / "plan.json"

    @property
    def statistics(self) -> Path:
        return self.root / "statistics"

    @property
    def sensitivity(self) -> Path:
        return self.root / "sensitivity.json"

    @property
    def onnx(self) -> Path:
        """A language model, as `--to onnx` writes it."""
        return self.root / "model.onnx"

    @property
    def graph(self) -> Path:
        """One product, float."""
        return self.root / "graph.onnx"

    @property
    def text(self) -> Path:
        return self.root / "text.txt"


def make(root: Path) -> Benign:
    """Once, however many processes ask."""
    found = Benign(root)
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "ready").exists():
            _make(found)
            (root / "ready").touch()
    return found


def _make(found: Benign) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(found.model)
    tokenizer().save_pretrained(found.model)
    found.text.write_text(TEXT * 60)
    pipeline.quantize(found.model, found.artifact, to="fewbits", format="q4_0", method="rtn", no_verify=True)
    export.export(found.artifact, found.gguf)
    export.export(found.artifact, found.onnx)
    fewbits.calibrate(found.model, found.statistics, data=[found.text], samples=4, length=32)
    fewbits.measure(found.model, found.sensitivity, stats=found.statistics, formats=("q4_0", "q8_0"), method="rtn")
    onnx.save(graph(), found.graph)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    learner = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|bos|>", "<|eos|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], learner)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")


def graph() -> onnx.ModelProto:
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(torch.randn(64, 32).numpy(), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 64), ("y", 32))]
    body = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "graph", ends[:1], ends[1:], [weight])
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)
