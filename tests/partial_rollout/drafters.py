"""Drafters of tests, from useless to all-knowing. What comes out must not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tests.partial_rollout.conftest import VOCAB

from longtail.sample import Sample
from longtail.spec_decode.choice import make_drafter
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest


class Oracle:
    """Knows how each sample goes on; each of its tokens is right with probability `right`, else any other one."""

    def __init__(self, streams: dict[str, list[int]], right: float, seed: int = 0) -> None:
        self.name = f"oracle-{right}"
        self.streams, self.right = streams, right
        self.random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            start = len(request.sample.output_ids)
            known = self.streams.get(request.sample.id, [])[start : start + request.max_tokens]
            if self.right < 1.0 or not self.streams:  # beyond the end of what it knows, anything
                known += self.random.integers(0, VOCAB, request.max_tokens - len(known)).tolist()
            wrong = self.random.random(len(known)) >= self.right
            drafts.append(Draft([(t + 1) % VOCAB if w else t for t, w in zip(known, wrong, strict=True)], self.name))
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        assert 0 < num_new <= len(sample.output_ids)

    def forget(self, sample_id: str) -> None:
        pass


NAMES = ["ngram", "group", "group>ngram", "garbage", "half right", "oracle"]


def drafter(name: str, expected: Sequence[Sample], seed: int = 0) -> Drafter:
    """expected: samples as they will be."""
    streams = {s.id: list(s.output_ids) for s in expected}
    made: dict[str, Callable[[], Drafter]] = {
        "garbage": lambda: Oracle({}, 1.0, seed),
        "half right": lambda: Oracle(streams, 0.6, seed),
        "oracle": lambda: Oracle(streams, 1.0, seed),
    }
    return made[name]() if name in made else make_drafter(name)
