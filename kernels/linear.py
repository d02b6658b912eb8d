"""Linear layers on packed weights, and the proof that a row's bits do not depend on the batch.

Three ways to multiply on a CPU, fastest first; `find_row_rule` tries them on the running machine and the model's own
shapes and says which one, with which padding of the row count, gives every row the same bits:

- `onednn`: weights prepacked once, oneDNN inner product (torch.ops.mkldnn, the operator that inductor emits)
- `aten`: torch.nn.functional.linear (MKL)
- `tiles`: F.linear on blocks of exactly ROWS_PER_TILE rows; invariant by construction, several times slower

Measured (AMD Zen 5, 1-4 threads): oneDNN gives a row the same bits for every row count >= 2; MKL for multiples of 4
(with two threads it splits 5 rows into 4 + 1, so ">= 4" is not enough).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F

Backend = Literal["onednn", "aten", "tiles"]
ROWS_PER_TILE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class RowRule:
    """How to call a matmul so that each row's bits are its own: pad the rows to at least `min_rows` and to a
    multiple of `multiple`."""

    backend: Backend
    min_rows: int = 1
    multiple: int = 1

    def padded(self, rows: int) -> int:
        rows = max(rows, self.min_rows)
        return rows + -rows % self.multiple


class PackedLinear:
    """One weight [out, in], or several stacked ones, in the layout that the backend reads. Call it on [T, in]."""

    __slots__ = ("backend", "bias", "in_features", "out_features", "packed")

    def __init__(self, weights: Iterable[torch.Tensor], bias: torch.Tensor | None, backend: Backend) -> None:
        parts = [w.detach() for w in weights]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.out_features, self.in_features = weight.shape
        self.backend = backend
        self.bias = bias
        # A copy in any case: the caller's tensor may be a trainer's, which changes it in place.
        self.packed = _pack(weight) if backend == "onednn" else weight.clone()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in] contiguous; residual: [T, out] added to the result -> [T, out]."""
        y: torch.Tensor
        if self.backend == "onednn":
            if residual is not None:
                y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")
            else:
                y = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
            return y
        if self.backend == "aten":
            y = F.linear(x, self.packed, self.bias)
        else:
            y = torch.cat([F.linear(tile, self.packed, self.bias) for tile in x.split(ROWS_PER_TILE)])
        return y if residual is None else y.add_(residual)


def onednn_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [T, in], weight: [out, in] -> [T, out]."""
    return F.linear(x, weight, bias)


_CANDIDATES = (
    RowRule("onednn", 1, 1),
    RowRule("onednn", 2, 1),
    RowRule("onednn", 4, 4),
    RowRule("onednn", 16, 16),
    RowRule("aten", 4, 1),
    RowRule("aten", 4, 4),
    RowRule("aten", 16, 16),
    RowRule("tiles", ROWS_PER_TILE, ROWS_PER_TILE),
)
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 130)


def find_row_rule(
    shapes: Iterable[tuple[int, int]], candidates: Iterable[RowRule] = _CANDIDATES, threads: Iterable[int] = (1, 2)
) -> RowRule | None:
    """The first rule under which rows keep their bits for every row count, place in the batch and thread count.

    shapes: (in, out) features of the model's linear layers; threads: besides torch's present setting.
    None if no candidate passes, in which case exact numerics is not available on this machine.
    """
    distinct = sorted(set(shapes))
    present = torch.get_num_threads()
    counts = sorted({present, *(t for t in threads if t <= present)})
    try:
        for rule in candidates:
            if rule.backend == "onednn" and not onednn_available():
                continue
            if all(_is_invariant(rule, shape, counts) for shape in distinct):
                return rule
    finally:
        torch.set_num_threads(present)
    return None


def _is_invariant(rule: RowRule, shape: tuple[int, int], threads: list[int]) -> bool:
    in_features, out_features = shape
    generator = torch.Generator().manual_seed(0)
    # Wide outputs (the LM head) are sampled: a row's bits do not depend on how many columns there are, and the
    # reduction runs over in_features, which is kept.
    out_features = min(out_features, 4096)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    most = rule.padded(max(_ROW_COUNTS))
    x = torch.randn(most, in_features, generator=generator)
    linear = PackedLinear([weight], None, rule.backend)
    expected = None
    for count in threads:
        torch.set_num_threads(count)
        for rows in sorted({rule.padded(r) for r in _ROW_COUNTS}, reverse=True):
            head, tail = linear(x[:rows].contiguous()), linear(x[most - rows :].contiguous())
            if expected is None:
                expected = head
            if not torch.equal(head, expected[:rows]) or not torch.equal(tail, expected[most - rows :]):
                return False
    return True
