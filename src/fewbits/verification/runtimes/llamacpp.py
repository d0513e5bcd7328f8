"""llama.cpp itself, out of the shared library inside the xllamacpp wheel, called by its C interface.

Its parameter structs are declared larger than they are, which the calling conventions of x86-64 and arm64 allow for a last argument that
is passed by value. So only the positions of the leading fields are assumed, for one version, and checked.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fewbits.errors import InputError, MissingError, UnknownKindError
from fewbits.verification.runtimes import Runtime
from fewbits.verification.session import PART, Session

if TYPE_CHECKING:
    from torch import Tensor

    from fewbits.model.gguf.model import GgufModel

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
_LEADING_CONTEXT_DEFAULTS = [512, 2048, 512, 1]  # n_ctx, n_batch, n_ubatch, n_seq_max
_DEBUG, _ERROR = 1, 4  # ggml's log levels
_POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "last", 4: "rank"}

_log: deque[tuple[int, str]] = deque(maxlen=400)  # the last messages; llama.cpp has one log per process


class _Params(ctypes.Structure):
    _fields_ = [("content", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_HANDLE, _INT, _BOOL, _FLOATS = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.POINTER(ctypes.c_float)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {  # name -> (result, arguments)
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_Log, _HANDLE]),
    "llama_model_default_params": (_Params, []),
    "llama_context_default_params": (_Params, []),
    "llama_model_load_from_file": (_HANDLE, [ctypes.c_char_p, _Params]),
    "llama_init_from_model": (_HANDLE, [_HANDLE, _Params]),
    "llama_set_n_threads": (None, [_HANDLE, _INT, _INT]),
    "llama_model_get_vocab": (_HANDLE, [_HANDLE]),
    "llama_vocab_n_tokens": (_INT, [_HANDLE]),
    "llama_tokenize": (_INT, [_HANDLE, ctypes.c_char_p, _INT, ctypes.POINTER(_INT), _INT, _BOOL, _BOOL]),
    "llama_batch_init": (_Batch, [_INT, _INT, _INT]),
    "llama_batch_free": (None, [_Batch]),
    "llama_decode": (_INT, [_HANDLE, _Batch]),
    "llama_get_logits": (_FLOATS, [_HANDLE]),
    "llama_encode": (_INT, [_HANDLE, _Batch]),
    "llama_set_embeddings": (None, [_HANDLE, _BOOL]),
    "llama_pooling_type": (_INT, [_HANDLE]),
    "llama_get_embeddings": (_FLOATS, [_HANDLE]),
    "llama_get_embeddings_seq": (_FLOATS, [_HANDLE, _INT]),
    "llama_model_n_embd": (_INT, [_HANDLE]),
    "llama_model_meta_val_str": (_INT, [_HANDLE, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]),
    "llama_get_memory": (_HANDLE, [_HANDLE]),
    "llama_memory_clear": (None, [_HANDLE, _BOOL]),
    "llama_free": (None, [_HANDLE]),
    "llama_model_free": (None, [_HANDLE]),
}


def _keep(level: int, text: bytes | None, _: object) -> None:
    line = (text or b"").decode(errors="replace").strip()
    if level > _DEBUG and line:
        _log.append((level, line))


_keep_log = _Log(_keep)  # a global, because ctypes does not keep callbacks alive


@cache
def _library() -> Any:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec and spec.submodule_search_locations
    try:
        library = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("*.so"))))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, StopIteration, AttributeError) as failure:
        hint = f"pip install --force-reinstall {PACKAGE}=={VERSION}"
        raise MissingError(f"the llama.cpp in {PACKAGE} cannot be loaded: {failure}", hint) from failure
    library.llama_log_set(_keep_log, None)
    library.llama_backend_init()
    if list(library.llama_context_default_params().content[:4]) != _LEADING_CONTEXT_DEFAULTS:
        raise MissingError(
            f"this build of {PACKAGE} lays its parameters out differently", f"pip install --force-reinstall {PACKAGE}=={VERSION}"
        )
    return library


class LlamaCppSession(Session):
    timed = True

    def __init__(self, path: Path, context: int) -> None:
        import torch

        self._library = library = _library()
        self._model = self._context = None
        _log.clear()
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self._model:
            raise InputError(f"llama.cpp refuses `{path}`: {_last_complaint()}", "the file is damaged, or not made for this llama.cpp")
        params = library.llama_context_default_params()
        self.encodes = self._metadata(f"{self._metadata('general.architecture')}.attention.causal") == "false"
        batch = context if self.encodes else min(context, PART)  # an encoder reads the whole text at once
        params.content[0], params.content[1], params.content[2] = context, batch, batch
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise MissingError(f"llama.cpp cannot make room for {context} tokens: {_last_complaint()}", "use a shorter context")
        threads = torch.get_num_threads()
        library.llama_set_n_threads(self._context, threads, threads)
        self.vocabulary = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self.context = context
        if self.encodes:
            library.llama_set_embeddings(self._context, True)
            self.pooling = _POOLINGS.get(int(library.llama_pooling_type(self._context)), "unknown")

    def logits(self, tokens: list[int]) -> Tensor:  # -> (len(tokens), vocabulary) float32
        import torch

        return torch.cat(list(self.parts(tokens)))

    def parts(self, tokens: list[int]) -> Iterator[Tensor]:
        if self.encodes:
            raise InputError("an encoder gives embeddings and no logits", "is it the file of another model?")
        self.check(tokens, len(tokens))
        self.forget()
        for start in range(0, len(tokens), PART):
            yield self.decode(tokens[start : start + PART], start, every=True)

    def following(self, tokens: list[int], count: int) -> Iterator[int]:
        self.check(tokens, len(tokens) + count)
        self.forget()
        for start in range(0, len(tokens), PART):
            last = self.decode(tokens[start : start + PART], start, every=False)
        for place in range(len(tokens), len(tokens) + count):
            token = int(last[-1].argmax())
            yield token
            if place + 1 < len(tokens) + count:
                last = self.decode([token], place, every=False)

    def embeddings(self, tokens: list[int]) -> Tensor:  # -> (len(tokens), width) float32, or (1, width) where they are pooled
        import numpy as np
        import torch

        if not self.encodes:
            raise InputError("a language model gives logits and no embeddings", "is it the file of another model?")
        self.check(tokens, len(tokens))
        library, shape = self._library, (1 if self.pooling else len(tokens), int(self._library.llama_model_n_embd(self._model)))
        with self._batch(tokens, 0, every=True) as batch:
            if library.llama_encode(self._context, batch):
                raise MissingError(f"llama.cpp could not run {len(tokens)} tokens: {_last_complaint()}", "use a shorter text")
            vectors = library.llama_get_embeddings_seq(self._context, 0) if self.pooling else library.llama_get_embeddings(self._context)
            return torch.from_numpy(np.ctypeslib.as_array(vectors, shape).copy())

    def close(self) -> None:
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._model = self._context = None

    def tokens_of(self, text: str, special: bool) -> list[int]:
        """By the file's own vocabulary. `special`: with the tokens that begin and end a text."""
        octets, vocabulary = text.encode(), self._library.llama_model_get_vocab(self._model)
        room = (ctypes.c_int32 * (len(octets) + 8))()
        count = int(self._library.llama_tokenize(vocabulary, octets, len(octets), room, len(room), special, False))
        if count < 0:
            raise InputError(f"llama.cpp cannot tokenize a text of {len(octets)} bytes", "is the file's vocabulary damaged?")
        return list(room[:count])

    def forget(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def decode(self, tokens: Sequence[int], start: int, every: bool) -> Tensor:
        """Appends tokens to the cache; returns the logits of all of them, or of the last one alone."""
        import numpy as np
        import torch

        with self._batch(tokens, start, every) as batch:
            if self._library.llama_decode(self._context, batch):
                raise MissingError(f"llama.cpp could not run {len(tokens)} tokens: {_last_complaint()}", "use a shorter context")
            shape = (len(tokens) if every else 1, self.vocabulary)
            return torch.from_numpy(np.ctypeslib.as_array(self._library.llama_get_logits(self._context), shape).copy())

    @contextmanager
    def _batch(self, tokens: Sequence[int], start: int, every: bool) -> Iterator[_Batch]:
        """One sequence, with outputs for every token or for the last one alone."""
        batch = self._library.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
                batch.logits[i] = every or i == len(tokens) - 1
            yield batch
        finally:
            self._library.llama_batch_free(batch)

    def _metadata(self, key: str) -> str:
        """A value of the file's metadata; empty if it has none."""
        room = ctypes.create_string_buffer(64)
        self._library.llama_model_meta_val_str(self._model, key.encode(), room, len(room))
        return room.value.decode(errors="replace")


class Tokenizer:
    """The vocabulary of a GGUF as llama.cpp applies it: in the place of a transformers tokenizer, where nothing here knows its rules."""

    chat_template = None

    def __init__(self, path: Path) -> None:
        self._session = RUNTIME.open(path, 8)
        self.model_max_length = 0

    def __len__(self) -> int:
        return self._session.vocabulary

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, **_: Any) -> SimpleNamespace:
        texts = [text] if isinstance(text, str) else text
        ids = [self._session.tokens_of(each, add_special_tokens) for each in texts]
        return SimpleNamespace(input_ids=ids[0] if isinstance(text, str) else ids)


