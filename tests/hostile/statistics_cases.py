"""Hostile statistics. Symmetric matrices are stored as triangles, so that one that is not symmetric cannot be said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benign import Benign
from cases import case
from safetensors.torch import load_file, save_file
from torch import Tensor

SITE = "model.layers.0.self_attn.q_proj"


def copied(folder: Path, benign: Benign) -> Path:
    shutil.copytree(benign.statistics, folder, dirs_exist_ok=True)
    return folder


def told(folder: Path, benign: Benign, change: Callable[[Any], object]) -> None:
    path = copied(folder, benign) / "statistics.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def counted(folder: Path, benign: Benign, field: str, change: Callable[[Tensor], Tensor], kind: str = "input") -> None:
    path = copied(folder, benign) / f"{kind}-00000.safetensors"
    tensors = load_file(path)
    tensors[f"{SITE}:{field}"] = change(tensors[f"{SITE}:{field}"]).contiguous()
    save_file(tensors, path)


@case("statistics")
def about_nothing(folder: Path, benign: Benign) -> None:
    """a statistics.json that is a list"""
    (copied(folder, benign) / "statistics.json").write_text("[]")


@case("statistics")
def weights_without_places(folder: Path, benign: Benign) -> None:
    """weights that do not say where their statistics lie"""
    told(folder, benign, lambda about: about.update(weights={name: {} for name in about["weights"]}))


@case("statistics")
def block_that_is_a_path(folder: Path, benign: Benign) -> None:
    """a block whose number is a path"""
    told(folder, benign, lambda about: about["weights"][SITE].update(block="/../../etc/passwd"))


@case("statistics")
def runs_of_nothing(folder: Path, benign: Benign) -> None:
    """runs that are numbers"""
    told(folder, benign, lambda about: about.update(runs=[1, 2]))


@case("statistics")
def other_model(folder: Path, benign: Benign) -> None:
    """statistics of another model"""
    told(folder, benign, lambda about: about.update(model_sha256="0" * 64))


@case("statistics")
def hessian_with_nan(folder: Path, benign: Benign) -> None:
    """a second moment that is NaN"""
    counted(folder, benign, "moment", lambda moment: moment.index_fill(1, torch.tensor([5]), float("nan")))


@case("statistics")
def hessian_below_zero(folder: Path, benign: Benign) -> None:
    """second moments below zero: a Hessian that no damping makes positive"""
    counted(folder, benign, "moment", lambda moment: -moment)


@case("statistics")
def broken_triangle(folder: Path, benign: Benign) -> None:
    """a triangle with a number too few"""
    counted(folder, benign, "moment", lambda moment: moment[:, :-1])


@case("statistics")
def hessian_of_another_width(folder: Path, benign: Benign) -> None:
    """a whole triangle, of a smaller matrix"""
    counted(folder, benign, "moment", lambda moment: moment[:, : 32 * 33 // 2])


@case("statistics")
def negative_squares(folder: Path, benign: Benign) -> None:
    """sums of squares below zero"""
    counted(folder, benign, "square", lambda square: -square)


@case("statistics")
def fisher_of_infinity(folder: Path, benign: Benign) -> None:
    """gradients that are infinite"""
    counted(folder, benign, "fisher", lambda fisher: fisher * float("inf"), "gradient")


@case("statistics")
def narrow_inputs(folder: Path, benign: Benign) -> None:
    """every statistic of an input half as wide as its weight"""
    path = copied(folder, benign) / "input-00000.safetensors"
    tensors = load_file(path)
    for field in ("total", "square", "low", "high", "first", "some"):
        tensors[f"{SITE}:{field}"] = tensors[f"{SITE}:{field}"][..., :32].contiguous()
    tensors[f"{SITE}:moment"] = tensors[f"{SITE}:moment"][:, : 32 * 33 // 2].contiguous()
    save_file(tensors, path)


@case("statistics")
def counts_that_are_floats(folder: Path, benign: Benign) -> None:
    """tokens counted in floats, below zero"""
    counted(folder, benign, "count", lambda count: -count.float())


@case("statistics")
def unknown_statistics(folder: Path, benign: Benign) -> None:
    """a field that there is not"""
    path = copied(folder, benign) / "input-00000.safetensors"
    save_file(load_file(path) | {f"{SITE}:__class__": torch.zeros(2)}, path)


@case("statistics")
def statistics_through_a_link(folder: Path, benign: Benign) -> None:
    """tensors in a link out of the folder"""
    path = copied(folder, benign) / "input-00000.safetensors"
    shutil.move(path, folder.parent / "linked-statistics.safetensors")
    path.symlink_to(folder.parent / "linked-statistics.safetensors")


@case("merged statistics")
def sum_of_nan(folder: Path, benign: Benign) -> None:
    """statistics to be added to others, with a NaN in them"""
    counted(folder, benign, "square", lambda square: square * float("nan"))


@case("merged statistics")
def sum_of_two_widths(folder: Path, benign: Benign) -> None:
    """statistics to be added to others, of another width"""
    counted(folder, benign, "fisher_square", lambda square: square[:, :32], "gradient")


@case("merged statistics")
def sum_of_other_experts(folder: Path, benign: Benign) -> None:
    """statistics to be added to others, that count experts which those do not have"""
    told(folder, benign, lambda about: about.update(experts={"model.layers.0.mlp": [1, 2, 3]}))


@case("merged statistics")
def experts_of_texts(folder: Path, benign: Benign) -> None:
    """statistics to be added to others, whose experts are no numbers"""
    told(folder, benign, lambda about: about.update(experts={"model.layers.0.mlp": ["a", None]}))


@case("statistics")
def infinite_tokens(folder: Path, benign: Benign) -> None:
    """a run of infinitely many tokens"""
    told(folder, benign, lambda about: about["runs"][0].update(tokens=float("inf")))
