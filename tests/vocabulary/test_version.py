"""Policy versions."""

from __future__ import annotations

import pytest

from longtail.version import PolicyVersion, staleness


@pytest.mark.parametrize(("current", "token", "expected"), [(0, 0, 0), (3, 3, 0), (3, 1, 2), (5, 0, 5)])
def test_staleness(current: int, token: int, expected: int) -> None:
    assert staleness(PolicyVersion(current), PolicyVersion(token)) == expected


def test_staleness_of_a_token_from_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="token_version 4 is newer than the current policy version 3"):
        staleness(PolicyVersion(3), PolicyVersion(4))
