"""Which tensors of a GGUF llama.cpp wants in float: llama-quantize's own rule, which goes by the names of tensors.

Its graphs add, convolve or index these as they are, or they are too small to be worth an error.
"""

from __future__ import annotations

import re

_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight"  # norms and routers
    r"|altup|laurel|per_layer_model_proj"  # Gemma 3n's small matrices
    r"|^position_embd\.weight|^token_types\.weight|\.position_embd|attn_rel_b\.weight|\.rel_pos"
    r"|ssm_conv1d|shortconv\.conv\.weight"  # convolutions over a few tokens
    r"|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|w[0-2]|v[0-2]|a[0-2]|g[12]|decay_w[12]|lerp_fused)\.weight"  # RWKV's two-dimensional vectors
    r"|sam\.(pos_embd|neck\.|net_)|\.patch_(embd|merger)|a\.rvq\.codebook|mm\.a\.code_embd"
)
_KEPT_OF = {  # by architecture
    "glm5-next": re.compile(
        r"hc_|indexer\.(attn_q_b|attn_k|proj)|indexer_compressor_(gate|ape)|ssm_[fg]_[ab]\.weight|ssm_beta\.weight"
        r"|attn_kv_a_mqa\.weight|attn_[kv]_b\.weight"
    )
}


def stays_in_float(name: str, shape: tuple[int, ...], architecture: str = "") -> bool:
    """`shape`: of any order; dimensions of 1 at its end do not count, as in ggml."""
    dimensions = sum(size > 1 for size in shape)
    if dimensions < 2 or not name.endswith("weight") or _KEPT.search(name):
        return True
    return architecture in _KEPT_OF and bool(_KEPT_OF[architecture].search(name))
