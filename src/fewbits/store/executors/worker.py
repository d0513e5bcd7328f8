"""The worker's side: does one unit of work and stores the result where the coordinator finds it.

A unit names a pure function. A result that exists already is not made again; two workers that make the same one write the same file.
A worker that could give other bytes (other code, another kind of machine) refuses.
"""

from __future__ import annotations

import atexit
import importlib
import platform
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import FewbitsError, InputError, MissingError
from fewbits.store import remote
from fewbits.store.cache import Cache, code_version, machine
from fewbits.store.executors.unit import Unit
from fewbits.store.files import is_full_disk
from fewbits.store.scratch import scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

Made = tuple[dict[str, Any], dict[str, "Tensor"]]  # the values and the tensors of a result
_FULL = "free some space there, or in the store, and run the same again"


def run(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What every worker calls: takes the fields of a `Unit`, returns the fields of an `Answer`."""
    import torch

    threads = torch.get_num_threads()
    try:
        return {"file": _made(Unit(**fields))}
    except FewbitsError as failure:
        message = f"{failure.args[0]} (worker on {platform.node()})"
        return {"error": message, "hint": failure.hint, "missing": isinstance(failure, MissingError)}
    except remote.Damaged as failure:
        return {"lost": str(failure)}
    except MemoryError:
        return {"lost": f"not enough memory on {platform.node()}"}
    except OSError as failure:
        if not is_full_disk(failure):
            return {"failed": traceback.format_exc()}
        return {"error": f"a disk is full: {failure} (worker on {platform.node()})", "hint": _FULL, "missing": True}
    except Exception:
        return {"failed": traceback.format_exc()}
    finally:
        torch.set_num_threads(threads)


@cache
def versions() -> Mapping[str, str]:
    """Of the packages that decide the result: what a user can compare and install."""
    return {name: metadata.version(name) for name in ("fewbits", "torch", "transformers")}


def _made(unit: Unit) -> str:
    """Makes the result unless it exists; returns its file name."""
    _check_alike(unit)
    store = remote.open(unit.store) if unit.store else None
    cache = Cache(scratch() / "cache" if store else Path(unit.folder), unit.about, listed=False)
    if store and (stored := store.find(f"cache/{cache.stem(unit.step, **unit.parameters)}-")):
        return stored.rpartition("/")[2]
    if not store and (result := cache.look(unit.step, **unit.parameters)):
        return result.path.name
    result = cache.keep(unit.step, *_function(unit)(unit), **unit.parameters)
    if store:
        store.put(result.path, f"cache/{result.path.name}")
        result.path.unlink()
    return result.path.name


def _function(unit: Unit) -> Callable[[Unit], Made]:
    """Only functions of fewbits: a unit is data from elsewhere, and must not choose code of other packages to run."""
    module, _, name = unit.function.partition(":")
    if not module.startswith("fewbits."):
        raise InputError(f"a unit asks for `{unit.function}`", "it does not come from fewbits")
    function: Callable[[Unit], Made] = getattr(importlib.import_module(module), name)
    return function


def _check_alike(unit: Unit) -> None:
    """Refuses a unit whose result could differ from the coordinator's: other versions, sources or processor."""
    import torch

    here, hint = versions(), "install the same fewbits, torch and transformers on all nodes"
    for name, wanted in unit.versions.items():
        if here[name] != wanted:
            raise InputError(f"this worker has {name} {here[name]}, and the work began with {name} {wanted}", hint)
    if code_version() != unit.about["code"]:
        message = f"this worker's files of fewbits {here['fewbits']} differ from those that the work began with"
        raise InputError(message, f"{hint}, from one wheel")
    capability, threads, processor = unit.about["machine"]
    torch.set_num_threads(threads)
    worker_capability, _, worker_processor = machine()
    for ours, theirs in ((worker_capability, capability), (worker_processor, processor)):
        if ours != theirs:
            message = f"this worker adds up with {ours}, and the work began with {theirs}: sums could differ in their last bits"
            raise InputError(message, "use nodes of one kind")


def placed(unit: Unit, what: str) -> Path:
    """The path of an input file, fetched from the store if there is one."""
    if unit.store is None:
        return Path(unit.inputs[what])
    path = scratch() / "files" / str(unit.inputs[what])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        remote.open(unit.store).get_blob(str(unit.inputs[what]), path)
    return path


@cache
def scratch() -> Path:
    """A folder that is removed when this process ends."""
    exits = ExitStack()
    atexit.register(exits.close)
    return Path(exits.enter_context(scratch_folder()))
