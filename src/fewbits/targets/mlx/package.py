"""mlx-lm, asked: its class of a model, without weights. Arrays of MLX are computed when they are looked at, so a class costs no memory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from fewbits.errors import InputError, MissingError
from fewbits.store.untrusted import first_line

HINT = "pip install 'fewbits[mlx]'"


def missing() -> str | None:
    """Why mlx-lm cannot be asked here; None if it can."""
    for module, package in (("mlx", "mlx"), ("mlx_lm", "mlx-lm")):
        if find_spec(module) is None:
            return f"the package `{package}` is not installed"
    try:
        import mlx.core  # noqa: F401 - on Linux the library itself is a second package
    except ImportError as failure:
        return f"mlx cannot be loaded ({first_line(failure)}); on Linux it needs the package `mlx-cpu`"
    return None


def needed() -> None:
    if reason := missing():
        raise MissingError(f"mlx-lm says how its folders are laid out, and {reason}", HINT)


def loaded(path: Path, lazy: bool = False) -> tuple[Any, dict[str, Any]]:
    """A folder in mlx-lm's own loader, and its config.json: every tensor that the model asks for must be there, and no other. `lazy`:
    values are not read. Code in the folder is never run."""
    from mlx_lm.utils import load_model

    model, settings = load_model(path, lazy=lazy, strict=True, trust_remote_code=False)
    return model, settings


def empty_model(settings: Mapping[str, Any]) -> Any:
    """mlx-lm's model for a config.json, with random values that nobody looks at. An InputError: it has none."""
    from mlx_lm.utils import _get_classes

    try:
        kind, arguments = _get_classes(dict(settings))
        return kind(arguments.from_dict(dict(settings)))
    except Exception as failure:  # whatever its code stumbles over in a config
        raise InputError(f"mlx-lm has no model for it: {first_line(failure)}", "use another `--to`, or a newer mlx-lm") from failure


def asked_for(settings: Mapping[str, Any]) -> dict[str, bool]:
    """The keys of config.json that mlx-lm reads for this model, and whether it needs them; none if it does not know the model."""
    from mlx_lm.utils import _get_classes

    try:
        arguments = signature(_get_classes(dict(settings))[1]).parameters
    except Exception:
        return {}
    return {name: argument.default is Parameter.empty for name, argument in arguments.items()}
