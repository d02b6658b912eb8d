"""Replay of recorded rollouts: by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from longtail.bench.spec_replay import replay
from longtail.sample import Sample
from longtail.spec_decode.choice import make_drafter
from longtail.spec_decode.drafter import Draft, DraftRequest

PROMPT = [1, 2, 3]


def test_replay_by_hand() -> None:
    """The second says what the first said, but for one token: 10 11 12 are accepted and 20 is the target's own; then a
    last step, for which nothing may be drafted."""
    groups = [[(PROMPT, [10, 11, 12, 13]), (PROMPT, [10, 11, 12, 20, 21])]]
    alone = replay(groups, lambda: make_drafter("group"), finished_siblings=0)
    assert (alone.steps, alone.tokens, alone.accepted) == (9, 9, 0)
    after = replay(groups, lambda: make_drafter("group"), finished_siblings=1)
    # The first one after the second: drafts 10 11 12, of 4 tokens at most 3, and all are accepted: one step.
    assert (after.steps, after.tokens) == (1 + 2, 9)
    assert after.acceptance_length == 3.0
    assert after.judged_by_position == [2, 2, 2, 1]
    assert after.accepted_by_position == [2, 2, 2, 0]
    assert (after.drafted, after.accepted) == (3 + 4, 6)


def test_those_that_run_at_once_hear_each_other() -> None:
    """Token by token by turns: the second drafts what the first has just said, and overtakes it no further."""
    groups = [[(PROMPT, [10, 11, 12, 13]), (PROMPT, [10, 11, 12, 13])]]
    at_once = replay(groups, lambda: make_drafter("group"))
    # Steps: A 10. B drafts 10, says 10 11. A drafts 11, says 11 12. B drafts 12, says 12 13. A: its last.
    assert (at_once.steps, at_once.tokens, at_once.accepted) == (5, 8, 3)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="from 0 to 1, not 2"):
        replay([[(PROMPT, [1]), (PROMPT, [2])]], lambda: make_drafter("group"), finished_siblings=2)


class Fork:
    """Two ways at every place: 1 2, and 3 and behind it 4 or 5."""

    name = "fork"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft([1, 3, 2, 4, 5], self.name, parents=[-1, -1, 0, 1, 1]) for _ in requests]

    def observe(self, sample: Sample, num_new: int) -> None:
        pass

    def forget(self, sample_id: str) -> None:
        pass


def test_a_tree_is_followed_where_it_agrees() -> None:
    """3 5 and 9 (all of a branch, and the target's own); 1 and 8 (2 is wrong); 6 (neither); 3 and 1 at the end."""
    found = replay([[([0], [3, 5, 9, 1, 8, 6, 3, 1])]], Fork)
    assert (found.steps, found.tokens, found.accepted) == (4, 8, 2 + 1 + 0 + 1)
    assert (found.judged_by_position, found.accepted_by_position) == ([4, 3], [3, 1])
