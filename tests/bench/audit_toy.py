"""A generator with verification by rejection sampling as textbooks write it down, and each way to get it wrong."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from longtail import Sample, SamplingParams
from longtail.bench.spec_audit_engine import Completion, DraftChoice, Verification
from longtail.bench.spec_audit_reference import Reference, Tokens, distribution, ends
from longtail.spec_decode.choice import make_drafter
from longtail.spec_decode.drafter import Drafter, DraftRequest

Fault = Literal["", "accepts too much", "residual", "temperature", "after the end", "log-probability", "hot"]


class Toy:
    """Speculative sampling with one-hot drafts (kernels/verify_rejection.py), one sample after the other.

    accepts too much: a wrong draft with probability `bias`; residual: it does not sum to 1; temperature: draft
    positions are judged at temperature 1; after the end: one more token where an accepted draft ends the sample;
    log-probability: the bonus token has that of the token before it; hot: everything at 1.3 times the temperature,
    drafts or not.
    """

    name = "toy"
    takes_drafters = True
    refuses: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __init__(
        self, reference: Reference, vocab_size: int, eos: Tokens, fault: Fault = "", bias: float = 0.02
    ) -> None:
        self.reference, self.vocab_size, self.eos, self.fault, self.bias = reference, vocab_size, eos, fault, bias
        self.verification: Verification = "rejection"
        self.exact = True
        self.drafter: Drafter | None = None
        self.length = 0
        self._rows: dict[Tokens, np.ndarray] = {}
        self._probs: dict[tuple[Tokens, Tokens, SamplingParams], np.ndarray] = {}

    def use(self, drafter: DraftChoice | None, length: int = 0) -> None:
        self.drafter = make_drafter(drafter) if isinstance(drafter, str) else drafter
        self.length = length

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Completion]:
        return [self._one(tuple(p), q, s, i) for i, (p, q, s) in enumerate(zip(prompts, params, seeds, strict=True))]

    def _one(self, prompt: Tokens, params: SamplingParams, seed: int, index: int) -> Completion:
        rng = random.Random(seed)
        sample = Sample(id=str(index), group_id="toy", index=index, prompt_ids=prompt, params=params, seed=seed)
        made = Completion(sample.output_ids, [], "", drafts=[])
        while not made.finish_reason:
            self._step(sample, made, rng)
        if self.drafter is not None:
            self.drafter.forget(sample.id)
        return made

    def _step(self, sample: Sample, made: Completion, rng: random.Random) -> None:
        output, params = sample.output_ids, sample.params
        assert params.max_tokens is not None
        drafts: list[int] = []
        room = min(self.length, params.max_tokens - len(output) - 1)
        if self.drafter is not None and output and room > 0:
            drafts = self.drafter.propose([DraftRequest(sample, room)])[0].tokens
            assert made.drafts is not None
            made.drafts.append((len(output), drafts))
        before = len(output)
        for j in range(len(drafts) + 1):
            draft = drafts[j] if j < len(drafts) else None
            p = self._distribution(sample.prompt_ids, tuple(output), params)
            token = self._decide(sample.prompt_ids, tuple(output), params, p, draft, rng)
            output.append(token)
            made.logprobs.append(math.log(p[token]) if p[token] > 0.0 else -math.inf)
            if self.fault == "log-probability" and draft is None and j:
                made.logprobs[-1] = made.logprobs[-2]
            if ends(output, params, self.eos):
                made.finish_reason = "stop"
                is_eos = token in self.eos and not params.ignore_eos
                made.stop_reason = None if is_eos else token
                if self.fault == "after the end" and token == draft:
                    output.append(token)
                    made.logprobs.append(made.logprobs[-1])
            elif len(output) >= params.max_tokens:
                made.finish_reason = "length"
            if made.finish_reason or token != draft:
                break
        if self.drafter is not None:
            self.drafter.observe(sample, len(output) - before)

    def _decide(
        self,
        prompt: Tokens,
        output: Tokens,
        params: SamplingParams,
        p: np.ndarray,
        draft: int | None,
        rng: random.Random,
    ) -> int:
        if params.temperature == 0.0:
            return int(p.argmax())
        if self.fault == "hot":
            warm = dataclasses.replace(params, temperature=params.temperature * 1.3)
            p = self._distribution(prompt, output, warm)
        if self.fault == "temperature" and draft is not None:
            p = self._distribution(prompt, output, dataclasses.replace(params, temperature=1.0))
        if draft is None:
            return _inverse(p, rng.random())
        bias = self.bias if self.fault == "accepts too much" else 0.0
        if rng.random() < p[draft] + bias * (1.0 - p[draft]) * (p[draft] > 0):
            return draft
        rest = np.where(np.arange(len(p)) == draft, 0.0, p)
        return _inverse(rest if self.fault == "residual" else rest / rest.sum(), rng.random())

    def _distribution(self, prompt: Tokens, output: Tokens, params: SamplingParams) -> np.ndarray:
        key = (prompt, output, params)
        if key not in self._probs:
            tokens = prompt + output
            if tokens not in self._rows:
                self._rows[tokens] = self.reference.next_logits([tokens])[0]
            self._probs[key] = np.exp(distribution(self._rows[tokens], prompt, output, params, self.eos)[0])
        return self._probs[key]


def _inverse(weights: np.ndarray, u: float) -> int:
    """The first token at which the running sum exceeds u, the last that has any weight if none does."""
    support = np.flatnonzero(weights)
    at = int(np.searchsorted(np.cumsum(weights[support]), u, side="right"))
    return int(support[min(at, len(support) - 1)])
