"""Windows, caps, sinks and draft trees in paged_attention on the CPU: kernel and reference against dense attention
written out, that a row's bits are its own, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from longtail.kernels import attention_cpu
from longtail.kernels.attention import (
    AttentionBatch,
    AttentionVariant,
    paged_attention,
    paged_attention_reference,
)
from longtail.kernels.kv import empty_kv, empty_scales, store_kv

TREE = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101, 0b1001011]
"""Row 0 with children 1, 2; 3 below 1; 4 and 5 below 2; 6 below 3."""
Span = tuple[int, int]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "output") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-6, msg=lambda m: f"{name}: {m}")


class World:
    """Sequences with random q, k, v at every position; `attend` asks for the rows of some positions."""

    def __init__(
        self,
        lens: list[int],
        dim: int = 16,
        block: int = 16,
        kv_heads: int = 1,
        group: int = 3,
        variant: AttentionVariant | None = None,
        layout: Any = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lens, self.block, self.group, self.scale = lens, block, group, dim**-0.5
        self.variant = variant or AttentionVariant()
        generator = torch.Generator().manual_seed(0)
        heads = kv_heads * group
        self.q, self.k, self.v = (
            [torch.randn(n, h, dim, generator=generator) for n in lens] for h in (heads, kv_heads, kv_heads)
        )
        counts = [-(-n // block) for n in lens]
        ids = list(range(sum(counts) + 2))
        random.Random(0).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.kv = empty_kv(sum(counts) + 2, 2, kv_heads, block, dim, layout=layout, dtype=dtype)
        self.scales = None
        if dtype != torch.float32:
            self.scales = empty_scales(sum(counts) + 2, 2, kv_heads, block)
        else:
            self.kv.fill_(torch.nan)
        for i in range(len(lens)):
            self.store(i)

    def store(self, i: int) -> None:
        at = [self.tables[i][p // self.block] * self.block + p % self.block for p in range(self.lens[i])]
        store_kv(self.k[i], self.v[i], self.kv, 1, torch.tensor(at), self.block, self.scales)

    def batch(self, spans: list[Span], trees: Sequence[Sequence[int] | None] | None = None) -> AttentionBatch:
        tables = self.tables
        if self.variant.window:  # blocks before the window of every row are gone
            dead = [max(start + 1 - self.variant.window, 0) // self.block for start, _ in spans]
            tables = [[-1] * k + table[k:] for k, table in zip(dead, tables, strict=True)]
        lens = [stop - start for start, stop in spans]
        return AttentionBatch.build(lens, [stop for _, stop in spans], tables, self.group, trees)

    def attend(
        self, spans: list[Span], trees: Sequence[Sequence[int] | None] | None = None, backend: Any = None
    ) -> list[torch.Tensor]:
        q = torch.cat([q[start:stop] for q, (start, stop) in zip(self.q, spans, strict=True)])
        batch = self.batch(spans, trees)
        out = paged_attention(q, self.kv, 1, batch, self.block, self.scale, self.variant, self.scales, backend)
        return list(out.split([stop - start for start, stop in spans]))

    def whole(self, backend: Any = None) -> list[torch.Tensor]:
        return self.attend([(0, n) for n in self.lens], backend=backend)

    def dense(self, i: int, seen: torch.Tensor) -> torch.Tensor:
        """seen: bool [rows, positions], of the last rows -> their outputs, in float64, all written out."""
        of, rows = self.variant, len(seen)
        k, v = (x[i].double().repeat_interleave(self.group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q[i][-rows:].double(), k) * self.scale
        if of.softcap:
            scores = of.softcap * (scores / of.softcap).tanh()
        weights = scores.exp() * seen
        total = weights.sum(-1, keepdim=True)
        if of.sinks is not None:
            total = total + of.sinks.double().exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / total, v).float()

    def causal(self, i: int) -> torch.Tensor:
        n, window = self.lens[i], self.variant.window
        p = torch.arange(n)
        seen = p[None] <= p[:, None]
        return self.dense(i, seen & (p[None] > p[:, None] - window) if window else seen)


SINKS = torch.tensor([1.5, -torch.inf, 20.0])
VARIANTS = {
    "window_1": AttentionVariant(window=1),
    "window_16": AttentionVariant(window=16),
    "window_29": AttentionVariant(window=29),
    "softcap": AttentionVariant(softcap=0.8),
    "softcap_50": AttentionVariant(softcap=50.0),
    "sinks": AttentionVariant(sinks=SINKS),
    "all": AttentionVariant(window=21, softcap=2.0, sinks=SINKS),
}
LENS = [1, 15, 16, 17, 70, 40]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_dense_attention(name: str, backend: str) -> None:
    world = World(LENS, variant=VARIANTS[name])
    for i, rows in enumerate(world.whole(backend)):
        assert_close(rows, world.causal(i), f"sequence {i}")


@pytest.mark.parametrize("name", ["window_29", "all"])
def test_the_6d_layout_is_the_reference_s(name: str) -> None:
    """And where nothing is said it is taken."""
    ours, theirs = World(LENS, variant=VARIANTS[name], layout="hnd"), World(LENS, variant=VARIANTS[name])
    for i, rows in enumerate(ours.whole()):
        assert torch.equal(rows, theirs.whole("reference")[i])


@pytest.mark.parametrize("layout", ["cpu", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
def test_8_bit_caches_are_close(dtype: torch.dtype, layout: str) -> None:
    """Codes are off by half a step: e4m3 by 2^-4 of the value, int8 by 1/254 of the row's largest."""
    world = World(LENS, kv_heads=2, group=1, layout=layout, dtype=dtype, variant=AttentionVariant(window=29))
    tolerance = 0.15 if dtype == torch.float8_e4m3fn else 0.02
    for i, rows in enumerate(world.whole()):
        torch.testing.assert_close(rows, world.causal(i), rtol=tolerance, atol=tolerance)


