"""Drafters for measuring: of a known quality, whatever the model says, and one that counts."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from longtail.sample import Sample
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest


class Oracle:
    """Knows how each sample goes on, and says so. At each output position it is right with probability `right`, which
    is drawn once from (seed, sample, position): it does not depend on what was drafted before. So each token of a draft
    is accepted with this probability, given those before it. Where it is wrong it says another token; of a sample that
    it does not know, and behind the end of what it knows, it says nothing.

    streams: output tokens by sample id.
    """

    def __init__(
        self, name: str, streams: Mapping[str, Sequence[int]], right: float, vocab_size: int, seed: int = 0
    ) -> None:
        if not 0.0 <= right <= 1.0:
            raise ValueError(f"drafter {name}: the probability to be right must be from 0 to 1, not {right}")
        if vocab_size < 2:
            raise ValueError(f"drafter {name}: vocab_size must be at least 2 for a wrong token, not {vocab_size}")
        self.name = name
        self._says: dict[str, list[int]] = {}
        for sample_id, stream in streams.items():
            tokens = np.asarray(stream, dtype=np.int64)
            wrong = np.random.default_rng([seed, zlib.crc32(sample_id.encode())]).random(len(tokens)) >= right
            self._says[sample_id] = np.where(wrong, (tokens + 1) % vocab_size, tokens).tolist()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            start = len(request.sample.output_ids)
            known = self._says.get(request.sample.id, ())
            drafts.append(Draft(list(known[start : start + request.max_tokens]), self.name))
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        """It has nothing to learn."""

    def forget(self, sample_id: str) -> None:
        """It keeps nothing."""


class Noise:
    """As many tokens as it may, drawn at random: a model's tokens equal them about once in vocab_size."""

    name = "noise"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            Draft(self._random.integers(0, self.vocab_size, request.max_tokens).tolist(), self.name)
            for request in requests
        ]

    def observe(self, sample: Sample, num_new: int) -> None:
        """It has nothing to learn."""

    def forget(self, sample_id: str) -> None:
        """It keeps nothing."""


class Counting:
    """A drafter, and what it was asked for."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.asked = 0
        """Times that a sequence was drafted for,"""
        self.seconds = 0.0
        """and what that took."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        start = time.perf_counter()
        drafts = self.drafter.propose(requests)
        self.seconds += time.perf_counter() - start
        self.asked += sum(request.max_tokens > 0 for request in requests)
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        self.drafter.observe(sample, num_new)

    def forget(self, sample_id: str) -> None:
        self.drafter.forget(sample_id)
