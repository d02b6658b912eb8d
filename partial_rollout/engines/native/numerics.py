"""Exact or fast: how the engine calls its matmuls, decided by a check on the running machine."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from longtail.errors import ExactNumericsUnavailable
from longtail.kernels.linear import RowRule, find_row_rule, onednn_available

Numerics = Literal["exact", "fast"]

logger = logging.getLogger(__name__)


def row_rule(numerics: Numerics, shapes: frozenset[tuple[int, int]]) -> RowRule:
    """The rule for linear layers of these (in, out) shapes.

    exact: proven here and now that each row's bits are independent of the batch (DESIGN.md section 1);
    ExactNumericsUnavailable if nothing passes. fast: whatever is quickest, rows unpadded.
    """
    if numerics == "fast":
        return RowRule("onednn" if onednn_available() else "aten")
    rule = _proven_rule(shapes, torch.get_num_threads())
    if rule is None:
        raise ExactNumericsUnavailable(
            "no way of calling matmul on this machine gives a row the same bits in every batch; "
            'use numerics="fast" (log-probabilities then differ by floating-point noise)'
        )
    if rule.backend == "tiles":
        logger.warning("exact numerics needs the slow tiled matmul on this machine; numerics='fast' is quicker")
    return rule


@functools.cache
def _proven_rule(shapes: frozenset[tuple[int, int]], threads: int) -> RowRule | None:
    # `threads` is in the key only: a proof holds for the thread setting it was made under.
    return find_row_rule(shapes)
