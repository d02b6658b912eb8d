"""A sample in the engine, and what a pass says of it."""

from __future__ import annotations

import dataclasses
import math

from longtail.partial_rollout.engines.native.verification import Verdict
from longtail.partial_rollout.engines.vllm.core import Emitted
from longtail.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class Stay(Sequence):
    """A sample in the engine, and the request that it is in vLLM."""

    request_id: str = ""
    """Empty: it has none for the moment."""
    has_ended: bool = False
    """vLLM itself has ended the request: its blocks are gone."""
    salt: str = ""
    """Of its blocks in the prefix cache: the version of the weights, and the epoch of the cache, at which it came."""


def verdict_of(e: Emitted) -> Verdict:
    """A token whose log-probability is no number was not drawn (`sampling`)."""
    for i, logprob in enumerate(e.logprobs):
        if not math.isfinite(logprob):
            fault = "no token left to sample (every logit is -inf)" if logprob == -math.inf else "NaN or +inf"
            return Verdict(e.token_ids[: i + 1], e.logprobs[: i + 1], fault)
    return Verdict(e.token_ids, e.logprobs, None)
