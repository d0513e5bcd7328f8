"""The forecast of the work against the work: the embedded model calibrated, measured, quantized and verified in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zoo.models import build

from fewbits import formats, model, planning, targets
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.errors import MissingError
from fewbits.preflight import Preflight, Step, Work, preflight

GGUF = targets.get("gguf")
SAMPLES, LENGTH, FORMATS, VERIFIED = 16, 256, ("q4_k", "q8_0"), 4096

CHILD = """
import ctypes, json, os, sys, time, torch
from pathlib import Path
from fewbits import artifact, calibration, embedded, formats, model, planning, sensitivity, targets
from fewbits.benchmarks.scale.process_usage import peak, resident
from fewbits.calibration import split
from fewbits.preflight import Work, preflight
from fewbits.progress import silent
from fewbits.verification.files import verify
folder, samples, length, names, verified = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(','), int(sys.argv[5])
source, target = model.open(embedded.MODEL), targets.get('gguf')
plan = planning.uniform(source.weights, target, formats.get('q4_k'), (), 'auto')
work = Work(samples, length, formats=len(names), verified=verified)
forecast = preflight(source, target, folder / 'out.gguf', work, plan, clock=time.process_time)
text = split.split(source, (), (), samples, length, 0, verified)
source.module()(input_ids=torch.zeros(1, 8, dtype=torch.long))  # the code is part of the idle process
found = {}

def timed(name, what):
    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps gave back is not there for this one
    before, _ = resident(os.getpid())
    with peak() as most:
        start = time.process_time()
        result = what()
        seconds = time.process_time() - start
    found[name] = {'seconds': seconds, 'memory': max(0, (most or [before])[0] - before)}
    return result

def size(path):
    return sum(f.stat().st_size for f in path.rglob('*') if f.is_file()) if path.is_dir() else path.stat().st_size

seen = timed('calibrating', lambda: calibration.collect(source, text.samples, folder / 'statistics'))
found['calibrating']['disk'] = size(folder / 'statistics')
timed('measuring', lambda: sensitivity.measure(source, seen, [formats.get(name) for name in names]))
def make():
    made = artifact.quantize(source, plan, folder / 'artifact', silent, seen)
    target.write(made, folder / 'out.gguf', silent)
