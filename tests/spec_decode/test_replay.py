"""Replay of recorded rollouts: by hand."""

from __future__ import annotations

import pytest

from longtail.bench.spec_replay import replay
from longtail.spec_decode.choice import make_drafter

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
