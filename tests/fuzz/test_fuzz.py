"""Short runs of the fuzzers. `make fuzz SECONDS=600` is the long one; what it finds becomes a case in tests/hostile."""

from __future__ import annotations

import importlib.util
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import readers

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "readers"
NATIVE = HERE.parents[1] / "src" / "fewbits" / "kernels" / "native"
DECODERS = HERE.parents[1] / "build" / "fuzz" / "decoders"
MUTATIONS = 1500
NUMBERS = [
    bytes([255] * 8),
    bytes(8),
    (1 << 63).to_bytes(8, "little"),
    (1 << 31).to_bytes(4, "little"),
    b'"',
    b"[",
    b"{",
    b"-1",
    b"1e999",
    b"NaN",
]


def mutated(content: bytes, source: random.Random) -> bytes:
    """A few of what fuzzers do: flip, cut, repeat, and put in what parsers stumble over."""
    out = bytearray(content)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(1, len(out) + 1)
        match source.randrange(4):
            case 0 if at < len(out):
                out[at] ^= 1 << source.randrange(8)
            case 1:
                del out[at : at + source.randint(1, 8)]
            case 2:
                out[at:at] = source.choice(NUMBERS)
            case _:
                out[at : at + 8] = source.choice(NUMBERS)
    return bytes(out)


def test_every_reader_has_a_seed_that_it_reads_or_refuses() -> None:
    seeds = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    assert {seed[0] % len(readers.READERS) for seed in seeds} == set(range(len(readers.READERS)))


def test_mutations_of_the_corpus_are_read_or_refused(tmp_path: Path) -> None:
    """Without a tool, and the same every time."""
    source, read = random.Random(0), readers.reader(tmp_path)
    seeds = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    for number in range(MUTATIONS):
        content = mutated(seeds[number % len(seeds)], source)
        try:
            read(content)
        except Exception as failure:
            raise AssertionError(f"reader {content[0] % len(readers.READERS)} on {content!r}") from failure


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="pip install atheris")
def test_readers_survive_a_few_seconds_of_atheris(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    words = ["-max_total_time=8", "-max_len=2048", "-print_final_stats=1", f"-artifact_prefix={tmp_path}/", str(tmp_path), str(CORPUS)]
    ended = subprocess.run([sys.executable, str(HERE / "fuzz_readers.py"), *words], capture_output=True, text=True, cwd=tmp_path)
    found = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
    record_property("table", f"atheris: {found[1] if found else 0} executions")
    assert ended.returncode == 0 and found, ended.stderr[-4000:]


@pytest.mark.slow
def test_some_decoders_survive_mutations_under_the_sanitizers(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """By any compiler, of the formats that compile in seconds. What finds more needs clang: the next one."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [
        NATIVE / "table.cc",
        *(NATIVE / "formats" / f"{name}.cc" for name in ("fp8", "iq4_xs", "k_symmetric")),
        HERE.parent / "kernels" / "native" / "weights.cc",
    ]
    words = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-pthread", f"-I{NATIVE}", f"-I{HERE.parent / 'kernels' / 'native'}"]
    words += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    all_of_it = [*words, *map(str, sources), str(HERE / "decoders.cc"), str(HERE / "without_clang.cc"), "-o", "decoders"]
    built = subprocess.run(all_of_it, cwd=tmp_path, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    seeds = sorted((HERE / "corpus" / "decoders").iterdir())
    ended = subprocess.run([str(tmp_path / "decoders"), "2000", *map(str, seeds)], capture_output=True, text=True, cwd=tmp_path)
    record_property("table", f"native decoders without clang: {ended.stdout.strip()}")
    assert ended.returncode == 0 and ended.stdout == "2000 executions\n", ended.stderr[-4000:]


@pytest.mark.skipif(not DECODERS.exists(), reason="`make fuzz` builds it, with clang")
def test_decoders_survive_a_few_seconds_of_libfuzzer(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    words = ["-max_total_time=5", "-max_len=4096", "-print_final_stats=1", str(tmp_path), str(HERE / "corpus" / "decoders")]
    ended = subprocess.run([str(DECODERS), *words], capture_output=True, text=True, cwd=tmp_path)
    found = re.search(r"number_of_executed_units: (\d+)", ended.stderr)
    record_property("table", f"libFuzzer: {found[1] if found else 0} executions")
    assert ended.returncode == 0 and found, ended.stderr[-4000:]
