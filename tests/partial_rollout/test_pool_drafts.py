"""The group index of drafts across the engines of a pool: what siblings wrote elsewhere is drafted from, and changes no
token."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from tests.partial_rollout.conftest import assert_same, group, prompt
from tests.partial_rollout.pool_helpers import STRATEGIES, balance, batch, collect_all, failing_maker, maker

from longtail import NativeEngine, Rollout, Sample
from longtail.events import Event
from longtail.partial_rollout.pool import EnginePool, sharing
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.drafter import Draft
from longtail.spec_decode.suffix_drafter import SuffixDrafter


def twins(name: str, count: int = 2, length: int = 60) -> list[Sample]:
    """Siblings that write the same, which nothing but a sibling tells."""
    samples = group(name, prompt(9, seed=hash(name) % 50), n=count, max_tokens=length, temperature=1.5).samples
    for sample in samples:
        sample.seed = samples[0].seed
    return samples


def finish(engine: Any) -> None:
    while engine.has_work:
        engine.step()


def tail_acceptance(engine: Any, drafter: str = "group") -> tuple[float, list[Sample]]:
    """Of the last sample: of its drafts, those that were accepted. Its sibling was first, on another engine if there
    is one (routing "load"), and still has a few tokens to go when it comes."""
    engine.use_drafter(drafter, FixedLength(4))
    first, last = twins("a")
    engine.add([first])
    while len(first.output_ids) < 57:
        engine.step()
    before = engine.stats()
    engine.add([last])
    finish(engine)
    after = engine.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert first.output_ids == last.output_ids
    return (after.num_accepted_tokens - before.num_accepted_tokens) / drafted if drafted else 0.0, [first, last]


@pytest.mark.parametrize("drafter", ["group", "group>ngram"])
def test_the_tail_accepts_as_on_one_engine(llama: Any, drafter: str) -> None:
    (one, alone), (shared, split), (unshared, apart) = (
        tail_acceptance(engine, drafter)
        for engine in (
            NativeEngine(llama, block_size=16, max_num_seqs=8),
            EnginePool(maker(llama), count=2, routing="load", over_wire=True),
            EnginePool(maker(llama), count=2, routing="load", share_drafts=None),
        )
    )
    assert {s.segments[0].engine for s in split} == {"pool-0", "pool-1"}
    for got in (*split, *apart):
        assert_same(got, alone[0] if got.index == 0 else alone[1])
    assert one > 0.8 and shared > 0.9 * one, (one, shared, unshared)
    assert unshared < 0.3 * one


def test_traffic(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand: an engine is told of a sibling once, with every second step; nothing of what it has itself, or
    of prompts that it does not hold."""
    events: list[Event] = []
    pool = EnginePool(maker(llama), count=2, routing="load", share_drafts=2, listener=events.append)
    monkeypatch.setattr(SuffixDrafter, "propose", lambda self, requests: [Draft([], self.name) for _ in requests])
    pool.use_drafter("group")
    sent: list[Any] = []
    for member in pool._crew.members:
        send = member.send

        def sending(method: str, *arguments: Any, name: str = member.name, send: Any = send) -> None:
            if method == "step" and arguments[-1] is not None:
                for sibling, parts in pickle.loads(arguments[-1]):
                    sent.extend((name, sibling, h.sample_id, h.start, len(h.tokens)) for h in parts)
            send(method, *arguments)

        member.send = sending  # type: ignore[method-assign]
    (a0, a1), (b0,) = twins("a", length=7), twins("b", count=1, length=7)
    pool.add([a0])
    pool.add([a1])  # on the other engine
    pool.add([b0])
    pool.step()
    assert sent == []  # both begin
    for _ in range(4):
        pool.step()
        pool.check_integrity()
    finish(pool)
    assert [s for s in sent if s[0] == "pool-0"] == [("pool-0", "a/0", "a/1", start, 2) for start in (0, 2, 4)]
    assert [s for s in sent if s[0] == "pool-1"] == [("pool-1", "a/1", "a/0", start, 2) for start in (0, 2, 4)]
    shares = [e for e in events if e.kind == "share"]
    stats = pool.stats()
    assert stats.num_news == len(shares) == 6 and stats.num_news_tokens == sum(e.num_tokens for e in shares) == 12
    assert stats.num_news_bytes == sum(e.value for e in shares) > 0 and {e.num_seqs for e in shares} == {1}


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_nothing_is_told_without_a_group_index(llama: Any, drafter: str | None) -> None:
    pool = EnginePool(maker(llama, drafter=drafter), count=2, routing="load")
    collect_all(Rollout(pool), batch())
    assert pool.stats().num_news == 0 and not pool._sharing._texts


