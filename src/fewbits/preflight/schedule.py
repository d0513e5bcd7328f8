"""A run with `--within`: its deadline, what was timed of it, and the settings that fit what time is left.

The settings are written into the work folder: a run that was killed goes on with those that its statistics were taken with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits import formats
from fewbits.errors import FewbitsError
from fewbits.preflight import within
from fewbits.preflight.sizes import Sizes
from fewbits.preflight.steps import steps_of
from fewbits.preflight.within import Settings
from fewbits.store.cache import hash_of
from fewbits.store.files import Staged

if TYPE_CHECKING:
    from fewbits.model.weights import Weight
    from fewbits.planning import Plan
    from fewbits.preflight.sizes import Source
    from fewbits.preflight.within import Deadline
    from fewbits.preflight.work import Pace, Step, Work
    from fewbits.targets import Target

NAME = "within.json"  # in the work folder
_LOOKED_AT, _ANSWERS = 20_000, 2.0  # operations for a number in the report (SmolLM2: 25 s); seconds


@dataclass(frozen=True)
class Schedule:
    deadline: Deadline
    full: Settings  # what was asked for
    chosen: Settings
    source: Source
    target: Target
    plan: Plan | None
    work: Work  # with the settings that were asked for
    rate: float  # operations a second in a large product
    pace: Pace
    began: float = 0.0  # seconds that opening the model and timing it took

    def settled(self, done: Sequence[str] = ()) -> Schedule:
        """The settings for the time that is left. `done`: steps that are over, whose settings stay."""
        weights: list[Weight] = list(self.source.weights)
        full = replace(self.full, samples=self.chosen.samples, tokens=self.chosen.tokens) if done else self.full  # text is drawn once
        full = replace(full, formats=self.chosen.formats) if "measuring" in done else full
        way = within.ladder(full, weights, done)
        late = self._lateness(done)
        if not done:
            self.deadline.check(self._seconds(way[0], done))
        return replace(self, chosen=within.choose(way, lambda settings: late * self._seconds(settings, done), self.deadline.left))

    def kept(self, folder: Path) -> Schedule | None:
        """With the settings that an earlier run of the same request chose; None: there was none."""
        with suppress(OSError, ValueError, KeyError, TypeError, FewbitsError):
            said = json.loads((folder / NAME).read_text())
            if said["asked"] == self._asked:
                chosen = tuple(formats.get(str(name)) for name in said["formats"])
                return replace(self, chosen=Settings(int(said["samples"]), chosen, int(said["tune"]), int(said["tokens"])))
        return None

    def keep(self, folder: Path) -> Schedule:
        folder.mkdir(parents=True, exist_ok=True)
        with Staged(folder / NAME) as staged:
            staged.write_text(json.dumps({"asked": self._asked} | _plain(self.chosen), indent=1))
        return self

    @property
    def _asked(self) -> str:
        return hash_of([self.deadline.seconds, self.source.fingerprint, _plain(self.full)])

    def steps(self, settings: Settings) -> list[Step]:
        work = replace(
            self.work,
            samples=settings.samples,
            text=None if self.work.text is None else round(self.work.text * settings.samples / max(1, self.full.samples)),
            formats=len(settings.formats),
            divisors=tuple(fmt.block or 1 for fmt in settings.formats),
            tune=settings.tune,
            verified=min(self.work.verified, settings.tokens),
        )
        return steps_of(Sizes(self.source, self.target, work, self.plan), work, self.rate, self.pace)

    @property
    def report(self) -> float:
        """Seconds for the page: the values of every weight are looked at, and a few answers are written."""
        numbers = sum(weight.shape[0] * weight.shape[1] for weight in self.source.weights)
        return numbers * _LOOKED_AT / self.rate + _ANSWERS

    @property
    def is_late(self) -> bool:
        """Whether there is no time left for more than what the report must have."""
        return self.deadline.left < self.report

    def _seconds(self, settings: Settings, done: Sequence[str]) -> float:
        return within.total(self.steps(settings), done) + self.report

    def _lateness(self, done: Sequence[str]) -> float:
        """How much longer what is over took than was forecast: what slows it down slows the rest. What went faster promises nothing."""
        steps = self.steps(self.chosen)
        forecast = within.total(steps) - within.total(steps, done)
        spent = self.deadline.seconds - self.deadline.left - self.began
        return max(1.0, spent / forecast) if forecast > 0 else 1.0


def _plain(settings: Settings) -> dict[str, object]:
    return {**vars(settings), "formats": [fmt.name for fmt in settings.formats]}
