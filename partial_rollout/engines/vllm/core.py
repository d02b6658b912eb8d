"""vLLM as far as the engine uses it: everything that knows vLLM's insides stands here and in `process_core.py`.

    LocalCore      LLMEngine in this process: a pass is made when the engine asks for one
    ProcessCore    AsyncLLM, whose core has a process of its own and makes passes without being asked

A `Request` here is one stay of a sample in vLLM: its prompt is all that the sample has, and what it makes comes out in
steps. It ends when it is withdrawn. A sample that is paused, or whose KV is to be computed again, comes back as another
request; what it finds computed is in the prefix cache, under its salt.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail.errors import LongtailError, UnsupportedModel
from longtail.partial_rollout.engines.vllm.config import VllmSettings
from longtail.partial_rollout.engines.vllm.correction import correct
from longtail.partial_rollout.engines.vllm.drafters import Proposer, proposer_of, speculative_config
from longtail.partial_rollout.engines.vllm.kv_link import Admission
from longtail.partial_rollout.engines.vllm.sampling import EXTENSION, KEY, row_state
from longtail.partial_rollout.engines.vllm.versions import VllmUnsupported
from longtail.partial_rollout.engines.vllm_plugin import WEIGHT_TRANSFER, register_weight_transfer
from longtail.sample import Sample
from longtail.version import PolicyVersion

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ModelConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor
    from vllm.v1.request import Request

CPU_BLOCK_SIZE, CPU_KV_BYTES = 32, 2 << 30
IN_CORE = "longtail.partial_rollout.engines.vllm.in_core"
"""What the core's process loads of ours."""
_running: weakref.WeakSet[LocalCore] = weakref.WeakSet()
"""Cores of this process. One that was dropped without `close` is not among them."""


class CoreDied(LongtailError):
    """The process of vLLM's core is gone. Samples keep all that had come from it: `pause` gives them back, and another
    engine continues them."""


@dataclasses.dataclass(slots=True)
class Emitted:
    """What a request made in a pass."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """Why vLLM itself has ended it; None: it goes on."""


@dataclasses.dataclass(slots=True)
class Pass:
    """What a forward pass did."""

    emitted: list[Emitted]
    starts: dict[str, int]
    """Of each request with a part in it, by its id: tokens of which it had the KV before,"""
    counts: dict[str, int]
    """and tokens that were computed, without drafts."""
    computed: dict[str, int]
    """Of those that go on, tokens of which it has the KV now."""
    num_drafts: int
    preempted: list[str]
    """Requests that lost their blocks."""
    started: float
    ended: float
    """On this machine's `time.perf_counter`."""
    sample_seconds: float = 0.0
    """Of these, those that our sampler took; 0 where it is in another process,"""
    draft_seconds: float = 0.0
    """and those that our drafts for the next pass took."""
    version: PolicyVersion | None = None
    """Of the weights that made it; None: of those that are in place."""
    admissions: dict[str, Admission] = dataclasses.field(default_factory=dict)
    """From the core's process: what requests found that got their blocks."""


def pass_of(s: SchedulerOutput, requests: Mapping[str, Request], emitted: list[Emitted], started: float) -> Pass:
    """Of a pass that has just ended. requests: the scheduler's."""
    cached, drafts = s.scheduled_cached_reqs, s.scheduled_spec_decode_tokens
    return Pass(
        emitted,
        starts={new.req_id: new.num_computed_tokens for new in s.scheduled_new_reqs}
        | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
        counts={i: n - len(drafts.get(i, ())) for i, n in s.num_scheduled_tokens.items()},
        computed={i: requests[i].num_computed_tokens for i in s.num_scheduled_tokens if i in requests},
        num_drafts=sum(token >= 0 for own in drafts.values() for token in own),  # the others fill a row up
        preempted=list(s.preempted_req_ids or ()),
        started=started,
        ended=time.perf_counter(),
    )


