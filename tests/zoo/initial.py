"""Random weights that behave like trained ones: logits that are sure of something, routers that choose, channels that stick out."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from zoo.tiny import Tiny

LOGITS = 2.5  # standard deviation of the logits aimed at
LOUD = 3.0  # what channels that stick out are multiplied by
EXPERT = 0.25  # of experts the more: a token that rounding gives to another one is a step, which no second-order forecast sees
WRITERS = re.compile(  # into the hidden state
    r"(o_proj|o_b_proj|down_proj|out_proj|c_proj|dense_4h_to_h|fc2|w2|Wo|output_linear|(attention|attn|output)\.dense)\b"
)
CHOICE = re.compile(r"(score_correction|expert)_bias\b")  # added to the scores that choose experts
LAST_NORM = re.compile(r"(?!.*(vision|visual|projector))\D*\b(norm|norm_f|ln_f|final_layernorm|final_layer_norm|embedding_norm)\.weight")


@torch.no_grad()
def initialise(module: Any, tiny: Tiny) -> None:
    """transformers' own initial values where they mean something (decays, time steps), random ones of unit gain elsewhere."""
    output = module.get_output_embeddings() if tiny.kind == "decoder" else None
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    turned = {id(parameter) for part in module.modules() if _is_transposed(part) for parameter in part.parameters(recurse=False)}
    for name, value in module.state_dict(keep_vars=True).items():
        if not value.is_floating_point():
            if value.ndim == 2:  # the experts of each token, where a table chooses them
                value.copy_(torch.rand(len(value), tiny.settings["n_routed_experts"]).argsort(-1)[:, : value.shape[1]])
        elif output is not None and value is output.weight:
            value.normal_(0, LOGITS * tiny.logits / tiny.final * value.shape[-1] ** -0.5)
        elif id(value) in tables:
            value.normal_(0, tiny.embedding)
        elif CHOICE.search(name):
            value.normal_(0, 0.03)
        elif name.endswith("_bias"):  # one for each expert
            value.normal_(0, 0.1 * EXPERT * tiny.residual)
        elif value.ndim > 1:
            inputs = value.shape[-2] if id(value) in turned else value.shape[-1] if value.ndim == 3 else value[0].numel()
            gain = tiny.residual * (EXPERT if value.ndim == 3 else 1.0) if WRITERS.search(name) else 1.0
            value.normal_(0, gain * inputs**-0.5)
        elif value.numel() > 1:
            centre = float(value[0])
            _spread(value, name)
            if LAST_NORM.fullmatch(name):  # Gemma adds one to its norms by itself
                value.copy_(tiny.final * value if centre else tiny.final * (1 + value) - 1)
        for ending, factor in tiny.factors.items():
            if name.endswith(ending):
                value.mul_(factor)


def _spread(vector: Tensor, name: str) -> None:
    """Norms around what they were, biases around zero: initial ones and zeros would hide one that is left out."""
    if not bool((vector == vector[0]).all()):
        return  # decays and time steps: transformers' initial values differ from each other
    scale = float(vector[0])
    vector.add_(torch.randn_like(vector) * (0.2 * abs(scale) if scale else 0.1))
    if "norm" in name and name.endswith("weight"):
        loud = torch.randperm(len(vector))[: len(vector) // 64]
        vector[loud] = vector[loud] * LOUD if scale else vector[loud] + LOUD - 1


def _is_transposed(part: nn.Module) -> bool:
    """Matrices that are stored as (inputs, outputs)."""
    return bool(getattr(part, "is_transposed", False)) or type(part).__name__ in {"Conv1D", "Llama4TextExperts"}
