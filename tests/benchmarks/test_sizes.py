"""Memory of a whole run is bounded by a block, not by the model: twice the same blocks, few and many, each in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from enumerated import one_of
from mixtures import SIZES, with_tokenizer

import fewbits
from fewbits import artifact, calibration, model, planning, targets
from fewbits.artifact.draft import Draft
from fewbits.benchmarks.scale import sizes
from fewbits.benchmarks.scale.process_usage import Phase, Usage, watch
from fewbits.benchmarks.scale.sizes import Point, Run, Scaling
from fewbits.benchmarks.synthetic_llama import Shape, write_checkpoint
from fewbits.benchmarks.tables import scale as pictures
from fewbits.calibration import triangles
from fewbits.calibration.triangles import Triangles
from fewbits.cli import bench
from fewbits.errors import InputError
from fewbits.progress import silent
from fewbits.store.threads import Turns
from fewbits.targets.export import export

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is asked of /proc")
FEW, MANY = Shape(2, 512, 1024, 2048), Shape(10, 512, 1024, 2048)
RUN = Run(samples=2, length=32, tokens=64, formats="q3_k,q5_k")
# Of 8 more blocks: caches and graphs of two sessions of llama.cpp, hidden states of a stream for each, names and figures of 56 weights,
# packed weights of a shard that is not full, and what the allocator happens to hold: 12 MB measured with 12 blocks more.
MARGIN = 24 << 20


@ON_LINUX
@pytest.mark.slow
def test_peak_memory_is_that_of_a_block_however_many_there_are(tmp_path: Path) -> None:
    few, many = (sizes.point(shape, RUN, tmp_path / "run") for shape in (FEW, MANY))
    extra = 4 * (MANY.weights - FEW.weights)
    assert extra > 3 * MARGIN  # holding what was added in float32, in any step, could not be missed
    assert many.watched.anonymous - few.watched.anonymous < MARGIN, (few.watched, many.watched)
    for step in (
        "statistics, forward",
        "statistics, backward",
        "measuring",
        "quantizing",
        "writing gguf",
        "verifying",
        "looking at values",
    ):
        assert any(phase.name == step for phase in many.watched.phases)
    assert many.watched.disk > few.watched.disk and many.file_bytes > 3 * few.file_bytes
    assert many.kl is not None and 0 < many.kl < 10
    assert not (tmp_path / "run").exists()


@ON_LINUX
def test_a_child_is_seen_in_each_of_its_steps(tmp_path: Path) -> None:
    code = """
import sys, time
from fewbits.benchmarks.scale.process_usage import followed
held = b""
for size in followed([0, 100 << 20], 2, "growing"):
    held += bytes(1 for _ in range(1)) * size
time.sleep(0.2)
del held
open(sys.argv[1], "wb").write(bytes(1 << 20))
for _ in followed([1], 1, "resting"):
    time.sleep(1.5)
