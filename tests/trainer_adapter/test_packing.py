"""Groups -> batch: what reaches a loss, what does not, and that the one does not change with the other."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import grad, make_group, make_sample, random_batch, with_random_logprobs

from longtail.sample import OBSERVATION, Group
from longtail.sampling_params import SamplingParams
from longtail.trainer_adapter.advantages import group_advantages
from longtail.trainer_adapter.batch import Inputs, TrainBatch, counts, expand, means, sums
from longtail.trainer_adapter.losses import PolicyLoss, dapo, dr_grpo, grpo, gspo
from longtail.trainer_adapter.packing import pack

LOSSES = {
    "grpo": grpo(kl_coef=0.1),
    "dr_grpo": dr_grpo(fixed_length=32),
    "dapo": dapo(),
    "dapo by group": dapo(aggregation="group_mean"),
    "gspo": gspo(clip_low=0.2, clip_high=0.2),
}


def two_turn_group() -> Group:
    """Sample 0: prompt 7; output 20 21 | 22 23 | 24 25 of versions 3 3 | -1 -1 | 5 5, the first token masked.
    Sample 1: prompt 7 8; output 20 of version 4."""
    return Group("g", [make_sample("g", 0, [3, 3, -1, -1, 5, 5], 1.0, masked=1), make_sample("g", 1, [4], 0.0)])


def test_a_batch_by_hand() -> None:
    batch = pack([two_turn_group()], version=6)
    assert batch.inputs is not None
    assert batch.inputs.input_ids.tolist() == [7, 20, 21, 22, 23, 24, 25, 7, 8, 20]
    assert batch.inputs.cu_seqlens.tolist() == [0, 7, 10]
    assert batch.inputs.cu_seqlens.dtype == torch.int32
    assert batch.inputs.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert batch.inputs.logit_index.tolist() == [0, 1, 2, 3, 4, 5, 8]
    assert batch.inputs.labels.tolist() == [20, 21, 22, 23, 24, 25, 20]
    assert batch.lengths.tolist() == [6, 1]
    assert batch.mask.tolist() == [False, True, False, False, True, True, True]
    assert batch.versions.tolist() == [3, 3, -1, -1, 5, 5, 4]
    assert batch.sampled.tolist() == [True, True, False, False, True, True, True]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([-0.1, -0.2, 0.0, 0.0, -0.5, -0.6, -0.1]))
    good, bad = group_advantages([1.0, 0.0])
    torch.testing.assert_close(batch.advantages, torch.tensor([good] * 6 + [bad]))
    assert (batch.sample_ids, batch.groups.tolist(), dict(batch.left_out)) == (("g/0", "g/1"), [0, 0], {})
    assert batch.padded(batch.versions, -7).tolist() == [[3, 3, -1, -1, 5, 5], [4, -7, -7, -7, -7, -7]]


@pytest.mark.parametrize(
    ("max_staleness", "mask"),
    [(3, [0, 1, 0, 0, 1, 1, 1]), (2, [0, 0, 0, 0, 1, 1, 1]), (1, [0, 0, 0, 0, 1, 1, 0]), (0, [0, 0, 0, 0, 0, 0, 0])],
)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_staleness_beyond_the_bound_never_reaches_the_loss(
    max_staleness: int, mask: list[int], loss: PolicyLoss
) -> None:
    batch = pack([two_turn_group()], version=6, max_staleness=max_staleness)
    assert batch.mask.tolist() == [bool(m) for m in mask]
    wrong = torch.where(batch.mask, batch.rollout_logprobs, math.nan)
    batch = batch.replace(logprobs=wrong.requires_grad_(), rollout_logprobs=wrong.detach(), ref_logprobs=wrong.detach())
    result = loss(batch)
    found = grad(result.loss, batch)
    assert result.loss.isfinite() and found.isfinite().all()
    assert int(result.tokens) == sum(mask)
    assert not found[~batch.mask].any()
    assert found[batch.mask].all()


def test_earlier_segments_are_left_out() -> None:
    """By version: two segments of one version that a preemption split are one."""
    batch = pack([two_turn_group()], version=6, last_segment_only=True)
    assert batch.mask.tolist() == [False, False, False, False, True, True, True]
    group = Group("g", [make_sample("g", 0, [2, 4, 4, -1], 1.0), make_sample("g", 1, [], 0.0)])
    assert pack([group], version=4, last_segment_only=True).mask.tolist() == [False, True, True, False]


def test_what_is_left_out_is_named() -> None:
    groups = [
        Group(
            "a",
            [
                make_sample("a", 0, [5], 1.0),
                make_sample("a", 1, [5], None, status="failed", finish_reason="error", failure="worker died"),
                make_sample("a", 2, [5], None, grade_failure="timed out"),
                make_sample("a", 3, [5], 0.0),
            ],
        ),
        Group("b", [make_sample("b", 0, [5], 1.0), make_sample("b", 1, [5], None, status="paused")]),
        make_group("c", [1.0, 1.0]),
    ]
    batch = pack(groups, version=5, zero_variance="leave_out")
    assert batch.sample_ids == ("a/0", "a/3")
    assert batch.advantages.tolist() == pytest.approx(group_advantages([1.0, 0.0]))
    assert dict(batch.left_out) == {
        "a/1": "failed: worker died",
        "a/2": "no reward: timed out",
        "b/0": "its group is not complete",
        "b/1": "its group is not complete",
        "c/0": "all rewards of the group are equal",
        "c/1": "all rewards of the group are equal",
    }
    kept = pack(groups, version=5, incomplete="train")
    assert kept.sample_ids == ("a/0", "a/3", "b/0", "c/0", "c/1")
    assert kept.left_out["b/1"] == "not done: paused"
    assert not kept.advantages[2:].any()  # b/0 has no sibling, those of c are equal


def test_an_incomplete_group_gives_a_gradient_if_the_policy_says_so() -> None:
    samples = [make_sample("x", i, [5, 5], float(i)) for i in range(2)] + [
        make_sample("x", 2, [5], None, status="paused")
    ]
    groups = [make_group("a", [0.0, 1.0]), Group("x", samples)]
    for incomplete, names in (("leave_out", {"a"}), ("train", {"a", "x"})):
        batch = with_random_logprobs(pack(groups, version=5, incomplete=incomplete))  # type: ignore[arg-type]
        found = grad(grpo()(batch).loss, batch)
        assert {name.split("/")[0] for name in batch.sample_ids} == names
        assert found.all()


def test_moving_keeps_everything() -> None:
    batch = grpo().weigh(with_random_logprobs(pack([two_turn_group()], version=6)))
    there = batch.to("cpu")
    for field in dataclasses.fields(TrainBatch):
        before, after = getattr(batch, field.name), getattr(there, field.name)
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after), field.name
        elif not isinstance(before, Inputs):
            assert before == after, field.name
    assert batch.inputs is not None and there.inputs is not None
    assert torch.equal(batch.inputs.input_ids, there.inputs.input_ids)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "unfit",
    [
        Group("x", [make_sample("x", 0, [5] * 4, 9.0), make_sample("x", 1, [5] * 9, None, status="paused")]),
        Group("x", [make_sample("x", 0, [5] * 4, 9.0), make_sample("x", 1, [5], None, status="running")]),
        Group("x", [make_sample("x", i, [5], None, status="failed", failure="f") for i in range(3)]),
        Group("x", [make_sample("x", i, [1] * 7, float(i)) for i in range(3)]),
    ],
    ids=["paused", "running", "failed", "too stale"],
)
def test_neighbours_gradients_are_unchanged(loss: PolicyLoss, place: int, unfit: Group) -> None:
    """Of every sample bit for bit, whatever stands before, between or behind."""
    fit = [make_group("a", [1.0, 0.0, 0.5], [4, 5, 5]), make_group("b", [0.0, 0.0, 1.0, 1.0], [5] * 6)]
    alone = with_random_logprobs(pack(fit, version=5, max_staleness=2, advantage=loss.advantage))
    among = with_random_logprobs(
        pack([*fit[:place], unfit, *fit[place:]], version=5, max_staleness=2, advantage=loss.advantage)
    )
    expected, found = grad(loss(alone).loss, alone), grad(loss(among).loss, among)
    taken = torch.tensor([not name.startswith("x") for name in among.sample_ids])
    tokens = expand(taken, among.lengths)
    assert expected.any()
    assert torch.equal(found[tokens], expected)
    assert not found[~tokens].any()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_zero_variance_has_zero_gradient(loss: PolicyLoss) -> None:
    groups = [make_group("a", [0.1] * 3), make_group("b", [0.0, 1.0])]
    plain = PolicyLoss(**{f: getattr(loss, f) for f in PolicyLoss.__dataclass_fields__} | {"kl_coef": 0.0})
    kept = with_random_logprobs(pack(groups, version=5, advantage=loss.advantage))
    found = grad(plain(kept).loss, kept)
    equal = expand(kept.groups == 0, kept.lengths)
    assert torch.equal(found[equal], torch.zeros(9))
    assert found[~equal].all()
    dropped = pack(groups, version=5, advantage=loss.advantage, zero_variance="leave_out")
    assert dropped.sample_ids == ("b/0", "b/1")


def test_truncated_samples_count_for_their_siblings_only() -> None:
    group = make_group("a", [1.0, 0.0])
    group.samples[1].finish_reason = "length"
    batch = pack([group], version=5, mask_truncated=True)
    assert batch.mask.tolist() == [True] * 3 + [False] * 3
    assert batch.advantages[0].item() == pytest.approx(group_advantages([1.0, 0.0])[0])


def test_nothing_to_pack() -> None:
    for groups in ([], [make_group("a", [None, None])]):
        batch = pack(groups, version=0)
        assert len(batch) == 0
        batch = batch.replace(logprobs=torch.zeros(0, requires_grad=True))
        assert grpo()(batch).loss.item() == 0.0
        assert list(grpo().weigh(batch).split(5)) == []


@pytest.mark.parametrize(
    ("groups", "settings", "says"),
    [
        ([make_group("a", [1.0, 0.0], [5, 7])], {}, "version 6: sample a/0 .* version 7"),
        ([make_group("a", [1.0, math.nan])], {}, "sample a/1: reward nan"),
        ([Group("a", [make_sample("a", 0, [5], 1.0, logprobs=[-math.inf])])], {}, "a/0: logprobs"),
        ([make_group("a", [1.0])], {"incomplete": "keep"}, "incomplete 'keep'"),
        ([make_group("a", [1.0])], {"zero_variance": "mask"}, "zero_variance 'mask'"),
        ([make_group("a", [1.0])], {"advantage": "gae"}, "advantage 'gae'"),
        ([make_group("a", [1.0])], {"max_staleness": -1}, "max_staleness"),
    ],
)
def test_bad_input(groups: list[Group], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack(groups, version=6, **settings)


# ---- the record


def test_sums_over_sequences() -> None:
    lengths = torch.tensor([2, 0, 3, 1, 0])
    x = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)
    mask = torch.tensor([1, 0, 0, 0, 0, 1], dtype=torch.bool)
    assert sums(x, lengths).tolist() == [3, 0, 12, 6, 0]
    assert means(x, mask, lengths).tolist() == [1, 0, 0, 6, 0]
    assert counts(mask, lengths).tolist() == [1, 0, 0, 1, 0]
    assert expand(torch.tensor([1, 2, 3, 4, 5]), lengths).tolist() == [1, 1, 3, 3, 3, 4]


def test_a_sequence_sum_does_not_depend_on_what_stands_beside_it() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    cuts = [0, 1, 34, 35, 99, 500, 503, 1000]
    lengths = torch.tensor([b - a for a, b in itertools.pairwise(cuts)])
    alone = [sums(x[a:b], torch.tensor([b - a])) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(sums(x, lengths), torch.cat(alone))


def test_padded_and_packed_are_the_same_record() -> None:
    packed = random_batch(3, lengths=(5, 2, 7))
    names = ("rollout_logprobs", "proximal_logprobs", "ref_logprobs", "versions", "mask", "advantages")
    fields: dict[str, Any] = {name: packed.padded(getattr(packed, name)) for name in names}
    logprobs = packed.padded(packed.need("logprobs").detach()).requires_grad_()
    padded = TrainBatch.from_padded(**fields, logprobs=logprobs, version=5, groups=packed.groups)
    for loss in LOSSES.values():
        a, b = loss(packed), loss(padded)
        torch.testing.assert_close(a.loss, b.loss, rtol=0, atol=1e-14)
        (g,) = torch.autograd.grad(b.loss, [logprobs])
        torch.testing.assert_close(packed.padded(grad(a.loss, packed)), g, rtol=0, atol=1e-15)


def test_select_takes_whole_sequences() -> None:
    whole = pack([make_group("a", [1.0, 0.0, 0.5], [4, OBSERVATION, 5]), two_turn_group()], version=6)
    part = whole.select(torch.tensor([False, True, False, True, False]))
    assert part.sample_ids == ("a/1", "g/0")
    assert part.lengths.tolist() == [3, 6]
    assert part.versions.tolist() == [4, -1, 5, 3, 3, -1, -1, 5, 5]
    assert part.inputs is not None and part.inputs.input_ids.tolist() == [7, 8, 20, 21, 22, 7, 20, 21, 22, 23, 24, 25]
    assert part.inputs.labels.tolist() == [20, 21, 22, 20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mask": torch.ones(17)}, "mask is torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask has shape \(3,\), must be \[17\]"),
        ({"advantages": torch.ones(17, dtype=torch.int64)}, "advantages is torch.int64"),
        ({"logprobs": torch.ones(2, 17)}, "logprobs has shape"),
        ({"versions": torch.ones(17)}, "versions is"),
        ({"groups": torch.zeros(1, dtype=torch.int64)}, "groups has shape"),
        ({"sample_ids": ("a",)}, "sample_ids has 1"),
        ({"lengths": torch.tensor([18, -1, 0, 0])}, "lengths has -1"),
        (
            {
                "inputs": Inputs(
                    input_ids=torch.zeros(20, dtype=torch.int64),
                    lengths=torch.tensor([5, 5, 5, 5]),
                    prompt_lengths=torch.tensor([1, 1, 1, 1]),
                )
            },
            "inputs.lengths",
        ),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        random_batch().replace(**fields)


def test_padded_fields_that_do_not_fit() -> None:
    mask, advantages = torch.ones(2, 3), torch.ones(2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"logprobs": torch.zeros(2, 4)}, "logprobs has shape"),
        ({"logprobs": torch.zeros(2, 3), "old_logprobs": torch.zeros(2, 3)}, "old_logprobs: no such field"),
        ({}, "rollout_logprobs"),
    ]
    for fields, says in cases:
        with pytest.raises(ValueError, match=says):
            TrainBatch.from_padded(mask=mask, advantages=advantages, **fields)
    with pytest.raises(ValueError, match="advantages has shape"):
        TrainBatch.from_padded(mask=mask, advantages=torch.ones(3), logprobs=torch.zeros(2, 3))


def test_params_are_untouched() -> None:
    """Packing reads samples and changes nothing of them."""
    group = two_turn_group()
    before = [(list(s.versions), list(s.logprobs), s.reward, s.masked, s.status) for s in group.samples]
    pack([group], version=6, max_staleness=0, last_segment_only=True, mask_truncated=True)
    assert [(list(s.versions), list(s.logprobs), s.reward, s.masked, s.status) for s in group.samples] == before
    assert group.samples[0].params == SamplingParams()
