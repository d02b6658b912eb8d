"""Windows, caps, sinks, draft trees and 8-bit caches in paged_attention's Triton kernels: against the reference, and
that a row's bits are its own with each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton.paged import KVCase

from longtail.kernels import attention_plan, attention_triton
from longtail.kernels.attention import (
    AttentionBatch,
    AttentionVariant,
    paged_attention_reference,
    paged_attention_triton,
)
from longtail.kernels.attention_plan import SplitPlan
from longtail.kernels.kv import empty_kv, store_kv_reference

TOLERANCES: dict[torch.dtype, Any] = {  # float16, bfloat16: p rounded to the dtype before p @ v, and the output
    torch.float32: {"rtol": 1e-5, "atol": 3e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}
PARTITION = 64
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def small_partitions(outputs_start_as_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "PARTITION", PARTITION)


class Case(KVCase):
    def check(self, dtype: torch.dtype) -> torch.Tensor:
        q, batch = torch.cat(self.q), self.batch()
        out = self.run(paged_attention_triton, q, batch)
        torch.testing.assert_close(out, self.run(paged_attention_reference, q, batch), **TOLERANCES[dtype])
        assert out.isfinite().all()
        return out


SINKS = torch.tensor([1.5, -torch.inf, 30.0])
VARIANTS = {
    "window_1": AttentionVariant(window=1),
    "window_16": AttentionVariant(window=16),
    "window_37": AttentionVariant(window=37),
    "window_100": AttentionVariant(window=100),
    "softcap": AttentionVariant(softcap=0.8),
    "softcap_50": AttentionVariant(softcap=50.0),
    "sinks": AttentionVariant(sinks=SINKS),
    "all": AttentionVariant(window=70, softcap=2.0, sinks=SINKS),
}
QUERIES, CONTEXTS = [1, 0, 5, 20, 9, 1], [2 * PARTITION + 9, 0, PARTITION + 3, 20, 3 * PARTITION + 4, 1]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    """Decode, an empty sequence, verification across a partition, a whole prompt, a resumed chunk, a first token."""
    Case(QUERIES, CONTEXTS, variant=VARIANTS[name]).check(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["window_37", "all"])
def test_variants_in_16_bits(name: str, dtype: torch.dtype) -> None:
    Case([1, 20], [2 * PARTITION + 9, 90], dtype=dtype, variant=VARIANTS[name]).check(dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # of the polynomial, which is then not taken
@pytest.mark.parametrize("factor", [1e-4, 1.0, 300.0, 1e18])
def test_the_cap_is_tanh_for_both_signs_and_all_magnitudes(factor: float) -> None:
    case = Case([4], [40], variant=AttentionVariant(softcap=5.0))
    case.q[0] *= factor
    case.check(torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("cache", [E4M3, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("shape", [(3, 1, 16, 16), (4, 2, 80, 32)], ids=str)
def test_8_bit_caches(shape: tuple[int, int, int, int], cache: torch.dtype, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, block = shape
    contexts = [1, 16, PARTITION + 1, 90]
    Case([1, 1, 1, 7], contexts, heads, kv_heads, dim, block, dtype, cache).check(dtype)


@pytest.mark.parametrize("cache", [E4M3, torch.int8], ids=["e4m3", "int8"])
def test_values_of_any_magnitude_survive_in_float16(cache: torch.dtype) -> None:
    """The weights are multiplied by the scales before they are rounded: neither underflow nor overflow."""
    for magnitude in (1e-3, 1.0, 6e4):
        case = Case([1], [100], dtype=torch.float16, cache=cache)
        for table in case.tables:
            assert case.scales is not None
            case.scales[table, 1, 1] *= magnitude / 3
        q, batch = case.q[0], case.batch()
        expected = case.run(paged_attention_reference, q.float(), batch)
        out = case.run(paged_attention_triton, q, batch).float()
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-3 * magnitude)


def test_a_broken_row_stays_visible() -> None:
    """An infinity in K of one token: the outputs of the rows that see it are NaN, the others are as before."""
    case = Case([4], [40], cache=torch.int8)
    clean = case.check(torch.float32)
    k = torch.ones(1, 1, 16)
    k[0, 0, 3] = torch.inf
    slot = case.tables[0][38 // 16] * 16 + 38 % 16
    store_kv_reference(k, torch.ones(1, 1, 16), case.kv, 1, torch.tensor([slot]), 16, case.scales)
    out = case.run(paged_attention_triton, torch.cat(case.q), case.batch())
    assert out[2:].isnan().all()
    assert torch.equal(out[:2], clean[:2])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(3, 1, 80, 16), (8, 1, 96, 64), (16, 1, 192, 256), (2, 2, 256, 2), (5, 5, 72, 128)],
)
def test_head_dims_that_are_no_powers_of_two_groups_and_blocks(heads: int, kv_heads: int, dim: int, block: int) -> None:
    Case([1, 3], [PARTITION + 6, 9], heads, kv_heads, dim, block).check(torch.float32)
    Case([1, 3], [PARTITION + 6, 9], heads, kv_heads, dim, block, torch.bfloat16).check(torch.bfloat16)


# ---- draft trees

TREE = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101, 0b1001011]
"""Row 0 with children 1, 2; 3 below 1; 4 and 5 below 2; 6 below 3."""


@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("base", [0, 5, 60, 2 * PARTITION - 3])
def test_a_tree_is_its_paths(base: int, variant: str) -> None:
    """Each row of a tree is the last row of a sequence that holds the committed tokens and its path alone."""
    of = AttentionVariant(window=9, softcap=2.0, sinks=SINKS) if variant == "all" else AttentionVariant()
    n = base + len(TREE)
    case = Case([len(TREE)], [n], variant=of, trees=[TREE])
    out = case.check(torch.float32)
    table = torch.tensor(case.tables[0])
    k, v = (case.kv[table, 1, i].transpose(1, 2).flatten(0, 1)[:n] for i in (0, 1))
    for row, mask in enumerate(TREE):
        path = [*range(base), *(base + j for j in range(len(TREE)) if mask >> j & 1)]
        kv = empty_kv(len(table), 2, 1, 16, 16, layout="hnd")
        store_kv_reference(k[path], v[path], kv, 1, torch.arange(len(path)), 16)
        batch = AttentionBatch.build([1], [len(path)], [list(range(len(table)))], 3)
        alone = paged_attention_triton(case.q[0][row : row + 1], kv, 1, batch, 16, case.scale, of)
        torch.testing.assert_close(out[row], alone[0], **TOLERANCES[torch.float32])


def test_a_tree_that_is_a_chain_is_plain_verification_bit_for_bit() -> None:
    chain = [(1 << row + 1) - 1 for row in range(6)]
    for variant in (AttentionVariant(), VARIANTS["window_37"]):
        tree = Case([6, 1], [PARTITION + 3, 9], variant=variant, trees=[chain, None])
        plain = Case([6, 1], [PARTITION + 3, 9], variant=variant)
        assert torch.equal(tree.check(torch.float32), plain.check(torch.float32))


def test_the_largest_tree_and_a_row_that_sees_later_ones() -> None:
    masks = [1 << row | 1 << 62 | row for row in range(63)]
    case = Case([63, 4], [63 + PARTITION, 4], heads=1, trees=[masks, None])
    case.check(torch.float32)


# ---- bit for bit


def split(out: torch.Tensor, queries: list[int]) -> list[torch.Tensor]:
    return list(out.split(queries))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("variant", "cache"),
    [
        ("window_16", None),
        ("window_37", None),
        ("softcap", None),
        ("sinks", None),
        ("all", torch.int8),
        ("all", E4M3),
    ],
)
def test_a_row_depends_neither_on_the_batch_nor_on_the_rows_that_ride_along(
    variant: str, cache: torch.dtype | None, dtype: torch.dtype
) -> None:
    """All at once, sequence by sequence, and row by row as decode would have computed them, when other blocks are gone
    and a tile starts with other partitions."""
    contexts = [2 * PARTITION + 3, 12, 2 * PARTITION + 9]
    case = Case([7, 12, 1], contexts, dtype=dtype, variant=VARIANTS[variant], cache=cache)
    whole = split(case.run(paged_attention_triton, torch.cat(case.q), case.batch()), case.queries)
    for i, queries in enumerate(case.queries):
        alone = case.run(paged_attention_triton, case.q[i], case.batch([i]))
        assert torch.equal(alone, whole[i])
        for t in range(0, queries, 3):
            assert torch.equal(case.run(paged_attention_triton, case.q[i][t : t + 1], case.row(i, t))[0], whole[i][t])


def test_a_tree_does_not_depend_on_the_batch() -> None:
    case = Case([7, 12], [PARTITION + 3, 12], variant=VARIANTS["all"], trees=[TREE, None])
    whole = split(case.run(paged_attention_triton, torch.cat(case.q), case.batch()), case.queries)
    for i in range(2):
        assert torch.equal(case.run(paged_attention_triton, case.q[i], case.batch([i])), whole[i])


def test_a_window_that_holds_everything_and_a_cap_of_nothing_are_plain_attention() -> None:
    plain = Case(QUERIES, CONTEXTS).check(torch.float32)
    assert torch.equal(Case(QUERIES, CONTEXTS, variant=AttentionVariant(window=10**6)).check(torch.float32), plain)
    none = AttentionVariant(sinks=torch.full((3,), -torch.inf))
    assert torch.equal(Case(QUERIES, CONTEXTS, variant=none).check(torch.float32), plain)


# ---- whole tiles


def whole(monkeypatch: pytest.MonkeyPatch, uneven: float = 1e9) -> None:
    """Every tile is computed whole, but those with more than `uneven` times the mean number of partitions."""
    monkeypatch.setattr(attention_triton, "WHOLE_FROM", 1)
    monkeypatch.setattr(attention_plan, "UNEVEN", uneven)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "tree"])
def test_a_program_for_all_partitions_gives_the_bits_of_the_split(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(QUERIES, CONTEXTS, variant=VARIANTS[name], dtype=dtype)
    q = torch.cat(case.q)
    split = case.run(paged_attention_triton, q, case.batch())
    whole(monkeypatch, uneven=1.3)  # some are whole and some split
    assert torch.equal(case.run(paged_attention_triton, q, case.batch()), split)
    whole(monkeypatch)
    monkeypatch.setattr(attention_triton, "combine_kernel", None)  # not to be launched
    assert torch.equal(case.run(paged_attention_triton, q, case.batch()), split)


def test_turns_give_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(QUERIES, CONTEXTS, heads=6, kv_heads=2)
    q = torch.cat(case.q)
    expected = case.run(paged_attention_triton, q, case.batch())
    monkeypatch.setattr(attention_plan, "WORKSPACE_BYTES", 3 * 2 * 16 * (16 + 2) * 4)  # three items
    batch = case.batch()
    assert torch.equal(case.run(paged_attention_triton, q, batch), expected)
    (plan,) = batch.plans.values()
    assert len(plan.turns) > 2


# ---- the plan


def plan_of(batch: AttentionBatch, window: int = 0, group: int = 2, **fields: Any) -> SplitPlan:
    fields = {"whole_from": None, "item_bytes": 1} | fields
    return SplitPlan.of(batch, window, group, PARTITION, torch.device("cpu"), **fields)


def test_the_plan_by_hand() -> None:
    """Two heads a KV head: 8 tokens a tile. Sequence 0: positions 120 .. 129, windows of 40 from 81 and from 89 on."""
    batch = AttentionBatch.build([10, 0, 1], [130, 3, 65], [[0], [1], [2]], 2)
    plan = plan_of(batch, window=40)
    (turn,) = plan.turns
    assert plan.whole is None
    assert turn.tiles.tolist() == [[0, 0, 16], [0, 16, 20], [2, 20, 22]]
    assert plan.first_seen.tolist() == [*range(81, 91), 25]
    assert turn.items.tolist() == [[0, 1], [1, 1], [1, 2], [2, 0], [2, 1]]  # the first tile ends at 128
    assert turn.item_starts.tolist() == [0, 1, 3, 5]
    everything = plan_of(batch)
    assert everything.turns[0].items.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert everything.block_tables is plan.block_tables  # what is the same for both is on the device once


def test_long_tiles_are_split_among_whole_ones() -> None:
    """Partitions: 1, 2, 1, 20; the mean is 6."""
    batch = AttentionBatch.build([1] * 4, [10, 100, 64, 20 * PARTITION], [[0]] * 4, 2)
    plan = plan_of(batch, whole_from=4)
    assert plan.whole is not None and plan.whole.tiles[:, 0].tolist() == [0, 1, 2, 3]  # 20 <= 4 x 6
    batch = AttentionBatch.build([1] * 5, [10, 100, 64, 1, 26 * PARTITION], [[0]] * 5, 2)
    plan = plan_of(batch, whole_from=5)
    assert plan.whole is not None and plan.whole.tiles[:, 0].tolist() == [0, 1, 2, 3]  # 26 > 4 x 31 / 5
    assert plan.whole.items.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0]]
    (turn,) = plan.turns
    assert turn.tiles[:, 0].tolist() == [4] and turn.items[:, 1].tolist() == list(range(26))
    assert plan_of(batch, whole_from=6).whole is None


@pytest.mark.parametrize(
    ("queries", "contexts", "group", "whole_from", "item_bytes"),
    [
        ([32768] + [1] * 200, [32768] + [1000] * 200, 4, 32, 8 * 16 * 130 * 4),  # a prefill among decodes
        ([8192], [32768], 4, None, 8 * 16 * 130 * 4),  # 8-bit cache
        ([8192], [32768], 2, None, 8 * 16 * 258 * 4),  # head_dim 256
        ([512], [32768], 128, None, 16 * 514 * 4),  # latents
    ],
)
def test_the_workspace_is_bounded(
    queries: list[int], contexts: list[int], group: int, whole_from: int | None, item_bytes: int
) -> None:
    batch = AttentionBatch.build(queries, contexts, [[0]] * len(queries), group)
    plan = SplitPlan.of(batch, 0, group, 256, torch.device("cpu"), whole_from=whole_from, item_bytes=item_bytes)
    most = max((len(turn.items) for turn in plan.turns), default=0)
    longest = -(-max(contexts) // 256)
    assert most * item_bytes <= attention_plan.WORKSPACE_BYTES + longest * item_bytes
    everything = [*plan.turns, *([plan.whole] if plan.whole else [])]
    assert sum(len(p.tiles) for p in everything) == sum(-(-n * group // 16) for n in queries)
    if whole_from is not None:
        assert plan.whole is not None and not plan.turns


def test_plans_of_two_devices_are_apart() -> None:
    batch = AttentionBatch.build([1], [5], [[0]], 2)
    plan_of(batch)
    other = SplitPlan.of(batch, 3, 2, PARTITION, torch.device("meta"), whole_from=None, item_bytes=1)
    assert other.block_tables.device.type == other.turns[0].tiles.device.type == "meta"


def test_layers_with_and_without_a_window_share_a_batch() -> None:
    case = Case(QUERIES, CONTEXTS)
    q, batch = torch.cat(case.q), case.batch()
    for case.variant in (VARIANTS["window_37"], AttentionVariant(), VARIANTS["window_37"], VARIANTS["all"]):
        expected = case.run(paged_attention_reference, q, case.batch())
        torch.testing.assert_close(case.run(paged_attention_triton, q, batch), expected, **TOLERANCES[torch.float32])
    assert sorted(window for window, *_ in batch.plans) == [0, 37, 70]


def test_the_cpu_layout_is_refused() -> None:
    batch = AttentionBatch.build([1], [5], [[0]], 3)
    with pytest.raises(ValueError, match=r"6-D cache .*empty_kv\(\.\.\., layout='hnd'\)"):
        paged_attention_triton(torch.ones(1, 3, 16), empty_kv(1, 2, 1, 16, 16), 1, batch, 16, 1.0)
