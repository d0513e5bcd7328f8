"""The same input gives the same bytes: run to run, and without calibration also on any number of threads and any kernel.

This file is its own child process: `python test_determinism.py MODEL OUT WHAT...` makes files that the tests compare; WHAT is a kernel, or
a name of MADE.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fewbits import embedded, pipeline
from fewbits.artifact import Artifact, manifest
from fewbits.artifact import machine as machines
from fewbits.artifact.machine import Machine
from fewbits.devices import processor
from fewbits.inspection import contents
from fewbits.store import maker

MIXED = ("down_proj=q6_k", "k_proj=iq4_nl", "o_proj=int4_g32", "embed=q8_0", "gate_proj=q4_1")
ROUNDED: dict[str, Any] = {"format": "q4_k", "override": MIXED, "method": "rtn", "no_verify": True}
PLAIN: dict[str, Any] = {"format": "int4_g32", "method": "rtn", "no_verify": True}
FITTED: dict[str, Any] = {"format": "q4_k", "override": MIXED, "method": "gptq", "no_verify": True, "samples": 6, "length": 48}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "rounded": ("rounded.gguf", ROUNDED),
    "artifact": ("rounded.fewbits", ROUNDED),
    "compressed": ("rounded.ct", PLAIN),
    "onnx": ("rounded.onnx", PLAIN),
    "genai": ("rounded.genai", PLAIN),
    "fitted": ("fitted.gguf", FITTED),
}

KERNELS = [
    name
    for name in (each.removeprefix("native-") for each in processor.BACKENDS)
    if name == "reference" or (any(row.isa == name and row.runs_here for row in processor.table().values()))
]


def make(model: Path, out: Path, whats: list[str]) -> None:
    for what in whats:
        name, how = MADE[what]
        pipeline.quantize(model, out / name, **how)


def hashes(path: Path) -> dict[str, str]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    assert files
    return {file.relative_to(path.parent).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def in_a_child(model: Path, out: Path, whats: list[str], **environment: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, str(model), str(out), *whats]
    subprocess.run(words, env={**os.environ, **environment}, check=True, timeout=120, cwd=out)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for blocks of 256."""
    folder = tmp_path_factory.mktemp("determinism") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def first(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first")
    assert torch.get_num_threads() == 1
    make(tiny, out, list(MADE))
    return out


@pytest.fixture(scope="module")
def second(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in another process, where hashes of texts, and so sets, have another order."""
    out = tmp_path_factory.mktemp("second")
    in_a_child(tiny, out, list(MADE), OMP_NUM_THREADS="1", PYTHONHASHSEED="7")
    return out


@pytest.mark.parametrize("what", MADE)
def test_twice_the_same_input_gives_the_same_bytes(what: str, first: Path, second: Path) -> None:
    name = MADE[what][0]
    assert hashes(first / name) == hashes(second / name)
    cache = f"{name}.work/artifact"
    assert hashes(first / cache) == hashes(second / cache)


@pytest.fixture(scope="module")
def threaded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two threads, by one kernel after the other, in a folder for each."""
    out = tmp_path_factory.mktemp("threaded")
    in_a_child(tiny, out, KERNELS, OMP_NUM_THREADS="2")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_rounded_weights_are_the_same_bytes_on_two_threads_and_by_every_kernel(kernel: str, first: Path, threaded: Path) -> None:
    file = threaded / kernel / "rounded.gguf"
    machine = json.loads((file.parent / "rounded.gguf.work" / "results.json").read_text())["reproduction"]["machine"]
    assert machine["threads"] == 2 and machine["kernels"].endswith(kernel)  # it did run so
    assert hashes(file) == hashes(first / "rounded.gguf")


def test_an_artifact_names_the_machine_where_its_bytes_depend_on_it_and_only_there(first: Path) -> None:
    fitted, rounded = (Artifact(first / f"{name}.gguf.work" / "artifact") for name in ("fitted", "rounded"))
    assert fitted.provenance.calibration and fitted.provenance.machine == machines.here()
    assert rounded.provenance.calibration is None and rounded.provenance.machine is None
    assert machines.here().torch == torch.__version__ and machines.here().threads == 1
    assert machines.here().instructions == torch.backends.cpu.get_cpu_capability()
    about = contents.inspect(fitted.path, no_values=True).metadata
    assert (about["machine.threads"], about["machine.torch"]) == (1, torch.__version__)


def test_the_results_say_who_gets_the_same_bytes(first: Path) -> None:
    for name, said in (("fitted", machines.SAME_HERE), ("rounded", machines.SAME_ANYWHERE)):
        work = first / f"{name}.gguf.work"
        about = json.loads((work / "results.json").read_text())["reproduction"]
        assert about["caveat"] == said and Machine(**about["machine"]) == machines.here()
        page = (work / "report.html").read_text()
        assert said in page and about["machine"]["instructions"] in page


@pytest.mark.parametrize("file", ["rounded.onnx", "rounded.genai/model.onnx"])
def test_a_graph_names_source_calibration_and_plan_by_hash(file: str, first: Path) -> None:
    onnx = pytest.importorskip("onnx")
    said = {entry.key: entry.value for entry in onnx.load(first / file, load_external_data=False).metadata_props}
    artifact = first / f"{file.split('/')[0]}.work" / "artifact"
    origin = Artifact(artifact).provenance
    assert said["fewbits.source_sha256"] == origin.sha256
    assert said["fewbits.calibration_sha256"] == hashlib.sha256(b"").hexdigest()
    assert said["fewbits.plan_sha256"] == hashlib.sha256((artifact / "plan.json").read_bytes()).hexdigest()


def test_a_calibrated_file_names_the_text(first: Path) -> None:
    made = Artifact(first / "fitted.gguf.work" / "artifact")
    assert manifest.said(made.provenance, made.plan)["fewbits.calibration_sha256"] == made.provenance.calibration


class TestResultsOfAnotherMachine:
    NOW: ClassVar[dict[str, Any]] = {"code": "a" * 64, "machine": ["AVX512", 2, "A"]}

    def keep(self, folder: Path, name: str, about: dict[str, Any]) -> None:
        """As `Cache.keep` writes it."""
        folder.mkdir(exist_ok=True)
        save_file({}, folder / f"weight-{name}.safetensors", {maker.ABOUT: maker.with_maker({}, about)})

    @pytest.mark.parametrize(
        ("before", "said"),
        [
            ({}, None),
            (
                {"machine": ["AVX512", 1, "A"]},
                "made with 1 thread, this one runs with 2 threads: they are made anew (OMP_NUM_THREADS=1 would",
            ),
            ({"machine": ["AVX512", 2, "B"]}, "made on B, this one runs on A: they are made anew"),
            ({"machine": ["AVX2", 2, "A"]}, "made with AVX2 instructions, this one runs with AVX512: they are made anew"),
            ({"code": "b" * 64}, "made by another version of fewbits, torch or transformers: they are made anew"),
            (
                {"code": "b" * 64, "machine": ["AVX512", 4, "A"]},
                "with 4 threads and by another version of fewbits, torch or tr",
            ),
        ],
    )
    def test_it_is_said_why_they_are_made_anew(self, before: dict[str, Any], said: str | None, tmp_path: Path) -> None:
        self.keep(tmp_path / "cache", "a", self.NOW | before)
        found = maker.changed(tmp_path / "cache", self.NOW)
        assert found is None if said is None else said in str(found)
        assert ("OMP_NUM_THREADS" in str(found)) == (list(before) == ["machine"] and before["machine"][1] != 2)  # where it helps

    def test_one_of_this_machine_is_gone_on_from_in_silence(self, tmp_path: Path) -> None:
        self.keep(tmp_path, "a", self.NOW | {"machine": ["AVX512", 1, "A"]})
        self.keep(tmp_path, "b", self.NOW)
        assert maker.changed(tmp_path, self.NOW) is None

    @pytest.mark.parametrize("said", [None, "", "[]", '{"made_by": ["a", 7]}', '{"made_by": ["a", ["AVX2", {}]]}', "[" * 10_000])
    def test_nothing_is_said_of_what_cannot_be_read(self, said: str | None, tmp_path: Path) -> None:
        assert maker.changed(tmp_path / "none", self.NOW) is None
        save_file({}, tmp_path / "weight-a.safetensors", {} if said is None else {maker.ABOUT: said})
        (tmp_path / "weight-b.safetensors").write_bytes(b"half")
        assert maker.changed(tmp_path, self.NOW) is None


def main(model: Path, out: Path, whats: list[str]) -> None:
    for kernel in [what for what in whats if what in KERNELS]:
        os.environ["FEWBITS_KERNEL"] = kernel
        make(model, out / kernel, ["rounded"])
    make(model, out, [what for what in whats if what in MADE])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
