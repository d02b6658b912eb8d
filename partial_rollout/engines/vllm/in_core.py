"""What vLLM's core process loads of ours, by name: its scheduler, its KV connector, and what extends its workers.

The scheduler is vLLM's. Beside the tokens of each pass it tells what the pass was, as the output of a request that does
not exist, so that both come in one message and in order (vLLM's frontend skips what it does not know). It adds one
method to the core, `longtail`, which the engine calls between two passes:

    freeze    no pass is made until `thaw`; a mark in the outputs says where they end
    requests  tokens of each request, and free blocks, for `check_integrity`
    save      the KV of a request, packed; what is to be restored comes with the request (`remote_saver.py`)

Importing this is what the plugin does (vLLM's faults, our weight transfer), also where longtail is not installed as a
plugin of vLLM.

The scheduler sees to it that the process ends when the engine's does: vLLM tells its core of an end in order alone, and
one whose engine was killed would keep its memory, its KV and its ports for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from longtail.partial_rollout.engines.vllm_plugin import load

load()

from vllm.v1.core.sched.interface import PauseState  # noqa: E402 - corrected first
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from longtail.errors import SnapshotMismatch  # noqa: E402
from longtail.kv_manager.tiers import Tiers  # noqa: E402
from longtail.partial_rollout.engines.vllm.connector import LongtailConnector  # noqa: E402
from longtail.partial_rollout.engines.vllm.core import pass_of, runner_in  # noqa: E402
from longtail.partial_rollout.engines.vllm.drafters import Proposer, proposer_of  # noqa: E402
from longtail.partial_rollout.engines.vllm.kv_link import PARAMETER, SNAPSHOT  # noqa: E402
from longtail.partial_rollout.engines.vllm.sampling import KEY, WorkerExtension  # noqa: E402
from longtail.partial_rollout.engines.vllm.saver import KVSaver  # noqa: E402
from longtail.partial_rollout.pool.packed import pack_snapshot, unpack_snapshot  # noqa: E402
from longtail.sample import Sample  # noqa: E402
from longtail.sampling_params import SamplingParams  # noqa: E402
from longtail.spec_decode.controller import Controller, ControllerConfig  # noqa: E402
from longtail.version import Fingerprint, PolicyVersion  # noqa: E402

__all__ = ["CoreConnector", "CoreScheduler", "WorkerExtension"]

WATCH_SECONDS = 1.0
"""Between two looks whether the engine's process is there,"""
LAST_SECONDS = 10.0
"""and for vLLM to end in order when it is gone."""
TOLD = "longtail"
"""Id of the request that does not exist."""


def tell(what: Any) -> EngineCoreOutput:
    return EngineCoreOutput(TOLD, [], kv_transfer_params={TOLD: pickle.dumps(what)})


def told(output: EngineCoreOutput) -> Any:
    assert output.kv_transfer_params is not None
    return pickle.loads(output.kv_transfer_params[TOLD])


class CoreScheduler(Scheduler):
    """Owns the saved KV of this process, if KV is to be saved: on its way in or out."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _end_with_engine()
        self.saver = _saver_of(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        EngineCore.longtail = _longtail
        self._started = 0.0
        self.proposer: Proposer | None = None
        self._offered: dict[str, str] = {}
        """Samples of requests that the saver knows, by request."""

    def add_request(self, request: Request) -> None:
        if self.saver is not None:
            self._offer(request)
        super().add_request(request)

    def _offer(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is None or PARAMETER not in params:
            return
        sample, packed = _sample_of(request), params.pop(SNAPSHOT, None)
        refused = None
        if packed is not None:
            try:
                sample.snapshot = unpack_snapshot(pickle.loads(packed), self.saver.tiers)
            except SnapshotMismatch as error:
                refused = str(error)
        self.saver.offer(sample, refused)
        self._offered[request.request_id] = sample.id

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Request]:
        ids = list(self.requests) if request_ids is None else request_ids
        ids = [ids] if isinstance(ids, str) else list(ids)
        done = super().finish_requests(ids, finished_status)
        for request_id in ids:
            if (sample_id := self._offered.pop(request_id, None)) is not None:
                self.saver.leave(sample_id)
            if self.proposer is not None:
                self.proposer.leave(request_id)
        return done

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._started = time.perf_counter()
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens or scheduler_output.preempted_req_ids:
            done = pass_of(scheduler_output, self.requests, [], self._started)
            done.draft_seconds = 0.0 if self.proposer is None else self.proposer.seconds
            came = [new.req_id for new in scheduler_output.scheduled_new_reqs]
            for request_id in (*came, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
                if request_id in self._offered:
                    done.admissions[request_id] = self.saver.admission(self._offered[request_id])
            outputs.setdefault(0, EngineCoreOutputs()).outputs.append(tell((done, self.num_free_blocks)))
        return outputs

    @property
    def num_free_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())


def _end_with_engine() -> None:
    engine, parent = multiprocessing.parent_process(), os.getppid()
    if engine is None:
        return

    def watch() -> None:
        # Of two forked cores the later one holds what tells the earlier one of an end: so the parent is looked at too.
        while engine.is_alive() and os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


class CoreConnector(LongtailConnector):
    """vLLM makes its halves before and after the scheduler: whoever comes first makes the saver that it looks for."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _saver_of(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)


