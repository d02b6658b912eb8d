"""PackedLinear, and the search for a way to multiply that gives a row the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from longtail.kernels import linear as module
from longtail.kernels.linear import (
    ROWS_PER_TILE,
    Backend,
    PackedLinear,
    RowRule,
    find_row_rule,
    linear_reference,
    onednn_available,
)

BACKENDS: list[Backend] = ["onednn", "aten", "tiles"]
TILES = RowRule("tiles", ROWS_PER_TILE, ROWS_PER_TILE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "onednn" and not onednn_available():
        pytest.skip("this torch has no oneDNN")
    chosen: Backend = request.param
    return chosen


# ---- PackedLinear


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 33])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_packed_linear_is_f_linear(backend: Backend, with_bias: bool, with_residual: bool, rows: int) -> None:
    weight, x = randn(24, 40, seed=1), randn(rows, 40, seed=2)
    bias = randn(24, seed=3) if with_bias else None
    residual = randn(rows, 24, seed=4) if with_residual else None
    x_before, residual_before = x.clone(), None if residual is None else residual.clone()
    packed = PackedLinear([weight], bias, backend)
    expected = F.linear(x, weight, bias) + (0 if residual is None else residual)
    assert_close(packed(x, residual), expected)
    torch.testing.assert_close(linear_reference(x, weight, bias), F.linear(x, weight, bias), rtol=0, atol=0)
    assert torch.equal(x, x_before)
    if residual is not None and residual_before is not None:
        assert torch.equal(residual, residual_before)  # the residual stream is read, not written


def test_packed_linear_by_hand(backend: Backend) -> None:
    weight, bias = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]]), torch.tensor([10.0, 20.0, 30.0])
    packed = PackedLinear([weight], bias, backend)
    assert packed(torch.tensor([[1.0, 1.0], [2.0, 0.0]])).tolist() == [[13.0, 19.0, 33.0], [12.0, 20.0, 36.0]]
    assert (packed.in_features, packed.out_features) == (2, 3)


def test_packed_linear_stacks_weights(backend: Backend) -> None:
    """q, k and v of one projection: the outputs stand side by side in the order given."""
    q, k, v = randn(16, 40, seed=1), randn(8, 40, seed=2), randn(8, 40, seed=3)
    bias, x = randn(32, seed=4), randn(5, 40, seed=5)
    packed = PackedLinear(iter([q, k, v]), bias, backend)
    assert (packed.in_features, packed.out_features) == (40, 32)
    expected = torch.cat([F.linear(x, w) for w in (q, k, v)], dim=1) + bias
    assert_close(packed(x), expected)


def test_packed_linear_takes_parameters_and_returns_no_graph(backend: Backend) -> None:
    out = PackedLinear([torch.nn.Parameter(randn(8, 16))], None, backend)(randn(4, 16, seed=1))
    assert not out.requires_grad


# ---- RowRule


@pytest.mark.parametrize(
    ("min_rows", "multiple", "expected"),
    [
        (1, 1, {1: 1, 2: 2, 5: 5}),
        (2, 1, {1: 2, 2: 2, 3: 3}),
        (4, 1, {1: 4, 4: 4, 5: 5}),
        (4, 4, {1: 4, 4: 4, 5: 8, 8: 8, 9: 12}),
        (16, 16, {1: 16, 16: 16, 17: 32}),
        (5, 4, {1: 8, 8: 8, 9: 12}),
    ],
)
def test_row_rule_padded(min_rows: int, multiple: int, expected: dict[int, int]) -> None:
    rule = RowRule("aten", min_rows, multiple)
    assert {rows: rule.padded(rows) for rows in expected} == expected


# ---- find_row_rule


def is_invariant(rule: RowRule, in_features: int, out_features: int, counts: range) -> bool:
    """The claim itself, checked apart from find_row_rule's own loop: other data, other counts, a row in the middle."""
    linear = PackedLinear([randn(out_features, in_features, seed=11)], None, rule.backend)
    x = randn(128, in_features, seed=12)
    whole = linear(x[: rule.padded(100)])
    for rows in counts:
        padded = rule.padded(rows)
        if not torch.equal(linear(x[:padded])[:rows], whole[:rows]):
            return False
        moved = torch.cat([x[50:51], x[: padded - 1]]) if padded > 1 else x[50:51]
        if not torch.equal(linear(moved)[0], whole[50]):
            return False
    return True


