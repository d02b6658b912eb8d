"""How a response is sampled. Field names and meanings are vLLM's, so that a user's settings carry over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Frozen, checked at construction. `from_dict` rejects unknown names."""

    n: int = 1
    """Samples per prompt: the group size."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 (or -1, as vLLM writes it) keeps all. Ties with the k-th are kept."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1]."""
    max_tokens: int | None = None
    """Cap on output tokens over all segments; None: up to the model's context."""
    min_tokens: int = 0
    """EOS, stop ids and stop strings do not end the sample before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the sample; the tokens that complete one stay in the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sample, besides the model's EOS."""
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of the group; each sample's own seed derives from it and its index. None: derived from the group id."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in prompt or output; > 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, int))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        _check_int("n", self.n, 1)
        _check_int("top_k", self.top_k, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}; lower min_tokens")
        _check_range("temperature", self.temperature, 0.0, math.inf)
        if 0.0 < self.temperature < 1e-4:
            raise ValueError(f"temperature {self.temperature} is too small to divide by; use 0 for greedy decoding")
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0; use temperature=0 for greedy decoding")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty must be above 0; 1.0 turns it off")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        if "" in self.stop:
            raise ValueError("stop contains an empty string, which would end every sample at once; remove it")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Raises ValueError that lists the known names if `values` has one that is not a field."""
        check_known_fields(cls, values)
        return cls(**values)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def check_known_fields(cls: type, values: Mapping[str, Any]) -> None:
    """Unknown keys are an error that names the known ones (for every config class of the project)."""
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}; the fields are: {', '.join(known)}")


def _as_tuple(name: str, value: Any, item: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, item):
        return (value,)
    if not isinstance(value, Sequence) or not all(isinstance(v, item) for v in value):
        raise ValueError(f"{name} must be a {item.__name__} or a list of them, not {value!r}")
    return tuple(value)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be at least {low}{'' if high is None else f' and at most {high}'}, not {value}")


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie between {low} and {high}, not {value}")
