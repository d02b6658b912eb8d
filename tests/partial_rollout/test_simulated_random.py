"""The simulated engine against itself: leaps against one pass at a time, lists against columns, on random scripts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from longtail.events import Event
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.engines.simulated import Length, LinearCost, SimulatedEngine, TableCost
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams

TOTALS = ("num_passes", "num_tokens", "num_prefill_tokens", "num_context_tokens", "num_output_tokens")


def length_of(sample: Sample) -> Length:
    rng = random.Random(sample.seed)
    tokens = rng.choice((1, 2, rng.randint(3, 20), rng.randint(21, 300)))
    failure = "its script says so" if rng.random() < 0.05 else None
    turns = tuple(rng.randint(1, 30) for _ in range(rng.randint(0, 3)))
    return Length(tokens, rng.choice(("stop", "length")), failure, turns)


def settings(rng: random.Random) -> dict[str, Any]:
    slots = rng.randint(1, 8)
    cost = (
        LinearCost(rng.random(), rng.random(), rng.random() / 8, rng.random() / 1000),
        TableCost({1: 0.5, 4: 0.75, 8: rng.uniform(1, 2)}, per_prefill_token=0.01, per_context=1e-4),
        LinearCost(),
    )
    return {
        "slots": slots,
        "cost": rng.choice(cost),
        "max_num_batched_tokens": rng.randint(slots, 40),
        "kv_tokens": rng.choice((None, 210, rng.randint(210, 400))),
        "enable_prefix_caching": rng.random() < 0.5,
        "preemption": rng.choice(("snapshot", "recompute")),
        "kv_on_update": rng.choice(("recompute", "keep")),
        "update_seconds": rng.choice((0.0, 0.3)),
        "save_seconds": rng.choice((0.0, 1e-3)),
        "restore_seconds": rng.choice((0.0, 2e-3)),
    }


def samples(rng: random.Random) -> list[Sample]:
    made = []
    for group in range(rng.randint(1, 6)):
        prompt = tuple(rng.randrange(100) for _ in range(rng.choice((1, 2, rng.randint(3, 60)))))
        params = SamplingParams(max_tokens=rng.choice((100, 120, 150)))
        for index in range(rng.randint(1, 5)):
            name = f"g{group}"
            seed = rng.getrandbits(64)
            sample = Sample(
                id=f"{name}/{index}", group_id=name, index=index, prompt_ids=prompt, params=params, seed=seed
            )
            sample.multi_turn = rng.random() < 0.25
            made.append(sample)
    return made


class Run:
    """One random script on one engine. Everything that the script does depends on what the caller of `step` sees, at
    the moments at which it wanted to see it."""

    def __init__(self, seed: int, *, leap: bool, materialise: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.leap = leap
        self.events: list[Event] = []
        fields = settings(rng)
        self.engine = SimulatedEngine(lengths=length_of, listener=self.events.append, materialise=materialise, **fields)
        self.samples = samples(rng)
        self.outside = list(self.samples)
        self.answers = {s.id: rng.randint(0, 3) for s in self.samples}
        self.log: list[Any] = []
        self.passes = 0
        for _ in self.play():
            self.engine.check_integrity()
        assert not self.engine.has_work
        for sample in self.samples:
            assert sample.is_done
            sample.check_integrity()

    def play(self) -> Iterator[None]:
        rng, engine = self.rng, self.engine
        while self.outside or engine.has_work:
            self.act()
            yield
            horizon = rng.choice((None, None, 1, rng.randint(2, 60), rng.randint(60, 500)))
            until = engine.now() + rng.uniform(0, 30) if rng.random() < 0.3 else None
            out = self.step(horizon, until)
            self.log.append(
                (
                    engine.now(),
                    out.version,
                    out.num_output_tokens,
                    out.num_seqs,
                    *([s.id for s in group] for group in (out.finished, out.at_limit, out.turns)),
                )
            )
            for sample in out.turns:
                self.answer(sample)
            for sample in out.at_limit:
                if rng.random() < 0.7:
                    engine.set_limit(sample.id, rng.choice((None, rng.randint(1, 40))))
                else:
                    self.outside += engine.pause([sample.id], snapshot=rng.random() < 0.5)
            yield

    def step(self, horizon: int | None, until: float | None) -> StepOutput:
        engine = self.engine
        if self.leap:
            return engine.step(horizon=horizon, until=until)
        total = StepOutput(engine.version)
        while engine.has_work:
            out = engine.step(until=engine.now())  # one pass
            out.num_output_tokens += total.num_output_tokens
            total = out
            engine.check_integrity()
            if out.finished or out.at_limit or out.turns:
                break
            if horizon is not None and total.num_output_tokens >= horizon:
                break
            if until is not None and engine.now() >= until:
                break
        return total

    def answer(self, sample: Sample) -> None:
        if self.answers[sample.id]:
            self.answers[sample.id] -= 1
            sample.append_observation([self.rng.randrange(100) for _ in range(self.rng.randint(1, 40))])
            self.outside.append(sample)
        else:
            sample.turn_ended = False
            sample.status, sample.finish_reason = "finished", "stop"

    def act(self) -> None:
        rng, engine = self.rng, self.engine
        inside = [s for s in self.samples if s.status in ("running", "waiting") and s not in self.outside]
        for sample in list(self.outside):
            if rng.random() < 0.6 or not inside:
                engine.add([sample], limit=rng.choice((None, rng.randint(1, 60))))
                self.outside.remove(sample)
                inside.append(sample)
        if rng.random() < 0.15:
            chosen = [s.id for s in inside if rng.random() < 0.3]
            self.outside += engine.pause(chosen, snapshot=rng.random() < 0.7)
        inside = [s for s in inside if s not in self.outside]
        if rng.random() < 0.05:
            engine.update_weights({}, engine.version + 1)
        if inside and rng.random() < 0.03:
            engine.fail(rng.choice(inside).id, after=rng.randint(0, 30))
        if inside and rng.random() < 0.1:
            engine.set_limit(rng.choice(inside).id, rng.choice((None, rng.randint(1, 50))))
        if inside and rng.random() < 0.03:
            engine.abort([rng.choice(inside).id])

    @property
    def result(self) -> dict[str, Any]:
        steps = [e for e in self.events if e.kind == "step"]
        return {
            "seen": self.log,
            "events": [
                (e.kind, e.time, e.duration, e.sample, e.group, e.num_tokens, e.value, e.detail)
                for e in self.events
                if e.kind != "step"
            ],
            "totals": {name: sum(getattr(e, name) for e in steps) for name in TOTALS},
            "end": [round(e.time + e.duration, 9) for e in steps][-1:],
            "stats": self.engine.stats(),
            "samples": [
                (
                    list(s.output_ids),
                    list(s.logprobs),
                    list(s.versions),
                    [(g.start, g.end, g.version, g.engine, g.kv) for g in s.segments],
                    (s.status, s.finish_reason, s.failure, s.masked, s.turn_ended),
                    s.timings,
                )
                for s in self.samples
            ],
        }


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in range(0, 200, 40)], ids=lambda r: str(r.start))
def test_leaps_are_single_passes(seeds: range) -> None:
    """Times to the bit: both reckon a run of passes from its start."""
    for seed in seeds:
        leaps = Run(seed, leap=True, materialise=True)
        assert leaps.result == Run(seed, leap=False, materialise=True).result, seed
        assert leaps.result == Run(seed, leap=True, materialise=False).result, seed


def test_the_scripts_meet_everything() -> None:
    """What the random scripts are for does happen in them."""
    kinds: dict[str, int] = {}
    leaps = 0
    for seed in range(60):
        run = Run(seed, leap=True, materialise=False)
        for event in run.events:
            kinds[event.kind] = kinds.get(event.kind, 0) + 1
            kinds[event.detail] = kinds.get(event.detail, 0) + 1
            leaps += event.num_passes > 10
    wanted = ("preempt", "pause", "park", "restore", "update", "out of blocks", "weight update", "error", "aborted")
    assert min(kinds.get(kind, 0) for kind in wanted) >= 20, kinds
    assert leaps > 150
