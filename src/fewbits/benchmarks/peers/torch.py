"""torch's float32 linear layer: what a product costs that is not quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbits.benchmarks.contenders import Multiplier, Product, copies
from fewbits.benchmarks.shapes import Packed


class TorchLinear(Multiplier):
    name, unit, rounding = "torch f32", "fp32", "none"

    def __init__(self, weight: Packed, threads: int, cold: int) -> None:
        from fewbits import kernels

        self._source = weight
        w = kernels.decode(weight.fmt, weight.parts, weight.shape)
        self.nbytes = w.nbytes
        self._weights = [w, *(w.clone() for _ in range(copies(w.nbytes, cold) - 1))]
        self.setting = f"{version()}, nn.functional.linear, {torch.backends.cpu.get_cpu_capability()}"

    def bind(self, x: Tensor) -> Product:
        made: list[Tensor] = []

        def run(number: int) -> None:
            with torch.inference_mode():
                made[:] = [torch.nn.functional.linear(x, self._weights[number % len(self._weights)])]

        return Product(run, lambda: made[0])

    def decoded(self, rows: Tensor) -> Tensor:
        return self._source.decoded(rows)

    def close(self) -> None:
        self._weights.clear()


def version() -> str:
    return f"torch {torch.__version__}"
