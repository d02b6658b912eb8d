"""The three calls beside a step loop: what is drafted, judged and counted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from tests.spec_decode.helpers import accepted, extend, make_sample

from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.controller import ControllerConfig
from longtail.spec_decode.drafter import Draft, DraftRequest
from longtail.spec_decode.speculation import DrafterDropped, Speculation
from longtail.spec_decode.suffix_drafter import SuffixConfig, group_drafter


class Says:
    """Proposes what it was told to."""

    name = "says"

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.observed: list[tuple[str, int]] = []
        self.forgotten: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self.tokens[: r.max_tokens], self.name) for r in requests]

    def observe(self, sample: Sample, num_new: int) -> None:
        self.observed.append((sample.id, num_new))

    def forget(self, sample_id: str) -> None:
        self.forgotten.append(sample_id)


def knows_costs(drafter: Says, batch: int, row_seconds: float = 0.0, match: bool = True) -> Speculation:
    speculation = Speculation(drafter, controller=ControllerConfig(max_drafts=4), match=match, clock=lambda: 0.0)
    for rows in range(1, 5 * batch + 1):
        for _ in range(5):
            speculation.cost.record(rows, 0.01 + row_seconds * rows)
    return speculation


def test_a_step_by_hand() -> None:
    drafter = Says([1, 2, 3, 4, 5])
    speculation = knows_costs(drafter, 2)
    a, b = make_sample("a"), make_sample("b")
    drafts = speculation.draft([a, b], [9, 2])
    assert [d.tokens for d in drafts] == [[1, 2, 3, 4], [1, 2]]
    extend(a, [1, 2, 9])
    extend(b, [1, 2, 3])
    speculation.done([a, b], drafts, [2, 2], [3, 3], 0.016)
    assert drafter.observed == [("a", 3), ("b", 3)]
    counts = speculation.forget("a")
    assert (counts.steps, counts.drafted, counts.accepted, counts.rejected, counts.emitted) == (1, 4, 2, 2, 3)
    assert counts.acceptance_length == 3.0
    assert counts.verify_seconds == pytest.approx(0.016 * 5 / 8)
    assert speculation.total.verify_seconds == pytest.approx(0.016)
    assert (speculation.total.drafted, speculation.total.accepted) == (6, 4)
    assert speculation.acceptance.by_position() == {"says": [(2, 2), (2, 2), (1, 0)]}
    assert drafter.forgotten == ["a"]
    assert speculation.forget("a").acceptance_length is None


def test_drafts_that_were_not_verified_are_judged_by_what_comes() -> None:
    """Rows that do not pay: no draft is verified, and yet acceptance is known by position. The first draft comes true
    twice and fails; those of the other two steps fail at once."""
    speculation = knows_costs(Says([1, 2, 3, 4]), 1, row_seconds=0.1)
    sample = make_sample("a")
    for token in (1, 2, 9):
        drafts = speculation.draft([sample], [4])
        assert drafts[0].tokens == []
        extend(sample, [token])
        speculation.done([sample], drafts, [0], [1], 0.11)
    assert speculation.acceptance.by_position() == {"says": [(3, 1), (1, 1), (1, 0)]}
    assert speculation.total.drafted == speculation.total.steps == 0
    assert speculation.plan is not None
    assert speculation.plan.reason == "does not pay"


@pytest.mark.parametrize("row_seconds", [0.0, 0.003, 0.1], ids=["all verified", "some", "none"])
def test_every_draft_is_judged_the_same_verified_or_not(row_seconds: float) -> None:
    """Against a comparison of each draft with the stream; the drafts and the stream are random."""
    rng = random.Random(0)
    drafter = Says([])
    speculation = knows_costs(drafter, 1, row_seconds)
    sample = make_sample("a")
    stream = [rng.randrange(3) // 2 for _ in range(400)]
    expected = [[0, 0] for _ in range(4)]
    verified = 0
    while len(sample.output_ids) < len(stream):
        position = len(sample.output_ids)
        drafter.tokens = [rng.randrange(3) // 2 for _ in range(4)]
        same = accepted(drafter.tokens, stream[position:])
        drafts = speculation.draft([sample], [4])
        if speculation.plan is not None:  # drafts were made
            for j in range(min(same + 1, 4, len(stream) - position)):
                expected[j][0] += 1
                expected[j][1] += j < same
        taken = min(same, len(drafts[0]))
        verified += len(drafts[0]) > 0
        new = stream[position : position + taken + 1]
        extend(sample, new)
        if len(sample.output_ids) == len(stream):
            sample.status = "finished"
        speculation.done([sample], drafts, [taken], [len(new)], 0.01 + row_seconds * (1 + len(drafts[0])))
    assert speculation.acceptance.by_position()["says"] == [(j, a) for j, a in expected]
    assert (verified > 0, speculation._open) == (row_seconds < 0.1, {})


def test_under_rejection_sampling_only_verified_drafts_are_judged() -> None:
    speculation = knows_costs(Says([1, 2]), 1, match=False)
    sample = make_sample("a")
    drafts = speculation.draft([sample], [4])
    extend(sample, [1, 5])
    speculation.done([sample], drafts, [1], [2], 0.01)
    assert speculation.acceptance.by_position() == {"says": [(1, 1), (1, 0)]}
    drafts = speculation.draft([sample], [4])
    extend(sample, [1])  # which ends the sample: the second token was not judged
    speculation.done([sample], drafts, [1], [1], 0.01)
    assert speculation.acceptance.by_position() == {"says": [(2, 2), (1, 0)]}


def test_a_sample_that_ends_within_its_draft() -> None:
    """Tokens behind the end are not judged, and not counted as emitted."""
    speculation = knows_costs(Says([1, 2, 3, 4]), 1)
    sample = make_sample("a")
    drafts = speculation.draft([sample], [4])
    extend(sample, [1, 2])
    sample.status = "finished"
    speculation.done([sample], drafts, [2], [2], 0.01)
    assert speculation.acceptance.by_position() == {"says": [(1, 1), (1, 1)]}
    assert speculation.total.emitted == 2


def test_a_turn_that_ends_within_its_draft() -> None:
    """What the environment writes then says nothing of the draft."""
    speculation = knows_costs(Says([1, 2, 3, 4]), 1)
    sample = make_sample("a")
    sample.multi_turn = True
    drafts = speculation.draft([sample], [4])
    extend(sample, [1, 2])
    sample.status, sample.turn_ended = "paused", True
    speculation.done([sample], drafts, [2], [2], 0.01)
    sample.append_observation([7, 8, 9])
    extend(sample, [5])
    speculation.observe(sample, 1)
    assert speculation.acceptance.by_position() == {"says": [(1, 1), (1, 1)]}


def test_a_sample_that_was_cut_elsewhere_is_not_judged_by_what_it_wrote_before() -> None:
    drafter = Says([1, 2, 3])
    speculation = knows_costs(drafter, 1)
    sample = make_sample("a", output=[5, 5, 5])
    drafts = speculation.draft([sample], [4])
    extend(sample, [1])
    speculation.done([sample], drafts, [1], [1], 0.01)  # the rest of the draft is open
    sample.status = "paused"
    sample.cut(1)
    speculation.enter(sample.id)
    assert drafter.forgotten == ["a"]
    extend(sample, [5, 5, 9, 9, 9])
    speculation.observe(sample, 5)
    assert speculation.acceptance.by_position() == {}
    assert speculation.forget("a").drafted == 3


def test_a_result_that_is_thrown_away_counts_nothing_and_is_judged_when_the_sample_comes_back() -> None:
    drafter = Says([1, 2])
    speculation = knows_costs(drafter, 1)
    sample = make_sample("a")
    drafts = speculation.draft([sample], [4])
    speculation.done([sample], drafts, [0], [0], 0.01)
    drafts = speculation.draft([sample], [4])  # again, and this step raises: `done` is not called
    drafts = speculation.draft([sample], [4])
    speculation.done([sample], drafts, [0], [0], 0.0)
    assert speculation.total.drafted == 0
    assert drafter.observed == []
    assert speculation.acceptance.by_position() == {}
    extend(sample, [1, 3])
    speculation.observe(sample, 2)
    assert speculation.acceptance.by_position() == {"says": [(1, 1), (1, 0)]}


@pytest.mark.parametrize(
    ("params", "refilled", "verified"),
    [
        (SamplingParams(ignore_eos=True), False, [0, 0]),
        (SamplingParams(ignore_eos=True), True, [1, 0]),
        (SamplingParams(ignore_eos=True, stop_token_ids=(9,)), False, [1, 0]),
        (SamplingParams(), False, [1, 0]),
    ],
    ids=["the ends are known", "refilled", "a stop id", "EOS"],
)
def test_whose_tokens_count(params: SamplingParams, refilled: bool, verified: list[int]) -> None:
    """10 ms and 3 ms a row. Sample a has 3 tokens left, b 900. A draft for a pays by tokens a second (2.6 in 19 ms
    against 2 in 16), and does nothing for the end of a run that ends with b."""
    drafter = Says([1])
    speculation = knows_costs(drafter, 2, row_seconds=0.003)
    a, b = make_sample("a"), make_sample("b")
    for sample in (a, b):
        sample.params = params
    for _ in range(40):
        speculation.acceptance.judge(Draft([1], "says"), 1, rejected=False)
    drafts = speculation.draft([a, b], [2, 0], refilled=refilled, left=[3, 900])
    assert [len(d) for d in drafts] == verified


def test_samples_that_stop_make_the_ends_open() -> None:
    """Caps of 100: before anything is known a stop in 256 tokens is assumed; then 50 samples of 10 tokens stop, or all
    come to their caps."""
    for reason, low, high in (("stop", 0.0, 0.0), ("length", 0.99, 1.0)):
        speculation = knows_costs(Says([1]), 1)
        sample = make_sample("a")
        assert speculation._worth_of([sample], [100]).certain == pytest.approx(math.exp(-100 / 256))
        for i in range(50 if reason == "stop" else 250):
            done = make_sample(f"{reason} {i}")
            extend(done, range(10 if reason == "stop" else 100))
            done.finish_reason = reason  # type: ignore[assignment]
            speculation.observe(done, len(done.output_ids))
        assert low <= speculation._worth_of([sample], [100]).certain <= high


def test_time_to_draft_is_charged_to_those_drafted_for() -> None:
    clock = itertools.count()
    speculation = knows_costs(Says([1]), 2)
    speculation.now = lambda: float(next(clock))
    samples = [make_sample("a"), make_sample("b")]
    drafts = speculation.draft(samples, [0, 1])
    for sample in samples:
        extend(sample, [1])
    speculation.done(samples, drafts, [0, 0], [1, 1], 0.01)
    assert speculation.total.draft_seconds == speculation.by_drafter["says"].draft_seconds == 1.0
    assert [speculation.forget(name).draft_seconds for name in ("a", "b")] == [0.0, 1.0]


def test_estimates_that_are_no_probabilities_drop_the_drafter() -> None:
    class Claims(Says):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([1], self.name, [float("nan")]) for _ in requests]

    speculation = knows_costs(Claims([]), 1)
    with pytest.warns(DrafterDropped, match="probs must be probabilities"):
        speculation.draft([make_sample("a")], [4])


def test_no_room_no_draft() -> None:
    speculation = knows_costs(Says([1, 2]), 2)
    samples = [make_sample("a"), make_sample("b")]
    assert [len(d) for d in speculation.draft(samples, [0, 0])] == [0, 0]
    assert [len(d) for d in speculation.draft(samples, [0, 1])] == [0, 1]
    assert speculation.draft([], []) == []
    speculation.done([], [], [], [], 0.01)


def test_trees_are_refused_until_they_can_be_verified() -> None:
    drafter = group_drafter(SuffixConfig(tree=True))
    speculation = knows_costs(Says([]), 1)
    speculation.drafter = drafter
    drafter.learn(make_sample("b", output=[5, 6]))
    with pytest.warns(DrafterDropped, match="one path"):
        assert [draft.tokens for draft in speculation.draft([make_sample("a")], [4])] == [[]]
    assert speculation.failure is not None


def test_report() -> None:
    speculation = knows_costs(Says([1, 2]), 1)
    sample = make_sample("a")
    for _ in range(3):
        drafts = speculation.draft([sample], [4])
        extend(sample, [1, 2, 7])
        speculation.done([sample], drafts, [2], [3], 0.01)
    report = speculation.report()
    says = report["drafters"]["says"]
    assert (says["steps"], says["drafted"], says["accepted"], says["emitted"]) == (3, 6, 6, 9)
    assert says["acceptance_length"] == 3.0
    assert says["judged_by_position"] == says["accepted_by_position"] == [3, 3]
    (batch,) = report["batches"]
    assert batch["batch"] == 1
    assert batch["steps"] == {"drafted": 3}
    assert batch["break_even_acceptance"] == pytest.approx(0.01, abs=1e-3)
    assert report["won_seconds"] == pytest.approx(0.06)


def test_a_group_is_drafted_for_better_than_its_samples_alone() -> None:
    """Eight samples of one noisy text: with `group` fewer steps than with `ngram`, and the same tokens."""
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(200)]
    streams = [[t if rng.random() < 0.9 else rng.randrange(1000) for t in text] for _ in range(8)]
    steps = {}
    for scope in ("prompt", "sample"):
        drafter = group_drafter()
        samples = [make_sample(f"g/{i}", [1, 2, 3] if scope == "prompt" else [1, 2, 3 + i]) for i in range(8)]
        steps[scope] = 0
        for sample, stream in zip(samples, streams, strict=True):
            while len(sample.output_ids) < len(stream):
                position = len(sample.output_ids)
                (draft,) = drafter.propose([DraftRequest(sample, 6)])
                taken = accepted(draft.tokens, stream[position:])
                new = stream[position : position + taken + 1]
                extend(sample, new)
                drafter.observe(sample, len(new))
                steps[scope] += 1
            assert sample.output_ids == stream
            drafter.forget(sample.id)
        drafter.check_integrity()
    assert steps["prompt"] < 0.5 * steps["sample"]
