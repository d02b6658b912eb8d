"""Policy versions: which weights made a token."""

from __future__ import annotations

from typing import NewType

PolicyVersion = NewType("PolicyVersion", int)
"""Counts weight updates: 0 for the first weights, +1 per update."""

Fingerprint = NewType("Fingerprint", str)
"""Hash of the weights that made a KV block. Equal versions of different runs have different fingerprints."""


def staleness(current: PolicyVersion, token_version: PolicyVersion) -> int:
    """How many updates the current policy is ahead of the one that made a token.

    Raises ValueError if the token claims to come from a future policy.
    """
    if token_version > current:
        raise ValueError(f"token_version {token_version} is newer than the current policy version {current}")
    return current - token_version
