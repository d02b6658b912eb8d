"""verl's own client, balancer and weight protocol against the server: what is cut goes on, bit for bit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from omegaconf import OmegaConf
from tests.verl.support import tiny
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

from longtail.trainer_adapter.plugins import verl as plugin

PROMPT = [20, 30, 40, 50, 60, 70]
SAMPLING = {"temperature": 0.9, "top_p": 1, "top_k": -1, "repetition_penalty": 1.05, "logprobs": True}
LENGTH = 500


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield
    ray.shutdown()


class Rollout:
    """A replica as verl's manager starts it, and verl's client for trainers that abort."""

    def __init__(self, checkpoint: Path, rank: int, **settings: Any) -> None:
        self.config = RolloutConfig(
            name="longtail",
            tensor_model_parallel_size=1,
            prompt_length=16,
            response_length=LENGTH,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            ignore_eos=True,
            checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=0),  # each tensor travels alone
            engine_kwargs={"longtail": settings},
        )
        self.model = HFModelConfig(path=str(checkpoint))
        self.replica = get_rollout_replica_class("longtail")(rank, self.config, self.model, gpus_per_node=1)
        rollout = {"name": "longtail", "response_length": LENGTH, "full_determinism": False, "nnodes": 1}
        rollout["disaggregation"] = {"enabled": False}
        self.manager = LLMServerManager.create_empty(
            config=OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})
        )
        self.client = self.manager.get_client(client_cls=FullyAsyncLLMServerClient)
        self.adapter = get_rollout_class("longtail")(self.config, self.model, None, replica_rank=rank)

    async def start(self) -> None:
        self.replica.rollout_mode = RolloutMode.HYBRID
        await self.replica.launch_servers()
        servers = {self.replica.server_address: self.replica.server_handle}
        await self.manager.global_load_balancer.add_servers.remote(servers=servers)

    def generate(self, **sampling: Any) -> Awaitable[Any]:
        return self.client.generate("session", prompt_ids=PROMPT, sampling_params={**SAMPLING, **sampling})

    async def stats(self) -> dict[str, Any]:
        return await self.replica.server_handle.stats.remote()

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        while not holds(await self.stats()):
            await asyncio.sleep(0.005)

    async def cut(self, tokens: int) -> None:
        """Aborts everything when so many more tokens are there."""
        before = (await self.stats())["num_output_tokens"]
        await self.until(lambda stats: stats["num_output_tokens"] >= before + tokens)
        await self.replica.abort_all_requests()


@pytest.fixture(scope="module")
def rollout(cluster: None, checkpoint: Path) -> Rollout:
    rollout = Rollout(checkpoint, rank=0)
    asyncio.run(rollout.start())
    return rollout


def logprobs_of(model: Any, tokens: list[int]) -> list[float]:
    """By transformers, of the output behind PROMPT, without penalties: of what was sampled at temperature 0.9."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float() / 0.9
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_a_request_cut_twice_goes_on_bit_for_bit_from_its_kv(rollout: Rollout) -> None:
    async def run() -> None:
        whole = await rollout.generate(seed=7)
        assert len(whole.token_ids) == len(whole.log_probs) == LENGTH
        await rollout.replica.clear_kv_cache()  # what the whole one left would be as good as the KV that is kept
        before = await rollout.stats()
        task = asyncio.ensure_future(rollout.generate(seed=7))
        for tokens in (100, 150):
            await rollout.cut(tokens)
            assert (await rollout.stats())["num_kept"] == 1
            await rollout.replica.sleep()
            assert (await rollout.stats())["kept_bytes"] > 0
            await rollout.replica.wake_up()  # and it still waits for those who aborted
            await rollout.replica.resume_generation()
        cut = await task
        after = await rollout.stats()
        assert cut.token_ids == whole.token_ids
        assert cut.log_probs == whole.log_probs
        assert cut.extra_fields["versions"] == [0] * LENGTH
        assert after["num_aborted"] - before["num_aborted"] == 2
        assert after["num_resumed"] - before["num_resumed"] == 2
        engine_before, engine_after = before["engine"], after["engine"]
        assert engine_after["num_recomputed_tokens"] == engine_before["num_recomputed_tokens"]
        assert engine_after["num_restored_tokens"] >= engine_before["num_restored_tokens"] + 250
        assert after["num_output_tokens"] - before["num_output_tokens"] == LENGTH

    asyncio.run(asyncio.wait_for(run(), 300))


def test_siblings_all_go_on(rollout: Rollout) -> None:
    async def run() -> None:
        before = await rollout.stats()
        tasks = [asyncio.ensure_future(rollout.generate(max_tokens=300)) for _ in range(8)]
        await rollout.cut(400)
        await rollout.replica.resume_generation()
        outputs = await asyncio.gather(*tasks)
        after = await rollout.stats()
        assert len({tuple(output.token_ids) for output in outputs}) == 8
        assert [len(output.token_ids) for output in outputs] == [300] * 8
        assert after["num_resumed"] - before["num_resumed"] == 8
        assert after["num_kept"] == after["num_requests"] == 0
        assert after["num_output_tokens"] - before["num_output_tokens"] == 8 * 300

    asyncio.run(asyncio.wait_for(run(), 300))


