"""What `import longtail` offers."""

from __future__ import annotations

import pytest

import longtail
from longtail.errors import ExactNumericsUnavailable, LongtailError, SnapshotMismatch, TraceError, UnsupportedModel
from longtail.events import Event, ignore


def test_every_public_name_exists() -> None:
    """Also those that are loaded on first use."""
    assert sorted(longtail.__all__) == sorted(set(longtail.__all__))
    for name in longtail.__all__:
        assert getattr(longtail, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sampel'"):
        _ = longtail.Sampel


def test_errors_have_one_base_and_unsupported_model_is_misuse_too() -> None:
    for error in (ExactNumericsUnavailable, SnapshotMismatch, TraceError, UnsupportedModel):
        assert issubclass(error, LongtailError)
    assert issubclass(UnsupportedModel, ValueError)
    assert not issubclass(SnapshotMismatch, ValueError)


def test_an_event_counts_nothing_until_told() -> None:
    event = Event("step", 1.5)
    assert (event.duration, event.num_tokens, event.num_output_tokens, event.iteration) == (0.0, 0, 0, -1)
    ignore(event)
