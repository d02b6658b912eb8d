"""Train-rollout mismatch: values by hand, parts joined, and exactly zero where the arithmetic is the rollout's."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longtail import Group, NativeEngine, Sample, SamplingParams
from longtail.partial_rollout.engines.native.training import ExactPolicy
from longtail.trainer_adapter.batch import TrainBatch
from longtail.trainer_adapter.losses import token_weights
from longtail.trainer_adapter.mismatch import MismatchMeter, measure
from longtail.trainer_adapter.packing import pack

VOCAB = 128


def by_hand() -> TrainBatch:
    """Version 5: two fresh tokens, one of version 4, one of version 2, one masked, one observation."""
    d = torch.tensor([0.0, 0.5, -0.25, 1.0, 9.0, 7.0], dtype=torch.float64)
    rollout = torch.full((6,), -2.0, dtype=torch.float64)
    return TrainBatch(
        lengths=torch.tensor([4, 2]),
        mask=torch.tensor([True, True, True, True, False, False]),
        advantages=torch.zeros(6, dtype=torch.float64),
        rollout_logprobs=rollout,
        logprobs=rollout + d,
        versions=torch.tensor([5, 5, 4, 2, 5, -1]),
        version=5,
        groups=torch.tensor([0, 0]),
    )


def test_values_by_hand() -> None:
    report = measure(by_hand())
    fresh = report.fresh
    assert fresh is not None and not report.is_exact
    assert (fresh.trained, fresh.max_difference, fresh.mean_difference) == (2, 0.5, 0.25)
    assert fresh.kl == -0.25 and fresh.kl_k3 == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert list(report.by_staleness) == [0, 1, 3]
    metrics = report.metrics()
    assert metrics["mismatch/max_difference"] == 0.5 and metrics["mismatch/tokens"] == 2
    assert metrics["mismatch/stale1/max_difference"] == 0.25 and metrics["mismatch/stale3/mean_difference"] == 1.0
    assert report.overall.max_difference == 1.0 and report.overall.trained == 4
    json.dumps(metrics)
    text = str(report)
    assert "2 tokens fresh: max 0.5, mean 0.25" in text and "1 tokens 3 versions behind: max 1" in text


def test_parts_are_joined() -> None:
    batch, meter = by_hand(), MismatchMeter()
    for i in range(2):
        chosen = torch.tensor([i == 0, i == 1])
        meter.add(batch.select(chosen))
    assert meter.report() == measure(batch)
    with pytest.raises(ValueError, match="nothing was added"):
        meter.report()
    meter.add(batch)
    with pytest.raises(ValueError, match="version is 6, of the parts before 5"):
        meter.add(batch.replace(version=6))
    with pytest.raises(ValueError, match="logprobs"):
        meter.add(batch.replace(logprobs=None))


def test_nothing_to_measure() -> None:
    batch = by_hand()
    report = measure(batch.replace(mask=torch.zeros(6, dtype=torch.bool)))
    assert report.fresh is None and report.is_exact and report.metrics() == {}
    assert "no token is trained on" in str(report)


def test_zero_in_exact_numerics_and_not_otherwise() -> None:
    """Over two versions, with a sample of both: fresh tokens 0.0 by the exact policy, and seen to differ by the model's
    own pass; stale ones differ by the weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            tie_word_embeddings=False,
            eos_token_id=2,
        )
    ).eval()
    engine = NativeEngine(model, kv_cache_bytes=4 << 20, max_num_seqs=4)
    policy = ExactPolicy(model, engine)
    params = SamplingParams(n=3, max_tokens=24, temperature=0.9, ignore_eos=True, seed=1)
    group = Group.from_prompt("g", [5, 9, 33, 4], params)
    engine.add(group.samples)
    for _ in range(10):
        engine.step()
    paused = engine.pause(snapshot=False)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    batch = _pack([group], version=0, partial=True)
    assert batch.inputs is not None
    (-policy.logprobs(batch.inputs, temperature=0.9).mean()).backward()
    optimiser.step()
    engine.update_weights(policy.weights(), 1)
    engine.add(paused)
    while engine.has_work:
        engine.step()
    batch = _pack([group], version=1)
    batch = batch.replace(weights=token_weights(batch, "token_mean"))
    meter = MismatchMeter()
    for part in batch.split(40):
        with torch.no_grad():
            assert part.inputs is not None
            meter.add(part.replace(logprobs=policy.logprobs(part.inputs, temperature=0.9)))
    report = meter.report()
    assert report.fresh is not None and report.fresh.trained == sum(v == 1 for s in group.samples for v in s.versions)
    assert report.is_exact and report.metrics()["mismatch/max_difference"] == 0.0
    assert report.metrics()["mismatch/stale1/max_difference"] > 1e-3
    ordinary = measure(batch.replace(logprobs=_ordinary(model, group.samples)))
    assert ordinary.fresh is not None and ordinary.fresh.max_difference is not None
    assert not ordinary.is_exact and ordinary.fresh.max_difference < 1e-4


def _pack(groups: list[Group], version: int, partial: bool = False) -> TrainBatch:
    if partial:
        from longtail.trainer_adapter.batch import Inputs

        samples = groups[0].samples
        inputs = Inputs(
            input_ids=torch.tensor([i for s in samples for i in (*s.prompt_ids, *s.output_ids)]),
            lengths=torch.tensor([s.num_tokens for s in samples]),
            prompt_lengths=torch.tensor([len(s.prompt_ids) for s in samples]),
        )
        n = sum(len(s.output_ids) for s in samples)
        return TrainBatch(
            lengths=inputs.lengths - inputs.prompt_lengths,
            mask=torch.ones(n, dtype=torch.bool),
            advantages=torch.zeros(n),
            rollout_logprobs=torch.tensor([x for s in samples for x in s.logprobs]),
            versions=torch.tensor([v for s in samples for v in s.versions]),
            version=version,
            groups=torch.zeros(len(samples), dtype=torch.long),
            inputs=inputs,
        )
    for group in groups:
        for sample in group.samples:
            sample.reward = 0.0
    return pack(groups, version=version)


def _ordinary(model: LlamaForCausalLM, samples: list[Sample]) -> torch.Tensor:
    found = []
    for s in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*s.prompt_ids, *s.output_ids]])).logits[0]
        logp = torch.log_softmax(logits[len(s.prompt_ids) - 1 : -1] / 0.9, -1)
        found.append(logp.gather(1, torch.tensor(s.output_ids)[:, None])[:, 0])
    return torch.cat(found)
