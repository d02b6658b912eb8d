"""The comparisons of this folder, on planted faults. Runs anywhere."""

from __future__ import annotations

import pytest
import torch

from longtail.kernels.attention import AttentionBatch, paged_attention_reference

from .compare import assert_as_reference, assert_gradients_close, assert_logprobs_close, assert_rows_close
from .paged import Paged, randn

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_that_are_not_seen_are_seen(dtype: torch.dtype) -> None:
    """The last 16 of 2,048: less than a hundredth of the sum, in values of some hundredths."""
    p = Paged(CPU, dtype, [1, 1], [2048, 2048], heads=4)

    def run(contexts: list[int]) -> torch.Tensor:
        batch = AttentionBatch.build([1, 1], contexts, p.tables, p.group)
        return paged_attention_reference(p.q, p.kv, 1, batch, p.block, p.scale)

    assert_rows_close(run([2048, 2048]), run([2048, 2048]))
    for contexts in ([2032, 2032], [2048, 2032], [2048, 2047]):
        wrong = run(contexts)
        if contexts[1] == 2047 and dtype == torch.bfloat16:
            continue  # one position is at the edge of what bfloat16 can show
        with pytest.raises(AssertionError, match="of a row's scale"):
            assert_rows_close(wrong, run([2048, 2048]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_let_through(dtype: torch.dtype) -> None:
    """As the kernels compute: weights rounded to the dtype before the second product, sums in float32."""
    q, k, v = randn(64, 128, seed=1).to(dtype), randn(2048, 128, seed=2).to(dtype), randn(2048, 128, seed=3).to(dtype)
    scores = q.float() @ k.float().T * 128**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    exact = (torch.softmax(scores.double(), -1) @ v.double()).to(dtype)
    rounded = (weights.to(dtype).float() @ v.float() / weights.sum(-1, keepdim=True)).to(dtype)
    assert_rows_close(rounded, exact)


def test_one_wrong_element_is_seen() -> None:
    wanted = randn(3, 4096)
    wrong = wanted.clone()
    wrong[1, 17] += 0.001
    with pytest.raises(AssertionError, match="single element"):
        assert_rows_close(wrong, wanted)
    wrong[1, 17] = torch.nan
    with pytest.raises(AssertionError):
        assert_rows_close(wrong, wanted)


def test_ids_are_compared_exactly() -> None:
    ids, logprobs = torch.arange(100_000, 100_064), torch.zeros(64)
    off = ids.clone()
    off[:2] += 1
    with pytest.raises(AssertionError, match="2 of 64 rows differ, 1 may"):
        assert_as_reference("sample", "", [off, logprobs], [ids, logprobs])
    assert_as_reference("sample", "", [torch.cat([off[1:2], ids[1:]]), logprobs], [ids, logprobs])
    with pytest.raises(AssertionError):
        assert_as_reference("sample", "", [ids, logprobs + 1e-3], [ids, logprobs])
    accepted, tokens = torch.zeros(64, dtype=torch.int32), ids[:, None].repeat(1, 2)
    with pytest.raises(AssertionError, match="1 of 64 rows differ, 0 may"):
        wrong = torch.cat([accepted[:1] + 1, accepted[1:]])
        assert_as_reference("verify_drafts", "match", [wrong, tokens], [accepted, tokens])


def test_small_errors_of_logprobs_and_gradients_are_seen() -> None:
    with pytest.raises(AssertionError):
        assert_logprobs_close(torch.full((4,), -10.0), torch.full((4,), -10.0002))
    p = torch.softmax(randn(2, 5000) * 2, -1)
    assert_gradients_close(p.bfloat16(), p)
    wrong = p.clone()
    wrong[:, -100:] = 0
    with pytest.raises(AssertionError):
        assert_gradients_close(wrong.bfloat16(), p)
