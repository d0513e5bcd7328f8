"""Workers that are processes of this machine. They live until `close`, so that each loads torch and the model once."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import IO

from fewbits.store.executors.unit import Answer, Unit


class Processes:
    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: list[_Process] = []

    def carry(self, waiting: deque[Unit]) -> Iterator[tuple[Unit, Answer]]:
        busy: dict[_Process, Unit] = {}
        with selectors.DefaultSelector() as selector:
            try:
                while waiting or busy:
                    while waiting and len(busy) < self._count:
                        process = self._idle.pop() if self._idle else _Process(waiting[0].about["machine"][1])
                        selector.register(process.answers, selectors.EVENT_READ, process)
                        busy[process] = waiting.popleft()
                        process.send(busy[process])
                    for key, _ in selector.select():
                        process = key.data
                        selector.unregister(process.answers)
                        unit, answer = busy.pop(process), process.answer()
                        if answer.lost and not process.is_alive:
                            process.end()
                        else:
                            self._idle.append(process)
                        yield unit, answer
            finally:
                for process in busy:
                    process.end()

    def close(self) -> None:
        for process in self._idle:
            process.end()
        self._idle.clear()


class _Process:
    def __init__(self, threads: int) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fewbits.store.executors.local_worker"],  # -P: no module out of the current folder
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            env={"OMP_WAIT_POLICY": "passive"} | os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._units, self.answers = self._process.stdin, self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, unit: Unit) -> None:
        with suppress(BrokenPipeError):  # it ended between two units; `answer` reports that
            self._units.write(json.dumps(asdict(unit)) + "\n")
            self._units.flush()

    def answer(self) -> Answer:
        line = self.answers.readline()
        if line.endswith("\n"):
            return Answer(**json.loads(line))
        status = self._process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        ended = f"signal {-status}" if status < 0 else f"exit code {status}"
        return Answer(lost=f"worker process {self._process.pid} ended with {ended}{': ' if last else ''}{''.join(last)}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._units.close()
        self.answers.close()
        self._stderr.close()
