"""A worker of this machine: units come in on standard input, a line of JSON each, and answers go out the same way."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading

from fewbits.executors import units


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to everybody; whoever started this one decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    while True:
        answers.write(json.dumps(units.run(json.loads(lines.get()))) + "\n")
        answers.flush()


def _listen(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # nobody waits for an answer any more, however that came about


if __name__ == "__main__":
    main()
