"""Opens a file in a process of its own before a runtime's native code opens it in ours.

llama.cpp ends the process where a file's metadata contradict each other, and no C++ parser is free of faults. A hostile file then kills a
process that does nothing else, and ours reports it. The price is loading the file twice.

`python -m fewbits.verification.sandbox RUNTIME FILE BYTES` is that process. It loads no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.errors import InputError
from fewbits.model import checkpoints

if TYPE_CHECKING:
    from fewbits.verification.runtimes import Runtime

_NATIVE = ("llama.cpp", "mlx", "onnxruntime", "onnxruntime-genai")  # the others are Python, and raise
_ROOM = 4 << 30  # bytes of address space that a runtime may take in addition to three copies of the file
_CONTEXT = 32
_SECONDS, _BYTES_PER_SECOND = 60, 50 << 20  # allowed at least, and the speed of a slow disk
_HINT = "do not trust it; write it anew, or try a newer version of the runtime"


def check(runtime: Runtime, path: Path) -> None:
    """Raises an InputError if the runtime does not survive this file, or takes far more time or memory than its size explains."""
    if runtime.name == "transformers":
        _ = checkpoints.open(path).config  # checks names, links and sizes, which transformers does not
    if runtime.name not in _NATIVE:
        return
    if not path.exists():
        raise InputError(f"there is nothing at `{path}`", "give a file that was written before")
    if runtime.name == "onnxruntime":
        from fewbits.model.onnx.graph import check_graph

        check_graph(path)
    elif runtime.name == "mlx":
        from fewbits.targets.mlx import contents

        contents.contents(path)  # checks offsets, shapes and types, which MLX takes as they are
    elif runtime.name == "llama.cpp":
        from fewbits.model.gguf.checkpoint import open_reader
        from fewbits.targets.gguf import first_part

        open_reader(first_part(path))  # checks counts and lengths, over which llama.cpp would loop for a minute
    parts = path.iterdir() if path.is_dir() else (path, path.with_name(f"{path.name}.data"))  # an .onnx file may have arrays beside it
    size = sum(part.stat().st_size for part in parts if part.is_file())
    try:
        ended = subprocess.run(  # -P: no module out of the current folder
            [sys.executable, "-P", "-m", "fewbits.verification.sandbox", runtime.name, str(path), str(3 * size + _ROOM)],
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # ggml would attach a debugger to itself first, for ten seconds
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
    """Loads the file as the runtime would. An orderly refusal is not reported here: our own process will meet it again."""
    if name == "llama.cpp":
        from fewbits.targets.gguf import first_part
        from fewbits.verification.runtimes import llamacpp

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
    elif name == "mlx":
        from fewbits.targets.mlx import package

        package.loaded(path)
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
    os._exit(0)  # at once: nothing needs to be freed


if __name__ == "__main__":
    _main(*sys.argv[1:])
