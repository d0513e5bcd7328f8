"""The likeliest continuation, by each runtime's own KV cache: written files are compared by what they generate."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from fewbits.verification.runtimes.llamacpp import LlamaCppSession
from fewbits.verification.session import PART, Session


def recomputed(session: Session, tokens: list[int], count: int) -> list[int]:
    """Without any cache: the whole sequence anew for each token."""
    sequence = list(tokens)
    for _ in range(count):
        sequence.append(int(session.logits(sequence)[-1].argmax()))
    return sequence[len(tokens) :]


def by_llama_cpp(session: LlamaCppSession, tokens: list[int], count: int) -> list[int]:
    session.check(tokens, len(tokens) + count)
    session.forget()
    for start in range(0, len(tokens), PART):
        last = session.decode(tokens[start : start + PART], start, every=False)
    made: list[int] = []
    while len(made) < count:
        made.append(int(last[-1].argmax()))
        last = session.decode(made[-1:], len(tokens) + len(made) - 1, every=False)
    return made


def by_genai(session: Any, tokens: list[int], count: int) -> list[int]:
    """genai's own search. It stops at the end of a text; we compare beyond it."""
    generator = session._fed(tokens, len(tokens) + count)
    made: list[int] = []
    while len(made) < count:
        generator.generate_next_token()
        made.append(int(generator.get_next_tokens()[0]))
        if generator.is_done() and len(made) < count:
            generator.append_tokens(np.array([made[-1:]], np.int32))
    return made


def by_transformers(session: Any, tokens: list[int], count: int) -> list[int]:
    """Not by its `generate`, which would stop at the end of a text and obey the folder's generation config."""
    made: list[int] = []
    new, cache = tokens, None
    with torch.inference_mode():
        for _ in range(count):
            out = session._module(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
            new, cache = [int(out.logits[0, -1].argmax())], out.past_key_values
            made += new
    return made


def tokenize(session: LlamaCppSession, text: str, special: bool = True) -> list[int]:
    """As llama.cpp reads a prompt. `special`: adds the tokens that begin and end a text. Names of control tokens stay plain text."""
    function, vocabulary = session._library.llama_tokenize, session._library.llama_model_get_vocab(session._model)
    integer, boolean = ctypes.c_int32, ctypes.c_bool
    function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, integer, ctypes.POINTER(integer), integer, boolean, boolean]
    content = text.encode()
    room = len(content) + 8
    out = (integer * room)()
    count = function(vocabulary, content, len(content), out, room, special, False)
    assert count >= 0, "a token is at least a byte long"
    return list(out[:count])