_SAVERS: dict[str, KVSaver] = {}
"""Of this process, by the name that its half in the engine's process has given it."""


def _saver_of(config: Any) -> Any:
    """`KVSaver`, or None where no KV is to be saved."""
    if config.kv_transfer_config is None:
        return None
    extra = config.kv_transfer_config.kv_connector_extra_config
    if (name := extra["link"]) not in _SAVERS:
        _SAVERS[name] = KVSaver(
            Tiers(None),
            encoding=extra["encoding"],
            keep_older=extra["keep_older"],
            by_version=extra["by_version"],
            name=name,
        )
    return _SAVERS[name]


def _sample_of(request: Request, num_tokens: int | None = None) -> Sample:
    """As far as saving its KV needs it. num_tokens: that it has; None: as many as the request."""
    state = request.sampling_params.extra_args[KEY]
    tokens, n = list(request.all_token_ids)[:num_tokens], state["num_prompt_tokens"]
    output = tokens[n:]
    return Sample(
        id=state["id"],
        group_id=state["id"],
        index=0,
        prompt_ids=tuple(tokens[:n]),
        params=SamplingParams.from_dict(state["params"]),
        seed=state["seed"],
        output_ids=output,
        logprobs=[0.0] * len(output),
        versions=[PolicyVersion(0)] * len(output),
    )


# -- what the engine calls --------------------------------------------------------------------------------------------


def _longtail(core: Any, method: str, argument: bytes) -> bytes:
    """argument, and what is returned: pickled. What is raised is returned."""
    try:
        return pickle.dumps(_METHODS[method](core, pickle.loads(argument)))
    except Exception as error:
        return pickle.dumps(error)


def _freeze(core: Any, mark: int) -> None:
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core.output_queue.put_nowait((0, EngineCoreOutputs(outputs=[tell(mark)])))


def _thaw(core: Any, _: None) -> None:
    core.scheduler.set_pause_state(PauseState.UNPAUSED)


def _requests(core: Any, _: None) -> tuple[dict[str, list[int]], int]:
    scheduler = core.scheduler
    if scheduler.saver is not None:
        scheduler.saver.check_integrity(list(scheduler._offered.values()))
    found = {i: list(request.all_token_ids) for i, request in scheduler.requests.items()}
    return found, scheduler.num_free_blocks


def _start_saver(core: Any, version: int) -> tuple[str, str | None, tuple[Any, str] | None]:
    """-> fingerprint, why no KV can be saved, and else the layout and dtype of the caches."""
    scheduler, saver = core.scheduler, core.scheduler.saver
    saver.open(scheduler.vllm_config, scheduler.kv_cache_config, runner_in(core).model, version)
    device = saver.device
    return saver.fingerprint, saver.unavailable, None if device is None else (device.layout, device.dtype)


def _save(core: Any, of: tuple[str, int]) -> Any:
    """of: a request, and tokens of its sample: this process may have gone on behind the end of a turn, even up to the
    end of the request. -> `PackedSnapshot`, None if there is none or no room."""
    scheduler, (request_id, num_tokens) = core.scheduler, of
    request = scheduler.requests.get(request_id)
    if request is None:
        return None
    (table,) = scheduler.kv_cache_manager.get_block_ids(request_id)
    snapshot = scheduler.saver.save(_sample_of(request, num_tokens), table, request.num_computed_tokens)
    return None if snapshot is None else pack_snapshot(snapshot)


def _weights_updated(core: Any, fingerprint: Fingerprint) -> None:
    core.scheduler.saver.weights_updated(fingerprint)


def _start_drafting(core: Any, of: tuple[int, tuple[int, ...]]) -> bool:
    core.scheduler.proposer = proposer_of(runner_in(core), *of)
    return core.scheduler.proposer is not None


def _use_drafter(core: Any, of: tuple[str | None, Controller | ControllerConfig | None]) -> None:
    core.scheduler.proposer.use(*of)


def _refilled(core: Any, refilled: bool) -> None:
    core.scheduler.proposer.refilled = refilled


def _drafts_updated(core: Any, version: int) -> None:
    core.scheduler.proposer.weights_updated(version)


def _drafting(core: Any, _: None) -> Any:
    return core.scheduler.proposer.speculation.report()


_METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "freeze": _freeze,
    "thaw": _thaw,
    "requests": _requests,
    "start_saver": _start_saver,
    "save": _save,
    "weights_updated": _weights_updated,
    "start_drafting": _start_drafting,
    "use_drafter": _use_drafter,
    "refilled": _refilled,
    "drafts_updated": _drafts_updated,
    "drafting": _drafting,
}
