"""Samples of several turns through the rollout: a real engine, a real environment on its event loop, every strategy."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.partial_rollout.conftest import VOCAB, EngineMaker
from tests.partial_rollout.turns import STOPS, TURNS, all_same, batch, undisturbed

from longtail import Group, Rollout, SamplingParams
from longtail.partial_rollout.environment import EnvironmentRunner, Observation, TurnRequest
from longtail.partial_rollout.environments.calculator import STOP, Calculator

SPECS = (
    "sync",
    "token-budget:tokens=60",
    "over-issue:groups=2",
    "context-aware:chunk=9",
    "short-first:groups=1",
    "bounded-staleness:groups=2",
)


class Scripted:
    """Answers as `turns.answer` does, after a moment."""

    async def reset(self, request: TurnRequest) -> None:
        assert request.turn == 0

    async def step(self, request: TurnRequest) -> Observation:
        await asyncio.sleep(0.002)
        if request.turn == TURNS:
            return Observation(done=True)
        draw = np.random.default_rng([len(request.output_ids), *request.output_ids[-3:]])
        tokens = draw.integers(2, VOCAB, int(draw.integers(1, 22))).tolist()
        if len(tokens) > 2:
            tokens[-2:] = [STOPS[0], 2]
        return Observation(tuple(tokens))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("snapshots", [True, False])
def test_turns_under_every_strategy(make_engine: EngineMaker, spec: str, snapshots: bool) -> None:
    """Parked in mid-rollout and continued: the bits of a run of one sample at a time that kept no KV."""
    samples = batch()
    groups: dict[str, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, Group(sample.group_id, [])).samples.append(sample)
    runner = EnvironmentRunner(Scripted())
    try:
        rollout = Rollout(make_engine(max_num_seqs=3), strategy=spec, environment=runner, snapshots=snapshots)
        rollout.submit(groups.values())
        while len(rollout.store):
            rollout.collect()
            rollout.check_integrity()
        all_same(samples, undisturbed(make_engine, "llama"))
        ledger = rollout.store.ledger
        assert ledger.generated == ledger.lines["trained"] == sum(s.num_generated for s in samples)
        assert runner.num_pending == 0
    finally:
        runner.close()


@pytest.mark.slow
def test_a_model_that_uses_a_calculator() -> None:
    """SmolLM2, shown three times how, writes <calc>...</calc>, reads the answer and goes on with it."""
    from transformers import AutoTokenizer

    from longtail import NativeEngine
    from longtail.bench.models import resolve_model

    source = str(resolve_model("smollm2-135m", progress=lambda text: None))
    tokenizer = AutoTokenizer.from_pretrained(source)
    shown = "".join(
        f"Question: What is {a} times {b}?\nTool: <calc>{a}*{b}</calc>= {a * b}\nAnswer: {a * b}\n\n"
        for a, b in ((12, 31), (45, 17), (23, 64))
    )
    asked = ((71, 83), (58, 29), (37, 46), (92, 13))
    engine = NativeEngine(source, tokenizer=tokenizer, max_num_seqs=4, max_model_len=512, kv_cache_bytes=256 << 20)
    runner = EnvironmentRunner(Calculator.of(tokenizer))
    try:
        rollout = Rollout(engine, environment=runner, decode=tokenizer.decode)
        params = SamplingParams(temperature=0.0, max_tokens=40, stop=(STOP, "\n\n"))
        groups = []
        for a, b in asked:
            ids = tokenizer(f"{shown}Question: What is {a} times {b}?\nTool:", add_special_tokens=False)["input_ids"]
            group = Group.from_prompt(f"{a}x{b}", ids, params)
            group.samples[0].multi_turn = True
            groups.append(group)
        rollout.submit(groups)
        assert len(rollout.collect()) == len(asked)
        right = 0
        for (a, b), group in zip(asked, groups, strict=True):
            (sample,) = group.samples
            observed = [s for s in sample.segments if s.version < 0]
            if observed:
                said = tokenizer.decode(sample.output_ids[observed[0].start : observed[0].end])
                right += said == f"= {a * b}\n" and str(a * b) in tokenizer.decode(sample.output_ids[observed[0].end :])
        assert right >= 3, [tokenizer.decode(g.samples[0].output_ids) for g in groups]
    finally:
        runner.close()
