"""Ctrl-C and SIGTERM: the command ends in good order wherever they find it, and says what the next one does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from enumerated import one_of

from fewbits import embedded

IN_A_DESTRUCTOR = """
import sys, time
from fewbits.cli import signals
sys.argv = ["fewbits", "quantize"]
signals.arm()
class Late:
    def __del__(self):
        print("in it", flush=True)
        time.sleep(30)
late = Late()
try:
    del late
    time.sleep(30)
    print("went on as if nothing had been")
except SystemExit as ended:
    print("cleaned up")
    signals.say(ended.code)
    raise
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_finds_a_destructor_is_not_lost(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", IN_A_DESTRUCTOR], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "in it\n"
    time.sleep(0.2)  # asleep
    process.send_signal(number)
    out, said = process.communicate(timeout=20)
    assert process.returncode == code and out == "cleaned up\n" and "goes on from what is finished" in said and "Traceback" not in said


@pytest.mark.parametrize(("number", "code"), one_of([(signal.SIGTERM, 143), (signal.SIGINT, 130)]))
def test_a_command_that_is_stopped_says_so_and_leaves_nothing_half(number: signal.Signals, code: int, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fewbits.cli", "quantize", str(embedded.MODEL), "-o", str(tmp_path / "m.gguf"), "--format", "q4_k"]
    process = subprocess.Popen([*words, "--no-verify"], stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("m.gguf.work/cache/*")):  # it has begun
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == code and "stopped: the same command goes on" in said and "Traceback" not in said
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".partial") or path.name == "lock"]
