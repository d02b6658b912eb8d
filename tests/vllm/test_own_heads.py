"""vLLM's drafting heads (EAGLE, EAGLE-3, MTP) under `VllmEngine`, with random weights, and its suffix method where
arctic-inference is installed: they draft, are right now and then, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import assert_same, local, run
from tests.vllm.heads import save_eagle, save_eagle3, save_mimo, save_target

from longtail import Group, Sample, SamplingParams
from longtail.partial_rollout.engines.vllm import VllmEngine

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 6, "repetition_penalty": 1.1},
    {"ignore_eos": False, "min_tokens": 5, "stop_token_ids": (7,)},
)
SETTINGS: dict[str, Any] = {"kv_cache_bytes": 8 << 20, "max_num_seqs": 8, "max_model_len": 256}


def samples_of(params: dict[str, Any]) -> list[Sample]:
    fields = {"n": 4, "max_tokens": 60, "ignore_eos": True, "seed": 3} | params
    groups = [Group.from_prompt(f"g{i}", [3 + (i + j) % 9 for j in range(20 + i)], SamplingParams(**fields))
              for i in range(2)]  # fmt: skip
    return [sample for group in groups for sample in group.samples]


@pytest.fixture(scope="module", params=["eagle", "eagle3", "mtp", "suffix"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Without drafts, and with the head. One vLLM after the other is made; both stay."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "suffix":
        pytest.importorskip("arctic_inference", reason="vLLM's suffix method needs arctic-inference")
        target, drafter = save_target(directory), "suffix"
    elif request.param == "mtp":
        target, drafter = save_mimo(directory), "mtp"
    else:
        target = save_target(directory / "target")
        head = (save_eagle if request.param == "eagle" else save_eagle3)(directory / "head")
        drafter = f"{request.param}:{head}"
    made = VllmEngine(target, **SETTINGS), VllmEngine(target, drafter=drafter, max_drafts=2, **SETTINGS)
    yield made
    for engine in reversed(made):
        engine.pause(snapshot=False)
        local(engine).llm.engine_core.shutdown()


@pytest.mark.parametrize("params", PARAMS)
def test_not_one_token_changes(engines: tuple[Any, Any], params: dict[str, Any]) -> None:
    plain, drafting = engines
    want, got = samples_of(params), samples_of(params)
    run(plain, want)
    before = drafting.stats()
    run(drafting, got)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    after = drafting.stats()
    drafted, accepted = (getattr(after, f"num_{n}_tokens") - getattr(before, f"num_{n}_tokens") for n in
                         ("draft", "accepted"))  # fmt: skip
    assert drafting.drafts_by_itself and drafting.speculation is None
    assert 0 < accepted < drafted  # right now and then: both ways are taken


def test_cut_and_resumed(engines: tuple[Any, Any]) -> None:
    plain, drafting = engines
    want, got = samples_of({"temperature": 1.0}), samples_of({"temperature": 1.0})
    run(plain, want)
    run(drafting, got, until=20)
    drafting.reset_prefix_cache()
    run(drafting, drafting.pause(), until=35)
    drafting.pause(snapshot=False)
    run(drafting, [sample for sample in got if not sample.is_done])
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
