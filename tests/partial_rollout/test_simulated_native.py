"""The simulated engine does what the native one does: the same events with the same counts, pass by pass; and where
memory is short, what the native scheduler decides over a pool that counts tokens."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, make_model, prompt

from longtail import Sample, SamplingParams
from longtail.events import Event
from longtail.partial_rollout.engines.native.scheduler import Scheduler
from longtail.partial_rollout.engines.simulated import Length, SimulatedEngine
from longtail.sequence import Sequence

FIELDS = ("num_tokens", "value", "detail")
STEP = ("num_seqs", "num_tokens", "num_prefill_tokens", "num_context_tokens", "num_output_tokens")


@functools.cache
def weights_of(version: int) -> Any:
    return make_model("llama", seed=version).state_dict()


def make_samples(seed: int, groups: int = 9) -> list[Sample]:
    rng = random.Random(seed)
    return [
        Sample(
            id=f"g{i}",
            group_id=f"g{i}",
            index=0,
            prompt_ids=tuple(prompt(rng.choice((1, 5, 12, 40)), i)),
            params=SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True),
            seed=rng.getrandbits(64),
        )
        for i in range(groups)
    ]


def live(engine: Any, samples: list[Sample], seed: int, weights: Callable[[int], Any]) -> list[Any]:
    """A random life, one pass at a time. -> what was seen of it."""
    rng = random.Random(seed)
    events: list[Event] = []
    engine.listener = events.append
    outside = list(samples)
    seen: list[Any] = []
    while outside or engine.has_work:
        inside = [s for s in samples if s not in outside and not s.is_done]
        for sample in list(outside):
            if rng.random() < 0.4 or not inside:
                engine.add([sample], limit=rng.choice((None, 1, 3, 8)))
                outside.remove(sample)
                inside.append(sample)
        if rng.random() < 0.2:
            gone = engine.pause([s.id for s in inside if rng.random() < 0.3], snapshot=rng.random() < 0.7)
            outside += gone
            inside = [s for s in inside if s not in outside]
        if inside and rng.random() < 0.1:
            engine.set_limit(rng.choice(inside).id, rng.choice((None, 2, 5)))
        if inside and rng.random() < 0.04:
            engine.abort([rng.choice(inside).id])
        if rng.random() < 0.06:
            engine.update_weights(weights(engine.version + 1), engine.version + 1)
        out = engine.step(until=engine.now())
        engine.check_integrity()
        seen.append(
            ([s.id for s in out.finished], sorted(s.id for s in out.at_limit), out.num_output_tokens, out.num_seqs)
        )
    for event in events:
        fields = STEP if event.kind == "step" else FIELDS
        seen.append((event.kind, event.sample, *(getattr(event, name) for name in fields)))
    for sample in samples:
        segments = [(s.start, s.end, s.version, s.kv) for s in sample.segments]
        seen.append((sample.id, sample.finish_reason, len(sample.output_ids), segments))
    seen.append(
        [
            getattr(engine.stats(), f"num_{n}")
            for n in ("steps", "output_tokens", "recomputed_tokens", "restored_tokens")
        ]
    )
    return seen


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
@pytest.mark.parametrize(("slots", "rows"), [(1, 512), (4, 512), (4, 7), (6, 24)])
def test_like_the_native_engine(make_engine: EngineMaker, slots: int, rows: int, kv_on_update: str) -> None:
    fields: dict[str, Any] = {
        "max_num_batched_tokens": rows,
        "kv_on_update": kv_on_update,
        "enable_prefix_caching": False,
    }
    for seed in range(3):
        native = make_engine(max_num_seqs=slots, name="engine", **fields)
        simulated = SimulatedEngine(slots=slots, name="engine", **fields)
        expected = live(native, make_samples(seed), seed, weights_of)
        assert live(simulated, make_samples(seed), seed, lambda version: {}) == expected, seed


# ---- short memory


class CountingKV:
    """A pool of KV blocks of one token, as far as the native scheduler looks into it."""

    prefix_caching = False

    def __init__(self, capacity: int) -> None:
        self.num_free = capacity

    def chunk(self, seq: Sequence, count: int) -> int:
        return count

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        missing = num_tokens - len(seq.block_tables)
        if missing > self.num_free:
            return False
        self.num_free -= missing
        seq.block_tables += [[]] * missing
        return True

    def release(self, seq: Sequence) -> None:
        self.num_free += len(seq.block_tables)
        seq.block_tables.clear()


def native_schedule(samples: list[Sample], capacity: int, slots: int, rows: int, snapshots: bool) -> list[Any]:
    """Each pass's admissions, preemptions, rows and ends, by the native scheduler."""
    kv = CountingKV(capacity)
    log: list[Any] = []
    saved: dict[Sequence, int] = {}

    def attach(seq: Sequence) -> bool:
        seq.num_computed_tokens = saved.get(seq, 0)
        return kv.reserve(seq, seq.num_computed_tokens)

    def preempt(seq: Sequence) -> None:
        log.append(("preempt", seq.sample.id))
        saved[seq] = seq.num_computed_tokens if snapshots else 0
        kv.release(seq)

    scheduler = Scheduler(
        kv,  # type: ignore[arg-type]
        max_num_seqs=slots,
        max_num_batched_tokens=rows,
        is_ready=lambda seq: True,
        attach=attach,
        on_admit=lambda seq: log.append(("admit", seq.sample.id)),
        on_preempt=preempt,
    )
    scheduler.waiting.extend(Sequence(s) for s in samples)
    while scheduler.waiting or scheduler.running:
        scheduled = scheduler.schedule()
        if not scheduled:
            continue
        step = ("step", len(scheduled), sum(item.num_tokens for item in scheduled))
        for item in scheduled:
            seq = item.seq
            seq.num_computed_tokens += item.num_tokens
            if seq.num_computed_tokens == seq.num_tokens:
                seq.token_ids.append(0)
                if len(seq.token_ids) - len(seq.sample.prompt_ids) == seq.sample.params.max_tokens:
                    log.append(("finish", seq.sample.id))
                    scheduler.running.remove(seq)
                    kv.release(seq)
        log.append(step)
    return log


@pytest.mark.parametrize("preemption", ["snapshot", "recompute"])
def test_like_the_native_scheduler_where_memory_is_short(preemption: str) -> None:
    preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        slots = rng.randint(1, 6)
        capacity, rows = rng.randint(72, 130), rng.choice((slots, slots + 3, 512))
        expected = native_schedule(make_samples(seed), capacity, slots, rows, preemption == "snapshot")
        events: list[Event] = []
        engine = SimulatedEngine(
            slots=slots,
            kv_tokens=capacity,
            max_num_batched_tokens=rows,
            preemption=preemption,
            enable_prefix_caching=False,
            listener=events.append,
            lengths=lambda s: Length(s.params.max_tokens or 1, "length"),
        )
        engine.add(make_samples(seed))
        while engine.has_work:
            engine.step(until=engine.now())
            engine.check_integrity()
        got: list[Any] = [(e.kind, e.sample) for e in events if e.kind in ("admit", "preempt", "finish", "step")]
        steps = iter([(e.kind, e.num_seqs, e.num_tokens) for e in events if e.kind == "step"])
        assert [next(steps) if kind == "step" else (kind, name) for kind, name in got] == expected, seed
        preemptions += sum(kind == "preempt" for kind, _ in got)
    assert preemptions > 50
