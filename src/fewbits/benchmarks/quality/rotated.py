"""The same Llama with a wider residual stream: a second model for types whose blocks are 256 columns wide.

SmolLM2 is 576 wide, which 256 does not divide. With Q (576, 768), seeded and random, its rows orthonormal, x Q stands for every state x
between blocks. It has the same length, so RMSNorm needs nothing but another mean; what reads the stream becomes W Q, what writes to it
Q^T W. No column is zero and none is a copy: all 768 carry the 576, mixed. Heads and MLP keep their widths, so `o_proj` reads 576 columns
as before and is left to types of 32.

What to know when reading figures measured on it:
- It is rotated: outliers of single channels are spread over all columns, which helps every rounding.
- Its inputs fill 576 of 768 dimensions. Error feedback can put errors into the other 192, where nobody reads them; the diagonal of an
  importance matrix cannot. A model that was trained 768 wide has no such room.
- Norms were folded into what reads them, the last one into the output: embedding and output are no longer one matrix.
- It calls itself a Mistral, which computes the same: transformers lets no Llama have 9 heads and a width that 9 does not divide. In a
  GGUF both are `llama`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fewbits.errors import InputError
from fewbits.model import checkpoints
from fewbits.progress import silent
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.model.checkpoints import Checkpoint
    from fewbits.progress import Progress

_BLOCK = 256  # columns of a super-block
_EMBEDDING, _OUTPUT, _LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_NORM = re.compile(r"norm\.weight$")
_READER = re.compile(r"^(?P<layer>model\.layers\.\d+\.)(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.weight$")
_WRITER = re.compile(r"\.(self_attn\.o_proj|mlp\.down_proj)\.weight$")
_MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None, "tie_word_embeddings": False}


def rotate(model_folder: str | Path, out_folder: str | Path, seed: int = 0, progress: Progress[Any] = silent) -> Path:
    """Writes a Hugging Face folder that computes what this one computes, in the next width that 256 divides."""
    checkpoint = checkpoints.open(model_folder)
    config = checkpoint.config
    if config.model_type != "llama":
        raise InputError(f"`{config.model_type}` cannot be rotated", "the rotation knows the norms of a `llama` and what reads them")
    narrow = int(config.hidden_size)
    wide = (narrow // _BLOCK + 1) * _BLOCK
    q, out = orthonormal_rows(narrow, wide, seed), Path(out_folder)
    with Staged(out, marker="config.json") as staged:
        staged.mkdir()
        checkpoint.save_assets(staged)
        rotated = {}
        names = checkpoint.names()
        for name in progress(names, len(names), f"rotating {narrow} into {wide} dimensions"):
            rotated[name] = _rotated(checkpoint, name, q)
        if _OUTPUT not in rotated:
            rotated[_OUTPUT] = _output(checkpoint, _EMBEDDING, q)
        save_file(rotated, staged / "model.safetensors", metadata={"format": "pt"})
        _widen(staged / "config.json", config, wide)
    return out


def orthonormal_rows(rows: int, cols: int, seed: int) -> Tensor:
    """(rows, cols) float64, drawn evenly from all such matrices."""
    gaussian = torch.randn(cols, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis, triangle = torch.linalg.qr(gaussian)
    rows_of_basis: Tensor = (basis * triangle.diagonal().sign()).T  # without the signs QR would prefer some matrices
    return rows_of_basis.contiguous()


def _rotated(checkpoint: Checkpoint, name: str, q: Tensor) -> Tensor:
    stored = checkpoint.load(name)
    if _NORM.search(name):
        return torch.ones(q.shape[1], dtype=stored.dtype)
    if name == _OUTPUT:
        return _output(checkpoint, name, q)
    if name == _EMBEDDING:
        return (stored.double() @ q).to(stored.dtype)
    if reader := _READER.search(name):
        norm = "input_layernorm" if "self_attn" in name else "post_attention_layernorm"
        return _read(stored, checkpoint.load(f"{reader['layer']}{norm}.weight"), q)
    if _WRITER.search(name):
        return (q.T @ stored.double()).to(stored.dtype)
    raise InputError(f"`{name}` cannot be rotated: it is no weight of a plain Llama", "give a `llama` without biases or adapters")


def _output(checkpoint: Checkpoint, name: str, q: Tensor) -> Tensor:
    return _read(checkpoint.load(name), checkpoint.load(_LAST_NORM), q)


def _read(w: Tensor, norm: Tensor, q: Tensor) -> Tensor:
    """What reads a normed state. The mean square over more columns is smaller, and the normed state longer, by a constant factor: folded
    in here, since ones are exact in every type of float and the factor, as a norm's weight, is in none."""
    narrow, wide = q.shape
    return ((w.double() * norm.double() * math.sqrt(narrow / wide)) @ q).to(w.dtype)


def _widen(file: Path, config: Any, wide: int) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eps = config.rms_norm_eps * config.hidden_size / wide
    content |= _MISTRAL | {"hidden_size": wide, "head_dim": head, "rms_norm_eps": eps}
    for unknown in ("attention_bias", "mlp_bias", "pretraining_tp"):
        content.pop(unknown, None)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
