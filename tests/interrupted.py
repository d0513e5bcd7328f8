"""Runs that something stops on the way, and that are called again: what they have in common, whatever it is that stops them.

The runs are forks of this process: torch is imported once, and what must not be undone is on the disk, not here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mixtures import with_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from fewbits import methods, pipeline, sensitivity
from fewbits.calibration import collector
from fewbits.store.cache import code_version

FAST: dict[str, Any] = {"samples": 4, "length": 32, "tokens": 64, "answers": 0}
BUDGETS: dict[str, dict[str, Any]] = {
    "size": {"size": "6bpw", "formats": ("q4_0", "q8_0"), **FAST},
    "accuracy": {"max_kl": 1e-3, "rounds": 3, "formats": ("int4_g32", "int8_channel"), "to": "fewbits", **FAST},
    "sequential, tuned": {"format": "int4_g32", "sequential": True, "tune": 3, "to": "fewbits", **FAST},
    "rewritten": {"format": "int4_g32", "rewrite": "awq", "to": "fewbits", **FAST},
}
UNITS = ("forward", "backward", "measured", "quantized")  # of work, as they are counted here


def tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
        max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return with_tokenizer(folder)


def forked(action: Callable[[], object], killed_after: float | None = None) -> int:
    """The status that a child ended with: 0, or the signal that killed it. Anything that it raises fails the test."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(70)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the run failed, see above"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def counted(act: Callable[[int, partial[Any], tuple[Any, ...]], Any]) -> Callable[[], None]:
    """In a child: every flush and every renaming goes through `act`, with its number."""
    number = iter(range(1 << 30))

    def patch() -> None:
        for name in ("fsync", "replace", "rename", "link", "unlink"):
            real = getattr(os, name)
            setattr(os, name, lambda *args, _real=real, **named: act(next(number), partial(_real, **named), args))

    return patch


def dies_at(place: int) -> Callable[[], None]:
    def act(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
        if number == place:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    return counted(act)


@dataclass
class Runs:
    """One call of `quantize`, again and again, at one place: results.json names it. A whole run is made first."""

    model: Path
    out: Path
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._note = self.out.with_name(f"{self.out.name}-units")
        code_version()  # once, for all forks: the sources may be edited meanwhile
        began = time.monotonic()
        assert forked(self.run) == 0
        self.seconds = time.monotonic() - began
        self.whole, self.units = self.files(), self.counted_units()

    @property
    def path(self) -> Path:
        return self.out / f"m.{self.options.get('to', 'gguf')}"

    def run(self) -> None:
        for name, where, what in [
            ("forward", collector.Collector, "_forward"),
            ("backward", collector.Collector, "_backward"),
            ("measured", sensitivity, "row_of"),
            ("quantized", type(methods.get("auto")), "quantize"),
        ]:
            setattr(where, what, self._counts(name, getattr(where, what)))  # in a child, which ends afterwards
        pipeline.quantize(self.model, self.path, **self.options)

    def counted_units(self) -> dict[str, int]:
        """Since they were asked for last."""
        done = self._note.read_text().split() if self._note.exists() else []
        self._note.unlink(missing_ok=True)
        return {name: done.count(name) for name in UNITS}

    def files(self) -> dict[str, bytes]:
        """All that a run leaves, the results kept included; how its report looks is another matter."""
        found = {str(path.relative_to(self.out)): path for path in sorted(self.out.rglob("*")) if path.is_file()}
        return {name: path.read_bytes() for name, path in found.items() if not name.endswith(".html")}

    def writes(self) -> int:
        """How many flushes, renamings, links and removals a whole run makes."""
        note = self.out.with_name("writes")

        def act(number: int, real: partial[Any], args: tuple[Any, ...]) -> Any:
            note.write_text(str(number + 1))
            return real(*args)

        self.ends(counted(act))
        return int(note.read_text())

    def ends(self, patch: Callable[[], None] = lambda: None, killed_after: float | None = None) -> int:
        """A run from nothing, with this done to it; what ended it."""

        def child() -> None:
            patch()
            self.run()

        shutil.rmtree(self.out, ignore_errors=True)
        self.counted_units()  # of a run that ended before it could be killed
        return forked(child, killed_after)

    def goes_on(self, what: object) -> None:
        """To the bytes of the whole run, with at most what was in hand done again."""
        assert forked(self.run) == 0
        found, done = self.files(), self.counted_units()
        assert found.keys() == self.whole.keys(), (what, found.keys() ^ self.whole.keys())
        assert [name for name in self.whole if self.whole[name] != found[name]] == [], what
        again = {name: done[name] - self.units[name] for name in UNITS}
        # weights are measured and rounded several at a time: with one thread one in hand, and two that wait for it or to be kept
        assert all(0 <= again[name] <= (3 if name in ("measured", "quantized") else 1) for name in UNITS), (what, again)
        assert sum(1 for name in UNITS if again[name]) <= 1, (what, again)

    def _counts(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._note.open("a") as file:
                file.write(f"{name}\n")
            return real(*args, **options)

        return call


def places(count: int) -> list[int]:
    """All; with FEWBITS_SHARE=2/8 those of them that leave 2 when divided by 8: what takes an hour can be done in several goes."""
    first, _, step = os.environ.get("FEWBITS_SHARE", "0/1").partition("/")
    return list(range(int(first), count, int(step)))


def survives(kills: Iterable[Callable[[], None]]) -> int:
    """How many there were, each a run that is stopped and the one after it, beginning from nothing: one that fails hides no other."""
    number, failures = 0, list[str]()
    for number, kill in enumerate(kills, 1):
        try:
            kill()
        except AssertionError as failure:
            failures.append(str(failure))
        if number % 25 == 0:
            sys.stderr.write(f"\n{number}, of which {len(failures)} failed\n")  # with `pytest -s`: a long one says how far it is
    assert not failures, "\n\n".join(failures)
    return number
