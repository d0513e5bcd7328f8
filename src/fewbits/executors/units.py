"""The units of work: one weight measured, one weight quantized, statistics of one part of the text. Pure functions, files in and out.

A unit says itself what its result is named by. One that is there already is not made again; two workers that make the same one write
the same file. A worker that would give other bytes (other code, another kind of machine) refuses.
"""

from __future__ import annotations

import atexit
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import FewbitsError, InputError, MissingError
from fewbits.executors import Unit, stores
from fewbits.files import is_full_disk, remove, sampled
from fewbits.kept import Kept, code_version, hash_of, machine
from fewbits.scratch import scratch_folder

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.calibration.storing import Statistics
    from fewbits.model import Model, Weight
    from fewbits.outcomes import Known
    from fewbits.rewrites import Rewrite

Made = tuple[dict[str, Any], dict[str, "Tensor"]]  # what is kept: values and tensors
_PATIENCE = 180.0  # seconds for the lock of a machine that is gone to be let go of; NFS takes 90
_FULL = "free some space there, or in the store, and run the same again"


def run(told: Mapping[str, Any]) -> dict[str, Any]:
    """A unit as JSON says it in, an `Answer` as JSON says it out: what every worker calls."""
    import torch

    threads = torch.get_num_threads()
    try:
        return {"file": _made(Unit(**told))}
    except FewbitsError as failure:
        where = f"{failure.args[0]} (worker on {platform.node()})"
        return {"error": where, "hint": failure.hint, "missing": isinstance(failure, MissingError)}
    except stores.Damaged as failure:
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
    """What a person can compare and install."""
    return {name: metadata.version(name) for name in ("fewbits", "torch", "transformers")}


def _made(unit: Unit) -> str:
    """The name of the result's file."""
    _check_alike(unit)
    store = stores.open(unit.store) if unit.store else None
    kept = Kept(_scratch() / "kept" if store else Path(unit.folder), unit.about, listed=False)
    if store and (there := store.find(f"kept/{kept.stem(unit.step, **unit.parameters)}-")):
        return there.rpartition("/")[2]
    if not store and (found := kept.look(unit.step, **unit.parameters)):
        return found.path.name
    result = kept.keep(unit.step, *_FUNCTIONS[unit.step](unit), **unit.parameters)
    if store:
        store.put(result.path, f"kept/{result.path.name}")
        result.path.unlink()
    return result.path.name


def _check_alike(unit: Unit) -> None:
    """That this worker would give the coordinator's bytes."""
    import torch

    own, hint = versions(), "install the same fewbits, torch and transformers on all nodes"
    for name, wanted in unit.versions.items():
        if own[name] != wanted:
            raise InputError(f"this worker has {name} {own[name]}, and the work began with {name} {wanted}", hint)
    if code_version() != unit.about["code"]:
        message = f"this worker's files of fewbits {own['fewbits']} differ from those that the work began with"
        raise InputError(message, f"{hint}, from one wheel")
    capability, threads, processor = unit.about["machine"]
    torch.set_num_threads(threads)
    own_capability, _, own_processor = machine()
    if (own_capability, own_processor) != (capability, processor):
        here, there = (own_capability, capability) if own_capability != capability else (own_processor, processor)
        message = f"this worker adds up with {here}, and the work began with {there}: sums could differ in their last bits"
        raise InputError(message, "use nodes of one kind")


def _row(unit: Unit) -> Made:
    import torch

    from fewbits import formats, sensitivity

    model, weight = _weight_of(unit)
    torch.set_num_threads(1)  # as in one process, where several are measured side by side
    wanted = [formats.get(name) for name in unit.inputs["formats"]]
    return sensitivity.values_of(sensitivity.row_of(model, _statistics(unit, model), weight, wanted, unit.inputs["method"])), {}


@dataclass(frozen=True)
class _Choice:
    format: str
    method: str


def _weight(unit: Unit) -> Made:
    from fewbits import outcomes

    model, weight = _weight_of(unit)
    known: Known | None = None
    if "imatrix" in unit.inputs:
        known = _importance(_placed(unit, "imatrix"), model)
    elif "statistics" in unit.inputs:
        known = _statistics(unit, model)
    if "factors" in unit.inputs:
        from fewbits.preparation import Rescaled

        rewrite = _rewrite(_placed(unit, "factors"))
        model, known = model.rewritten(rewrite), Rescaled(_statistics(unit, model), rewrite)
    choice = _Choice(unit.parameters["format"], unit.parameters["method"])
    return outcomes.packed(outcomes.quantized(model, weight, choice, known))


