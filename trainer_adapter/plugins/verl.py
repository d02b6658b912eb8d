"""verl 0.9.1 with longtail as its rollout: `actor_rollout_ref.rollout.name=longtail`.

    pip install longtail                 # verl finds it by its entry point, or, from a source tree:
    export VERL_USE_EXTERNAL_MODULES=longtail.trainer_adapter.plugins.verl
    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=longtail trainer.v1.trainer_mode=colocate_async \\
        algorithm.rollout_correction.rollout_is=token ...

    AgentLoopWorker --- ResumingClient --generate--> Server (one actor a replica) --> service --> engine
    trainer ---------- Replica --abort, sleep, ...->   ^
    ActorRolloutRefWorker --- Adapter --weights--------+

verl aborts what runs at each weight update and sends it again, prompt + output so far, under a new request id. The
service knows it by its tokens: the sample goes on with its seed, the position of its noise and its penalty counts, and
with its KV where the weights are still those that made it (or `kv_on_update` is "keep"). Each token comes with its
log-probability and, in `extra_fields["versions"]`, with the trainer's step of the weights that made it. Importance
weights come from the log-probabilities: `rollout_is=token` has verl make them; by default it corrects nothing.

Settings of the engine stand in `actor_rollout_ref.rollout.engine_kwargs.longtail`, and go before those of verl that
mean the same. `service` among them names another function that makes the service (`ServiceFactory`).
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils import normalize_token_ids
from verl.utils.fs import copy_to_local
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from longtail.sample import sample_seed
from longtail.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

NAME = "longtail"
SERVICE = "longtail.bench.services:native_service"
"""What makes the service where the settings name no other."""
LOGPROBS_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw"}

Tensors = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]
"""By name: the bytes (uint8 [n]), dtype and shape. Ray passes the bytes through shared memory."""


# ---- what is needed of the rollout layer


class Completion(Protocol):
    """The tokens of one request, with an entry for each in logprobs and versions."""

    token_ids: list[int]
    logprobs: list[float]
    versions: Sequence[int]
    finish_reason: str
    failure: str | None
    version: int
    routed_experts: Any


class Request(Protocol):
    completion: Future[Any]

    def cancel(self) -> None: ...


class Service(Protocol):
    """`partial_rollout.service.RolloutService`, as far as it is used here."""

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, max_new_tokens: int | None = None
    ) -> Request: ...

    def abort_all(self) -> Future[int]: ...

    def pause(self, mode: Any = "keep") -> Future[None]: ...

    def resume(self) -> Future[None]: ...

    def update_weights(self, weights: Mapping[str, Any], version: int | None = None) -> Future[Any]: ...

    def reset_prefix_cache(self) -> Future[None]: ...

    def stats(self) -> Any: ...


class ServiceFactory(Protocol):
    """Makes a service for the model in a directory, its engine at version 0. seed: of samples that name none."""

    def __call__(self, model: str, *, seed: int, **settings: Any) -> Service: ...


def load_factory(path: str) -> ServiceFactory:
    """path: "module:function". ValueError if there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"engine_kwargs.longtail.service: {path!r} is no module:function ({error})") from error


# ---- the server: one actor for each replica


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a `Server` needs of verl's RolloutConfig."""

    model: str
    """Directory, or a path that verl's `copy_to_local` makes one of."""
    service: str
    seed: int
    prompt_length: int
    response_length: int
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    sleeps: bool = True
    """Whether it gives up its KV while the trainer works."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the service."""

    @classmethod
    def of(cls, config: Any, model: str, rank: int, mode: RolloutMode | None) -> ServerConfig:
        """config: a RolloutConfig. ValueError for what this rollout does not do."""
        if config.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"rollout.logprobs_mode must be {' or '.join(LOGPROBS_MODES)}, not {config.logprobs_mode!r}"
            )
        for name, on in (("quantization", config.quantization), ("qat", (config.qat or {}).get("enable"))):
            if on:
                raise ValueError(f"rollout.{name} is not supported by longtail; leave it out")
        settings = {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
            "max_model_len": config.max_model_len,
            "enable_prefix_caching": config.enable_prefix_caching,
            "logprobs_mode": LOGPROBS_MODES[config.logprobs_mode],
            "record_routing": config.enable_rollout_routing_replay,
        }
        settings.update(config.engine_kwargs.get(NAME) or {})
        return cls(
            model=model,
            service=settings.pop("service", SERVICE),
            seed=sample_seed(config.seed, "", rank),
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            repetition_penalty=config.repetition_penalty,
            ignore_eos=config.ignore_eos,
            sleeps=config.free_cache_engine and mode is not RolloutMode.STANDALONE,
            settings=settings,
        )


