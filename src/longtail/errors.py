"""Named failures. Misuse by the caller is a `ValueError` (see DESIGN.md section 6); these are the rest."""

from __future__ import annotations


class LongtailError(Exception):
    """Base of every error that is not the caller's misuse."""


class ExactNumericsUnavailable(LongtailError):
    """The start-up check found no way to make this machine's arithmetic independent of the batch."""


class UnsupportedModel(LongtailError, ValueError):
    """The engine cannot run this architecture; running it anyway would give a wrong answer."""


class SnapshotMismatch(LongtailError):
    """A saved KV snapshot does not belong to these weights, this model or this sample."""


class SnapshotCorrupt(SnapshotMismatch):
    """A file of a snapshot is missing, damaged or foreign. The sample continues from its tokens."""


class TraceError(LongtailError):
    """A trace file is missing, empty, truncated or not a longtail trace."""


class StoreError(LongtailError):
    """A sample store on disk cannot be used as asked. Nothing in it was changed."""


class DirectoryLocked(LongtailError):
    """Another process works in the directory."""


class StoreLocked(StoreError, DirectoryLocked):
    """Another process has the store open."""


class StoreCorrupt(StoreError):
    """What is on disk is not a sample store, or is damaged."""


class GradeError(LongtailError):
    """A sample cannot be graded: what its task says is missing or wrong. It gets no reward, and not a reward of 0."""


class SandboxUnavailable(LongtailError):
    """Programs cannot be run in a sandbox here; they are never run without one."""


class StoreFull(StoreError):
    """The disk is full: what was to be written is still in memory, and is written by the next commit that succeeds."""