def test_sinks_by_hand() -> None:
    """One key with score 0, a sink of ln 3: the value counts for 1/4."""
    kv = empty_kv(1, 1, 1, 16, 16)
    store_kv(torch.zeros(1, 1, 16), torch.full((1, 1, 16), 8.0), kv, 0, torch.tensor([0]), 16)
    batch = AttentionBatch.build([1], [1], [[0]], 1)
    of = AttentionVariant(sinks=torch.tensor([1.0986123]))
    for backend in ("cpu", "reference"):
        out = paged_attention(torch.ones(1, 1, 16), kv, 0, batch, 16, 1.0, of, backend=backend)
        torch.testing.assert_close(out, torch.full((1, 1, 16), 2.0))


@pytest.mark.parametrize("factor", [1e-4, 300.0, 1e18])
def test_the_cap_is_tanh_for_all_magnitudes(factor: float) -> None:
    world = World([40], variant=AttentionVariant(softcap=5.0))
    world.q[0] *= factor
    assert_close(world.whole("cpu")[0], world.causal(0))


# ---- draft trees


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("base", [0, 5, 14, 40])
def test_a_tree_is_dense_attention_under_its_mask(base: int, variant: str, backend: str) -> None:
    """The window of a row counts from its depth: over its path, then back over the committed positions."""
    of = AttentionVariant(window=9, softcap=2.0, sinks=SINKS) if variant == "all" else AttentionVariant()
    n = base + len(TREE)
    world = World([n, 20], variant=of)
    out = world.attend([(base, n), (3, 20)], [TREE, None], backend)
    seen = torch.zeros(len(TREE), n, dtype=torch.bool)
    for row, mask in enumerate(TREE):
        path = [base + j for j in range(len(TREE)) if mask >> j & 1]
        seen[row, ([*range(base), *path])[-9 if variant == "all" else 0 :]] = True
    assert_close(out[0], world.dense(0, seen))
    assert torch.equal(out[1], world.attend([(base, base), (3, 20)], backend=backend)[1])