def _shard(unit: Unit) -> Made:
    """Its own folder is its own work folder: one that was killed is gone on with, by whoever gets it next and sees the same folder."""
    from fewbits.calibration import sharding

    samples = sharding.samples_of(unit.inputs["samples"])
    folder = _scratch() / "shard" if unit.store else Path(unit.inputs["folder"])
    found = _patiently(lambda: sharding.one(_model(unit)[0], samples, folder, **unit.inputs["options"]))
    if not unit.store:
        return {"digest": found.digest}, {}
    store = stores.open(unit.store)
    files = {path.name: store.put_blob(path) for path in sorted(found.folder.iterdir())}
    digest = found.digest
    remove(folder)
    return {"digest": digest, "files": files}, {}


_FUNCTIONS: Mapping[str, Callable[[Unit], Made]] = {"row": _row, "weight": _weight, "shard": _shard}


def _patiently(work: Callable[[], Statistics]) -> Statistics:
    """A folder that a lost worker still seems to hold: its system, or the file server, lets go of it in a while."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return work()
        except InputError as failure:
            if "is in use" not in failure.args[0] or time.monotonic() > end:
                raise
            time.sleep(2.0)


def _weight_of(unit: Unit) -> tuple[Model, Weight]:
    model, weights = _model(unit)
    return model, weights[unit.parameters["weight"]]


def _model(unit: Unit) -> tuple[Model, dict[str, Weight]]:
    where = unit.model
    return _opened(where["where"], where["offline"], where["fingerprint"], tuple(sorted(where["files"].items())))


@lru_cache(maxsize=1)
def _opened(where: str, offline: bool, fingerprint: str, files: tuple[tuple[str, str], ...]) -> tuple[Model, dict[str, Weight]]:
    """Compared by samples of its files: hashing a large model in every worker would take longer than the work."""
    from fewbits import model as models

    found = models.open(where, offline)
    here = {path.name: sampled(path) for path in found.checkpoint.files()}
    if here != dict(files):
        differs = sorted(name for name in {*here, *dict(files)} if here.get(name) != dict(files).get(name))
        hint = "the same files must lie at the same path on all nodes"
        raise InputError(f"`{where}` is another model here: {', '.join(differs[:3])}", hint)
    vars(found)["fingerprint"] = fingerprint
    return found, {weight.name: weight for weight in found.weights}


def _statistics(unit: Unit, model: Model) -> Statistics:
    told = unit.inputs["statistics"]
    folder = told["folder"] if unit.store is None else _gathered(unit.store, tuple(sorted(told["files"].items())))
    return _read(str(folder), unit.about.get("statistics")).expect(model.weights)


@lru_cache(maxsize=2)
def _read(folder: str, digest: str | None) -> Statistics:  # noqa: ARG001 - of other statistics at the same place nothing is remembered
    from fewbits.calibration.storing import Statistics

    return Statistics(Path(folder))


def _gathered(store: str, files: tuple[tuple[str, str], ...]) -> Path:
    """The files of one block in a folder of their own. Two blocks stay: a unit's neighbours read the same ones."""
    folder = _scratch() / "statistics" / hash_of(files)[:16]
    if not folder.is_dir():
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime) if folder.parent.is_dir() else []
        for old in others[:-1]:
            remove(old)
        partial = folder.with_suffix(".partial")
        remove(partial)
        partial.mkdir(parents=True)
        for name, blob in files:
            stores.open(store).get_blob(blob, partial / name)
        partial.rename(folder)
    return folder


def _placed(unit: Unit, what: str) -> Path:
    """An input that is a single file."""
    if unit.store is None:
        return Path(unit.inputs[what])
    path = _scratch() / "files" / str(unit.inputs[what])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        stores.open(unit.store).get_blob(str(unit.inputs[what]), path)
    return path


@lru_cache(maxsize=1)
def _rewrite(path: Path) -> Rewrite:
    from safetensors.torch import load_file

    from fewbits.rewrites import Rewrite

    return Rewrite.from_tensors(load_file(path))


@lru_cache(maxsize=1)
def _importance(path: Path, model: Model) -> Known:
    from fewbits.calibration.importance_matrix import ImportanceMatrix

    return ImportanceMatrix(path, model)


@cache
def _scratch() -> Path:
    """This process's own folder."""
    held = ExitStack()
    atexit.register(held.close)
    return Path(held.enter_context(scratch_folder()))
