"""`fewbits bench decode`: tokens per second of a whole model, one at a time and as a prompt, against llama.cpp on the same weights.

The model is a Llama with random weights, packed in one format, unless an artifact is given. Both hold the same codes; llama.cpp loads them
from a file of its own, repacked as it does by default. They take turns, a token each, at the same length of text.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits import embedded, targets
from fewbits.benchmarks.peers import ggml_matmul
from fewbits.benchmarks.speed import roofline
from fewbits.benchmarks.speed.roofline import Memory
from fewbits.benchmarks.synthetic_llama import SyntheticLlama
from fewbits.benchmarks.timing import Contender, Spread, Timed, interleaved, on_threads, speedup
from fewbits.devices import processor
from fewbits.inference.llama import LlamaDecoder
from fewbits.model.tokenizer import load_tokenizer
from fewbits.progress import Progress, silent
from fewbits.store.scratch import scratch_folder
from fewbits.verification.runtimes import needed
from fewbits.verification.runtimes.llamacpp import RUNTIME as LLAMACPP

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.verification.runtimes.llamacpp import LlamaCppSession

SHAPE = {  # of TinyLlama 1.1B
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_ROOM = 1024  # tokens after the prompt: more than are ever timed
OURS, PEER = "fewbits", "llama.cpp"


@dataclass(frozen=True)
class Phase:
    name: str  # "one token" or "prompt"
    contender: str
    tokens_per_second: float
    seconds: Spread  # of a call
    share_of_bandwidth: float | None  # for one token: bytes of weights read per second over what memory gives
    quiet_rounds: int
    speedup: Spread | None  # how many times as fast as this one fewbits is; None: it is fewbits


@dataclass(frozen=True)
class TokenBench:
    model: str
    format: str
    threads: int
    kernel: str  # the instruction set of ours
    peer: str | None  # ggml's version and instruction sets
    prompt: int
    weight_bytes: int  # that one token reads
    read_bytes_per_second: float
    phases: tuple[Phase, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def bench_decode(
    format: str = "q4_k",
    artifact: Artifact | None = None,
    prompt: int = 512,
    threads: int | None = None,
    peers: bool = False,
    rounds: int = 7,
    progress: Progress[Any] = silent,
) -> TokenBench:
    with on_threads(threads) as count:
        return _bench(format, artifact, prompt, count, peers, rounds, progress)


def _bench(
    format: str, artifact: Artifact | None, prompt: int, threads: int, peers: bool, rounds: int, progress: Progress[Any]
) -> TokenBench:
    model: Any = artifact or SyntheticLlama(format, targets.get("gguf"), load_tokenizer(embedded.MODEL), **SHAPE)
    tokens = [5 + i * 7919 % (model.config.vocab_size - 5) for i in range(prompt)]
    bandwidth = roofline.measure(threads, Memory(threads, roofline.cold_bytes())).best("read")
    assert bandwidth, "reading is written for every processor"
    with ExitStack() as opened:
        ours = LlamaDecoder(model, "float", prompt + _ROOM, progress)
        session = _llamacpp(model, prompt + _ROOM, opened, progress) if peers else None
        many = [Contender(OURS, _prompted(ours, tokens), threads)]
        if session:
            many.append(Contender(PEER, lambda _: _prompted_peer(session, tokens), threads))
        prompts = interleaved(many, max(2, rounds // 2), threads)
        one = [Contender(OURS, lambda _: ours.step(tokens[0]), threads)]
        if session:
            one.append(Contender(PEER, _stepping(session, tokens), threads))
        steps = interleaved(one, rounds, threads)
        read = ours.nbytes
    rate = bandwidth.per_second.median
    phases = [*_phases("one token", steps, 1, read / rate), *_phases("prompt", prompts, prompt, None)]
    fmt, peer = format if artifact is None else "its plan", f"{ggml_matmul.version()}, {ggml_matmul.features()}" if peers else None
    return TokenBench(model.path.name, fmt, threads, processor.backend(), peer, prompt, read, rate, tuple(phases))


def _phases(name: str, timed: list[Timed], tokens: int, least: float | None) -> list[Phase]:
    return [
        Phase(
            name,
            each.name,
            tokens / each.undisturbed.median,
            each.undisturbed,
            None if least is None else least / each.undisturbed.median,
            sum(each.quiet),
            None if each is timed[0] else speedup(timed[0], each),
        )
        for each in timed
    ]


def _prompted(decoder: LlamaDecoder, tokens: list[int]) -> Callable[[int], object]:
    def run(_: int) -> None:
        decoder.forget()
        decoder.prompt(tokens, every=False)

    return run


def _prompted_peer(session: LlamaCppSession, tokens: list[int]) -> None:
    session.forget()
    session.decode(tokens, 0, every=False)


def _stepping(session: LlamaCppSession, tokens: list[int]) -> Callable[[int], object]:
    return lambda number: session.decode(tokens[:1], len(tokens) + number, every=False)


def _llamacpp(model: Any, context: int, opened: ExitStack, progress: Progress[Any]) -> LlamaCppSession:
    needed(LLAMACPP)
    file = Path(opened.enter_context(scratch_folder())) / "model.gguf"
    targets.get("gguf").write(model, file, progress)
    session = LLAMACPP.open(file, context)
    opened.callback(session.close)
    return session
