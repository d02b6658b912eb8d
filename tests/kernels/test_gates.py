"""Gates: against their references and `transformers`, and that an element's bits do not depend on its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from longtail.kernels.activation import sigmoid
from longtail.kernels.gates import gated_rms_norm, gated_rms_norm_reference, silu, softplus

SIZES = [1, 15, 16, 17, 40, 576]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("op", "exact"), [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)])
def test_over_the_whole_range(op: Callable, exact: Callable) -> None:
    x = torch.linspace(-100, 100, 20_001)
    torch.testing.assert_close(op(x), exact(x.double()).float(), rtol=5e-7, atol=1e-35)
    edges = torch.tensor([0.0, -0.0, 88.0, -86.0, 1e4, 3e38])
    torch.testing.assert_close(op(edges), exact(edges), rtol=1e-6, atol=0)
    assert op(torch.tensor([math.nan])).isnan().all()
    assert op(torch.empty(0, 24)).shape == (0, 24)
    half = randn(3, 40).bfloat16()
    assert torch.equal(op(half), exact(half))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [sigmoid, silu, softplus])
def test_elements_do_not_depend_on_their_place(op: Callable, size: int) -> None:
    x = randn(9, size, seed=6) * 3
    whole = op(x)
    for t in range(9):
        assert torch.equal(op(x[t : t + 1])[0], whole[t])
        assert torch.equal(op(x[t, -1:]), whole[t, -1:])
    assert torch.equal(op(x.flip(0, 1)), whole.flip(0, 1))
    assert torch.equal(op(x.T), whole.T)


def test_the_comparison_sees_torchs_own_sigmoid() -> None:
    x = randn(4096, seed=1).repeat(1, 1)[0]
    assert not torch.equal(torch.sigmoid(x), torch.cat([torch.sigmoid(v) for v in x.split(1)]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("act", "theirs"), [("silu", Qwen3NextRMSNormGated), ("sigmoid", KimiLinearRMSNormGated)])
def test_gated_rms_norm(act: Literal["silu", "sigmoid"], theirs: type, size: int) -> None:
    x, gate, weight = randn(9, size, seed=1) * 5, randn(9, size, seed=2) * 5, randn(size, seed=3)
    whole = gated_rms_norm(x, gate, weight, 1e-5, act)
    torch.testing.assert_close(whole, gated_rms_norm_reference(x, gate, weight, 1e-5, act), rtol=3e-6, atol=1e-6)
    module = theirs(size, eps=1e-5)
    module.weight.data.copy_(weight)
    torch.testing.assert_close(whole, module(x, gate).detach(), rtol=3e-6, atol=1e-6)
    for t in range(9):
        assert torch.equal(gated_rms_norm(x[t : t + 1], gate[t : t + 1], weight, 1e-5, act)[0], whole[t])
    spoiled = gate.clone()
    spoiled[[0, 8]] = math.nan
    out = gated_rms_norm(x, spoiled, weight, 1e-5, act)
    assert torch.equal(out[1:8], whole[1:8]) and out[[0, 8]].isnan().all()
    spread = gated_rms_norm(x[None], gate[None], weight, 1e-5, act)
    assert torch.equal(spread[0], whole)


def test_misuse_is_named() -> None:
    x = randn(3, 4)
    with pytest.raises(ValueError, match=r"want \[\.\.\., H\] twice and \[H\]"):
        gated_rms_norm(x, x[:, :2], torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="act is 'relu', use 'silu' or 'sigmoid'"):
        gated_rms_norm(x, x, torch.ones(4), 1e-6, "relu")  # type: ignore[arg-type]
