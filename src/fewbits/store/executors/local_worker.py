"""The program of a local worker process: reads units from standard input, one JSON line each, and writes answers to standard output."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading

from fewbits.store.executors import worker


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the coordinator decides what ends
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be read as an answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    while True:
        answers.write(json.dumps(worker.run(json.loads(lines.get()))) + "\n")
        answers.flush()


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # standard input was closed: the coordinator has ended, or does not need this worker any more


if __name__ == "__main__":
    main()
