"""`fewbits formats`: every format, with its size, targets and kernel."""

from __future__ import annotations

from fewbits.cli.options import Json
from fewbits.cli.output import show_json


def formats(as_json: Json = False) -> None:
    """Every format: bits per weight, who carries it, what runs it here."""
    from fewbits import formats as known
    from fewbits import kernels, targets
    from fewbits.model.weights import Weight
    from fewbits.reporting.terminal import console, inspection

    shape = (4096, 4096)
    weights = [Weight("any", shape, "mlp", dtype) for dtype in ("fp16", "bf16")]  # MLX has scales in the type of the model
    rows = []
    for fmt in known.all().values():
        files = (target for target in targets.all().values() if target.runtime != "torch")  # our own artifact carries them all
        carriers = [target.name for target in files if any(target.accepts(weight, fmt) is None for weight in weights)]
        rows.append((fmt, fmt.bits_per_weight(shape), carriers, kernels.who(fmt, shape)))
    if as_json:
        listed = [
            {"name": f.name, "about": f.about, "run": f.group, "block": f.block, "bits_per_weight": bits, "targets": to, "kernel": kernel}
            for f, bits, to, kernel in rows
        ]
        show_json(listed)
    else:
        with console.on_stdout():
            inspection.formats((f, bits, ", ".join(to), kernel) for f, bits, to, kernel in rows)
