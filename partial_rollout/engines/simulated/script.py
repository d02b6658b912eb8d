"""What a model would say, without one: how long each sample gets and how it ends, and which tokens it has.

All of it is a function of the sample alone (its prompt, parameters and seed), so that a sample has the same tokens and
the same end under every schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Literal

from longtail.sample import OBSERVATION, FinishReason, Sample

_MASK = 2**64 - 1
_STRIDE, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # of splitmix64 (Steele, Lea, Flood 2014)


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """How long a response gets and how it ends. Caps (max_tokens, max_model_len) cut it; then it ends by "length"."""

    tokens: int
    """Output tokens in all."""
    reason: Literal["stop", "length"] = "stop"
    failure: str | None = None
    """It does not end but fails, with this text, when the token after these is due."""
    turns: tuple[int, ...] = ()
    """Of a multi-turn sample: tokens of its first turn, its second, ...; of those beyond, the last of these. Empty:
    `tokens` each. (Such a sample ends by a cap, or when its environment says so.)"""

    def __post_init__(self) -> None:
        low = 0 if self.failure is not None else 1
        for name, value, least in (("tokens", self.tokens, low), *(("turns", turn, 1) for turn in self.turns)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Length.{name} must be an integer of at least {least}, not {value!r}")
        if self.reason not in ("stop", "length"):
            raise ValueError(f'Length.reason must be "stop" or "length", not {self.reason!r}')


Lengths = Callable[[Sample], Length]


def to_max_tokens(sample: Sample) -> Length:
    """Every sample runs to its cap. ValueError if it has none."""
    if sample.params.max_tokens is None:
        raise ValueError(f"sample {sample.id}: max_tokens is None: how long does it get? Give lengths=")
    return Length(sample.params.max_tokens, "length")


def scripted(lengths: Mapping[str, int | Length]) -> Lengths:
    """By sample id. ValueError for a sample that is not in the script."""
    script = {name: length if isinstance(length, Length) else Length(length) for name, length in lengths.items()}

    def look_up(sample: Sample) -> Length:
        if sample.id not in script:
            raise ValueError(f"sample {sample.id} is not in the script of lengths; add it")
        return script[sample.id]

    return look_up


def log_normal(median: float, sigma: float, *, shortest: int = 1, longest: int | None = None) -> Lengths:
    """Lengths as reasoning models have them, with a long tail to the right: log-normal, cut to [shortest, longest], the
    quantile taken from the sample's seed. sigma: standard deviation of the logarithm."""
    for name, value in (("median", median), ("sigma", sigma)):
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
    normal = statistics.NormalDist()

    def draw(sample: Sample) -> Length:
        quantile = (_mix(sample.seed) + 0.5) / 2**64
        tokens = max(round(median * math.exp(sigma * normal.inv_cdf(quantile))), shortest)
        return Length(tokens if longest is None else min(tokens, longest))

    return draw


# -- how a sample ends -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """The next thing that happens to a sample, and its output length then."""

    length: int
    kind: Literal["finish", "turn", "failure"]
    reason: FinishReason = "stop"
    failure: str = ""
    emission: int = dataclasses.field(init=False)
    """Output tokens asked for by then: a failure takes the place of a token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "emission", self.length + (self.kind == "failure"))


@functools.lru_cache(maxsize=1 << 16)
def finish_at(length: int, reason: FinishReason) -> Ending:
    """Samples that end alike share it."""
    return Ending(length, "finish", reason)


def ending_of(sample: Sample, length: Length, max_model_len: int | None) -> Ending:
    """A function of the sample and its output so far. A turn starts where the last observation ends."""
    cap = cap_of(sample, max_model_len)
    if length.failure is not None and (cap is None or length.tokens < cap):
        return Ending(length.tokens, "failure", "error", length.failure)
    if sample.multi_turn:
        answered = [s.end for s in sample.segments if s.version == OBSERVATION]
        turns = length.turns or (length.tokens,)
        end = (answered[-1] if answered else 0) + turns[min(len(answered), len(turns) - 1)]
        return Ending(end, "turn") if cap is None or end <= cap else finish_at(cap, "length")
    if cap is None or length.tokens <= cap:
        return finish_at(length.tokens, length.reason)
    return finish_at(cap, "length")


def cap_of(sample: Sample, max_model_len: int | None) -> int | None:
    """Most output tokens that it may have."""
    cap = sample.params.max_tokens
    if max_model_len is None:
        return cap
    room = max_model_len - len(sample.prompt_ids)
    return room if cap is None else min(cap, room)


# -- tokens ------------------------------------------------------------------------------------------------------------


def token_ids(seed: int, start: int, end: int, vocab_size: int) -> list[int]:
    """Of output positions start to end - 1."""
    return [(h >> 20) % vocab_size for h in _hashes(seed, start, end)]


def logprobs(seed: int, start: int, end: int) -> list[float]:
    """In (-8, 0], exact in float32."""
    return [-(h & 0xFFFF) / 8192 for h in _hashes(seed, start, end)]


def both(seed: int, start: int, end: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """`token_ids` and `logprobs`."""
    hashes = _hashes(seed, start, end)
    return [(h >> 20) % vocab_size for h in hashes], [-(h & 0xFFFF) / 8192 for h in hashes]


def _hashes(seed: int, start: int, end: int) -> list[int]:
    """Of 44 bits each."""
    states = range(seed + start * _STRIDE, seed + end * _STRIDE, _STRIDE)
    return [((x ^ x >> 30) * _MIX & _MASK) >> 20 for x in states]


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * _MIX & _MASK
    return (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