timed('quantizing', make)
found['quantizing']['disk'] = size(folder / 'artifact') + size(folder / 'out.gguf')
timed('verifying', lambda: verify(folder / 'out.gguf', source, length=length, tokens=verified))
print(json.dumps({'forecast': forecast.to_dict(), 'found': found}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = [str(tmp_path_factory.mktemp("work")), str(SAMPLES), str(LENGTH), ",".join(FORMATS), str(VERIFIED)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(sys.platform != "linux", reason="memory is asked of /proc")
@pytest.mark.parametrize("name", ["calibrating", "measuring", "quantizing", "verifying"])
def test_a_step_takes_no_more_than_was_said_and_about_as_long(told: dict[str, Any], name: str) -> None:
    said = next(step for step in told["forecast"]["steps"] if step["name"] == name)
    found = told["found"][name]
    assert found["memory"] <= said["memory"]
    assert 1 / 3 <= found["seconds"] / said["seconds"] <= 3  # processor time of one thread: other programs do not count
    if "disk" in found:
        assert found["disk"] <= said["disk"] <= 3 * found["disk"]


def test_statistics_grow_with_samples_and_what_is_beyond_the_buffer_takes_no_memory(
    embedded_model: model.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewbits.preflight.rate_of", lambda *_: 1e11)
    out = tmp_path / "out.gguf"
    plain = Work(samples=64, length=512)
    small, large = (preflight(embedded_model, GGUF, out, work).steps[0] for work in (plain, replace(plain, samples=128)))
    assert large.disk > small.disk and large.memory > small.memory and large.seconds == pytest.approx(2 * small.seconds)
    assert small.disk > 6 * 64 * 512 * 256 * 4  # states between four blocks, before and after them, and the gradient: to go on from
    states = 2 * 64 * 512 * 256 * 4  # that a block reads and gives
    spilt = preflight(embedded_model, GGUF, out, replace(plain, buffer=states // 2)).steps[0]
    assert spilt.disk == small.disk
    moments = 4 * 2 * (6 * 256**2 + 768**2)  # of two halves, in float32: q, k, v, o, gate and up read 256 columns, down 768
    moments += 4 * 2 * (3 * 256**2 + 2 * 128**2 + 2 * 768**2)  # of the gradients at q, o and down, k and v, gate and up
    assert small.memory - spilt.memory == states + moments - states // 2  # they share the room


def test_memory_grows_with_the_width_of_a_model_and_not_with_its_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what llama.cpp holds, which may lay the quantized weights out anew."""
    monkeypatch.setattr("fewbits.preflight.rate_of", lambda *_: 1e11)
    monkeypatch.setattr("fewbits.preflight.steps.SHARD_BYTES", 0)  # both models would fit into one
    shapes = {"base": Shape(2, 256, 512, 2048), "deep": Shape(12, 256, 512, 2048), "wide": Shape(2, 512, 1024, 2048)}
    work = Work(samples=4, length=64, formats=3, verified=256, size="4.5bpw")
    steps = {}
    for name, shape in shapes.items():
        write_checkpoint(tmp_path / name, shape)
        found = preflight(model.open(tmp_path / name), GGUF, tmp_path / f"{name}.gguf", work)
        steps[name] = {step.name: step for step in found.steps}
    packed = 4.5 / 8 * (shapes["deep"].weights - shapes["base"].weights)
    caches = 2 * 10 * 2 * 256 * 256 * 2  # keys and values in 16 bits, of the file and of the float file: 256 tokens are llama.cpp's least
    allowed = {"calibrating": 0, "measuring": 0, "quantizing": 0, "verifying": packed + caches}
    for step, more in allowed.items():
        base, deep, wide = (steps[name][step] for name in shapes)
        assert wide.memory > base.memory
        assert deep.memory <= base.memory + more + 1
        assert step == "measuring" or deep.disk > 2 * base.disk


def test_only_what_is_asked_for_is_counted(embedded_model: model.Model, tmp_path: Path) -> None:
    plan = planning.uniform(embedded_model.weights, GGUF, formats.get("q4_0"))
    (only,) = preflight(embedded_model, GGUF, tmp_path / "a.gguf", Work(feedback=False), plan).steps
    assert only.name == "quantizing"
    assert only.disk >= 2 * plan.nbytes
    thrice = preflight(embedded_model, GGUF, tmp_path / "a.gguf", Work(feedback=False, makes=3), plan).steps[0]
    assert thrice.disk == 3 * only.disk


ROOMY = Preflight((Step("quantizing", 100, 200, 5.0), Step("verifying", 300, 400, 100.0)), "somewhere", 10**6, 10**6)


@pytest.mark.parametrize(
    ("less", "what"),
    [
        ({"free_memory": 299}, "verifying needs 300 B of memory, and 299 B are free"),
        ({"free_disk": 599}, "600 B on the disk of `somewhere`"),
        ({"free_disk": 399, "held": 200}, "600 B on the disk of `somewhere`"),
    ],
)
def test_what_cannot_fit_is_refused_with_a_hint(less: dict[str, Any], what: str) -> None:
    ROOMY.check()
    with pytest.raises(MissingError, match=what) as refused:
        replace(ROOMY, **less).check()
    assert refused.value.hint and refused.value.exit_code == 3
    replace(ROOMY, free_memory=300, free_disk=600).check()
    replace(ROOMY, free_disk=400, held=200).check()
    replace(ROOMY, free_memory=None, free_disk=None).check()  # a system that does not say


def test_the_line_says_memory_disk_and_time() -> None:
    assert ROOMY.line() == "this will need up to 300 B of memory, 600 B of disk, about 2 min (quantizing 5 s, verifying 2 min)"


@pytest.mark.parametrize("name", ["gemma3", "gemma4_shared", "gemma3n", "hunyuan_moe", "mamba2", "bert"])
def test_sizes_are_found_wherever_a_config_has_them(name: str, tmp_path: Path) -> None:
    """In the config of its language part, another one for each layer, in a list, or not at all."""
    source = model.open(build(name, tmp_path / "model"))
    ahead = preflight(source, targets.get("fewbits"), tmp_path / "out", Work(8, 32, formats=2, verified=64))
    assert all(step.memory > 0 and step.seconds > 0 for step in ahead.steps)


def test_all_that_is_stored_between_blocks_is_counted(tmp_path: Path) -> None:
    """Of this model five times the hidden states, of which four are given to blocks and stored once."""
    source = model.open(build("gemma4_shared", tmp_path / "model"))
    one, two = (preflight(source, targets.get("fewbits"), tmp_path / "out", Work(n, 512)).steps[0].disk for n in (1000, 2000))
    between = 4 * 512 * (4 * (256 + 768) + 2 * (256 + 768 + 1024))
    assert two - one >= 1000 * between
    assert two - one < 2 * 1000 * between  # samples of inputs are kept beside them
