"""A file is tried in a process of its own before a runtime's native code opens it in ours.

llama.cpp ends the process where a file's metadata contradict each other, and no parser in C++ is free of faults: what a hostile file
brings down is then a process that had nothing else to do. Ours stays, and says so. Costs the file's loading once more.

`python -m fewbits.trial RUNTIME FILE` is that process. It loads no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits import checkpoints
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.runtimes import Runtime

_TRIED = ("llama.cpp", "onnxruntime", "onnxruntime-genai")  # the others are Python, and raise
_ROOM = 4 << 30  # bytes of address space that a runtime may take beside three copies of the file
_CONTEXT = 32
_SECONDS, _BYTES_PER_SECOND = 60, 50 << 20  # of time, and what a slow disk reads in one
_HINT = "do not trust it; write it anew, or try a newer version of the runtime"


def check(runtime: Runtime, path: Path) -> None:
    """Raises an InputError where the runtime does not survive this file, or takes what no file of its size should."""
    if runtime.name == "transformers":
        _ = checkpoints.open(path).config  # names, links and sizes, which it would take as they are
    if runtime.name not in _TRIED:
        return
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a file that was written before")
    if runtime.name == "onnxruntime":
        from fewbits.onnx_files.reading import check_graph

        check_graph(path)
    elif runtime.name == "llama.cpp":
        from fewbits.checkpoints.gguf_file import open_reader
        from fewbits.targets.gguf import first_part

        open_reader(first_part(path))  # counts and lengths, which llama.cpp would go through one by one for a minute
    parts = path.iterdir() if path.is_dir() else (path, path.with_name(f"{path.name}.data"))  # an .onnx file may have arrays beside it
    size = sum(part.stat().st_size for part in parts if part.is_file())
    try:
        ended = subprocess.run(  # -P: no module from the folder that one happens to be in
            [sys.executable, "-P", "-m", "fewbits.trial", runtime.name, str(path), str(3 * size + _ROOM)],
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # ggml would have a debugger look at itself first, for ten seconds
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS + size / _BYTES_PER_SECOND,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{runtime.name} does not come to an end with `{path}`", _HINT) from None
    if ended.returncode:
        lines = [line.strip() for line in ended.stderr.decode(errors="replace").splitlines() if line.strip()]
        said = next((line for line in lines if "ASSERT" in line), lines[-1] if lines else "it does not say why")
        how = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"exit code {ended.returncode}"
        raise InputError(f"{runtime.name} dies of `{path}` ({how}): {said}", _HINT)


def _open(name: str, path: Path) -> None:
    """What the runtime does with a file before it computes anything. A refusal in good order is left to our own process to report."""
    if name == "llama.cpp":
        from fewbits.runtimes import llamacpp
        from fewbits.targets.gguf import first_part

        library = llamacpp._library()
        model = library.llama_model_load_from_file(str(first_part(path)).encode(), library.llama_model_default_params())
        if model:
            params = library.llama_context_default_params()
            params.content[0] = params.content[1] = params.content[2] = _CONTEXT
            library.llama_init_from_model(model, params)
    elif name == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    else:
        import onnxruntime_genai

        onnxruntime_genai.Model(str(path))


def _main(name: str, path: str, room: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (int(room) if most == resource.RLIM_INFINITY else min(int(room), most), most))
    try:
        _open(name, Path(path))
    except Exception as failure:
        sys.stderr.write(f"{failure}\n")
    os._exit(0)  # what the runtime would free does not matter any more


if __name__ == "__main__":
    _main(*sys.argv[1:])
