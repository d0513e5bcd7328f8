"""A format of your own, from outside the package: 4-bit integers under scales that are powers of two, one byte for 32 columns.

    python examples/own_format.py

Written, packed, compared with q4_0 and mxfp4 in error, and used to quantize a model. In the package itself a format is a file in
src/fewbits/formats/ that lists it in FORMATS; everything else below stays the same.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import fewbits
from fewbits import embedded, formats
from fewbits.formats import Format, Shape, Spec
from fewbits.formats.storage.codes import decode, encode, spread


@dataclass(frozen=True, kw_only=True)
class PowerOfTwo(Format):
    """w = 2^e * (q - 8): a multiplication by a shift, and half the bytes of a float16 scale."""

    def parts(self, shape: Shape) -> dict[str, Spec]:
        rows, cols = shape
        return {"codes": Spec("uint8", (rows, cols // 2)), "exponents": Spec("int8", (rows, cols // 32))}

    def fit(self, w: Tensor, importance: Tensor | None = None, fixed=None, how: str = "search") -> dict[str, Tensor]:
        """The least power of two that clips nothing; with a search, the one below too, where that leaves less error."""
        x = w.reshape(len(w), -1, 32)
        weight = torch.ones(32) if importance is None else importance.reshape(-1, 32)
        largest = x.abs().amax(-1).clamp(min=2.0**-100)
        safe = torch.ceil(torch.log2(largest / 7)).clamp(-126, 127)
        if how == "max":
            return {"exponents": safe.to(torch.int8)}
        errors = []
        for exponent in (safe, safe - 1):
            scale = torch.exp2(exponent)[..., None]
            errors.append((weight * (decode(encode(x, self.levels, scale), self.levels, scale) - x).square()).sum(-1))
        return {"exponents": torch.where(errors[1] < errors[0], safe - 1, safe).clamp(-126, 127).to(torch.int8)}

    def affine(self, grid: dict[str, Tensor], columns=slice(None)) -> tuple[Tensor, None]:
        return spread(torch.exp2(grid["exponents"].float()), 32, columns), None

    def pack(self, codes: Tensor, grid: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "exponents": grid["exponents"]}

    def unpack(self, parts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = parts["codes"] & 15, parts["codes"] >> 4
        return torch.stack([low, high], -1).reshape(len(low), -1), {"exponents": parts["exponents"]}


OWN = PowerOfTwo(
    name="int4_pow2", about="4 bits, scales 2^n", levels=tuple(float(q - 8) for q in range(16)), group=32, block=32
)  # fmt: skip


def main(folder: Path) -> None:
    formats.all()[OWN.name] = OWN  # known by its name from here on: to plans, methods, the artifact, the command line
    try:
        compared = fewbits.compare(embedded.MODEL, "layers.0", [OWN.name, "mxfp4", "q4_0"])
        print("format     bits   error   kernel")
        for row in compared.formats:
            print(f"{row.format:<10} {row.bits_per_weight:.3f}  {row.error:.4f}  {row.kernel}")

        made = fewbits.quantize(embedded.MODEL, folder, to="fewbits", format=OWN.name, method="rtn", tokens=1024)
        assert made.verdict is not None, "it was verified"
        print(f"whole model: {made.plan.bits_per_weight:.3f} bits per weight, KL {made.verdict.kl_mean:.4f}, run by {made.verdict.runtime}")
    finally:
        del formats.all()[OWN.name]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
