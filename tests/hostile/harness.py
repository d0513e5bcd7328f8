"""Runs command lines on files that nobody should trust, each in a process of its own with limits and no way out.

Starting Python with torch takes seconds, so one process loads everything and forks for every command. In the fork memory and time are
limited and measured, and what a file must never bring about ends the process: a connection, a pickle, another program.
`python harness.py` is that process: a command as JSON on each line of stdin, what became of it on each line of stdout.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

MEMORY = 200 << 20  # more than the idle process has
SECONDS = 5  # of processor time
_BACKSTOP = 2 << 30  # of address space: an allocation beyond fails at once instead of taking the machine down
_WALL = 120  # seconds until a process that sleeps is ended
_FORBIDDEN = ("socket.connect", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
_ALLOWED = [sys.executable, "-P", "-m", "fewbits.verification.sandbox"]
_STEPPED_OUT = 77  # exit code where something of that was tried
_LINES = 12  # of stderr that are kept


@dataclass(frozen=True)
class Ended:
    """How one command ended."""

    code: int  # of a signal: its number, negative
    seconds: float
    bytes: int  # at most, beyond the idle process
    said: str  # the end of stderr

    @property
    def complaint(self) -> str | None:
        """What is wrong with this end for a file that is to be refused; None: nothing."""
        if self.code < 0:
            return f"it died of {signal.Signals(-self.code).name}"
        if self.code == _STEPPED_OUT:
            return "it tried what a file must not bring about"
        if "Traceback" in self.said:
            return "it left a traceback"
        if self.code not in (2, 3):
            return f"it ended with {self.code}"
        if "hint:" not in self.said or "not enough memory" in self.said:
            return "it did not say what to do"
        return self.excess

    @property
    def excess(self) -> str | None:
        if self.seconds > SECONDS:
            return f"it took {self.seconds:.1f} s"
        return f"it took {self.bytes >> 20} MB" if self.bytes > MEMORY else None


class Harness:
    """The process that forks, seen from a test."""

    def __init__(self) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "1000", "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet}
        )

    def run(self, *words: object) -> Ended:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def _load() -> None:
    """All that a command may import, so that no fork does."""
    import importlib

    import onnx
    import onnxruntime
    import onnxruntime.capi.onnxruntime_pybind11_state
    import safetensors.torch
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    torch.set_num_threads(1)
    loaded: Sequence[Any] = (onnx, onnxruntime, safetensors.torch, transformers, AutoConfig, AutoTokenizer, LlamaForCausalLM)
    assert loaded
    own = (
        "cli", "pipeline", "inspection", "verification.forecast.measurement", "calibration.collector", "inference.llama",
        "inspection.formats", "sensitivity", "model.gguf.checkpoint", "reporting.terminal.plans", "onnx_graphs.verbs", "onnx_graphs.save",
        "onnx_graphs.outputs", "onnx_graphs.statistics", "verification.runtimes.torch", "targets.gguf", "targets.onnx",
        "targets.onnx_genai", "targets.compressed_tensors",
    )  # fmt: skip
    for name in own:
        importlib.import_module(f"fewbits.{name}")
    from fewbits import methods, targets
    from fewbits.verification import runtimes

    assert methods.get("auto") and runtimes.all() and targets.all()
    _once("inspect", "/nowhere.gguf")  # what reads arguments and draws errors is loaded by use


def _once(*words: str) -> None:
    from contextlib import redirect_stderr, suppress
    from io import StringIO

    from fewbits import cli

    sys.argv = ["fewbits", *words]
    with suppress(SystemExit), redirect_stderr(StringIO()):
        cli.main()


def _confined(words: list[str], errors: int) -> None:
    """In the fork: never returns."""
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(tempfile.mkdtemp(dir=os.environ.get("HOSTILE_SCRATCH")))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _BACKSTOP, used + _BACKSTOP))
    signal.alarm(_WALL)
    sys.addaudithook(_watch)
    sys.argv = ["fewbits", *words]
    code = 1
    try:
        from fewbits import cli

        cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event not in _FORBIDDEN or (event == "subprocess.Popen" and list(arguments[1])[: len(_ALLOWED)] == _ALLOWED):  # type: ignore[call-overload]
        return
    os.write(2, f"\n{event} {arguments!r}\n".encode())
    traceback.print_stack()
    os._exit(_STEPPED_OUT)


def _run(words: list[str]) -> Ended:
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _confined(words, errors.fileno())
        _, status, usage = os.wait4(child, 0)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    lines = said.splitlines()
    tail = "\n".join(lines if len(lines) <= 2 * _LINES else [*lines[:_LINES], "...", *lines[-_LINES:]])
    return Ended(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 - _idle(), tail)


@cache
def _idle() -> int:
    """Bytes that a fork has at its end which does nothing."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss * 1024


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    _load()
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        os.environ["HOSTILE_SCRATCH"] = scratch
        for line in sys.stdin:
            answers.write(json.dumps(asdict(_run(json.loads(line)))) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
