"""The one object that does the whole way: every method is compared with the verbs that it stands for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import pytest
import torch

import fewbits
from fewbits import embedded
from fewbits.artifact import Artifact
from fewbits.errors import InputError
from fewbits.inference.packed_weights import packed_weights
from fewbits.model import Model
from fewbits.progress import silent
from fewbits.targets import export

INPUTS = ["import os\n\ndef main(", "class Error(Exception):\n    ", "for i in range("]
TARGETS = ["self):\n", "pass\n", "10):"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> fewbits.Workbench:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "text.txt").write_text(embedded.calibration_text()[:60_000])
    found = fewbits.Workbench(folder / "m.fewbits", model=embedded.MODEL, exact=True, progress=silent)
    made = found.quantize(data=folder / "text.txt", format="q4_k", samples=2, length=64, tokens=256)
    assert made.path == found.folder and made.verdict is not None and made.coverage is not None
    return found


def test_a_folder_alone_generates(bench: fewbits.Workbench) -> None:
    opened = fewbits.Workbench(bench.folder, exact=True, progress=silent)
    tokens = opened.artifact.tokenizer(INPUTS[0], return_tensors="pt")["input_ids"]
    expected = bench.artifact.module().generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
    assert opened.generate(INPUTS[0], tokens=12) == bench.artifact.tokenizer.decode(expected, skip_special_tokens=True)
    torch.manual_seed(0)
    drawn = {opened.generate(INPUTS[0], tokens=8, do_sample=True, temperature=3.0, top_k=0) for _ in range(4)}
    assert len(drawn) > 1  # options are transformers'


def test_a_benchmark_counts_the_targets_and_nothing_else(bench: fewbits.Workbench, embedded_model: Model) -> None:
    found = bench.benchmark(INPUTS, TARGETS)
    tokenizer, floats, ours = embedded_model.tokenizer, embedded_model.module(), bench.artifact.module()
    hits, hits_base, kl, nll = [], [], [], []
    for before, after in zip(INPUTS, TARGETS, strict=True):
        start, wanted = tokenizer(before)["input_ids"], tokenizer(after, add_special_tokens=False)["input_ids"]
        for n, token in enumerate(wanted):  # one at a time, each from all before it
            seen = torch.tensor([start + wanted[:n]])
            with torch.inference_mode():
                base, test = (module(seen).logits[0, -1].double().log_softmax(-1) for module in (floats, ours))
            hits_base.append(int(base.argmax()) == token)
            hits.append(int(test.argmax()) == token)
            kl.append(float((base.exp() * (base - test)).sum()))
            nll.append(-float(test[token]))
    assert found.accuracy == sum(hits) / len(hits) and found.accuracy_base == sum(hits_base) / len(hits_base)
    assert found.verdict.tokens == len(kl) and found.verdict.runtime == "transformers"
    # float32 sums in another order (whole sequences, packed rows): far below the four digits compared here
    assert found.verdict.kl_mean == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert found.verdict.ppl == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)
    tokens = [
        [tokenizer(text, add_special_tokens=first)["input_ids"] for text in some] for some, first in ((INPUTS, True), (TARGETS, False))
    ]
    assert bench.benchmark(*tokens) == found  # given as tokens


def test_it_exports_the_same_file_as_the_verb(bench: fewbits.Workbench, tmp_path: Path) -> None:
    ours = bench.export(tmp_path / "a.gguf")
    theirs = export.export(bench.folder, tmp_path / "b.gguf")
    assert ours.read_bytes() == theirs.read_bytes() and len(gguf.GGUFReader(ours).tensors) > 20


def test_a_model_and_a_plan(bench: fewbits.Workbench, tmp_path: Path) -> None:
    plan = json.loads((bench.folder / "plan.json").read_text())
    for row in plan["weights"].values():
        row["method"] = "rtn"
    plan["weights"]["model.embed_tokens"]["format"] = "int8_channel"
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"target": "fewbits"}))
    other = fewbits.Workbench(tmp_path / "out", embedded.MODEL, tmp_path / "plan.json", progress=silent)
    other.quantize(no_verify=True)
    assert other.folder == tmp_path / "out" / "model.fewbits"
    assert Artifact(other.folder).plan["model.embed_tokens"].format == "int8_channel"
    assert not any(matrix.exact for matrix in packed_weights(other.module))


def test_quantizing_anew_is_seen(tmp_path: Path) -> None:
    bench = fewbits.Workbench(tmp_path / "m.fewbits", embedded.MODEL, progress=silent)
    for format in ("fp16", "int4_g32"):
        bench.quantize(format=format, method="rtn", no_verify=True)
        assert {entry.format for entry in bench.artifact.plan.entries} == {format}
        assert f", {format}" in repr(bench.module)


def test_what_it_needs_is_named(bench: fewbits.Workbench, tmp_path: Path) -> None:
    alone = fewbits.Workbench(bench.folder, progress=silent)
    for call in (lambda: alone.quantize(format="fp16"), lambda: alone.benchmark(INPUTS, TARGETS)):
        with pytest.raises(InputError, match="model=MODEL"):
            call()
    with pytest.raises(InputError, match="3 inputs do not go with 1 targets"):
        bench.benchmark(INPUTS, TARGETS[:1])
    with pytest.raises(InputError, match="no text to compare on"):
        bench.benchmark(["a"], [""])
    with pytest.raises(InputError, match=r"fewbits\.json"):
        fewbits.Workbench(tmp_path / "nothing", progress=silent).generate("a")
