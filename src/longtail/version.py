"""Policy versions: which weights made a token."""

from __future__ import annotations

from typing import NewType

PolicyVersion = NewType("PolicyVersion", int)
"""Counts weight updates: 0 for the first weights, +1 per update."""

Fingerprint = NewType("Fingerprint", str)
"""Hash of the weights that made a KV block. Equal versions of different runs have different fingerprints."""


def check_version(version: int) -> PolicyVersion:
    """The same, if it can be one: ValueError for anything but an integer of at least 0."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version must be an integer of at least 0, not {version!r}")
    return PolicyVersion(version)


def check_newer(version: int, current: PolicyVersion) -> PolicyVersion:
    """The same, if it can follow `current`: ValueError if it is no integer, or not above it."""
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError(f"version must be an integer, not {version!r}")
    if version <= current:
        raise ValueError(f"version must be above the current {current}, not {version}; versions only grow")
    return PolicyVersion(version)


def staleness(current: PolicyVersion, token_version: PolicyVersion) -> int:
    """How many updates the current policy is ahead of the one that made a token.

    Raises ValueError if the token claims to come from a future policy.
    """
    if token_version > current:
        raise ValueError(f"token_version {token_version} is newer than the current policy version {current}")
    return current - token_version
