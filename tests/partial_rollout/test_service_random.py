"""Random lives of a service: aborts, resumes, cancels, pauses and updates in any order. Whatever happens, each token is
the one that the weights of its version make of the tokens before it, each sample is that of its seed, nothing counts
twice, and in the end the blocks and the host memory are all there."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import (
    Stepped,
    barrier,
    continued,
    make_stepped,
    params,
    result,
    serving,
    steps,
)

from longtail import NativeEngine, Sample
from longtail.partial_rollout.service import Completion, KeptConfig, Request, RolloutService
from longtail.sample import sample_seed

SAMPLES = 6
KEPT = [KeptConfig(), KeptConfig(max_samples=2), KeptConfig(max_bytes=20_000), KeptConfig(max_samples=0)]


@dataclasses.dataclass
class Life:
    """Of one sample, from its caller's side."""

    prompt: list[int]
    seed: int
    length: int
    parts: list[Completion] = dataclasses.field(default_factory=list)
    request: Request | None = None
    bases: list[int] = dataclasses.field(default_factory=list)
    """Of each part: at which token the sample that made it began."""

    @property
    def tokens(self) -> list[int]:
        return [t for c in self.parts for t in c.token_ids]

    @property
    def is_over(self) -> bool:
        return bool(self.parts) and self.parts[-1].finish_reason == "length"

    def send(self, service: RolloutService) -> None:
        had = self.tokens
        p = params(seed=self.seed, max_tokens=None, presence_penalty=0.5, min_p=0.01)
        self.request = service.generate([*self.prompt, *had], p, max_new_tokens=self.length - len(had))

    def settle(self) -> None:
        """Takes in what its request ended with."""
        if self.request is not None and self.request.completion.done():
            done = result(self.request)
            self.bases.append(len(self.tokens) - done.num_resumed_tokens)
            self.parts.append(done)
            self.request = None


lives = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(2, 20)), min_size=SAMPLES, max_size=SAMPLES
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("send"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("abort all"), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.sampled_from(["keep", "abort", "wait", "resume", "update", "forget prefixes"]), st.just(0)),
    ),
    max_size=40,
)


@functools.cache
def engines(blocks: int) -> tuple[Stepped, tuple[NativeEngine, NativeEngine], list[dict[str, Any]]]:
    models = [make_model("llama", seed=seed) for seed in (0, 1)]
    one = make_stepped(models[0]).kv.bytes_per_block
    engine = make_stepped(
        models[0], kv_cache_bytes=blocks * one, max_model_len=16 * 16, max_num_seqs=4, max_num_batched_tokens=24
    )
    return engine, (make_stepped(models[0]), make_stepped(models[1])), [m.state_dict() for m in models]


def act(service: RolloutService, samples: list[Life], action: str, number: int, weights: list[dict[str, Any]]) -> None:
    life = samples[number % SAMPLES]
    if action == "send" and life.request is None and not life.is_over:
        life.send(service)
    elif action == "steps":
        steps(service, number)
    elif action == "abort" and life.request is not None:
        service.abort([life.request.id]).result()
    elif action == "abort all":
        service.abort_all().result()
    elif action == "cancel" and life.request is not None:
        life.request.cancel()
    elif action in ("keep", "abort", "wait"):
        service.pause(action)  # type: ignore[arg-type]
    elif action == "resume":
        service.resume().result()
    elif action == "update":
        version = service.stats().version + 1
        service.update_weights(weights[version % 2], version).result()
    elif action == "forget prefixes":
        service.reset_prefix_cache().result()
    barrier(service)
    service.check_integrity()
    for one in samples:
        one.settle()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lives=lives,
    actions=actions,
    blocks=st.sampled_from([17, 64]),
    kept=st.sampled_from(KEPT),
)
def test_random_lives(
    lives: list[tuple[int, int, int]], actions: list[tuple[str, int]], blocks: int, kept: KeptConfig
) -> None:
    engine, alone, weights = engines(blocks)
    engine.reset_prefix_cache()
    first = engine.version + engine.version % 2  # the version of the first weights, again
    engine.update_weights(weights[0], first + 2)
    samples = [Life(prompt(n, seed), seed, length) for n, seed, length in lives]
    with serving(engine, kept=kept) as service:
        for action, number in actions:
            act(service, samples, action, number, weights)
        service.resume().result()
        for life in samples:
            if life.request is None and not life.is_over:
                life.send(service)
        steps(service, None)
        for life in samples:
            life.settle()
            assert life.is_over and len(life.tokens) == life.length
        stats = service.stats()
        made = sum(len(life.tokens) for life in samples)
        assert stats.num_output_tokens == made and stats.num_requests == 0
        assert stats.num_completed == SAMPLES and stats.num_failed == 0
    assert engine.tiers.host_used == 0
    for life in samples:
        check(life, alone)


def check(life: Life, alone: tuple[NativeEngine, NativeEngine]) -> None:
    """Each run of one version within a part, against that version's weights on their own."""
    versions = [v for c in life.parts for v in c.versions]
    assert versions == sorted(versions)
    start = 0
    for part, base in zip(life.parts, life.bases, strict=True):
        first, start = start, start + len(part.token_ids)
        borders = [first, *(i for i in range(first + 1, start) if versions[i] != versions[i - 1]), start]
        for a, b in pairwise(borders):
            if a < b:
                check_run(life, alone, base, a, b)


def check_run(life: Life, alone: tuple[NativeEngine, NativeEngine], base: int, start: int, end: int) -> None:
    tokens, logprobs = life.tokens, [p for c in life.parts for p in c.logprobs]
    versions = [v for c in life.parts for v in c.versions]
    sample = Sample(
        id="check",
        group_id="check",
        index=0,
        prompt_ids=(*life.prompt, *tokens[:base]),
        params=params(seed=life.seed, presence_penalty=0.5, min_p=0.01, max_tokens=None),
        seed=sample_seed(life.seed, "", 0),
        output_ids=tokens[base:],
        logprobs=logprobs[base:],
        versions=versions[base:],
    )
    want = continued(alone[versions[start] % 2], sample, start - base, end - base)
    assert (tokens[start:end], logprobs[start:end]) == want, (start, end, versions[start])
