"""The peers that `--peer` names: whose environment, which program, what it makes, and with which settings.

Settings are the peer's own defaults, or what its documentation recommends where that differs; nothing is set to make a peer look worse.

autoround           200 steps, its default
autoround-rtn       no steps: what its documentation recommends for GGUF (an optimized rounding with an importance matrix)
autoround-ext       200 steps with its algorithm extension, the other recommendation for GGUF
autoscheme          AutoRound's AutoScheme: it chooses the type of each layer, within the bytes of the mix; 200 steps
llmcompressor-rtn   rounding by the largest value of each group, as the library of the layout (compressed-tensors) describes it
llmcompressor-gptq  GPTQ with the observer that searches ranges (`mse`; for nvfp4 `nvfp4_expanded_mse`, made for it)
llmcompressor-awq   AWQ, likewise, in the same symmetric layout
llmcompressor-awq-asym  AWQ with zero points, as in its examples: a few more bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fewbits.errors import InputError

TARGET_SIZE = "target-size"  # llama.cpp's own, rebuilt in quality/target_size.py: it needs no environment
_FLOAT4: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
FOLDERS: dict[str, dict[str, Any]] = {  # formats of compressed-tensors folders that peers make too, in its own words
    **{f"int4_g{n}": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": n} for n in (32, 64, 128)},
    "nvfp4_tensor": _FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": _FLOAT4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
_OF_NVFP4 = {"mse": "nvfp4_expanded_mse"}  # the observer that llm-compressor has for its scales
_MIXES = (  # that AutoRound writes
    "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s", "q5_k_m", "q6_k", "q8_0",
)  # fmt: skip
_TOGETHER = {"llmcompressor": ("llmcompressor-gptq", "llmcompressor-awq")}


@dataclass(frozen=True)
class Peer:
    name: str
    program: str  # of programs/, and the name of its environment
    writes_gguf: bool = False
    writes_folders: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None  # other than its own: for trying things out

    @property
    def maker(self) -> str:
        return self.name if self.steps is None else f"{self.name}, {self.steps} steps"

    def makes(self, mix: str) -> bool:
        """Whether it can make a GGUF of the size of this mix of llama.cpp's."""
        return self.writes_gguf and (self.name == "autoscheme" or mix in _MIXES)

    def gguf_job(self, mix: str, weight_bytes: int, weights: int) -> dict[str, Any]:
        """`weight_bytes`: of the mix, for who chooses types himself; `weights`: how many they hold."""
        arguments = dict(self.settings) | ({} if self.steps is None else {"iters": self.steps})
        if self.name == "autoscheme":  # the name of the file's type says how the embedding is stored
            kind = mix if mix in _MIXES else "q4_k_m"
            return {"format": f"gguf:{kind}", "bits": 8 * weight_bytes / weights, "weight_bytes": weight_bytes, "arguments": arguments}
        return {"format": f"gguf:{mix}", "scheme": f"GGUF:{mix.upper()}", "arguments": arguments}

    def makes_folder(self, fmt: str) -> bool:
        return self.writes_folders and (self.program == "llmcompressor" or fmt.startswith("int4"))

    def folder_job(self, fmt: str) -> dict[str, Any]:
        if self.program == "llmcompressor":
            observer = self.settings["observer"]
            own = {"symmetric": self.settings["symmetric"], "observer": _OF_NVFP4.get(observer, observer) if "nvfp4" in fmt else observer}
            return {"method": self.settings["method"], "weights": own | FOLDERS[fmt]}
        arguments = {**self.settings, "group_size": FOLDERS[fmt]["group_size"]} | ({} if self.steps is None else {"iters": self.steps})
        return {"format": "llm_compressor", "scheme": "W4A16", "arguments": arguments}


def _llmcompressor(name: str, method: str, symmetric: bool, observer: str = "mse") -> Peer:
    settings = {"method": method, "symmetric": symmetric, "observer": observer}
    return Peer(name, "llmcompressor", writes_folders=True, settings=settings)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("autoround", "autoround", True, True, {"iters": 200}),
        Peer("autoround-rtn", "autoround", True, True, {"iters": 0}),
        Peer("autoround-ext", "autoround", True, True, {"iters": 200, "enable_alg_ext": True}),
        Peer("autoscheme", "autoround", True, False, {"iters": 200}),
        _llmcompressor("llmcompressor-rtn", "rtn", True, "memoryless_minmax"),
        _llmcompressor("llmcompressor-gptq", "gptq", True),
        _llmcompressor("llmcompressor-awq", "awq", True),
        _llmcompressor("llmcompressor-awq-asym", "awq", False),
    )
}


def parse(names: Sequence[str], steps: int | None = None) -> list[Peer]:
    """Peers in environments of their own, in the order given; `llmcompressor` stands for its GPTQ and its AWQ."""
    chosen: dict[str, Peer] = {}
    for name in (one for asked in names for one in _TOGETHER.get(asked.lower(), (asked.lower(),))):
        if name not in PEERS:
            raise InputError(f"no peer is named `{name}`", f"known ones: {', '.join((*PEERS, *_TOGETHER, TARGET_SIZE))}")
        peer = PEERS[name]
        chosen[name] = replace(peer, steps=steps) if peer.settings.get("iters") else peer
    return list(chosen.values())
