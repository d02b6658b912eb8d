"""vLLM's AsyncLLM: its core has a process of its own, and makes passes without being asked.

    engine's thread    add, abort, freeze ----+                 +--> step, freeze: passes in order
    thread of a loop             AsyncLLM: socket to the core   socket from the core, watched: one queue
    process                                   +--> EngineCore: in_core.CoreScheduler, worker --+

What the core makes comes in order in one queue: tokens, what the pass was, the version of its weights, and the marks of
`freeze`. So everything that had been made when the core stood still is known when `freeze` returns. Requests of others
go through the same AsyncLLM (`core.llm`); ours are kept from its output processor.

If the process dies, what had come from it is still told; after that `CoreDied` is raised.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import pickle
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from longtail.partial_rollout.engines.vllm.core import Core, CoreDied, Emitted, Pass
from longtail.version import PolicyVersion

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from longtail.partial_rollout.engines.vllm.remote_drafting import RemoteProposer

PATIENCE = 1.0
"""Seconds between two looks whether the process is still there, while nothing comes from it."""


class ProcessCore(Core):
    """Called by one thread at a time."""

    llm: AsyncLLM

    def _start(self, executor: type[Executor]) -> None:
        self._queue: queue.SimpleQueue[EngineCoreOutputs | BaseException] = queue.SimpleQueue()
        self._died: BaseException | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._marks = itertools.count()
        self._free = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-frontend", daemon=True)
        self._thread.start()
        try:
            self.llm = self._run(self._make(executor))
            _, self._free = self.call("requests")
        except BaseException:
            self.close()
            raise
        self._num_blocks = self._free

    async def _make(self, executor: type[Executor]) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM(vllm_config=self.config, executor_class=executor, log_stats=False, log_requests=False)
        client: Any = llm.engine_core
        get, came = client.get_output_async, self._queue

        async def watched() -> EngineCoreOutputs:
            try:
                outputs: EngineCoreOutputs = await get()
            except BaseException as error:
                came.put(error)
                raise
            came.put(outputs)
            return outputs

        client.get_output_async = watched  # the task that calls it has not begun
        return llm

    # -- to the core --------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the loop's thread."""
        if self._loop.is_closed():
            work.close()
            self.check_alive()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(PATIENCE)
            except concurrent.futures.TimeoutError:
                if future.done():  # it has raised a timeout of its own
                    raise
                self._look()
            except BaseException as error:
                self._raise_if_dead(error)
                raise

    def call(self, method: str, argument: Any = None) -> Any:
        """Of `in_core`, between two passes."""
        answer = pickle.loads(self._run(self._utility(method, argument)))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def post(self, method: str, argument: Any = None) -> None:
        """The same, without waiting for it."""
        self._post(lambda: self._utility(method, argument))

    def _utility(self, method: str, argument: Any) -> Coroutine[Any, Any, Any]:
        client: Any = self.llm.engine_core
        made: Coroutine[Any, Any, Any] = client.call_utility_async("longtail", method, pickle.dumps(argument))
        return made

    def _post(self, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In the order of the calls; does not wait."""
        if self._loop.is_closed():
            self.check_alive()

        async def sent() -> None:
            try:
                await send()
            except Exception as error:  # the next call, or the next output, says so
                self._queue.put(error)

        def start() -> None:
            task = self._loop.create_task(sent())
            self._sending.add(task)  # the loop itself would let the garbage collector have it
            task.add_done_callback(self._sending.discard)

        self._loop.call_soon_threadsafe(start)

    def _raise_if_dead(self, error: BaseException) -> None:
        if isinstance(error, _dead_error()):
            raise self._gone(error) from error

    def _gone(self, error: BaseException) -> CoreDied:
        if self._died is None:
            self._died = error
            if not isinstance(error, _dead_error()):
                self._end()  # nobody could stop what it does
        is_dead = isinstance(self._died, _dead_error())
        return CoreDied(f"{'the process of ' if is_dead else ''}vLLM's core is gone ({self._died})")

    def _look(self) -> None:
        """CoreDied if vLLM has found out that the process is gone."""
        if hasattr(self, "llm") and self.llm.errored:
            self._raise_if_dead(self.llm.dead_error)

    @property
    def is_alive(self) -> bool:
        return self._died is None and not self.llm.errored

    def check_alive(self) -> None:
        if self._died is not None:
            raise self._gone(self._died) from self._died
        self._look()

    def make_proposer(self, version: int) -> RemoteProposer | None:
        from longtail.partial_rollout.engines.vllm.remote_drafting import RemoteProposer

        return RemoteProposer(self) if self.call("start_drafting", (version, self.eos_token_ids)) else None

    def rpc(self, method: str | Callable[[Any], Any], **kwargs: Any) -> list[Any]:
        if not isinstance(method, str):
            raise TypeError("workers are in another process: name a method of theirs")
        found: list[Any] = self._run(self.llm.collective_rpc(method, kwargs=kwargs))
        return found

    def set_weight_version(self, version: str) -> None:
        self._run(self.llm.update_weight_version(version))

    def _add(self, request_id: str, prompt: Any, params: SamplingParams) -> str:
        made = self.llm.input_processor.process_inputs(request_id, prompt, params, supported_tasks=("generate",))
        made.external_req_id = request_id
        self._post(lambda: self.llm.engine_core.add_request_async(made))
        return request_id

    def withdraw(self, request_id: str) -> None:
        if self.is_alive:
            self._post(lambda: self.llm.engine_core.abort_requests_async([request_id]))

    def freeze(self) -> list[Pass]:
        """Of a core that has died: what it had made."""
        mark = next(self._marks)
        done: list[Pass] = []
        try:
            self.call("freeze", mark)
            while not self._take(done, mark):
                pass
        except CoreDied:
            self._rest(done)
        return done

    def thaw(self) -> None:
        if self.is_alive:
            with contextlib.suppress(CoreDied):
                self.call("thaw")

    def requests(self) -> dict[str, list[int]]:
        found: dict[str, list[int]]
        found, self._free = self.call("requests")
        return found

    # -- from the core ------------------------------------------------------------------------------------------------

    def step(self, *, wait: bool = True) -> list[Pass]:
        done: list[Pass] = []
        self._rest(done)
        while wait and not done:
            self._take(done)
        return done

    def _rest(self, done: list[Pass]) -> None:
        with contextlib.suppress(CoreDied, queue.Empty):
            while True:
                self._take(done, wait=False)

    def _take(self, done: list[Pass], mark: int | None = None, *, wait: bool = True) -> bool:
        """The next message, waiting for it. -> whether it was the mark. CoreDied"""
        while True:
            try:
                outputs = self._queue.get(timeout=PATIENCE) if wait else self._queue.get_nowait()
                break
            except queue.Empty:
                if not wait:
                    raise
                self.check_alive()
        if isinstance(outputs, BaseException):
            self._queue.put(outputs)  # whoever asks again hears it again
            raise self._gone(outputs) from outputs
        return self._read(outputs, done, mark)

    def _read(self, outputs: EngineCoreOutputs, done: list[Pass], mark: int | None) -> bool:
        from longtail.partial_rollout.engines.vllm.in_core import TOLD, told

        emitted, passes, is_mark = [], [], False
        for out in outputs.outputs:
            if out.request_id != TOLD:
                scores = [] if out.new_logprobs is None else out.new_logprobs.logprobs[:, 0].tolist()
                reason = None if out.finish_reason is None else str(out.finish_reason)
                emitted.append(Emitted(out.request_id, list(out.new_token_ids), scores, reason))
            elif isinstance(what := told(out), int):
                is_mark = what == mark
            else:
                made, self._free = what
                passes.append(made)
        version = PolicyVersion(int(outputs.weight_version)) if (outputs.weight_version or "").isdigit() else None
        if emitted and not passes:  # vLLM ends requests outside of passes too: those that it cannot read
            passes.append(Pass([], {}, {}, {}, 0, [], 0.0, 0.0))
        done += [dataclasses.replace(made, emitted=emitted, version=version) for made in passes]
        return is_mark

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._free

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if hasattr(self, "llm"):
            self._end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()
        self._died = self._died or RuntimeError("it is closed")

    def _end(self) -> None:
        if self.llm.output_handler is not None:  # else it says with a traceback that the core is gone
            self._loop.call_soon_threadsafe(self.llm.output_handler.cancel)
        self.llm.shutdown()


def _dead_error() -> type[BaseException]:
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError
