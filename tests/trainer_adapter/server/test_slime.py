"""slime's requests, recorded, and what it takes out of the answers.

Read in THUDM/slime: slime/rollout/sglang_rollout.py at 0044b40d (generate, abort), sglang_streaming_rollout.py at
0b63cca1, backends/sglang_utils/server_control.py at 15b8e507 (abort_server_until_idle), sglang_engine.py at 03b32d8b
(health_generate, flush_cache, get_weight_version, pause and continue), utils/types.py at 0d234f3e
(update_from_meta_info). The bodies below are what these send with slime's default arguments; the reader is written
after what they read.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import make_stepped, params, steps, undisturbed
from tests.trainer_adapter.server.helpers import client, run_async, save_model, served, stream

GROUP = 4
LENGTH = 20
STATUS = {"length": "truncated", "abort": "aborted", "stop": "completed"}


def sampling_params(index: int) -> dict[str, Any]:
    """`GenerateState.sampling_params`, with sglang_enable_deterministic_inference."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": LENGTH,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 42 + index,
    }


class SlimeSample:
    """What slime keeps of a sample between its requests."""

    def __init__(self, ids: list[int], index: int) -> None:
        self.prompt, self.index = ids, index
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.weight_versions: list[str] = []
        self.response_length, self.status = 0, "pending"

    def payload(self) -> dict[str, Any]:
        sampling = sampling_params(self.index)
        sampling["max_new_tokens"] -= self.response_length
        self.tokens = self.tokens or list(self.prompt)
        return {"sampling_params": sampling, "return_logprob": True, "input_ids": self.tokens}

    def take(self, output: dict[str, Any]) -> None:
        assert isinstance(output["text"], str)
        meta = output["meta_info"]
        new = [item[1] for item in meta["output_token_logprobs"]]
        self.tokens = self.tokens + new
        self.log_probs += [item[0] for item in meta["output_token_logprobs"]]
        self.response_length += len(new)
        self.weight_versions.append(meta["weight_version"])
        self.status = STATUS[meta["finish_reason"]["type"]]
        assert {"prompt_tokens", "completion_tokens"} <= set(meta)


def num_requests(load: dict[str, Any]) -> int:
    """Of `GET /v1/loads?include=core,disagg,queues`, as `num_requests_from_load` counts them."""
    return sum(one.get("num_total_reqs", 0) for one in load["loads"])


def test_a_rollout_that_is_cut(tmp_path: Path) -> None:
    """Partial rollout: a group runs, slime aborts until the server is idle, updates, and sends the aborted samples
    again without any rid. Streamed and not. Each is in the end the sample of its seed."""
    model = make_model("llama")
    directory = save_model(model, tmp_path)
    engine, alone = make_stepped(model), make_stepped(model)
    want = [
        undisturbed(alone, prompt(1), params(seed=42 + i, max_tokens=LENGTH, ignore_eos=False)) for i in range(GROUP)
    ]
    samples = [SlimeSample(prompt(1), i) for i in range(GROUP)]

    async def generate(http: Any, sample: SlimeSample) -> None:
        if sample.index % 2:
            answer = await http.post("/generate", json=sample.payload())
            answer.raise_for_status()
            sample.take(answer.json())
            return
        last = None
        async with stream(http, "/generate", {**sample.payload(), "stream": True}) as events:
            async for event in events:
                last = event if event != "[DONE]" else last
        assert last is not None
        sample.take(last)

    async def rollout(server: Any) -> None:
        async with client(base_url=server.url) as http:
            assert (await http.get("/health_generate")).status_code == 200
            assert (await http.get("/flush_cache")).status_code == 200
            engine.budget = 0
            first = asyncio.gather(*(generate(http, s) for s in samples))
            while server.service.stats().num_requests < GROUP:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(steps, server.service, 8)

            (worker,) = (await http.get("/workers")).json()["workers"]
            assert (await http.post(worker["url"] + "/abort_request", json={"abort_all": True})).status_code == 200
            load = (await http.get(worker["url"] + "/v1/loads?include=core,disagg,queues")).json()
            assert num_requests(load) == 0
            await first
            assert {s.status for s in samples} == {"aborted"}
            assert [s.response_length for s in samples] == [8] * GROUP

            # The same weights as a new version: versions change, tokens do not.
            await http.post("/pause_generation", json={})
            update = {"model_path": directory, "flush_cache": True, "weight_version": "1"}
            assert (await http.post("/update_weights_from_disk", json=update)).json()["success"]
            assert (await http.get("/get_weight_version")).json() == {"weight_version": "1"}
            await http.post("/continue_generation", json={})
            engine.budget = None
            await asyncio.gather(*(generate(http, s) for s in samples[::-1]))

    with served(engine) as server:
        run_async(rollout(server))
        assert server.service.stats().num_resumed == GROUP
    for sample, expected in zip(samples, want, strict=True):
        assert sample.tokens == [*prompt(1), *expected.output_ids]
        assert sample.log_probs == expected.logprobs
        assert sample.weight_versions == ["0", "1"]
        assert sample.status == STATUS[str(expected.finish_reason)]
