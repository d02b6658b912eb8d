"""Linear layers on packed weights, and the proof that a row's bits do not depend on the batch.

Three ways to multiply on a CPU, fastest first; `find_row_rule` tries them on the running machine and the model's own
shapes and says which one, with which padding of the row count, gives every row the same bits:

- `onednn`: weights prepacked once, oneDNN inner product (torch.ops.mkldnn, the operator that inductor emits)
- `aten`: torch.nn.functional.linear (MKL)
- `tiles`: F.linear on blocks of exactly ROWS_PER_TILE rows; invariant by construction, several times slower

Measured (AMD Zen 5, 1-4 threads): oneDNN gives a row the same bits for every row count >= 2; MKL for multiples of 4
(with two threads it splits 5 rows into 4 + 1, so ">= 4" is not enough).

On a GPU `batch_invariant_linear` reaches the same by one tile configuration for a weight, whatever the batch, and no
split of the reduction (He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025): a row is
multiplied by the same instructions in the same order in decode, verification, prefill and the trainer's forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from longtail.kernels._checks import check_devices
from longtail.kernels._triton import compiles_for_amd, on_device_of, tl
from longtail.kernels._triton import jit as triton_jit

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

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """outputs: int64 [R] -> the weight's rows of these outputs, [R, in]."""
        weight = self.packed.to_dense() if self.packed.is_mkldnn else self.packed
        return weight[outputs]


def onednn_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [T, in], weight: [out, in] -> [T, out]."""
    return F.linear(x, weight, bias)


def batch_invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    rule: RowRule | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias + residual, a row of it having the same bits in every batch and at every place in it.

    x: [T, in]; weight: [out, in], of the same dtype; bias: [out] or None; residual: [T, out] or None; rule: of
    `find_row_rule`, by which float32 is multiplied on a CPU, packing the weight in each call (an engine keeps a
    `PackedLinear` instead) -> [T, out] in x's dtype. Sums are float32 and rounded once. No gradients. ValueError:
    shapes or dtypes that do not fit each other.
    """
    _check_linear(x, weight, bias, residual)
    if x.is_cuda:
        return batch_invariant_linear_triton(x, weight, bias, residual)
    if rule is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return batch_invariant_linear_reference(x, weight, bias, residual)
    rows, more = len(x), (0, 0, 0, rule.padded(len(x)) - len(x))
    linear = PackedLinear([weight], bias, rule.backend)
    return linear(F.pad(x, more).contiguous(), None if residual is None else F.pad(residual, more))[:rows]


def _check_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        given = f"x {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"batch_invariant_linear: {given}: want [T, in] and [out, in] of one dtype")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"batch_invariant_linear: bias {tuple(bias.shape)} must be [{weight.shape[0]}]")
    if residual is not None and residual.shape != (x.shape[0], weight.shape[0]):
        wanted = (x.shape[0], weight.shape[0])
        raise ValueError(f"batch_invariant_linear: residual {tuple(residual.shape)} must be {wanted}")
    check_devices("batch_invariant_linear", x=x, weight=weight, bias=bias, residual=residual)


def batch_invariant_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `batch_invariant_linear`; any device and dtype. Blocks of exactly ROWS_PER_TILE rows, the last one padded."""
    _check_linear(x, weight, bias, residual)
    dtype = torch.promote_types(x.dtype, torch.float32)
    tiles = F.pad(x.to(dtype), (0, 0, 0, -len(x) % ROWS_PER_TILE)).split(ROWS_PER_TILE)
    y = torch.cat([F.linear(tile, weight.to(dtype)) for tile in tiles])[: len(x)]
    y = y if bias is None else y + bias.to(dtype)
    y = y if residual is None else y + residual.to(dtype)
    return y.to(x.dtype)


class Tile(NamedTuple):
    """How the Triton kernel cuts a matmul: rows and outputs of a program, inputs of a round, and how it is launched."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tile_for(dtype: torch.dtype, out_features: int, amd: bool) -> Tile:
    """By the weight alone, never by the batch: decode pads its rows to a tile, which costs nothing while the weight is
    what takes time to read. Wide outputs take wide tiles; up to 8192, narrow ones keep more multiprocessors busy."""
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2 if amd else 3)
    if out_features > 8192:
        return Tile(64, 128, 64, 4, 2 if amd else 3)
    return Tile(64, 64, 64, 4, 2 if amd else 4)


GROUP = 8
"""Row tiles that are multiplied with one tile of the weight before the next: it is then still in the cache."""


def batch_invariant_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `batch_invariant_linear`; float32 (no TF32), float16 and bfloat16."""
    _check_linear(x, weight, bias, residual)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, weight = x.contiguous(), weight.contiguous()
    with on_device_of(x):
        tile = tile_for(x.dtype, outputs, compiles_for_amd())
        _linear_kernel[(-(-rows // tile.rows) * -(-outputs // tile.outputs),)](
            x,
            weight,
            x if bias is None else bias.contiguous(),
            x if residual is None else residual.contiguous(),
            out,
            rows,
            INPUTS=inputs,
            OUTPUTS=outputs,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            BLOCK_ROWS=tile.rows,
            BLOCK_OUT=tile.outputs,
            BLOCK_IN=tile.inputs,
            GROUP=GROUP,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


@triton_jit
def _linear_kernel(
    x: tl.tensor,  # this and what follows are contiguous
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """A program computes BLOCK_ROWS x BLOCK_OUT of the result, summing over all inputs in order."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    in_group = GROUP * tl.cdiv(OUTPUTS, BLOCK_OUT)
    first = program // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    m = (first + program % in_group % height).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = (program % in_group // height).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    x_at = x + m[:, None] * INPUTS + k[None, :]
    weight_at = weight + n[:, None] * INPUTS + k[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, INPUTS, BLOCK_IN):
        inside = (start + k < INPUTS)[None, :]
        a = tl.load(x_at, mask=(m < rows)[:, None] & inside, other=0.0)
        b = tl.load(weight_at, mask=(n < OUTPUTS)[:, None] & inside, other=0.0)
        acc += tl.dot(a, tl.trans(b), input_precision="ieee")
        x_at += BLOCK_IN
        weight_at += BLOCK_IN
    if BIAS:
        acc += tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    mask = (m < rows)[:, None] & (n < OUTPUTS)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + m[:, None] * OUTPUTS + n[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + m[:, None] * OUTPUTS + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


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