class Core:
    """Owns vLLM's frontend. extra_args: further EngineArgs, of our own parts."""

    llm: Any
    """LLMEngine, or AsyncLLM."""

    def __init__(self, model: str, settings: VllmSettings, extra_args: Mapping[str, Any]) -> None:
        set_defaults(by_counter=settings.sampling == "counter")
        if settings.batch_invariant:
            _want_batch_invariance()
        correct()
        register_weight_transfer()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.executor import Executor

        args = engine_args(model, settings, extra_args, is_cpu=current_platform.is_cpu())
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        if unknown := sorted(set(args) - known):
            raise ValueError(f"engine_args: vLLM's EngineArgs have no field {', '.join(unknown)}")
        config = EngineArgs(**args).create_engine_config()
        if config.model_config.is_encoder_decoder or config.model_config.runner_type != "generate":
            raise UnsupportedModel(f"model: {model} is no decoder that generates; the vLLM engine runs those only")
        self.config = config
        self._stamp = itertools.count()
        self._start(Executor.get_class(config))

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return int(self.config.model_config.get_vocab_size())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return eos_of(self.config.model_config)

    @property
    def max_model_len(self) -> int:
        return int(self.config.model_config.max_model_len)

    def sample_by_counter(self, raw_logprobs: bool) -> None:
        """Puts our sampler in the place of vLLM's. UnsupportedModel where its runner has none that can be replaced."""
        if self.config.use_v2_model_runner:
            raise UnsupportedModel(
                "model: vLLM runs it on its model runner V2, whose sampler cannot be replaced; unset "
                "VLLM_USE_V2_MODEL_RUNNER, or use sampling='vllm'"
            )
        self.rpc("longtail_sample_by_counter", eos_token_ids=self.eos_token_ids, raw_logprobs=raw_logprobs)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, sample: Sample, salt: str, by_counter: bool, kv_params: Mapping[str, Any] | None) -> str:
        """-> the request's id. The sample goes on behind what it has. salt: of its blocks in the prefix cache; requests
        share blocks of one salt only. kv_params: for a KV connector."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tokens = [*sample.prompt_ids, *sample.output_ids]
        p = sample.params
        extra: dict[str, Any] = {KEY: row_state(sample)}
        if kv_params is not None:
            extra["kv_transfer_params"] = dict(kv_params)
        if by_counter:
            ours: dict[str, Any] = {"temperature": 0.0}  # all that it decides is decided by our sampler
        else:
            ours = {
                "temperature": p.temperature,
                "top_p": p.top_p,
                "top_k": p.top_k,
                "min_p": p.min_p,
                "presence_penalty": p.presence_penalty,
                "frequency_penalty": p.frequency_penalty,
                "repetition_penalty": p.repetition_penalty,
                "seed": sample.seed & (2**63 - 1),
            }
        params = SamplingParams(
            **ours,
            # What ends a sample is decided by the engine, with all of the sample in sight, and while it has its blocks.
            max_tokens=self.max_model_len - len(tokens),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        prompt: Any = {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt}
        return self._add(f"{sample.id}#{next(self._stamp)}", prompt, params)

    @property
    def block_size(self) -> int:
        return int(self.config.cache_config.block_size)

    # -- where the core is --------------------------------------------------------------------------------------------

    scheduler: Scheduler
    """Of this process, as the two below; there is none where the core has another."""

    @property
    def runner(self) -> Any:
        """The model runner; None where workers have processes of their own."""
        return None

    def block_table(self, request_id: str) -> list[int]:
        """Of a request of a model whose layers all keep the same; empty if it has ended, or has no blocks."""
        raise NotImplementedError

    def _start(self, executor: type[Executor]) -> None:
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        return True

    def make_proposer(self, version: int) -> Any:
        """`Proposer` or `RemoteProposer`, for weights of this version; None if vLLM was not made for one."""
        raise NotImplementedError

    def check_alive(self) -> None:
        """CoreDied if the core's process is not there any more."""

    def rpc(self, method: str | Callable[[Any], Any], **kwargs: Any) -> list[Any]:
        """Of every worker."""
        raise NotImplementedError

    def set_weight_version(self, version: str) -> None:
        raise NotImplementedError

    def _add(self, request_id: str, prompt: Any, params: SamplingParams) -> str:
        raise NotImplementedError

    def withdraw(self, request_id: str) -> None:
        """Ends a request: its blocks are free, and found by those of its salt until they are needed."""
        raise NotImplementedError

    def step(self, *, wait: bool = True) -> list[Pass]:
        """What was made since the last call, or, if nothing was, what the next pass makes. wait: for that one."""
        raise NotImplementedError

    def step_lost(self) -> None:
        """`step` raised: workers may not have heard which requests had ended before it, and are told again."""

    def freeze(self) -> list[Pass]:
        """No pass is made until `thaw`. -> those that were made before, and not told of yet."""
        return []

    def thaw(self) -> None: ...

    def requests(self) -> dict[str, list[int]]:
        """Tokens of each request that vLLM has."""
        raise NotImplementedError

    @property
    def num_blocks(self) -> int:
        """Without the null block, which is never handed out."""
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        """As far as is known."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what vLLM holds of the process, so that another engine can start in it. May be called again."""
        raise NotImplementedError


