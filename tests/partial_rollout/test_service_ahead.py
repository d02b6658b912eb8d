"""A service on an engine that runs ahead: what a call finds made is told at once, and what has ended by then ended."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import (
    Stepped,
    again,
    assert_equals,
    expected,
    make_stepped,
    params,
    result,
    serving,
    steps,
)

from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.service import Request, RolloutService


class Ahead(Stepped):
    """Makes a pass that nobody asked for before each call that comes between two."""

    def _between_passes(self) -> AbstractContextManager[None]:
        self._step(StepOutput(self._version), False)
        return nullcontext()


def send(service: RolloutService, *lengths: int) -> list[Request]:
    """Different prompts, of such lengths of output."""
    return [service.generate(prompt(9 + 3 * i, i), params(seed=i, max_tokens=n)) for i, n in enumerate(lengths)]


@pytest.fixture
def engine() -> Ahead:
    return Ahead(make_model("llama"), kv_cache_bytes=4 << 20, max_num_seqs=8, block_size=16)


def test_aborts(engine: Ahead) -> None:
    """One sample ends, with its last token, in the pass in which all were to be aborted."""
    alone = make_stepped()
    with serving(engine) as service:
        short, *others = send(service, 6, 24, 24, 24)
        steps(service, 5)
        assert service.abort_all().result() == 3
        service.check_integrity()
        assert_equals([result(short)], expected(alone, short))
        parts = [[result(request)] for request in others]
        assert all(part.finish_reason == "abort" and len(part.token_ids) == 6 for (part,) in parts)
        resumed = [again(service, request, own) for request, own in zip(others, parts, strict=True)]
        steps(service, None)
        for request, more, own in zip(others, resumed, parts, strict=True):
            assert_equals([*own, result(more)], expected(alone, request))
        stats = service.stats()
    assert (stats.num_completed, stats.num_aborted) == (4, 3)


def test_updates_and_cancels(engine: Ahead) -> None:
    """Others gain a token meanwhile, and end."""
    with serving(engine) as service:
        first, second, third = send(service, 4, 24, 24)
        steps(service, 3)
        service.update_weights(make_model("llama", seed=1).state_dict()).result()
        service.check_integrity()
        assert result(first).versions == [0] * 4
        second.cancel()
        service.check_integrity()
        steps(service, None)
        versions = result(third).versions
        assert versions == [0] * 4 + [1] * 20
        stats = service.stats()
    assert stats.num_output_tokens == 4 + 5 + 24 and stats.num_discarded_tokens == 5