def is_unknown(path: Path) -> bool:
    """Whether this llama.cpp has never heard of the file's architecture. Any other refusal is an error."""
    try:
        RUNTIME.open(path, 8).close()
    except InputError:
        if "unknown model architecture" in _last_complaint():
            return True
        raise
    return False


def lend_tokenizer(model: GgufModel) -> None:
    """llama.cpp's own, where the file's rules are not known here."""
    try:
        _ = model.tokenizer
    except UnknownKindError:
        vars(model)["tokenizer"] = Tokenizer(model.file.path)


def _last_complaint() -> str:
    """The last informative error in the log, without the name of the C function that wrote it."""
    errors = [line for level, line in _log if level == _ERROR]
    telling = [line for line in errors if "failed to load model" not in line] or errors
    return re.sub(r"^\w+: (error loading model: )?", "", telling[-1]) if telling else "it does not say why"


class LlamaCpp(Runtime):
    name = "llama.cpp"
    extra = "llamacpp"

    def missing(self) -> str | None:
        try:
            installed = installed_version(PACKAGE)
        except PackageNotFoundError:
            return f"{PACKAGE} {VERSION} is not installed"
        return None if installed == VERSION else f"{PACKAGE} is {installed}, but {VERSION} is needed"

    def version(self) -> str:
        return f"{PACKAGE} {installed_version(PACKAGE)}"

    def takes(self, path: Path) -> bool:
        if path.is_dir():  # a split model
            return any(path.glob("*-00001-of-*.gguf"))
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"

    def open(self, path: Path, context: int) -> LlamaCppSession:
        if reason := self.missing():
            raise MissingError(f"llama.cpp cannot run here: {reason}", "pip install 'fewbits[llamacpp]'")
        if not self.takes(path):
            raise InputError(f"`{path}` is not a GGUF file", "give a file that `--to gguf` wrote")
        from fewbits.targets.gguf import first_part

        return LlamaCppSession(first_part(path), context)


RUNTIME = LlamaCpp()
