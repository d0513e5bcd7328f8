"""What `fewbits run` gives, and how it chooses tokens, whoever generates them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fewbits.errors import InputError


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            raise InputError("the temperature is at least 0 and top-p a share up to 1", "0 and 1 are the defaults")


GREEDY = Choice()


@dataclass(frozen=True)
class Stats:
    engine: str  # "native", or "transformers: " and the reason
    prompt_tokens: int
    new_tokens: int
    prompt_tokens_per_second: float
    tokens_per_second: float | None  # without the first token, which the prompt gives; None: there was only one
    weight_bytes: int
    cache_bytes: int
    peak_memory_bytes: int  # of the whole process
    threads: int
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Generated:
    """The text, its tokens, and what they cost."""

    text: str
    tokens: tuple[int, ...]
    stopped: str  # "end" (of the text) or "length"
    stats: Stats

    def __str__(self) -> str:
        """The text is in `text`; here it is one line."""
        made, rate = self.stats, self.stats.tokens_per_second
        speed = f", {rate:.3g} tokens/s" if rate else ""
        return f"{' '.join(self.text.split())}\n{made.prompt_tokens} tokens read, {made.new_tokens} written{speed}\n{made.engine}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def peak_memory() -> int:
    """Of this process."""
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kilobytes elsewhere