@pytest.mark.parametrize("shape", [(64, 96), (40, 24), (17, 5), (576, 192)])
def test_find_row_rule_finds_one_that_holds(shape: tuple[int, int]) -> None:
    rule = find_row_rule([shape])
    assert rule is not None  # tiles at the latest
    for threads in {1, torch.get_num_threads()}:
        torch.set_num_threads(threads)
        assert is_invariant(rule, *shape, range(1, 40))


def test_find_row_rule_tiles_always_pass() -> None:
    assert find_row_rule([(64, 96), (17, 5)], candidates=[TILES]) == TILES


def test_find_row_rule_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    find_row_rule([(16, 16)], candidates=[TILES])
    find_row_rule([(16, 16)], candidates=[])
    assert torch.get_num_threads() == before


def test_find_row_rule_without_candidates() -> None:
    assert find_row_rule([(16, 16)], candidates=[]) is None


class Variant:
    """A matmul that breaks the promise in one way; everything else is F.linear on full tiles, which keeps it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Backend = "aten") -> None:
        self.backend, self.original = backend, PackedLinear.__call__
        monkeypatch.setattr(PackedLinear, "__call__", lambda packed, x: self.call(packed, x))

    def call(self, packed: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, -len(x) % ROWS_PER_TILE))
        y = torch.cat([F.linear(tile, packed.packed) for tile in padded.split(ROWS_PER_TILE)])[: len(x)]
        return self.spoil(y) if packed.backend == self.backend else y

    def spoil(self, y: torch.Tensor) -> torch.Tensor:
        return y


def one_ulp_up(y: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(y, torch.tensor(float("inf")))


class DependsOnRowCount(Variant):
    """One number of one row is an ulp off, for one row count only."""

    def spoil(self, y: torch.Tensor) -> torch.Tensor:
        if len(y) == 12:
            y[3, 5] = one_ulp_up(y[3, 5])
        return y


class DependsOnPlace(Variant):
    """As a kernel that treats the last rows of a batch differently."""

    def spoil(self, y: torch.Tensor) -> torch.Tensor:
        y[-1] = one_ulp_up(y[-1])
        return y


class DependsOnThreads(Variant):
    def spoil(self, y: torch.Tensor) -> torch.Tensor:
        return one_ulp_up(y) if torch.get_num_threads() == 1 else y


@pytest.mark.parametrize("variant", [DependsOnRowCount, DependsOnPlace, DependsOnThreads])
def test_find_row_rule_refuses_a_planted_variant(variant: type[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    if variant is DependsOnThreads and torch.get_num_threads() < 2:
        torch.set_num_threads(2)
    variant(monkeypatch)
    aten = RowRule("aten", 4, 4)
    assert find_row_rule([(16, 24)], candidates=[aten]) is None
    assert find_row_rule([(16, 24)], candidates=[aten, TILES]) == TILES  # the next candidate is taken


def test_find_row_rule_accepts_what_keeps_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    Variant(monkeypatch)
    aten = RowRule("aten", 4, 4)
    assert find_row_rule([(16, 24)], candidates=[aten, TILES]) == aten


def test_find_row_rule_checks_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyWide(Variant):
        def spoil(self, y: torch.Tensor) -> torch.Tensor:
            return one_ulp_up(y) if y.shape[1] == 24 and len(y) == 8 else y

    OnlyWide(monkeypatch)
    aten = RowRule("aten", 4, 4)
    assert find_row_rule([(16, 8)], candidates=[aten]) == aten
    assert find_row_rule([(16, 8), (16, 24)], candidates=[aten]) is None


def test_find_row_rule_padding_can_rescue_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is off below four rows passes once the rule pads to four."""

    class FewRows(Variant):
        def spoil(self, y: torch.Tensor) -> torch.Tensor:
            return one_ulp_up(y) if len(y) < 4 else y

    FewRows(monkeypatch)
    candidates = [RowRule("aten", 1, 1), RowRule("aten", 2, 1), RowRule("aten", 4, 1), TILES]
    assert find_row_rule([(16, 24)], candidates=candidates) == RowRule("aten", 4, 1)


def test_find_row_rule_skips_onednn_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onednn_available", lambda: False)
    rule = find_row_rule([(16, 24)])
    assert rule is not None
    assert rule.backend != "onednn"


def test_rows_of_a_packed_weight() -> None:
    weight = torch.randn(37, 24)
    wanted = torch.tensor([3, 36, 0, 3])
    for backend in ("onednn", "aten", "tiles"):
        if backend != "onednn" or onednn_available():
            assert torch.equal(PackedLinear([weight[:20], weight[20:]], None, backend).rows(wanted), weight[wanted])