def test_a_chain_is_plain_verification_bit_for_bit() -> None:
    chain = [(1 << row + 1) - 1 for row in range(6)]
    for variant in (AttentionVariant(softcap=9.0), VARIANTS["window_29"]):
        world = World([70], variant=variant)
        assert torch.equal(world.attend([(64, 70)], [chain])[0], world.attend([(64, 70)])[0])


def test_trees_in_the_batch_by_hand() -> None:
    """Sequence 0: a tree of three rows on five committed tokens; sequence 1: two plain rows."""
    batch = AttentionBatch.build([3, 2], [8, 4], [[0], [1]], 1, [[0b1, 0b11, 0b101], None])
    assert batch.tree_masks is not None and batch.tree_bases is not None
    assert batch.tree_masks.tolist() == [1, 3, 5, 0, 0]
    assert batch.tree_bases.tolist() == [5, 5, 5, 3, 4]
    assert batch.context_lens.tolist() == [6, 7, 8, 3, 4]
    assert batch.first_seen(3).tolist() == [3, 4, 4, 0, 1]  # the tree's depths are 1, 2, 2
    assert AttentionBatch.build([3, 2], [8, 4], [[0], [1]], 1, [None, None]).tree_masks is None


@pytest.mark.parametrize(
    ("masks", "says"),
    [
        ([1, 3], r"2 masks for 3 rows"),
        ([1, 1, 5], r"row 1 must see itself, set bit 1"),
        ([1, 3, 8 | 4], r"mask of row 2 is 0xc, its bits must name the 3 rows"),
        ([1, 3, 0], r"mask of row 2 is 0x0"),
    ],
)
def test_masks_that_are_no_tree(masks: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AttentionBatch.build([3], [8], [[0]], 1, [masks])


def test_trees_that_are_too_large() -> None:
    with pytest.raises(ValueError, match="at most 63 rows, not 64"):
        AttentionBatch.build([64], [64], [[0]], 1, [[1 << i for i in range(64)]])
    batch = AttentionBatch.build([3], [8], [[0]], 1, [[1, 3, 7]])
    with pytest.raises(ValueError, match="path of 3 tree rows does not fit in a window of 2"):
        batch.first_seen(2)


# ---- bit for bit


@pytest.mark.parametrize("name", VARIANTS)
def test_decode_is_chunked_prefill_is_whole_prefill(name: str) -> None:
    """With other blocks gone and other rows in the tile each time."""
    world = World([70], variant=VARIANTS[name])
    (whole,) = world.whole("cpu")
    for chunk in (1, 3, 5, 17):
        chunks = [world.attend([(p, min(p + chunk, 70))])[0] for p in range(0, 70, chunk)]
        assert torch.equal(torch.cat(chunks), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("name", ["window_29", "all"])
@pytest.mark.parametrize(("dim", "block"), [(36, 16), (64, 32)])
def test_neither_the_batch_nor_the_threads_change_a_bit(
    name: str, dim: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(LENS, dim=dim, block=block, variant=VARIANTS[name])
    spans = [(0, 1), (3, 15), (15, 16), (0, 17), (61, 70), (40, 40)]
    outputs = []
    for threshold in (0, 10**9):  # the parallel compilation and the serial one
        monkeypatch.setattr(attention_cpu, "PARALLEL_FROM", threshold)
        outputs.append(torch.cat(world.attend(spans)))
    assert torch.equal(*outputs)
    for i, rows in enumerate(outputs[0].split([stop - start for start, stop in spans])):
        alone = [(n, n) for n in world.lens]
        alone[i] = spans[i]
        assert torch.equal(world.attend(alone)[i], rows)


def test_a_tree_does_not_depend_on_the_batch() -> None:
    world = World([47, 30], variant=VARIANTS["all"])
    both = world.attend([(40, 47), (10, 30)], [TREE, None])
    assert torch.equal(world.attend([(40, 47), (30, 30)], [TREE, None])[0], both[0])


def test_a_window_that_holds_everything_is_plain_attention_bit_for_bit() -> None:
    plain = torch.cat(World(LENS).whole())
    assert torch.equal(torch.cat(World(LENS, variant=AttentionVariant(window=10**6)).whole()), plain)


# ---- what is broken stays visible


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["plain", "all", "softcap"])
def test_a_bad_key_is_not_hidden(name: str, bad: float) -> None:
    """Not by the maximum, which drops NaN, and not by the exponential, whose value at NaN would be 0."""
    world = World([40], variant=VARIANTS.get(name))
    world.k[0][30, 0, 2] = bad
    world.q[0][:, :, 2] = 1.0
    world.store(0)
    (out,) = world.whole("cpu")
    assert out[:30].isfinite().all()
    if bad != bad or name == "plain":  # a cap takes an infinite score to the cap, as it should
        assert out[30:].isnan().all()


def test_a_bad_sink_is_not_hidden() -> None:
    world = World([20], variant=AttentionVariant(sinks=torch.tensor([0.0, torch.nan, 0.0])))
    for backend in ("cpu", "reference"):
        (out,) = world.whole(backend)
        assert out[:, 1].isnan().all()
        assert out[:, [0, 2]].isfinite().all()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"window": -1}, "window must be 0"),
        ({"softcap": -1.0}, "softcap must be 0"),
        ({"softcap": float("nan")}, "softcap must be 0"),
        ({"sinks": torch.ones(3).double()}, "sinks must be float32"),
        ({"sinks": torch.ones(3, 1)}, "sinks must be float32"),
        ({"sinks": torch.ones(6)[::2]}, "and contiguous"),
    ],
)
def test_a_variant_that_means_nothing(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AttentionVariant(**arguments)


def test_backends_say_what_they_do_not_take() -> None:
    world = World([20])
    batch, q = world.batch([(19, 20)]), world.q[0][19:]

    def attend(kv: torch.Tensor, backend: Any, **more: Any) -> None:
        paged_attention(q, kv, 1, batch, 16, 1.0, backend=backend, **more)

    with pytest.raises(ValueError, match="backend 'cuda' is none of"):
        attend(world.kv, "cuda")
    with pytest.raises(ValueError, match="CPU kernel takes float32, a 5-D cache"):
        attend(world.kv.half(), "cpu")
    with pytest.raises(ValueError, match="CPU kernel takes float32, a 5-D cache"):
        attend(empty_kv(4, 2, 1, 16, 16, layout="hnd"), "cpu")
    with pytest.raises(ValueError, match="takes no scales"):
        attend(world.kv, "cpu", scales=empty_scales(4, 2, 1, 16))
    with pytest.raises(ValueError, match="needs scales"):
        attend(empty_kv(4, 2, 1, 16, 16, dtype=torch.int8), None)
    with pytest.raises(ValueError, match="has no scales"):
        attend(world.kv, "reference", scales=empty_scales(4, 2, 1, 16))
    with pytest.raises(ValueError, match=r"6-D cache .*layout='hnd'"):
        attend(world.kv, "triton")
    for backend in ("cpu", "reference"):
        with pytest.raises(ValueError, match=r"sinks must be \[3\]"):
            attend(world.kv, backend, variant=AttentionVariant(sinks=torch.ones(2)))
        with pytest.raises(ValueError, match="does not fit kv"):
            attend(empty_kv(4, 2, 2, 16, 16), backend)


def test_the_reference_is_what_the_default_falls_back_to() -> None:
    world = World([20], dim=10)
    expected = paged_attention_reference(world.q[0], world.kv, 1, world.batch([(0, 20)]), 16, world.scale)
    assert torch.equal(world.whole()[0], expected)
