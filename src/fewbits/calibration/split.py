"""Samples to calibrate with and windows to judge on, which are never the same text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fewbits import embedded
from fewbits.calibration import by_domain, collection
from fewbits.calibration.text.documents import documents
from fewbits.calibration.text.domains import Mix
from fewbits.calibration.text.samples import checksum
from fewbits.calibration.text.windows import Window, check_ids, window_length, windows
from fewbits.errors import InputError

if TYPE_CHECKING:
    from fewbits.calibration.collection import Paths
    from fewbits.calibration.text.domains import Length
    from fewbits.calibration.text.samples import Samples
    from fewbits.model import Model


@dataclass(frozen=True)
class Text:
    samples: Samples | None  # to calibrate with; None: nothing is calibrated
    windows: list[Window]  # to judge on
    domains: list[str] = field(default_factory=list)  # of each window, the kind of its text

    def fewer(self, share: float) -> Text:
        """With this share of the windows of every kind, and at least one of each."""
        total = Counter(self.domains)
        left = {name: max(1, round(share * count)) for name, count in total.items()}
        if not total:
            return replace(self, windows=self.windows[: max(1, round(share * len(self.windows)))])
        seen: Counter[str] = Counter()
        kept = []
        for index, name in enumerate(self.domains):
            seen[name] += 1
            kept += [index] if seen[name] <= left[name] else []
        return replace(self, windows=[self.windows[i] for i in kept], domains=[self.domains[i] for i in kept])


def split(
    source: Model, data: Paths, held_out: Paths, samples: int, length: Length, seed: int, tokens: int, mix: Mix | None = None
) -> Text:
    """With `samples` 0 nothing is calibrated. Without `held_out`, a part of the data is set aside to judge on."""
    if mix:
        mix.check(by_domain.names_of(collection.listed(data)))
    if held_out or not data:
        judged = held_out_text(source, held_out, None if length == "data" else length, tokens, mix)
        return replace(judged, samples=collection.draw(source, data, samples, length, seed, mix)) if samples else judged
    if mix:
        return _split_each(source, data, samples, length, seed, tokens, mix)
    wanted = max(1, tokens // (window_length(source.config, None if length == "data" else length) - 1))
    drawn = collection.draw(source, data, samples + wanted, length, seed)
    return _set_aside(drawn, samples, wanted, "")


def _split_each(source: Model, data: Paths, samples: int, length: Length, seed: int, tokens: int, mix: Mix) -> Text:
    """Some of every kind of text is set aside, however little there is of it."""
    paths = collection.listed(data)
    kinds = by_domain.parts(source, by_domain.names_of(paths), samples, length, tokens, mix)
    texts = [_set_aside(by_domain.draw(source, paths, part, seed), part.samples, part.judged, part.domain) for part in kinds]
    drawn = [text.samples for text in texts if text.samples]
    return Text(
        by_domain.joined(drawn, seed) if drawn else None,
        [window for text in texts for window in text.windows],
        [domain for text in texts for domain in text.domains],
    )


def _set_aside(drawn: Samples, samples: int, wanted: int, domain: str) -> Text:
    judged = [list(ids) for ids in drawn.ids]
    if not samples:
        return Text(None, judged[:wanted], list(drawn.domains[:wanted]))
    if len(judged) < 2:
        of, named = (f"`{domain}`", f"{domain}=") if domain else ("the data", "")
        raise InputError(f"{of} gives a single sample", f"give more text with `--data`, or other text with `--held-out {named}FILE`")
    aside = max(1, min(wanted, max(len(judged) // 4, len(judged) - samples)))  # of little text a quarter
    some = slice(aside, aside + samples)
    ids = drawn.ids[some]
    kept = replace(drawn, ids=ids, sources=drawn.sources[some], domains=drawn.domains[some], digest=checksum(ids))
    return Text(kept, judged[:aside], list(drawn.domains[:aside]))


def held_out_windows(source: Model, data: Paths, length: int | None, tokens: int) -> list[Window]:
    return held_out_text(source, data, length, tokens).windows


def held_out_text(source: Model, data: Paths, length: int | None, tokens: int, mix: Mix | None = None) -> Text:
    """Windows of every kind of text, each kind from its beginning. Without weights, so many tokens are shared by all kinds alike."""
    paths, mix, text = collection.listed(data), mix or Mix(), Text(None, [])
    names = by_domain.names_of(paths)
    for name, share in mix.shares(names).items():
        own = window_length(source.config, mix.lengths.get(name, length))
        of = "the text" if len(names) == 1 else f"`{name}`"
        cut = windows(_joined(source.tokenizer, paths, name), source.tokenizer, own, max(1, round(tokens * share)), of)
        text.windows.extend(cut)
        text.domains.extend([name] * len(cut))
    check_ids(text.windows, source.config)
    return text


def _joined(tokenizer: Any, paths: Any, domain: str) -> str:
    if not paths:
        return embedded.verification_text()
    # a chat template writes the token that every window begins with
    begins = (getattr(tokenizer, "bos_token", None) or "") if tokenizer("").input_ids else ""
    return "\n\n".join(document.text.removeprefix(begins) for document in documents(paths, tokenizer, domain))
