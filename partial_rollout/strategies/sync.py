"""Wait for everything: the baseline that every trainer starts from."""

from __future__ import annotations

from longtail.partial_rollout.strategies.base import Strategy


class Sync(Strategy):
    """An iteration ends when everything that it works on has ended. Strictly on-policy; the tail is waited out.

    groups: it works on so many groups, the oldest; None: on all.
    """

    name = "sync"
