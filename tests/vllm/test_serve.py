"""`RolloutService` and `longtail serve` over vLLM: everything at once, and a process."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from tests.bench.serve_helpers import serving
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import again, joined, make_stepped, params, result, undisturbed
from tests.trainer_adapter.server.helpers import save_model
from tests.trainer_adapter.server.load_helpers import load
from tests.vllm.conftest import HEADS, NOISE, EngineMaker

from longtail.bench.engines import make_engine
from longtail.partial_rollout.service import RolloutService

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("core", ["local", "process"])
def test_everything_at_once(tmp_path: Path, core: str) -> None:
    """100 streams under three updates: each token is what the weights of its version make of those before it (the
    native engine says which), aborted ones go on from their kept KV, and all blocks come back."""
    from longtail.partial_rollout.engines.vllm import VllmEngine

    models = [make_model("llama", seed=seed, **HEADS) for seed in (0, 1)]
    directories = [save_model(model, tmp_path / str(i)) for i, model in enumerate(models)]
    models[0].save_pretrained(tmp_path / "model")
    engine = VllmEngine(tmp_path / "model", core=core, max_num_seqs=32, kv_cache_bytes=16 << 20, block_size=32)
    alone = [make_stepped(model, max_num_seqs=64, max_num_batched_tokens=256) for model in models]
    load(engine, alone, directories, streams=100, noise=NOISE)
    engine.close()


def test_aborted_requests_come_back(make_vllm: EngineMaker) -> None:
    """As longer prompts: from their kept KV, nothing is computed again, and the samples are those of nobody's cut."""
    engine, alone = make_vllm(), make_stepped(make_model("llama", **HEADS))
    before = engine.stats()
    with RolloutService(engine, seed=5) as service:
        requests = [service.generate(prompt(40 + i, i), params(seed=i, max_tokens=150)) for i in range(6)]
        first: list[list[int]] = []
        for request in requests:
            next(iter(request))
        assert service.abort_all().result() == 6
        parts = [[result(request)] for request in requests]
        for request, own in zip(requests, parts, strict=True):
            first.append(own[0].token_ids)
            own.append(result(again(service, request, own)))
        service.check_integrity()
        assert service.stats().num_resumed == sum(map(bool, first)) > 0
    for request, own in zip(requests, parts, strict=True):
        expected = undisturbed(alone, list(request.prompt_ids), request.params)
        tokens, logprobs = joined(*own)
        assert tokens == expected.output_ids
        assert logprobs == pytest.approx(expected.logprobs, rel=0.0, abs=NOISE)
    after = engine.stats()
    assert after.num_recomputed_tokens == before.num_recomputed_tokens
    restored = after.num_restored_tokens - before.num_restored_tokens
    cached = after.num_cached_tokens - before.num_cached_tokens  # full blocks that vLLM's prefix cache still had
    assert restored > 0 and restored + cached >= 6 * 40
    assert after.num_free_blocks == after.num_blocks
    engine.check_integrity()


@pytest.mark.parametrize("core", ["local", "process"])
def test_a_process(directories: dict[str, Path], core: str) -> None:
    arguments = ["--engine", "vllm", "--model", str(directories["llama"]), "--port", "0"]
    arguments += ["--model-name", "tiny", "--kv-cache-mib", "16", "--drafter", "ngram", "--core", core]
    with (
        serving(*arguments, PYTHONPATH=str(ROOT / "src")) as (url, _),
        httpx2.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        answer = http.post("/v1/completions", json=body).json()
        assert len(answer["choices"][0]["token_ids"]) == 4
        assert http.get("/server_info").json()["engine"] == "vllm"


def test_too_little_memory_is_named_in_our_words(directories: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes: vLLM wants room for a sample of max_model_len tokens"):
        make_engine("vllm", directories["llama"], kv_cache_bytes=1 << 16)