class Server:
    """Answers verl's calls with a service of its own. All methods run in the actor's event loop.

    It generates while nothing has closed it: an abort (until `resume_generation`), sleep (until `wake_up`), a release
    of the KV (until `resume_kv_cache`). Requests that come meanwhile wait.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.service = load_factory(config.service)(copy_to_local(config.model), seed=config.seed, **config.settings)
        self._steps = [0]
        """The trainer's step for each version of the engine: verl may send weights twice in a step."""
        self._incoming: dict[str, torch.Tensor] = {}
        self._closed: set[str] = set()
        self._rejects = False

    async def generate(
        self,
        request_id: str,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> TokenOutput:
        """The output from prompt_ids on: all of a fresh prompt's, the rest of one that was aborted.

        ValueError for what cannot be generated. RuntimeError if the sample failed: verl drops its group."""
        if image_data or video_data or audio_data or mm_processor_kwargs:
            raise ValueError("longtail generates text: a prompt with images, video or audio needs another rollout")
        if self._rejects:
            return self._output([], [], [], "aborted", self._steps[-1])
        prompt = [int(token) for token in normalize_token_ids(prompt_ids)]
        params, limit = self._params(sampling_params, len(prompt))
        request = self.service.generate(prompt, params, max_new_tokens=limit)
        try:
            done: Completion = await asyncio.wrap_future(request.completion)
        except asyncio.CancelledError:
            request.cancel()
            raise
        if done.finish_reason == "error":
            raise RuntimeError(f"request {request_id}: {done.failure}")
        versions = [self._steps[version] for version in done.versions]
        reason = "aborted" if done.finish_reason == "abort" else "completed"
        routed = None if done.routed_experts is None else np.asarray(done.routed_experts)
        return self._output(done.token_ids, done.logprobs, versions, reason, self._steps[done.version], routed)

    @staticmethod
    def _output(
        tokens: list[int], logprobs: list[float], versions: list[int], reason: str, step: int, routed: Any = None
    ) -> TokenOutput:
        fields = {
            "global_steps": versions[-1] if versions else step,
            "min_global_steps": versions[0] if versions else step,
            "versions": versions,
        }
        return TokenOutput(
            token_ids=tokens, log_probs=logprobs, routed_experts=routed, stop_reason=reason, extra_fields=fields
        )

    def _params(self, values: Mapping[str, Any], prompt_length: int) -> tuple[SamplingParams, int]:
        """verl's sampling parameters, in vLLM's names, and how many tokens this request may bring."""
        values = {"repetition_penalty": self.config.repetition_penalty, "ignore_eos": self.config.ignore_eos, **values}
        if (wanted := values.pop("logprobs", None)) not in (None, False, True):  # 0, too: that of the token itself
            raise ValueError(f"logprobs must be True or False, not {wanted!r}: each token comes with its own alone")
        config = self.config
        limit = min(config.response_length, config.prompt_length + config.response_length - prompt_length)
        for name in ("max_new_tokens", "max_tokens"):
            limit = values.pop(name, limit)
        return SamplingParams.from_dict(values), max(limit, 1)

    # -- the trainer's calls ------------------------------------------------------------------------------------------

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Each request ends with the tokens that it has. reject_request: those that come until `resume_generation` are
        answered with none, and do not wait."""
        self._rejects = reject_request
        closing = self._close("abort")
        aborted = self.service.abort_all()  # nothing can start between the two
        await closing
        return {"aborted_count": await asyncio.wrap_future(aborted), "request_ids": []}

    async def resume_generation(self) -> None:
        self._rejects = False
        await self._open("abort")

    async def sleep(self) -> None:
        """Waits for what still runs, and frees all KV blocks. Samples that were aborted have theirs in host memory."""
        if self.config.sleeps:
            await self._close("sleep", "wait")
            await self.clear_kv_cache()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            await self._open("sleep")

    async def release_kv_cache(self) -> None:
        """For the time of a weight update."""
        await self._close("release", "wait")
        await self.clear_kv_cache()

    async def resume_kv_cache(self) -> None:
        await self._open("release")

    async def clear_kv_cache(self) -> None:
        """Forgets the KV of finished samples. That of aborted ones says which weights made it, and is not mistaken."""
        await asyncio.wrap_future(self.service.reset_prefix_cache())

    def _close(self, gate: str, mode: str = "keep") -> asyncio.Future[None]:
        self._closed.add(gate)
        return asyncio.wrap_future(self.service.pause(mode))

    async def _open(self, gate: str) -> None:
        self._closed.discard(gate)
        if not self._closed:
            await asyncio.wrap_future(self.service.resume())

    async def receive_weights(self, tensors: Tensors, start: bool) -> None:
        """A part of the next weights. start: the first one."""
        if start:
            self._incoming = {}
        for name, (data, dtype, shape) in tensors.items():
            self._incoming[name] = torch.tensor(data).view(dtype).reshape(shape)

    async def update_weights(self, global_steps: int | None) -> None:
        """The weights that have been received, as the engine's next version. global_steps: the trainer's step; None:
        the same again."""
        weights, self._incoming = self._incoming, {}
        self._steps.append(self._steps[-1] if global_steps is None else int(global_steps))
        try:
            await asyncio.wrap_future(self.service.update_weights(weights, len(self._steps) - 1))
        except ValueError:
            self._steps.pop()
            raise

    async def start_profile(self, **_: Any) -> None:
        logger.warning("rollout.profiler: longtail has no profiler of verl's kind; its engine traces itself")

    async def stop_profile(self) -> None:
        return

    async def stats(self) -> dict[str, Any]:
        """The service's counts, and the trainer's step of the weights."""
        return {**dataclasses.asdict(self.service.stats()), "global_steps": self._steps[-1]}


# ---- verl's side of it


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    return f"{NAME}_server_{kind}{replica_rank}{suffix}"


class Replica(RolloutReplica):
    """One server, however many GPUs of the trainer share it (`tensor_model_parallel_size`, ...)."""

    async def launch_servers(self) -> None:
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = server_name(self.replica_rank, kind, self.name_suffix)
        config = ServerConfig.of(self.config, self.model_config.path, self.replica_rank, self.rollout_mode)
        options: dict[str, Any] = {"name": name, "max_concurrency": self.max_concurrency}
        if self.workers:  # on the node of those who send the weights
            node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        server = ray.remote(Server).options(**options).remote(config)
        await server.stats.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class Adapter(rollout_base.BaseRollout):
    """In each worker of the trainer: sends the actor's weights to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    @property
    def server(self) -> Any:
        if self._server is None:  # it is started after the workers
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.is_leader_rank:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Takes all of `weights`, a complete state dict, on every rank (making them is a collective operation); the
        leader sends them, so many bytes at once as `checkpoint_engine.update_weights_bucket_megabytes` says.

        ValueError for weights in another form: deltas, or a LoRA adapter that is not merged."""
        if wire_format != "named_tensors":
            raise ValueError(f"checkpoint_engine.backend sends {wire_format!r}; longtail takes whole tensors")
        if peft_config is not None:
            raise ValueError("longtail takes merged weights; set actor_rollout_ref.model.lora.merge=True")
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: Tensors = {}
        nbytes, start = 0, True
        async for name, tensor in ensure_async_iterator(weights):
            if not self.is_leader_rank:
                continue
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            if bucket and nbytes + data.nbytes > limit:
                await self.server.receive_weights.remote(bucket, start)
                bucket, nbytes, start = {}, 0, False
            bucket[name] = (data, tensor.dtype, tuple(tensor.shape))
            nbytes += data.nbytes
        if self.is_leader_rank:
            await self.server.receive_weights.remote(bucket, start)
            await self.server.update_weights.remote(global_steps)


# ---- the client that resumes

_versions: contextvars.ContextVar[list[int]] = contextvars.ContextVar("versions")


class _Pieces(LLMServerClient):
    """Notes the versions of each piece of a response that `ResumingClient` has in hand."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        output = await super().generate(request_id, **kwargs)
        _versions.get().extend(output.extra_fields["versions"])
        return output


class ResumingClient(FullyAsyncLLMServerClient, _Pieces):
    """verl's client puts the pieces of a response together, and keeps of their extra fields two steps alone. This one
    keeps the version of each token: `FullyAsyncLLMServerClient` takes the pieces from `_Pieces`, its next in line."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        versions: list[int] = []
        token = _versions.set(versions)
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            _versions.reset(token)
        output.extra_fields["versions"] = versions
        if versions:
            output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"] = versions[0], versions[-1]
        return output


def _register() -> None:
    """Makes the name known. Clients are chosen by the trainer, with no hook for a rollout to name its own."""
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
    rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{Adapter.__module__}.{Adapter.__qualname__}"
    get_client = LLMServerManager.get_client

    @functools.wraps(get_client)
    def get_client_of(self: Any, client_cls: type | None = None, **kwargs: Any) -> Any:
        if self.rollout_config.name == NAME and client_cls is FullyAsyncLLMServerClient:
            client_cls = ResumingClient
        return get_client(self, client_cls, **kwargs)

    LLMServerManager.get_client = get_client_of


_register()