def test_requests_wait_while_it_sleeps_and_are_refused_where_that_is_asked_for(rollout: Rollout) -> None:
    async def run() -> None:
        await rollout.replica.sleep()
        task = asyncio.ensure_future(rollout.generate(max_tokens=5))
        await rollout.until(lambda stats: stats["num_queued"] == 1)
        await rollout.replica.wake_up()
        assert len((await task).token_ids) == 5
        await rollout.replica.abort_all_requests(reject_request=True)
        handle = rollout.replica.server_handle
        refused = await handle.generate.remote(request_id="a", prompt_ids=PROMPT, sampling_params=dict(SAMPLING))
        assert (refused.token_ids, refused.stop_reason) == ([], "aborted")
        await rollout.replica.resume_generation()

    asyncio.run(asyncio.wait_for(run(), 300))


def test_weights_change_in_the_middle(cluster: None, checkpoint: Path) -> None:
    """Each token has the log-probability of the model that its version names."""
    rollout = Rollout(checkpoint, rank=1)
    other = tiny.model(seed=1)

    async def run() -> None:
        await rollout.start()
        await rollout.adapter.update_weights(iter(tiny.model().state_dict().items()), global_steps=4)
        task = asyncio.ensure_future(rollout.generate(repetition_penalty=1.0))
        await rollout.cut(200)
        await rollout.replica.sleep()
        await rollout.adapter.resume(["weights"])
        await rollout.adapter.update_weights(iter(other.state_dict().items()), global_steps=5)
        await rollout.adapter.update_weights(iter(other.state_dict().items()))  # as before a validation: no step
        await rollout.adapter.resume(["kv_cache"])
        await rollout.replica.resume_generation()
        output = await task
        versions, fields = output.extra_fields["versions"], output.extra_fields
        assert len(versions) == len(output.token_ids) == LENGTH
        assert set(versions) == {4, 5} and versions == sorted(versions)
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (4, 5)
        assert (await rollout.stats())["num_resumed"] == 1
        by_model = {4: logprobs_of(tiny.model(), output.token_ids), 5: logprobs_of(other, output.token_ids)}
        expected = [by_model[version][i] for i, version in enumerate(versions)]
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(expected), atol=1e-4, rtol=0)

    asyncio.run(asyncio.wait_for(run(), 300))


def test_what_it_does_not_do_is_said(rollout: Rollout, checkpoint: Path) -> None:
    async def fails(error: type[Exception], says: str, call: Awaitable[Any]) -> None:
        with pytest.raises(error, match=says):
            await call

    async def run() -> None:
        generate = rollout.replica.server_handle.generate.remote
        request = {"request_id": "a", "prompt_ids": PROMPT}
        await fails(ValueError, "images", generate(**request, sampling_params={}, image_data=["image"]))
        await fails(ValueError, "no field best_of", generate(**request, sampling_params={"best_of": 2}))
        await fails(ValueError, "logprobs", generate(**request, sampling_params={"logprobs": 5}))
        await fails(ValueError, "1024|too long|max_model_len", generate("a", [3] * 1024, {}))
        adapter = rollout.adapter
        await fails(ValueError, "merge=True", adapter.update_weights([], peft_config={"r": 8}))
        await fails(ValueError, "whole tensors", adapter.update_weights([], wire_format="delta_flush"))
        await fails(ValueError, "missing", adapter.update_weights([("a", torch.zeros(2))], global_steps=9))
        assert (await rollout.stats())["global_steps"] == 0, "refused weights have no step"
        assert len((await rollout.generate(max_tokens=3)).token_ids) == 3, "and it works on"

    asyncio.run(asyncio.wait_for(run(), 300))


def test_settings() -> None:
    def settings(**fields: Any) -> plugin.ServerConfig:
        config = RolloutConfig(name="longtail", tensor_model_parallel_size=1, **fields)
        return plugin.ServerConfig.of(config, "model", 3, RolloutMode.HYBRID)

    config = settings(max_num_seqs=8, engine_kwargs={"longtail": {"max_num_seqs": 4, "kv_on_update": "keep"}})
    assert config.settings["max_num_seqs"] == 4 and config.settings["kv_on_update"] == "keep"
    assert config.settings["logprobs_mode"] == "processed" and config.sleeps
    assert settings(seed=1).seed != settings(seed=2).seed
    with pytest.raises(ValueError, match="logprobs_mode"):
        settings(logprobs_mode="raw_logits")
    with pytest.raises(ValueError, match="quantization"):
        settings(quantization="fp8")
    with pytest.raises(ValueError, match="module:function"):
        plugin.load_factory("longtail.bench.services")


def test_verl_finds_it_by_its_entry_point() -> None:
    code = "import verl.workers.rollout.replica as r; print(r.get_rollout_replica_class('longtail').__module__)"
    env = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [plugin.__name__], done.stderr[-2000:]
