"""AReaL's own client, in its own environment: `areal_client.py URL PROMPTS LENGTH WEIGHTS`.

It starts a request for each prompt (a JSON list of lists), updates the weights from the directory WEIGHTS through
AReaL's own calls while they run (pause, update, continue, as its trainer does), and prints what `agenerate` gives, one
JSON object a line."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra.utils.http import arequest_with_retry


def main(url: str, prompts: list[list[int]], length: int, weights: str) -> None:
    address = url.removeprefix("http://")
    config = InferenceEngineConfig(
        backend="sglang:d1", experiment_name="test", trial_name="test", setup_timeout=30, request_retries=1
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=address, train_data_parallel_size=1)
    sampling = GenerationHyperparameters(max_new_tokens=length, max_tokens=4096, temperature=1.0, ignore_eos=True)

    async def update() -> None:
        """What its update from disk does, without the name service that tells when the trainer has saved."""
        import aiohttp
        from areal.api import WeightUpdateMeta

        while not sys.stdin.readline():  # told when the requests are under way
            pass
        await asyncio.to_thread(engine.pause_generation)
        meta = WeightUpdateMeta(type="disk", path=weights)
        async with aiohttp.ClientSession() as session:
            for request in SGLangBackend().build_disk_weight_update_requests(meta).requests:
                answer = await arequest_with_retry(
                    session=session,
                    addr=address,
                    endpoint=request.endpoint,
                    payload=request.payload,
                    method=request.method,
                    max_retries=1,
                    timeout=60,
                )
                print(json.dumps({"update": answer}), flush=True)
        engine.set_version(1)
        await asyncio.to_thread(engine.continue_generation)

    async def generate() -> None:
        async def one(number: int, ids: list[int]) -> None:
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=sampling))
            print(
                json.dumps(
                    {
                        "number": number,
                        "input": response.input_tokens,
                        "output": response.output_tokens,
                        "logprobs": response.output_logprobs,
                        "versions": response.output_versions,
                        "stop": response.stop_reason,
                    }
                ),
                flush=True,
            )

        await asyncio.gather(*(one(i, ids) for i, ids in enumerate(prompts)))

    updating = threading.Thread(target=lambda: asyncio.run(update()), daemon=True)
    updating.start()
    asyncio.run(generate())
    updating.join()
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
