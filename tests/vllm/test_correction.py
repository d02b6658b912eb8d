"""The corrections: found by what vLLM does, said once, taken back, and no longer there once upstream has them."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.vllm.spec_helpers import run, save_tiny, vllm_on

from longtail.partial_rollout.engines import vllm_plugin
from longtail.partial_rollout.engines.vllm import correction
from longtail.partial_rollout.engines.vllm.correction import (
    CONSTRAINTS,
    MIN_TOKENS,
    NUMBA,
    TOP_K,
    Correction,
    VllmCorrected,
    VllmNotProbed,
)

ALL = [CONSTRAINTS, TOP_K, MIN_TOKENS, NUMBA]


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM as it is installed, nothing said yet; corrected afterwards, as other tests expect it."""
    correction.undo()
    monkeypatch.setattr(correction, "_said", set())
    yield
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VllmCorrected)
        correction.undo()
        correction.correct()


def test_the_pinned_vllm_has_these_faults() -> None:
    """If this fails after an upgrade, upstream has corrected a fault: take its correction out of correction.py, and its
    line out of the docs."""
    assert correction.faults() == ALL


def test_corrects_what_is_there_and_says_so_once() -> None:
    with pytest.warns(VllmCorrected) as caught:
        assert correction.correct() == ALL
    said = [str(w.message) for w in caught if w.category is VllmCorrected]
    assert all(name in text for name, text in zip(ALL, said, strict=True))
    assert correction.faults() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", VllmCorrected)
        assert correction.correct() == []
        correction.undo()
        assert correction.faults() == ALL
        assert correction.correct() == ALL  # again, without a word


def test_leaves_alone_what_is_not_named() -> None:
    with pytest.warns(VllmCorrected):
        assert correction.correct([NUMBA]) == [NUMBA]
    assert correction.faults() == [CONSTRAINTS, TOP_K, MIN_TOKENS]


def test_leaves_a_vllm_without_the_fault_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As upstream would correct it: then ours is not put in its place."""
    from vllm.utils import cpu_triton_utils

    def theirs(*args: object) -> None:
        correction.expand(*args)

    monkeypatch.setattr(correction, "_expand_in_use", lambda: theirs)
    original = cpu_triton_utils._expand_kernel_impl
    with pytest.warns(VllmCorrected):
        assert correction.correct() == [TOP_K, MIN_TOKENS, NUMBA]
    assert cpu_triton_utils._expand_kernel_impl is original


def test_says_when_a_fault_cannot_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    monkeypatch.delattr(topk_topp_sampler, "apply_top_k_top_p")
    with pytest.warns() as said:
        assert correction.correct() == [CONSTRAINTS, MIN_TOKENS, NUMBA]
    missed = [str(w.message) for w in said if w.category is VllmNotProbed]
    assert len(missed) == 1
    assert TOP_K in missed[0] and "spec audit" in missed[0]


def test_a_correction_that_does_not_help_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    useless = Correction("useless", "nothing", lambda: True, lambda: lambda: None)
    monkeypatch.setattr(correction, "CORRECTIONS", (useless,))
    with pytest.raises(RuntimeError, match="useless"):
        correction.correct()


def test_the_plugin_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_plugin.SWITCH, "0")
    vllm_plugin.correct()
    assert correction.faults() == ALL
    monkeypatch.delenv(vllm_plugin.SWITCH)
    with pytest.warns(VllmCorrected):
        vllm_plugin.correct()
    assert correction.faults() == []


def test_vllm_finds_the_plugin() -> None:
    """Needs longtail to be installed, as `make test-vllm` does."""
    from importlib.metadata import entry_points

    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "longtail"]
    assert found.load() is vllm_plugin.load


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_is_a_loop_over_rows(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(0, 5, (7,), generator=random)
        values = torch.randint(0, 3, (7,), generator=random).to(dtype)
        want = [1.0 if v == 0 else v for v, n in zip(values.tolist(), counts.tolist(), strict=True) for _ in range(n)]
        got = torch.full((len(want),), 99, dtype=dtype)
        correction.expand(got, values, counts.cumsum(0).int(), 0, 1)
        assert torch.equal(got, torch.tensor(want, dtype=dtype))


def test_min_tokens_end_where_they_say() -> None:
    """A row's ban is lifted if output and drafts are long enough, and put back for the next sampling."""
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    for row, (least, output) in enumerate([(3, [5]), (4, [5]), (2, [5])]):
        processor.min_toks[row] = (least, output, {1, 2}, False)
    rows = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
    processor.logits_slice = (rows, torch.tensor([1, 2] * 3, dtype=torch.int32))
    with correction._long_enough([processor, types.SimpleNamespace()], [[8, 8], [8, 8], [8]]):
        logits = processor.apply(torch.zeros(3, 4))
    assert torch.isinf(logits).nonzero().tolist() == [[1, 1], [1, 2]]
    logits = processor.apply(torch.zeros(3, 4))
    assert torch.isinf(logits).any(dim=1).all()


def test_reaches_an_engine_that_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernels are registered when a worker starts: corrected before and after, and in the next engine too."""
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    def expands() -> bool:
        temperatures, ends = torch.tensor([0.7, 0.0]), torch.tensor([2, 3], dtype=torch.int32)
        got = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 3, replace_from=0, replace_to=1)
        return torch.equal(got, torch.tensor([0.7, 0.7, 1.0]))

    model = save_tiny(tmp_path_factory.mktemp("tiny"))
    for _ in range(2):
        with vllm_on(model, None) as llm:
            assert isinstance(rejection_sampler.expand_kernel, KernelOverride)
            assert expands()
            run(llm, [[5, 6, 7]])
            correction.undo()
            assert correction.faults() == ALL
            correction.correct()
            assert expands()
