"""`serve`: opens the model, listens until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fewbits.errors import InputError
from fewbits.inference.engine import open_for_texts
from fewbits.inference.serving.turns import Turns
from fewbits.inference.text_model import TextModel
from fewbits.progress import Progress, silent

_GRACE = 5  # seconds that answers have to end in when the server is stopped: they are cut off, and only have to be sent


class Served(NamedTuple):
    """What is listening, told once it does."""

    url: str
    name: str
    context: int | None
    engine: str
    open_to_others: bool  # beyond this machine, without a key
    stop: Callable[[], None]  # as Ctrl-C does, from any thread


def serve(
    out: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    name: str | None = None,
    queue: int = 16,
    api_key: str | None = None,
    context: int | None = None,
    kv: str | None = None,
    on_ready: Callable[[Served], None] | None = None,
    progress: Progress[Any] = silent,
) -> None:
    """An OpenAI-compatible endpoint over a file, until Ctrl-C or SIGTERM. One request is computed at a time, `queue` more may wait.

    `port` 0 takes a free one. `api_key`: what clients must send; without it everybody who reaches the port is answered. `context`: tokens
    of a text with its answer, by default 4096 or what the model takes.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise InputError("serving needs the packages `starlette` and `uvicorn`", 'pip install "fewbits[serve]"')
    path = Path(out)
    refuse_what_others_serve(path)
    with _listening(host, port) as listener:
        model = _loaded(path, context, kv, progress)
        turns = Turns(queue)
        try:
            from fewbits.inference.serving.app import application

            app = application((model, name or name_of(path), int(time.time())), turns, api_key or None)
            address = listener.getsockname()
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            url = f"http://{shown}:{address[1]}/v1"
            server = _server(app, turns)
            open_to_others = not (_is_loopback(address[0]) or api_key)
            served = Served(url, name or name_of(path), model.context, model.engine, open_to_others, server.stop)
            if on_ready:
                server.on_ready = partial(on_ready, served)
            server.run(sockets=[listener])
        finally:
            turns.close()


def _loaded(path: Path, context: int | None, kv: str | None, progress: Progress[Any]) -> TextModel:
    try:
        return open_for_texts(path, context=context, kv=kv, progress=progress)
    except InputError as failure:
        if path.suffix.lower() != ".gguf" or kv is not None:
            raise
        raise InputError(failure.args[0], f"{failure.hint}; what llama.cpp reads it serves: `llama-server -m {path}`") from failure


def refuse_what_others_serve(path: Path) -> None:
    """Files that a runtime of theirs serves, and what cannot be served at all."""
    from fewbits.artifact.located import located
    from fewbits.inference import genai_folder, mlx_folder

    if located(path) or mlx_folder.takes(path) or genai_folder.takes(path):
        return
    if not path.exists():
        raise InputError(f"`{path}` does not exist", "give a .gguf, or what `fewbits quantize` wrote")
    if path.suffix.lower() == ".onnx":
        raise InputError(
            f"`{path.name}` is a graph without a KV cache, which cannot be served", "quantize with `--to onnx-genai`, and serve that folder"
        )
    if (path / "config.json").is_file():
        raise InputError(f"`{path.name}` is served by vLLM or transformers, not by fewbits", f"vllm serve {path}")


def name_of(path: Path) -> str:
    """Under which clients ask for it: the name of the file or folder that was written."""
    path = path.resolve()
    return (path.parent if path.name == "artifact" else path).name.removesuffix(".work") or "model"


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Before the model is loaded: an address that is taken is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as failure:
        raise InputError(
            f"cannot listen on `{host}` port {port}: {failure}", "give another `--port` (0: a free one) or `--host`"
        ) from failure
    with listener:
        yield listener


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _server(app: Any, turns: Turns) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        on_ready: Callable[[], None] | None = None

        def stop(self) -> None:
            turns.stop()
            self.should_exit = True

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """A signal ends the server, and that is all: it is not raised again afterwards."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            threading.Thread(target=turns.stop).start()  # a lock may be held by the very code that the signal interrupted
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.on_ready and self.started:
                self.on_ready()

    return Server(
        uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=_GRACE, ws="none")
    )
