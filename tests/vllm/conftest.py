"""Engines on a real vLLM, one for many tests: importing and starting one takes half a minute. Elsewhere all skip."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.partial_rollout.conftest import letters, make_model  # noqa: F401 - letters is a fixture
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from longtail import Group, Sample
from longtail.events import ignore

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm import VllmEngine
    from longtail.partial_rollout.engines.vllm.core import LocalCore

MISSING = "needs vLLM (its own environment: make test-vllm)"
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU takes heads of 32."""
NOISE = 1e-4
"""What two runs of the same tokens may differ by in a log-probability: the shapes of a pass round differently."""

def local(engine: VllmEngine) -> LocalCore:
    from longtail.partial_rollout.engines.vllm.core import LocalCore

    assert isinstance(engine.core, LocalCore)
    return engine.core


EngineMaker = Callable[..., "VllmEngine"]


collect_ignore = []
if importlib.util.find_spec("vllm") is None:  # they use it when they are imported
    collect_ignore = ["test_audit.py", "test_correction.py", "test_drafters.py", "test_pool.py"]
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines run in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_configure(config: pytest.Config) -> None:
    # Said once a process, by whichever test comes first; test_correction.py looks at it.
    config.addinivalue_line("filterwarnings", "ignore:vLLM has the fault")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def tiny() -> LlamaForCausalLM:
    model = make_model("llama", **HEADS)
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory, tiny: LlamaForCausalLM) -> dict[str, Path]:
    """Of the models, by kind."""
    qwen3 = make_model("qwen3", **HEADS)
    assert isinstance(qwen3, Qwen3ForCausalLM)
    paths = {}
    for kind, model in {"llama": tiny, "qwen3": qwen3}.items():
        paths[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(paths[kind])
    return paths


@pytest.fixture(scope="session")
def make_vllm(directories: dict[str, Path]) -> Iterator[EngineMaker]:
    """Engines with the same settings are one engine, its cache forgotten, with the model's own weights, of whatever
    version that is by now."""
    made: dict[str, VllmEngine] = {}

    def make(kind: str = "llama", **settings: Any) -> VllmEngine:
        from longtail.partial_rollout.engines.vllm import VllmEngine

        settings = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "block_size": 32} | settings
        key = f"{kind} {settings}"
        if key not in made:
            made[key] = VllmEngine(directories[kind], **settings)
        engine = made[key]
        assert not engine.has_work, "an earlier test left samples in the engine"
        if engine.version:
            own = AutoModelForCausalLM.from_pretrained(directories[kind]).state_dict()
            engine.update_weights(own, engine.version + 1)
        engine.reset_prefix_cache()
        return engine

    yield make
    for engine in made.values():
        local(engine).llm.engine_core.shutdown()


def run(engine: VllmEngine, samples: Sequence[Sample] = (), until: int | None = None) -> None:
    """Adds samples and steps until all are done, or until the first one has `until` output tokens."""
    engine.add(samples)
    while engine.has_work:
        if until is not None and len(samples[0].output_ids) >= until:
            break
        engine.step()
        engine.check_integrity()


def generate(engine: VllmEngine, *groups: Group) -> list[Sample]:
    samples = [sample for group in groups for sample in group.samples]
    run(engine, samples)
    return samples


def assert_same(got: Sample, expected: Sample, noise: float = NOISE) -> None:
    """Equal tokens; log-probabilities up to rounding."""
    assert got.output_ids == expected.output_ids
    torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), atol=noise, rtol=0)
    assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    got.check_integrity()


@pytest.fixture(scope="session")
def saving_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.kv_helpers import save_model

    return save_model(tmp_path_factory.mktemp("saving"))


@pytest.fixture(scope="session")
def saving_engine(saving_model: Path) -> VllmEngine:
    from tests.vllm.kv_helpers import SETTINGS

    from longtail.partial_rollout.engines.vllm import VllmEngine

    return VllmEngine(saving_model, **SETTINGS)


@pytest.fixture
def saving(saving_engine: VllmEngine) -> Iterator[VllmEngine]:
    """Saves KV to tiers of the test's own, with nothing cached, with the weights of its model. All blocks must be free
    in the end."""
    from tests.vllm.kv_helpers import make_model

    from longtail.kv_manager.tiers import Tiers

    engine, saver = saving_engine, saving_engine.saver
    assert saver is not None
    fingerprint = saver.fingerprint
    saver.tiers, engine.listener = Tiers(), ignore
    engine.reset_prefix_cache()
    yield engine
    engine.pause(snapshot=False)
    engine.check_integrity()
    assert engine.core.num_free_blocks == engine.core.num_blocks
    if saver.fingerprint != fingerprint:
        engine.update_weights(make_model().state_dict(), engine.version + 1)
    assert saver.fingerprint == fingerprint
