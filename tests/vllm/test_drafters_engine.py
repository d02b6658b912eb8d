"""`VllmEngine` with longtail's drafters: with its own sampling not one token changes, whoever drafts and whatever
happens to a sample meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from tests.vllm.conftest import EngineMaker, assert_same, generate, run

from longtail import Group, SamplingParams
from longtail.events import Event, ignore
from longtail.partial_rollout.engines.vllm import VllmEngine, VllmSettings
from longtail.partial_rollout.engines.vllm.drafters import Proposer
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.speculation import Speculation

PROMPT = (5, 6, 7, 8) * 4


def counted(engine: VllmEngine) -> Speculation:
    assert isinstance(engine.speculation, Speculation)
    return engine.speculation


def group(name: str, n: int = 4, **params: Any) -> Group:
    fields = {"n": n, "max_tokens": 40, "temperature": 0.7, "ignore_eos": True, "seed": 3} | params
    return Group.from_prompt(name, PROMPT, SamplingParams(**fields))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 8, "min_p": 0.01},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"ignore_eos": False, "min_tokens": 9, "stop_token_ids": (20, 21, 22, 30, 31)},
    ],
)
def test_drafting_changes_nothing(make_vllm: EngineMaker, params: dict[str, Any]) -> None:
    want = generate(make_vllm(), group("g", **params))
    engine = make_vllm(drafter="group", max_drafts=4)
    for choice in ("group", "ngram", "group>ngram", None):
        engine.use_drafter(choice, None if choice is None else FixedLength(4))
        before = engine.stats()
        got = generate(engine, group("g", **params))
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
        drafted = engine.stats().num_draft_tokens - before.num_draft_tokens
        assert (drafted > 0) == (choice is not None)
        if engine.speculation is not None:
            total = counted(engine).total
            accepted = engine.stats().num_accepted_tokens - before.num_accepted_tokens
            assert (total.drafted, total.accepted) == (drafted, accepted)


def test_samples_come_and_go(make_vllm: EngineMaker) -> None:
    """Paused, resumed, with other weights' versions in between; nothing of a request is left in the end."""
    want = generate(make_vllm(), group("g"))
    engine = make_vllm(drafter="group", max_drafts=4)
    engine.use_drafter("group", FixedLength(3))
    events: list[Event] = []
    engine.listener = events.append
    samples = group("g").samples
    run(engine, samples, until=9)
    parts = engine.pause()
    run(engine, parts, until=20)
    engine.pause([samples[1].id])
    run(engine, [samples[1]])
    engine.listener = ignore
    for a, b in zip(samples, want, strict=True):
        assert_same(a, b)
    told = [event for event in events if event.kind == "drafts"]
    total = counted(engine).total
    assert sum(event.num_draft_tokens for event in told) == total.drafted > 0
    assert sum(event.num_accepted_tokens for event in told) == total.accepted
    assert {event.sample for event in told} <= {sample.id for sample in samples}
    assert isinstance(engine.proposer, Proposer)
    assert not engine.proposer._samples and not engine.proposer._counts
    assert not counted(engine)._by_sample
    engine.use_drafter(None)


def test_siblings_are_drafted_from_each_other(make_vllm: EngineMaker) -> None:
    """Greedy siblings write the same: those that come later are drafted from the first, version by version."""
    engine = make_vllm(drafter="group", max_drafts=4)
    engine.use_drafter("group", FixedLength(4))
    first = generate(engine, group("g", n=1, temperature=0.0))
    before = counted(engine).total.accepted
    later = generate(engine, group("h", n=3, temperature=0.0))
    assert all(sample.output_ids == first[0].output_ids for sample in later)
    report = counted(engine).report()
    assert counted(engine).total.accepted - before > 3 * 25
    assert report["drafters"]["group"]["acceptance_length"] > 2.0
    engine.use_drafter(None)


def test_settings_say_what_they_cannot_do(make_vllm: EngineMaker) -> None:
    with pytest.raises(ValueError, match="did you mean 'group'"):
        VllmSettings(drafter="grop")
    with pytest.raises(ValueError, match="leave one of them out"):
        VllmSettings(drafter="group", speculative={"method": "ngram"})
    with pytest.raises(ValueError, match="max_drafts"):
        VllmSettings(drafter="group", max_drafts=0)
    with pytest.raises(ValueError, match="use drafter"):
        VllmSettings(engine_args={"speculative_config": {}})
    plain = make_vllm()
    plain.use_drafter(None)
    assert plain.speculation is None and not plain.drafts_by_itself
    with pytest.raises(ValueError, match="not made for longtail's drafters"):
        plain.use_drafter("group")
