"""longtail: a rollout layer for reinforcement learning on language models that attacks the long tail.

The vocabulary is imported here; the parts live in longtail.partial_rollout, longtail.kv_manager, longtail.kernels,
longtail.spec_decode, longtail.trainer_adapter and longtail.bench, and are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtail.errors import (
    DirectoryLocked,
    ExactNumericsUnavailable,
    LongtailError,
    SnapshotMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    TraceError,
    UnsupportedModel,
)
from longtail.events import Event
from longtail.routing import RoutedExperts
from longtail.sample import Group, Sample, Segment
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint, PolicyVersion, staleness

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.native.engine import NativeEngine
    from longtail.partial_rollout.rollout import Rollout
    from longtail.partial_rollout.store import SampleStore
    from longtail.partial_rollout.strategies import Sync, TokenBudget

__version__ = "0.1.0"

__all__ = [
    "DirectoryLocked",
    "Event",
    "ExactNumericsUnavailable",
    "Fingerprint",
    "Group",
    "LongtailError",
    "NativeEngine",
    "PolicyVersion",
    "Rollout",
    "RoutedExperts",
    "Sample",
    "SampleStore",
    "SamplingParams",
    "Segment",
    "Sequence",
    "SnapshotMismatch",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "Sync",
    "TokenBudget",
    "TraceError",
    "UnsupportedModel",
    "staleness",
]

# Loaded on first use, so that `import longtail` needs neither torch nor pandas.
_LAZY = {
    "NativeEngine": "longtail.partial_rollout.engines.native.engine",
    "Rollout": "longtail.partial_rollout.rollout",
    "SampleStore": "longtail.partial_rollout.store",
    "Sync": "longtail.partial_rollout.strategies",
    "TokenBudget": "longtail.partial_rollout.strategies",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'longtail' has no attribute {name!r}")
