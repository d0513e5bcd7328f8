"""`fewbits bench kernels | quantize | decode`: the clockwork, the limits, the other libraries' answers, and what is printed and written."""

from __future__ import annotations

import json
import platform
import struct
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fewbits import formats, kernels
from fewbits.benchmarks import contenders, timing
from fewbits.benchmarks.contenders import Multiplier, WrongProductError, check, checked
from fewbits.benchmarks.peers import ggml, ggml_matmul, onnxruntime
from fewbits.benchmarks.peers import torch as peers_torch
from fewbits.benchmarks.shapes import packed
from fewbits.benchmarks.speed import decode, quantize, roofline
from fewbits.benchmarks.speed.kernels import Ours
from fewbits.benchmarks.timing import Contender, interleaved, speedup, spread
from fewbits.devices import processor

# onnxruntime adds two products of bytes in 16 bits where the processor has nothing better, which overflow: the bench says so
SATURATES = platform.machine() == "x86_64" and "vnni" not in Path("/proc/cpuinfo").read_text()
SHAPE = (96, 512)  # rows that repack (by eights), columns that every block divides


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's common pool is for good: the sessions of every later test would have to use it."""
    monkeypatch.setattr(onnxruntime, "_share_threads", lambda threads: False)  # noqa: ARG005


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short bursts, and weights that may stay in a cache."""
    monkeypatch.setattr(timing, "_BURST", 0.001)
    monkeypatch.setattr(timing, "_PATIENCE", 0.01)
    monkeypatch.setattr(timing, "_PAUSE", 0.001)
    monkeypatch.setattr(roofline, "cold_bytes", lambda: 1 << 20)
    monkeypatch.setattr(roofline, "_OPERATIONS", 1e6)


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now, self.worked, self.waited, self.slept, self.slow = 0.0, 0.0, 0.0, 0.0, 1.0
        self.order: list[tuple[str, int]] = []

    def machine(self) -> timing.Machine:
        return timing.Machine(lambda: self.now, lambda: self.worked, lambda: self.waited, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def work(self, seconds: float, processors: int = 2) -> None:
        self.now += seconds
        self.worked += seconds * processors

    def contender(self, name: str, seconds: float) -> Contender:
        def call(number: int) -> None:
            self.order.append((name, number))
            self.work(seconds * self.slow)

        return Contender(name, call)


def test_contenders_take_turns_and_each_call_takes_the_next_copy() -> None:
    clock = Clock()
    timed = interleaved([clock.contender("a", 0.04), clock.contender("b", 0.01)], 4, 2, clock.machine())
    turns = [name for i, (name, _) in enumerate(clock.order) if i == 0 or clock.order[i - 1][0] != name]
    assert turns == ["a", "b", "a", "b", "a", "b", "a"]  # to and fro: who ends a round begins the next
    for name in "ab":
        assert [number for who, number in clock.order if who == name] == list(range(sum(who == name for who, _ in clock.order)))
    assert [len(each.calls) for each in timed] == [4, 12]  # 30 ms of calls in a round, or one
    assert [each.latency.median for each in timed] == pytest.approx([0.04, 0.01])
    assert clock.slept == pytest.approx(8 * 0.03)
    clock.slept = 0.0
    interleaved([clock.contender("a", 0.04)], 1, 1, clock.machine())
    assert clock.slept == 0.0


def test_a_ratio_holds_on_a_machine_that_is_slow_at_times() -> None:
    clock = Clock()
    slow = clock.contender("slow", 0.06)

    def call(number: int) -> None:
        clock.slow = (1.0, 4.0, 2.0)[number % 3]  # a round is as slow for one as for the other
        slow.call(number)

    a, b = interleaved([Contender("a", call), Contender("b", lambda _: clock.work(0.03 * clock.slow))], 1, 1, clock.machine())
    assert speedup(b, a).median == pytest.approx(2.0) and a.undisturbed.median == pytest.approx(0.06 * 2.0)


def test_calls_that_were_disturbed_are_repeated_and_left_out() -> None:
    clock = Clock()

    def waits(number: int) -> None:  # in one of three calls a thread waits for a processor
        late = 0.05 if number % 3 == 2 else 0.0
        clock.waited += late
        clock.work(0.01 + late)

    def alone(number: int) -> None:  # in every other call the second thread does not come at all
        clock.work(0.01, 2) if number % 2 else clock.work(0.02, 1)

    def hopeless(_: int) -> None:
        clock.waited += 0.05
        clock.work(0.06)

    a, b, c = interleaved([Contender("a", waits), Contender("b", alone), Contender("c", hopeless)], 2, 2, clock.machine())
    for timed in (a, b):
        assert timed.calls == pytest.approx([0.01] * len(timed.calls)) and timed.quiet == (True, True)
        assert timed.undisturbed.high == pytest.approx(0.01)
    assert c.quiet == (False, False) and c.rounds == pytest.approx((0.06, 0.06))
    assert len(c.calls) < 2 * 0.7 / 0.06  # patience has an end


def test_ratios_are_of_quiet_rounds_if_there_are_any() -> None:
    own, other = timing.Timed("a", (), (1.0, 9.0, 1.0), (True, False, True)), timing.Timed("b", (), (2.0, 2.0, 4.0), (True, True, False))
    assert speedup(own, other).high == 2.0
    apart = timing.Timed("c", (), (8.0, 3.0, 8.0), (False, True, False))
    assert speedup(own, apart).low == speedup(own, apart).high == 3.0
    nobody = timing.Timed("d", (), (2.0, 18.0, 2.0), (False, False, False))
    assert speedup(own, nobody).low == speedup(own, nobody).high == 2.0


def test_linux_says_how_long_threads_waited() -> None:
    before = timing.seconds_waited()
    assert 0.0 <= before <= timing.seconds_waited()


def test_spread_is_median_and_quartiles() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert spread([7.0]).low == spread([7.0]).high == 7.0


needs_native = pytest.mark.skipif(processor.native_missing() is not None, reason="no native module")


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_reading_reads_every_byte(threads: int) -> None:
    stored = np.random.default_rng(0).integers(0, 256, 4 * 256 * 16 * threads, np.uint8)
    for isa in processor.native().roofline_readers():
        assert processor.native().roofline_read(isa, stored, threads) == np.bitwise_xor.reduce(stored.view(np.uint64)), isa
    assert "any" in processor.native().roofline_readers()


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_peaks_do_every_operation_that_they_count(threads: int) -> None:
    rounds = 1000
    for unit, isa, operations in processor.native().roofline_peaks():
        # a lane sums four products of 3 and -5 in a round, or one of 0.5 and 0.25
        lane = struct.pack("<i", -60 * rounds) if unit == "int8" else struct.pack("<f", 0.125 * rounds)
        lanes = operations / 2 / (4 if unit == "int8" else 1)
        (word,) = struct.unpack("<Q", lane * 2)
        found = processor.native().roofline_peak(unit, isa, rounds, threads)
        assert found == int(lanes / 2) * word * threads % 2**64, (unit, isa)


@needs_native
@pytest.mark.usefixtures("tiny")
def test_limits_are_measured_for_what_runs_here() -> None:
    limits = roofline.measure(1, roofline.Memory(1, 1 << 20), rounds=2)
    assert {limit.kind for limit in limits.all} <= {"read", "int8", "fp32"}
    assert all(0 < limit.per_second.low <= limit.per_second.median <= limit.per_second.high for limit in limits.all)
    best = limits.best("read")
    assert best and best.setting == "memory"


@pytest.fixture(scope="module")
def product() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((8, 512), generator=generator).double(), 0.02 * torch.randn((64, 512), generator=generator).double()


def test_the_check_passes_what_rounding_explains(product) -> None:
    x, w = product
    check((x.float() @ w.float().T), x, w, "none", "float32")
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = ((x / step).round() * step) @ w.T
    assert 1e-3 < check(rounded, x, w, "row", "int8 per row") < 2e-2
    with pytest.raises(WrongProductError, match="int8"):
        check(rounded, x, w, "none", "int8, said to be float")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda y: y * 1.05,
        lambda y: y.roll(1, 1),
        lambda y: torch.where(torch.arange(64) == 5, y + y.std() / 2, y),  # one row of the weight
        lambda y: torch.where(torch.arange(64) == 63, torch.zeros(()), y),  # the last one forgotten
        lambda y: y * torch.nan,
    ],
    ids=["scale", "order", "one row", "forgotten", "nan"],
)
def test_the_check_finds_a_wrong_product(product, break_it: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, w = product
    y = (x @ w.T).float()
    check(y, x, w, "row", "right")
    with pytest.raises(WrongProductError):
        check(break_it(y), x, w, "row", "wrong")


@pytest.mark.parametrize("name", ["q4_k", "int8_channel", "int4_tensor", "fp8_e4m3_tensor"])
def test_packed_weights_decode_as_the_kernel_decodes_them(name: str) -> None:
    if name not in formats.all():
        pytest.skip(f"no format {name}")
    weight = packed(formats.get(name), SHAPE)
    whole = kernels.decode(weight.fmt, weight.parts, SHAPE).double()
    rows = torch.tensor([0, 17, 95])
    assert torch.equal(weight.decoded(rows), whole[rows])
    assert weight.nbytes == sum(part.nbytes for part in weight.parts.values())
    assert not torch.equal(whole[0], whole[1]) and whole.std() > 0.01


def answers(multiplier: Multiplier) -> None:
    """Every copy, for one row and for several."""
    try:
        for rows in (1, 5):
            x = torch.randn((rows, SHAPE[1]), generator=torch.Generator().manual_seed(rows))
            product = multiplier.bind(x)
            error = checked(multiplier, product, x, SHAPE[0])
            first = product.output().clone()
            assert first.shape == (rows, SHAPE[0]) and first.dtype == torch.float32
            assert error < (1e-6 if multiplier.rounding == "none" else 2e-2)
            for number in (1, 2, 3):
                other = multiplier.bind(x)  # an output of its own, which nobody has written to
                other.run(number)
                assert torch.equal(other.output(), first)
    finally:
        multiplier.close()


@pytest.mark.parametrize("name", [name for name in ggml.SPELLED if name in formats.all()])
def test_ggml_answers_as_the_reference(name: str) -> None:
    pytest.importorskip("xllamacpp")
    weight = packed(formats.get(name), SHAPE)
    for repacked in (False, True) if ggml_matmul.repacks(name, SHAPE) else (False,):
        answers(ggml_matmul.GgmlMatmul(weight, 1, 3 * weight.nbytes, repacked))


def test_ggml_repacks_some_types_and_only_rows_by_eights() -> None:
    pytest.importorskip("xllamacpp")
    if "avx2" not in ggml_matmul.features().split():
        pytest.skip("which types are repacked is known for AVX2")
    assert ggml_matmul.repacks("q4_0", SHAPE) and ggml_matmul.repacks("q4_k", SHAPE)
    assert not ggml_matmul.repacks("q5_1", SHAPE) and not ggml_matmul.repacks("q4_0", (95, 512))


@pytest.mark.parametrize("name", ["int2_g32", "int4_g32", "int4_g128", "int8_g32", "int8_channel"])
def test_onnxruntime_answers_as_the_reference(name: str) -> None:
    pytest.importorskip("onnxruntime")
    weight = packed(formats.get(name), SHAPE)
    if name != "int8_channel":
        answers(onnxruntime.MatMulNBits(weight, 1, 3 * weight.nbytes))
    elif SATURATES:
        with pytest.raises(WrongProductError, match="onnxruntime int8 computes something else"):
            answers(onnxruntime.MatMulInteger(weight, 1, 3 * weight.nbytes))
    else:
        answers(onnxruntime.MatMulInteger(weight, 1, 3 * weight.nbytes))


def test_torch_and_fewbits_answer_as_the_reference() -> None:
    weight = packed(formats.get("q4_k"), SHAPE)
    answers(peers_torch.TorchLinear(weight, 1, 3 * SHAPE[0] * SHAPE[1] * 4))
    answers(Ours(weight, 1, 3 * weight.nbytes))


def test_copies_fill_what_is_cold() -> None:
    assert contenders.copies(100, 1000) == 10 and contenders.copies(300, 1000) == 4 and contenders.copies(5000, 1000) == 1


@needs_native
@pytest.mark.usefixtures("tiny")
def test_bench_kernels_prints_a_table_and_writes_results_and_a_picture(run, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("onnxruntime")
    words = (
        "bench",
        "kernels",
        "--format",
        "q4_0,int8_channel",
        "--shape",
        "512x96",
        "--rows",
        1,
        "--rows",
        8,
        "--threads",
        1,
        "--rounds",
        2,
    )
    code, out, err = run(*words, "--peers", "-o", tmp_path / "made")
    assert code == 0
    for text in ("one row", "many rows", "x ggml", "x onnxruntime", "x torch", "q4_0", "CPU_REPACK", "limits of this machine"):
        assert text in out and text not in err
    result = json.loads((tmp_path / "made" / "results.json").read_text())
    assert set(result) == {"machine", "limits", "cases", "skipped"}
    assert [text.partition(" computes")[0].rpartition(": ")[2] for text in result["skipped"]] == ["onnxruntime int8"] * 2 * SATURATES
    assert [(case["format"], case["k"], case["n"], case["rows"]) for case in result["cases"]] == [
        ("q4_0", 512, 96, 1), ("q4_0", 512, 96, 8), ("int8_channel", 512, 96, 1), ("int8_channel", 512, 96, 8),
    ]  # fmt: skip
    names = [[each["name"] for each in case["results"]] for case in result["cases"]]
    assert names[0] == ["fewbits", "ggml q4_0", "ggml q4_0 repacked", "onnxruntime 4-bit g32", "torch f32"]
    assert names[2] == ["fewbits", "ggml q8_0", "onnxruntime 8-bit g32", *["onnxruntime int8"] * (not SATURATES), "torch f32"]
    for case in result["cases"]:
        assert case["results"][0]["speedup"] is None
        for each in case["results"]:
            seconds = each["seconds"]["median"]
            assert each["gigabytes_per_second"] == pytest.approx(each["bytes"] / seconds / 1e9)
            assert each["gigaoperations_per_second"] == pytest.approx(2 * case["rows"] * 512 * 96 / seconds / 1e9)
            assert each["bound"] in ("read", "int8", "fp32") and each["share_of_limit"]["median"] > 0
    picture = ElementTree.parse(tmp_path / "made" / "roofline.svg").getroot()
    marks = [mark for mark in picture.iter("{http://www.w3.org/2000/svg}circle") if len(mark)]
    assert len(marks) == 4 * 4  # ours and the fastest of each library
    assert all(0 <= float(mark.get("cx", -1)) <= 960 and 0 <= float(mark.get("cy", -1)) <= 600 for mark in marks)
    assert "href" not in (tmp_path / "made" / "roofline.svg").read_text()


@needs_native
@pytest.mark.usefixtures("tiny")
def test_bench_kernels_answers_in_json_and_says_what_it_left_out(run) -> None:
    code, out, err = run(
        "bench", "kernels", "--format", "q4_0", "--format", "Q4_K", "--shape", "576x32", "--rows", 1, "--rounds", 1, "--json"
    )
    result = json.loads(out)
    assert code == 0 and err == ""
    assert [case["format"] for case in result["cases"]] == ["q4_0"] and len(result["cases"][0]["results"]) == 1
    assert len(result["skipped"]) == 1 and "q4_k" in result["skipped"][0] and "256" in result["skipped"][0]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("kernels", "--shape", "4096"), "4096x14336"),
        (("kernels", "--shape", "0x5"), "4096x14336"),
        (("kernels", "--format", "q4k"), "did you mean `q4_k`"),
        (("quantize", "--format", "q4_k", "--shape", "100x4"), "choose another `--shape`"),
        (("dequantize", "--format", "q4_k", "--shape", "100x4"), "choose another `--shape`"),
    ],
)
def test_wrong_words_end_with_a_hint(run, words: tuple[str, ...], hint: str) -> None:
    code, out, err = run("bench", *words)
    assert code == 2 and out == "" and hint in err


@pytest.mark.usefixtures("tiny")
def test_bench_quantize_compares_speed_and_weighted_error(run) -> None:
    pytest.importorskip("xllamacpp")
    code, out, _ = run("bench", "quantize", "--format", "q4_0", "--shape", "256x32", "--threads", 1, "--rounds", 2, "--peers", "--json")
    result = json.loads(out)
    assert code == 0 and result["peer"].startswith("ggml") and (result["k"], result["n"]) == (256, 32)
    assert [(row["format"], row["importance"]) for row in result["rows"]] == [("q4_0", False), ("q4_0", True)]
    w, importance = quantize.weights((256, 32))
    for row, given in zip(result["rows"], (None, importance), strict=True):
        theirs = quantize.GgmlQuantizer("q4_0", w, given, 2)
        stored = theirs(0)
        theirs.close()
        weight = 1.0 if given is None else given.double()
        squares = (kernels.decode(formats.get("q4_0"), {"blocks": stored}, (32, 256)).double() - w.double()).square() * weight
        assert row["error"] / row["error_ratio"] == pytest.approx(float(squares.sum() / (w.double().square() * weight).sum()))
        assert row["speedup"]["median"] > 0 and row["ggml_million_weights_per_second"]["median"] > 0
    code, out, err = run("bench", "quantize", "--format", "q4_0", "--shape", "256x32", "--rounds", 1)
    assert code == 0 and "million weights per second" in " ".join(out.split()) and "million" not in err


@needs_native
@pytest.mark.parametrize("isa", ["avx512", "avxvnni", "avx2"])
@pytest.mark.usefixtures("tiny")
def test_a_peer_that_was_built_for_less_is_said(run, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    pytest.importorskip("xllamacpp")
    if not any(row.isa == isa and row.runs_here for row in processor.table().values()):
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setenv(processor.FORCE, isa)
    monkeypatch.setattr(ggml_matmul, "features", lambda: "avx avx2 fma")
    code, out, err = run("bench", "quantize", "--format", "q4_0", "--shape", "256x32", "--rounds", 1, "--peers")
    assert code == 0 and "avx avx2 fma" in out and ("no AVX-512 VNNI kernels" in err) == (isa == "avx512") and "no AVX-VNNI" not in err


@needs_native
@pytest.mark.usefixtures("tiny")
def test_bench_decode_times_whole_models_on_both_sides(run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(decode, "SHAPE", decode.SHAPE | small | {"vocab_size": 2048})
    words = ("bench", "decode", "--format", "q4_k", "--prompt", 8, "--threads", 1, "--rounds", 2, "--peers")
    code, out, err = run(*words, "--json")
    result = json.loads(out)
    assert code == 0, err
    assert [(phase["name"], phase["contender"]) for phase in result["phases"]] == [
        ("one token", "fewbits"), ("one token", "llama.cpp"), ("prompt", "fewbits"), ("prompt", "llama.cpp"),
    ]  # fmt: skip
    assert result["kernel"] == processor.backend() and result["peer"].startswith("ggml")
    assert all(phase["tokens_per_second"] > 0 for phase in result["phases"])


@needs_native
def test_limits_are_of_the_instruction_set_that_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {peak.setting for peak in roofline.peaks(1, 1e7)}
    if not any("512" in setting for setting in every):
        pytest.skip("this processor has no AVX-512 to keep from")
    monkeypatch.setenv(processor.FORCE, "avx2")
    assert {peak.setting for peak in roofline.peaks(1, 1e7)} == {"avx2"}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("tiny")
def test_bench_dequantize_compares_speed(run, threads: int) -> None:
    pytest.importorskip("xllamacpp")
    words = ("bench", "dequantize", "--format", "q4_0,q6_k,int4_g32", "--shape", "256x33", "--threads", threads, "--rounds", 2, "--peers")
    code, out, _ = run(*words, "--json")
    result = json.loads(out)
    assert code == 0 and result["threads"] == threads
    assert [row["format"] for row in result["rows"]] == ["q4_0", "q6_k", "int4_g32"]
    assert result["rows"][0]["speedup"]["median"] > 0 and result["rows"][2]["speedup"] is None  # ggml has no int4_g32
    code, out, err = run(*words)
    assert code == 0 and "billion weights per second" in " ".join(out.split()) and "dequantize_row" in out and "billion" not in err