print('{"done": true}')
"""
    found, result = watch([sys.executable, "-c", code, str(tmp_path / "file")], tmp_path)
    assert result == {"done": True}
    phases = {phase.name: phase for phase in found.phases}
    assert phases["growing"].anonymous > phases["resting"].anonymous + (90 << 20)
    assert found.largest.name == "growing" and found.anonymous == phases["growing"].anonymous
    assert 1.3 < phases["resting"].seconds < found.seconds and found.disk >= 1 << 20


def test_what_a_child_complains_of_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="code 3") as refused:
        watch([sys.executable, "-c", "import sys; sys.stderr.write('no room'); sys.exit(3)"], tmp_path)
    assert refused.value.hint == "no room"


def test_a_checkpoint_has_the_weights_that_its_shape_says(tmp_path: Path) -> None:
    shape = Shape(3, 64, 128, 2048)
    write_checkpoint(tmp_path / "model", shape)
    opened = model.open(tmp_path / "model")
    assert sum(rows * cols for rows, cols in (weight.shape for weight in opened.weights)) == shape.weights
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 4
    assert opened.weights[0].tied_to == "lm_head" and {weight.dtype for weight in opened.weights} == {"fp16"}
    assert not torch.equal(*(opened.load(opened.weights[i]) for i in (1, 8)))  # of two blocks


def test_a_mixture_has_the_weights_that_its_shape_says(tmp_path: Path) -> None:
    shape = Shape(2, 64, 32, 2048, experts=4, chosen=2)
    write_checkpoint(tmp_path / "model", shape)
    opened = model.open(tmp_path / "model")
    assert sum(rows * cols for rows, cols in (weight.shape for weight in opened.weights)) == shape.weights
    assert sum(weight.expert == 3 for weight in opened.weights) == 2 * 2
    assert abs(Shape.mixture(4, 128).weights / 1e9 - 4) < 0.11


@pytest.mark.parametrize("billions", sizes.SIZES)
def test_sizes_are_met_by_blocks_of_one_kind(billions: float) -> None:
    shape = Shape.of(billions)
    assert abs(shape.weights / 1e9 - billions) <= 0.5 * shape.block / 1e9 + 1e-9 and shape.block == Shape.of(0.1).block


@pytest.mark.parametrize("n", [1, 3, 300, 1025, 1300])  # by indices, and by rows and tiles
def test_triangles_stand_for_their_squares(n: int) -> None:
    pair = torch.randn(2, n, n, generator=torch.Generator().manual_seed(n))
    pair = pair + pair.mT
    rows, columns = torch.triu_indices(n, n)
    expected = pair[:, rows, columns]
    packed = triangles.pack(pair.clone())
    assert torch.equal(packed, expected)
    found = Triangles(packed)
    assert found.shape == pair.shape and torch.equal(found[0], pair[0]) and torch.equal(found[1], pair[1])
    assert torch.equal(found.total(), pair.sum(0)) and torch.equal(found.diagonal(), pair.diagonal(dim1=1, dim2=2))
    assert torch.equal(found / pair[0].abs(), pair / pair[0].abs()) and torch.equal(found * 3.0, pair * 3.0)


@pytest.mark.parametrize("shape", [(2, 5), (1, 6), (6,), (2, 2, 2)])
def test_what_is_no_pair_of_triangles_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no pair of triangles"):
        Triangles(torch.zeros(shape))


def test_threads_hold_no_more_together_than_the_limit_and_the_largest_goes_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Lock
    from time import sleep

    turns, lock, held, seen = Turns(10), Lock(), [0], []

    def work(nbytes: int) -> None:
        with turns.taken(nbytes):
            with lock:
                held[0] += nbytes
                seen.append(held[0])
            sleep(0.01)
            with lock:
                held[0] -= nbytes

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [4, 5, 25, 3, 3, 3, 9, 1, 5, 5] * 2))
    assert max(total for total in seen if total != 25) <= 10 and seen.count(25) == 2
    assert max(seen) == 25 and any(total in (9, 10) for total in seen)


def test_the_picture_shows_every_point_and_is_valid() -> None:
    def point(blocks: int) -> Point:
        shape = Shape(blocks)
        watched = Usage(60.0 * blocks, 10**9, 2 * 10**9, 10**9, [Phase("measuring", 1.0, 10**9)])
        return Point(shape, shape.weights, 4 * shape.block, 2 * shape.weights, shape.weights // 2, 0.1, watched)

    result = Scaling(Run(), 2, (point(1), point(70)), (point(3),))
    root = ElementTree.fromstring(pictures.picture(result))
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 * 3  # anonymous memory, the model, time
    flat = [float(circle.get("cy", "0")) for circle in circles[:2]]
    assert flat[0] == flat[1]
    pictures.table(result)
    assert json.loads(json.dumps(result.to_dict()))["deeper"][1]["weights"] == Shape(70).weights


@pytest.mark.parametrize("text", ["a", "0.1,-3", "nan", "0"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a list of sensible numbers"):
        bench.numbers_of(text, "--sizes")


@pytest.mark.parametrize(("widths", "run"), [([1000], Run()), ([1024], Run(formats="q3_k,q9")), ([1024], Run(method="magic"))])
def test_what_cannot_be_measured_is_refused_before_a_checkpoint_is_written(tmp_path: Path, widths: list[int], run: Run) -> None:
    with pytest.raises(InputError):
        sizes.scale(tmp_path / "out", [0.1], widths, run)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experts, of which the last is never chosen: two of the others are opposites each, and the better one is above its zero."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    theirs = MixtralForCausalLM(MixtralConfig(intermediate_size=256, num_local_experts=5, **SIZES | {"hidden_size": 256}))
    with torch.no_grad():
        for name, router in theirs.named_parameters():
            if name.endswith(".gate.weight"):
                router[1], router[3], router[4] = -router[0], -router[2], 0
    folder = tmp_path_factory.mktemp("mixture")
    theirs.save_pretrained(folder)
    return with_tokenizer(folder)


def test_statistics_of_experts_beyond_the_memory_are_the_same(mixture: Path, tmp_path: Path) -> None:
    """Their sums are in mapped files, and there is a pass through the block for each expert."""
    source = model.open(mixture)
    drawn = calibration.draw(source, (), 4, 32, 0)
    roomy, spilt = (calibration.collect(source, drawn, tmp_path / str(memory), memory=memory) for memory in (1 << 30, 1))
    assert len(list(roomy.folder.glob("gradient-00000*"))) == 2 and len(list(spilt.folder.glob("gradient-00000*"))) == 7
    for weight in source.weights:
        ours, theirs = spilt.of(weight.name), roomy.of(weight.name)
        for field in ("sensitivity", "gradient_square", "fisher_square", "fisher", "outputs"):
            one, other = getattr(ours, field), getattr(theirs, field)
            assert (one is other is None) or torch.equal(one, other), (weight.name, field)
        assert ours.input is None or torch.equal(ours.input.moment, theirs.input.moment)
    assert spilt.of("model.layers.0.mlp.experts.down_proj.4").borrowed == 1


@pytest.mark.parametrize("asked", one_of([{"size": "5bpw", "formats": ["q4_k", "q6_k"]}, {"format": "q4_k"}]), ids=["size", "format"])
def test_experts_that_no_token_reached_borrow_and_are_reported(mixture: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    result = fewbits.quantize(mixture, tmp_path / "x.gguf", samples=4, length=32, tokens=64, memory=1 << 20, **asked)
    said = "those of all experts of its layer"
    few = [name for name, row in result.outcomes.items() if any(said in note for note in row.get("notes", ()))]
    unseen = [f"model.layers.{i}.mlp.experts.{name}.4" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert set(few) >= set(unseen)
    assert result.verdict and result.verdict.passed
    artifact.Artifact(result.artifact).check()  # every weight decodes to finite values
    for name in ("results.json", "report.html"):
        text = (tmp_path / "x.gguf.work" / name).read_text()
        assert said in text and unseen[0] in text
    assert "NaN" not in (tmp_path / "x.gguf.work" / "results.json").read_text()


def test_a_float_file_is_the_same_without_an_artifact(embedded_model: model.Model, tmp_path: Path) -> None:
    target = targets.get("gguf")
    plan = planning.unquantized(embedded_model.weights, target)
    through = export(artifact.quantize(embedded_model, plan, tmp_path / "artifact", silent), tmp_path / "a.gguf", to="gguf")
    target.write_draft(Draft(embedded_model, plan), tmp_path / "b.gguf", silent)
    assert (tmp_path / "b.gguf").read_bytes() == through.read_bytes()
