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
    routed.extend(rows(0, 10, 20))
    array = np.asarray(routed)
    assert array.dtype == np.int16 and array.tolist()[1] == [[10, 11, 12], [13, 14, 15]]
    routed.extend(rows(30))  # an array that somebody holds does not stand in the way
    assert len(routed) == 4 and len(array) == 3
    assert routed == RoutedExperts(2, 3, rows(0, 10, 20, 30)) != RoutedExperts(3, 2, rows(0, 10, 20, 30))
    routed.truncate(2)
    assert np.asarray(routed, dtype=np.int64)[:, 0, 0].tolist() == [0, 10]


def test_bytes_that_are_no_rows_are_refused() -> None:
    for layers, top_k, data in ((2, 3, bytes(13)), (0, 3, b""), (2, -1, b"")):
        with pytest.raises(ValueError, match="no rows of"):
            RoutedExperts(layers, top_k, data)
    with pytest.raises(ValueError, match="no rows of 12"):
        RoutedExperts(2, 3).extend(bytes(13))
