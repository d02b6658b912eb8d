"""RoutedExperts: rows of a sample's positions."""

from __future__ import annotations

import numpy as np
import pytest

from longtail import RoutedExperts


def rows(*positions: int) -> bytes:
    """Of two layers of three experts: a row says which position it is of."""
    return np.array([[[p, p + 1, p + 2], [p + 3, p + 4, p + 5]] for p in positions], np.int16).tobytes()


def test_rows_come_back_as_an_array() -> None:
    routed = RoutedExperts(2, 3)
    assert len(routed) == 0 and np.asarray(routed).shape == (0, 2, 3)
    routed.write(0, rows(0, 10, 20), keep=True)
    array = np.asarray(routed)
    assert array.dtype == np.int16 and array.tolist()[1] == [[10, 11, 12], [13, 14, 15]]
    routed.write(3, rows(30), keep=True)  # an array that somebody holds does not stand in the way
    assert len(routed) == 4 and len(array) == 3
    assert routed == RoutedExperts(2, 3, rows(0, 10, 20, 30)) != RoutedExperts(3, 2, rows(0, 10, 20, 30))


def test_computed_again_keeps_or_replaces() -> None:
    kept, replaced = RoutedExperts(2, 3, rows(0, 1, 2)), RoutedExperts(2, 3, rows(0, 1, 2))
    kept.write(1, rows(7, 8, 9), keep=True)
    replaced.write(1, rows(7), keep=False)
    assert np.asarray(kept)[:, 0, 0].tolist() == [0, 1, 2, 9]
    assert np.asarray(replaced)[:, 0, 0].tolist() == [0, 7]
    kept.write(0, rows(5, 6), keep=True)  # nothing beyond what is there
    kept.truncate(3)
    assert np.asarray(kept)[:, 0, 0].tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="3 to 4 are missing"):
        kept.write(4, rows(5), keep=True)


def test_bytes_that_are_no_rows_are_refused() -> None:
    for layers, top_k, data in ((2, 3, bytes(13)), (0, 3, b""), (2, -1, b"")):
        with pytest.raises(ValueError, match="no rows of"):
            RoutedExperts(layers, top_k, data)
