"""Whether enough of a model can be quantized in this layout to be worth a file: known from the module graph, before any work."""

from __future__ import annotations

from typing import Any

_LEAST = 0.5  # of the weights beside embeddings and output: with less, a file of 4-bit weights is as large as one of 10 bits


def too_little(config: Any) -> str | None:
    """Why most of this model would stay in float; None if it would not."""
    from torch import nn

    from fewbits.targets.compressed_tensors.layout import layout_of, skeleton

    module = skeleton(config)
    layout = layout_of(config, module)
    ends = {id(end.weight) for end in (module.get_input_embeddings(), module.get_output_embeddings()) if end is not None}
    counted, left = 0, dict[str, int]()  # weights, and those that stay in float by the class of what holds them
    for name, part in module.named_modules():
        for leaf, tensor in part.named_parameters(recurse=False):
            if tensor.dim() < 2 or id(tensor) in ends or isinstance(part, nn.Embedding):
                continue
            counted += tensor.numel()
            if f"{name}.{leaf}" not in layout.experts and not (isinstance(part, nn.Linear) and leaf == "weight"):
                left[type(part).__name__] = left.get(type(part).__name__, 0) + tensor.numel()
    kept = sum(left.values())
    if kept <= (1 - _LEAST) * counted:
        return None
    kind = max(left, key=lambda each: left[each])
    why = "vLLM and transformers read quantized experts one by one, and these have no such form" if "xpert" in kind else "not Linear layers"
    return f"{100 * kept / counted:.0f} % of its weights beside the embeddings would stay in float: `{kind}` ({why})"