class LocalCore(Core):
    """An `LLMEngine`, core and all, in this process."""

    llm: LLMEngine

    def _start(self, executor: type[Executor]) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self.llm = LLMEngine(
            vllm_config=self.config, executor_class=executor, log_stats=True, multiprocess_mode=False
        )
        self._look()
        _running.add(self)
        self._names: dict[str, str] = {}
        """Of requests: the ids that we gave them, by vLLM's own."""
        self._scheduled: SchedulerOutput | None = None
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._recorded

    def _look(self) -> None:
        """VllmUnsupported unless the parts that this engine reads are where they are expected."""
        for path in (
            "engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks",
            "engine_core.engine_core.scheduler.requests",
            "engine_core.engine_core.scheduler.schedule",
            "engine_core.engine_core.model_executor",
            "output_processor.request_states",
        ):
            part: Any = self.llm
            for name in path.split("."):
                if not hasattr(part, name):
                    raise VllmUnsupported(f"vLLM's LLMEngine has no {path} (missing: {name}); this vLLM is not known")
                part = getattr(part, name)

    def make_proposer(self, version: int) -> Proposer | None:
        return proposer_of(self.runner, version, self.eos_token_ids)

    def rpc(self, method: str | Callable[[Any], Any], **kwargs: Any) -> list[Any]:
        return self.llm.collective_rpc(method, kwargs=kwargs)

    def set_weight_version(self, version: str) -> None:
        self.llm.set_weight_version(version)

    @property
    def runner(self) -> Any:
        return runner_in(self.llm.engine_core.engine_core)

    @property
    def scheduler(self) -> Scheduler:
        scheduler: Scheduler = self.llm.engine_core.engine_core.scheduler
        return scheduler

    def _add(self, request_id: str, prompt: Any, params: SamplingParams) -> str:
        own = self.llm.add_request(request_id, prompt, params)
        self._names[own] = request_id
        return own

    def withdraw(self, request_id: str) -> None:
        self.llm.abort_request([request_id], internal=True)
        del self._names[request_id]

    def step_lost(self) -> None:
        if self._scheduled is not None:
            self.scheduler.finished_req_ids |= self._scheduled.finished_req_ids

    def _recorded(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._scheduled = self._schedule(*args, **kwargs)
        return self._scheduled

    def step(self, *, wait: bool = True) -> list[Pass]:
        self._scheduled = None
        ids = {name: own for own, name in self._names.items()}
        started, emitted = time.perf_counter(), []
        for out in self.llm.step():
            (made,) = out.outputs
            logprobs = [next(iter(at.values())).logprob for at in made.logprobs or ()]
            emitted.append(Emitted(ids[out.request_id], list(made.token_ids), logprobs, made.finish_reason))
        if self._scheduled is None:
            return [Pass(emitted, {}, {}, {}, 0, [], started, time.perf_counter())]
        done = pass_of(self._scheduled, self.scheduler.requests, emitted, started)
        sampler = getattr(self.runner, "sampler", None)
        done.draft_seconds = getattr(getattr(self.runner, "drafter", None), "seconds", 0.0)
        if done.counts:
            done.sample_seconds = float(getattr(sampler, "ended", 0.0) - getattr(sampler, "started", 0.0))
        return [done]

    def requests(self) -> dict[str, list[int]]:
        found = self.scheduler.requests
        assert set(self.llm.output_processor.request_states) == set(found), "vLLM's two halves differ"
        return {i: list(request.all_token_ids) for i, request in found.items()}

    @property
    def num_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def block_table(self, request_id: str) -> list[int]:
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return list(table)

    def close(self) -> None:
        """The last one of the process gives back what vLLM holds of it for all together, its process groups."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if not hasattr(self, "llm"):  # it is closed
            return
        self.scheduler.schedule = self._schedule
        _running.discard(self)
        if _running:  # vLLM's own shutdown, which also waits for the garbage collector, would take along their groups
            self.llm.engine_core._finalizer.detach()
            self.scheduler.shutdown()
            self.config.compilation_config.static_forward_context.clear()  # the layers, and their caches
            gc.unfreeze()  # vLLM has frozen what it made at its start
        else:
            self.llm.engine_core.shutdown()
        del self.llm
        gc.collect()
        if not _running:
            cleanup_dist_env_and_memory()


def set_defaults(*, by_counter: bool) -> None:
    """Of the environment, as vLLM reads it where it builds an engine, not as it is imported."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else a CPU's worker has a process of its own
    if by_counter:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the runner whose sampler is replaced


def runner_in(core: Any) -> Any:
    """The model runner of vLLM's EngineCore; None where the workers have processes of their own."""
    return getattr(getattr(core.model_executor, "driver_worker", None), "model_runner", None)


def eos_of(config: ModelConfig) -> tuple[int, ...]:
    """Ids that end a sample of this model."""
    eos = config.try_get_generation_config().get("eos_token_id")
    if eos is None:
        eos = getattr(config.hf_text_config, "eos_token_id", None)
    ids = eos if isinstance(eos, list | tuple) else (eos,)
    return tuple(i for i in ids if i is not None and 0 <= i < config.get_vocab_size())


def _want_batch_invariance() -> None:
    """ValueError without an accelerator, and where parts of vLLM have already read that it is not wanted."""
    if not torch.accelerator.is_available():
        raise ValueError("batch_invariant: vLLM has no such kernels for a CPU; leave it off")
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        return
    if any(name.startswith("vllm.v1") for name in sys.modules):
        raise ValueError(
            "batch_invariant: vLLM is already imported without it; set VLLM_BATCH_INVARIANT=1 in the environment"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


def engine_args(model: str, s: VllmSettings, extra: Mapping[str, Any], *, is_cpu: bool) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs."""
    args: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "max_num_seqs": s.max_num_seqs,
        "max_num_batched_tokens": s.max_num_batched_tokens,
        "enable_prefix_caching": s.enable_prefix_caching,
        "enforce_eager": is_cpu if s.enforce_eager is None else s.enforce_eager,
        "logprobs_mode": f"{s.logprobs_mode}_logprobs",
        "async_scheduling": False,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
    }
    if s.core == "process":
        args |= {"worker_extension_cls": f"{IN_CORE}.WorkerExtension", "scheduler_cls": f"{IN_CORE}.CoreScheduler"}
    optional = {
        "dtype": s.dtype or ("float32" if is_cpu else None),
        "max_model_len": s.max_model_len,
        "block_size": s.block_size or (CPU_BLOCK_SIZE if is_cpu else None),
        "kv_cache_memory_bytes": s.kv_cache_bytes or (CPU_KV_BYTES if is_cpu else None),
        "speculative_config": _speculative(s),
    }
    args |= {name: value for name, value in optional.items() if value is not None}
    return {**args, **s.engine_args, **extra}


def _speculative(s: VllmSettings) -> dict[str, Any] | None:
    if s.drafter is not None:
        return speculative_config(s.drafter, s.max_drafts)
    return None if s.speculative is None else dict(s.speculative)


def check_directory(model: str | Path) -> str:
    """ValueError for what is not a model directory, nor may be a hub id."""
    if not isinstance(model, str | Path):
        raise ValueError(
            f"model: vLLM loads models from a directory or the hub, not a {type(model).__name__}; save it "
            "(save_pretrained) and give the directory"
        )
    source = str(model)
    if ("/" in source and source.startswith((".", "/", "~"))) or Path(source).exists():
        source = str(Path(source).expanduser())
        if not (Path(source) / "config.json").is_file():
            raise ValueError(f"model: {source} is not a model directory (no config.json)")
    return source
