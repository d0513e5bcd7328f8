"""A checkpoint with another layout than its module: most mixtures are published with one tensor per expert and matrix.

transformers has rules that turn such tensors into parameters when it loads them. Here the same rules are applied to one parameter at a
time, and to one expert at a time where the file has a tensor for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fewbits.model.checkpoints import Checkpoint


def converted(checkpoint: Checkpoint, skeleton: nn.Module) -> Checkpoint:
    """The same checkpoint if every parameter is stored under its name and in its shape; else one that assembles the others."""
    prefix = f"{getattr(skeleton, 'base_model_prefix', '')}."
    stored = set(checkpoint.names())
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}

    def missing(name: str) -> bool:
        match = next((other for other in (name, name.removeprefix(prefix), prefix + name) if other in stored), None)
        return match is None or checkpoint.shape(match) != wanted[name]

    recipes = _recipes(checkpoint, skeleton) if any(map(missing, wanted)) else {}
    recipes = {name: recipe for name, recipe in recipes.items() if name in wanted and missing(name)}
    return _Converted(checkpoint, recipes) if recipes else checkpoint


@dataclass(frozen=True)
class _Recipe:
    """How one parameter is made from the tensors that match each pattern of a rule. Without operations: a tensor under another name."""

    name: str
    sources: dict[str, list[str]]
    operations: tuple[Any, ...] = ()
    patterns: tuple[str, ...] = ()
    target: str = ""
    skeleton: Any = None

    @property
    def first(self) -> str:
        return next(iter(self.sources.values()))[0]

    @property
    def experts(self) -> int | None:
        """Size of the first dimension, if each entry of it is made from its own tensors."""
        counts = {len(names) for names in self.sources.values()}
        stacked = bool(self.operations) and type(self.operations[0]).__name__ == "MergeModulelist" and self.operations[0].dim == 0
        return counts.pop() if stacked and len(counts) == 1 else None

    def made(self, load: Callable[[str], Tensor], which: slice = slice(None)) -> Tensor:
        tensors: dict[str, Any] = {pattern: [load(name) for name in names[which]] for pattern, names in self.sources.items()}
        for operation in self.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=list(self.patterns),
                target_patterns=[self.target],
                full_layer_name=self.name,
                model=self.skeleton,
                config=self.skeleton.config,
                missing_keys=None,
            )
        (made,) = tensors.values()
        tensor: Tensor = made[0] if isinstance(made, list) else made
        return tensor


class _Converted:
    def __init__(self, original: Checkpoint, recipes: dict[str, _Recipe]) -> None:
        self.path, self._original, self._recipes = original.path, original, recipes
        self._merging: Checkpoint = getattr(original, "merging", original)  # what operations are applied to

    @property
    def config(self) -> Any:
        return self._original.config

    def names(self) -> list[str]:
        used = {name for recipe in self._recipes.values() for names in recipe.sources.values() for name in names}
        return [*(name for name in self._original.names() if name not in used), *self._recipes]

    def shape(self, name: str) -> tuple[int, ...]:
        import torch

        if name not in self._recipes:
            return self._original.shape(name)
        return tuple(self._recipes[name].made(lambda source: torch.empty(self._original.shape(source), device="meta")).shape)

    def dtype(self, name: str) -> str:
        recipe = self._recipes.get(name)
        return self._original.dtype(name) if recipe is None else self._source(recipe).dtype(recipe.first)

    def load(self, name: str) -> Tensor:
        recipe = self._recipes.get(name)
        return self._original.load(name) if recipe is None else recipe.made(self._source(recipe).load)

    def load_slice(self, name: str, index: int) -> Tensor:
        recipe = self._recipes.get(name)
        if recipe is None:
            return self._original.load_slice(name, index)
        if recipe.experts is None:
            return self.load(name)[index]
        return recipe.made(self._source(recipe).load, slice(index, index + 1))[0]

    def _source(self, recipe: _Recipe) -> Checkpoint:
        return self._merging if recipe.operations else self._original

    def save_assets(self, folder: Path) -> None:
        self._original.save_assets(folder)

    def files(self) -> list[Path]:
        return self._original.files()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)  # what only some checkpoints have, as a tokenizer


def _recipes(checkpoint: Checkpoint, skeleton: nn.Module) -> dict[str, _Recipe]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(skeleton)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, wanted = getattr(skeleton, "base_model_prefix", ""), skeleton.state_dict()
    recipes: dict[str, _Recipe] = {}
    for stored in sorted(checkpoint.names(), key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, wanted)
        rule = by_pattern.get(pattern)
        if rule is None:
            recipes[name] = _Recipe(name, {"": [stored]}, skeleton=skeleton)
        elif len(rule.target_patterns) == 1:  # a tensor that becomes several parameters is not split here
            if name not in recipes:
                sources: dict[str, list[str]] = {each: [] for each in rule.source_patterns}
                patterns, target = tuple(rule.source_patterns), rule.target_patterns[0]
                recipes[name] = _Recipe(name, sources, tuple(rule.operations), patterns, target, skeleton)
            recipes[name].sources[pattern].append(stored)
    return {name: recipe for name, recipe in recipes.items() if all(recipe.sources.values())}
