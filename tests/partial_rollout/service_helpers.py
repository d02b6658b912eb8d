"""A service on an engine whose steps are counted out, and what an undisturbed engine makes of the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.partial_rollout.conftest import make_model, prompt, run

from longtail import NativeEngine, Sample, SamplingParams, Segment
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.service import Completion, Request, RolloutService
from longtail.sample import sample_seed
from longtail.version import PolicyVersion


class Stepped(NativeEngine):
    """Has work while there are steps left in `budget`; None: no limit."""

    budget: int | None = None

    @property
    def has_work(self) -> bool:
        return self.is_busy and self.budget != 0

    @property
    def is_busy(self) -> bool:
        return super().has_work

    def step(self, **options: Any) -> StepOutput:
        out = super().step(**options)
        if self.budget:
            self.budget -= 1
        return out


def make_stepped(model: Any = None, **settings: Any) -> Stepped:
    settings = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "block_size": 16} | settings
    return Stepped(make_model("llama") if model is None else model, **settings)


@contextmanager
def serving(engine: Stepped, *, steps: int | None = 0, **options: Any) -> Iterator[RolloutService]:
    """steps: that the engine makes before it is told to make more; None: as many as it likes. At the end everything is
    back where it was."""
    engine.budget = steps
    before = engine.stats().num_free_blocks
    with RolloutService(engine, **{"seed": 5, **options}) as service:
        yield service
    engine.budget = None
    assert not engine.has_work
    engine.check_integrity()
    assert engine.stats().num_free_blocks == before == engine.stats().num_blocks


def barrier(service: RolloutService) -> None:
    """Until the thread has done what it was asked before."""
    service._thread.call(lambda: None).result()


def steps(service: RolloutService, count: int | None) -> None:
    """Lets it make so many steps (None: as many as it likes), and waits for them, or for the work to end."""
    engine = service.engine
    assert isinstance(engine, Stepped)
    engine.budget = count
    barrier(service)
    while engine.has_work and not service.stats().is_paused:
        service.check_integrity()
    service.check_integrity()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, **fields})


def undisturbed(engine: NativeEngine, prompt: list[int], p: SamplingParams, *, index: int = 0) -> Sample:
    """What the sample of a seed is."""
    assert p.seed is not None
    sample = Sample(
        id="alone", group_id="alone", index=0, prompt_ids=tuple(prompt), params=p, seed=sample_seed(p.seed, "", index)
    )
    run(engine, [sample])
    return sample


def continued(engine: NativeEngine, sample: Sample, start: int, end: int) -> tuple[list[int], list[float]]:
    """What this engine's weights make of output positions start to end, after the tokens before them."""
    again = cut_to(sample, start, end, engine.version)
    run(engine, [again])
    return again.output_ids[start:], again.logprobs[start:]


def cut_to(sample: Sample, start: int, end: int, version: PolicyVersion) -> Sample:
    """Another sample that stands at `start` and ends at `end`."""
    again = copy.copy(sample)
    again.params = dataclasses.replace(sample.params, max_tokens=end)
    again.output_ids, again.logprobs = sample.output_ids[:start], sample.logprobs[:start]
    again.versions = [version] * start
    again.segments = [Segment(0, start, version, "reference")] if start else []
    again.status, again.finish_reason, again.stop_reason, again.snapshot = "paused", None, None, None
    return again




def joined(*parts: Completion) -> tuple[list[int], list[float]]:
    return [t for c in parts for t in c.token_ids], [p for c in parts for p in c.logprobs]


def assert_equals(parts: list[Completion], expected: Sample) -> None:
    """Bit for bit, from its first token to its end."""
    tokens, logprobs = joined(*parts)
    assert tokens == expected.output_ids
    assert torch.equal(torch.tensor(logprobs), torch.tensor(expected.logprobs))
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (expected.finish_reason, expected.stop_reason)


def result(request: Request) -> Completion:
    return request.result(timeout=60)


def submit(service: RolloutService, count: int, **fields: Any) -> list[Request]:
    """A request for each of so many prompts, with seeds."""
    return [service.generate(prompt(9 + 3 * i, i), params(seed=i, **fields)) for i in range(count)]


def expected(alone: NativeEngine, request: Request) -> Any:
    return undisturbed(alone, list(request.prompt_ids), request.params)


def again(service: RolloutService, request: Request, parts: list[Completion], **fields: Any) -> Request:
    """The same request, sent again with what has come of it."""
    tokens = [*request.prompt_ids, *joined(*parts)[0]]
    return service.generate(tokens, **{"params": request.params, **fields})