def test_a_message_is_bounded_and_memory_is(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MOST_TOKENS", 10)
    monkeypatch.setattr(sharing, "KEPT_TOKENS", 100)
    events: list[Event] = []
    pool = EnginePool(maker(llama, drafter="group"), count=2, routing="load", listener=events.append, share_drafts=1)
    for number in range(4):
        collect_all(Rollout(pool), batch(groups=number + 1))
    shares = [e for e in events if e.kind == "share"]
    assert shares and max(e.num_tokens for e in shares) == 10
    assert pool._sharing._num_tokens <= 100
    pool.check_integrity()


def test_texts_of_running_samples_beyond_the_bound_are_not_gone_through_at_each(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "KEPT_TOKENS", 100)
    tries = list[int]()
    room = sharing.Sharing._make_room

    def counted(self: sharing.Sharing) -> None:
        tries.append(self._num_tokens)
        room(self)

    monkeypatch.setattr(sharing.Sharing, "_make_room", counted)
    pool = EnginePool(maker(llama, drafter="group"), count=2, routing="load")
    pool.add(group("a", prompt(9), n=8, max_tokens=40).samples)
    finish(pool)
    assert pool._sharing._num_tokens <= 320 and 1 <= len(tries) <= (320 - 100) // (100 // 8) + 8
    pool.check_integrity()


def test_engines_that_join_draft_as_the_others(llama: Any) -> None:
    pool = EnginePool(maker(llama), count=1)
    pool.use_drafter("ngram")
    pool.add_engine()
    speculations = [member.host.engine.speculation for member in pool._crew.members]  # type: ignore[attr-defined]
    assert [speculation.drafter.name for speculation in speculations] == ["ngram", "ngram"]
    pool.use_drafter(None)
    pool.add_engine()
    assert list(pool.drafting().values()) == [None] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_samples_of_the_single_engine(llama: Any, alone: dict[str, Sample], strategy: str) -> None:
    """Under every strategy, with weights that are sent again: versions age, samples are cut and come back."""
    pool = EnginePool(maker(llama, drafter="group>ngram"), count=3, routing="load", share_drafts=2, over_wire=True)
    pool.use_drafter("group>ngram", FixedLength(3))
    rollout = Rollout(pool, strategy=STRATEGIES[strategy])
    got = collect_all(rollout, batch(), dict(llama.state_dict()))
    assert got.keys() <= alone.keys() and (len(got) == len(alone) or strategy in ("over-issue", "tail-rounds"))
    for name, sample in got.items():
        assert_same(sample, alone[name])
    balance(pool, rollout)
    assert pool.stats().num_news_tokens > 0
    for member in pool._crew.members:
        speculation = member.host.engine.speculation  # type: ignore[attr-defined]
        assert speculation.failure is None
        speculation.drafter.drafters[0].check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_random_losses(llama: Any, alone: dict[str, Sample], seed: int) -> None:
    rng = random.Random(seed)
    make = failing_maker(llama, rng, 0.04, drafter="group")
    pool = EnginePool(make, count=3, routing="load", restarts=1000, share_drafts=1)
    rollout = Rollout(pool, strategy=("token-budget:tokens=90", "context-aware:chunk=6", "sync")[seed])
    got = collect_all(rollout, batch(), dict(llama.state_dict()))
    assert got.keys() == alone.keys()
    for name, sample in got.items():
        assert_same(sample, alone[name])
    balance(pool, rollout)
    assert len(pool.failures) >= 5 and pool.stats().num_news > 0
