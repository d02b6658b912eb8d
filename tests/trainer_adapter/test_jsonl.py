"""Samples as JSON lines in slime's names: ours come back as they were, slime's as what they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partial_rollout.conftest import group, make_model, prompt
from tests.trainer_adapter.helpers import make_sample

from longtail import Rollout, RoutedExperts, Sample, SamplingParams, TokenBudget
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.trainer_adapter.plugins.jsonl import from_record, iter_samples, read_jsonl, to_record, write_jsonl


def as_values(sample: Sample) -> dict[str, Any]:
    return {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}


def through_json(sample: Sample, **fields: Any) -> Sample:
    return from_record(json.loads(json.dumps(to_record(sample, **fields))))


stamps = st.lists(st.integers(0, 4), max_size=6).map(sorted)


@settings(max_examples=100, deadline=None)
@given(
    versions=stamps,
    logprobs=st.lists(st.floats(-50, 0), min_size=6, max_size=6),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    index=st.integers(0, 9),
)
def test_ours_come_back_as_they_were(
    versions: list[int], logprobs: list[float], reward: float | None, index: int
) -> None:
    sample = make_sample("g", index, versions, reward, logprobs=logprobs[: len(versions)])
    sample.params = SamplingParams(temperature=0.5, stop=("a", "b"), stop_token_ids=(3,), seed=index, max_tokens=9)
    sample.masked = len(versions) // 2
    assert as_values(through_json(sample)) == as_values(sample)


def test_observations_and_routing_come_back() -> None:
    sample = make_sample("g", 1, [3, 3, -1, -1, 4], 1.0, multi_turn=True)
    sample.routed_experts = RoutedExperts(2, 2, bytes(8 * (sample.num_tokens - 1)))
    back = through_json(sample, metadata={"task": "sums"}, label="7")
    assert as_values(back) == as_values(sample)
    record = to_record(sample)
    assert record["loss_mask"] == [1, 1, 0, 0, 1]
    assert record["weight_versions"] == ["3", "4"]
    assert record["rollout_log_probs"][2:4] == [0.0, 0.0]


def test_slimes_names() -> None:
    """Against the fields of slime/utils/types.py, written out."""
    sample = make_sample("g7", 2, [3, 4, 4], 0.5, tokens=[20, 21, 22])
    record = to_record(sample, group_index=7, prompt="what?", label="42", decode=lambda ids: f"<{len(ids)}>")
    ours = record["metadata"].pop("longtail")
    assert record == {
        "group_index": 7,
        "index": 2,
        "prompt": "what?",
        "tokens": [*sample.prompt_ids, 20, 21, 22],
        "response": "<3>",
        "response_length": 3,
        "label": "42",
        "reward": 0.5,
        "loss_mask": [1, 1, 1],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": sample.logprobs,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
    }
    assert ours["segments"] == [[0, 1, 3, "test", "computed"], [1, 3, 4, "test", "computed"]]


@pytest.mark.parametrize(
    ("status", "reason", "tokens", "slime"),
    [
        ("finished", "stop", 2, "completed"),
        ("finished", "length", 2, "truncated"),
        ("finished", "repetition", 2, "truncated"),
        ("finished", "aborted", 2, "aborted"),
        ("failed", "error", 2, "failed"),
        ("paused", None, 2, "aborted"),
        ("waiting", None, 0, "pending"),
    ],
)
def test_status(status: Any, reason: Any, tokens: int, slime: str) -> None:
    sample = make_sample("g", 0, [1] * tokens, None, status=status, finish_reason=reason)
    assert to_record(sample)["status"] == slime
    assert (through_json(sample).status, through_json(sample).finish_reason) == (status, reason)


SLIME: dict[str, Any] = {
    "group_index": 3,
    "index": 1,
    "prompt": "what?",
    "tokens": [5, 6, 7, 8, 9, 10],
    "response": "...",
    "response_length": 4,
    "label": "42",
    "reward": {"score": 1.0, "format": 0.0},
    "loss_mask": [0, 1, 0, 1],
    "weight_versions": ["4", "3"],
    "rollout_log_probs": [-0.1, -0.2, 0.0, -0.4],
    "status": "truncated",
    "metadata": {"start_rollout_id": 2},
    "spec_info": {"spec_verify_ct": 0},
}


def test_slimes_own() -> None:
    """Leading zeros of the mask are left out of the loss, later ones were not written by the policy; the oldest version
    for all, since their borders are not known."""
    sample = from_record(SLIME, reward_key="score")
    assert (sample.prompt_ids, sample.output_ids) == ((5, 6), [7, 8, 9, 10])
    assert (sample.versions, sample.masked) == ([3, 3, -1, 3], 1)
    assert sample.loss_mask == [False, True, False, True]
    assert sample.logprobs == [-0.1, -0.2, 0.0, -0.4]
    assert (sample.id, sample.group_id, sample.index, sample.reward) == ("g3/1", "g3", 1, 1.0)
    assert (sample.status, sample.finish_reason) == ("finished", "length")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": "x"}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, 2.5]}, "tokens"),
        ({"response_length": 6}, "response_length"),
        ({"response_length": -1}, "response_length"),
        ({"rollout_log_probs": None}, "rollout_log_probs"),
        ({"rollout_log_probs": [0.0]}, "rollout_log_probs"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"loss_mask": [0, 2, 1, 1]}, "loss_mask"),
        ({"weight_versions": ["default"]}, "weight_versions"),
        ({"status": "lost"}, "status"),
    ],
)
def test_what_is_no_sample(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(SLIME | {"reward": 1.0}) + "\n\n" + json.dumps(SLIME | {"reward": 1.0} | change) + "\n")
    lines = read_jsonl(path)
    next(lines)
    with pytest.raises(ValueError, match=rf"a.jsonl, line 3: .*{named}"):
        next(lines)


def test_a_reward_needs_its_key() -> None:
    with pytest.raises(ValueError, match="score, format"):
        from_record(SLIME)


def test_files_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = [make_sample(name, i, [1, 2], 0.0) for name in "ab" for i in range(2)]
    assert write_jsonl(path, samples) == 4
    assert [as_values(s) for s in read_jsonl(path)] == [as_values(s) for s in samples]
    assert [json.loads(line)["group_index"] for line in path.read_text().splitlines()] == [0, 0, 1, 1]
    samples[3].logprobs[0] = float("nan")
    with pytest.raises(ValueError, match="b/1 is not finite"):
        write_jsonl(path, samples[::-1])
    assert len(list(read_jsonl(path))) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]
    with pytest.raises(ValueError, match="longtail"):
        to_record(samples[0], metadata={"longtail": 1})


def test_an_iterator_of_a_rollout(tmp_path: Path) -> None:
    """All samples, once, whatever the strategy hands over at a time; and what is submitted on the way."""
    engine = NativeEngine(make_model("llama"), kv_cache_bytes=4 << 20, max_num_seqs=4, block_size=16)
    rollout = Rollout(engine, strategy=TokenBudget(20))
    rollout.submit([group(f"g{i}", prompt(5, i), n=2, max_tokens=8 + i) for i in range(3)])
    seen = []
    for sample in iter_samples(rollout):
        seen.append(sample)
        if len(seen) == 1:
            rollout.submit([group("late", prompt(5), n=2, max_tokens=4)])
    assert sorted(s.id for s in seen) == sorted(f"{g}/{i}" for g in ("g0", "g1", "g2", "late") for i in (0, 1))
    assert write_jsonl(tmp_path / "s.jsonl", seen) == 8
    assert [as_values(s) for s in read_jsonl(tmp_path / "s.jsonl")] == [as_values(s) | {"snapshot": None} for s in seen]
