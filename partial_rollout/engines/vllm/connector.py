"""vLLM's KV connector of longtail: what a request's snapshot holds need not be computed.

vLLM loads it by this module's path (`KVLink.config`). Its half in the scheduler translates between vLLM and the link:

    get_num_new_matched_tokens -> link.find: how many tokens the snapshot brings, verified and in host memory by then
    update_state_after_alloc   -> link.admit: the request has got its blocks
    build_connector_meta       -> link.load: fills them, on the stream on which the pass will read them

Its half in the worker has nothing to do: engine, scheduler and worker are in one process, with no step in flight
between two schedules, so loading is done before the worker hears of the step (vLLM keeps one worker half for the whole
process, which several engines would share). Saving is the engine's call to the link, between steps, before it aborts
the request: vLLM holds no block back for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from longtail.partial_rollout.engines.vllm.kv_link import PARAMETER, link_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    sample_id: str
    block_ids: list[int]
    """All of the request's."""
    num_cached_tokens: int
    """Whole blocks of vLLM's own, which stay as they are."""
    num_tokens: int
    """Up to which the KV is loaded."""


class LongtailConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._link = link_of(self._kv_transfer_config.get_from_extra_config("link", None))
        self._loads: list[_Load] = []
        self._found: dict[str, int] = {}
        """Tokens of vLLM's own prefix cache, by sample."""
        self._idle = True
        """The last step had nothing to do."""

    # -- scheduler -----------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Saved KV is an accelerator: nothing waits for it."""
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        sample_id = _sample_of(request)
        if sample_id is None:
            return 0, False
        self._found[sample_id] = num_computed_tokens
        if request.skip_reading_prefix_cache:
            self._link.refuse(sample_id, "prompt log-probabilities were asked for: vLLM computes everything")
            return 0, False
        # With nothing else to do it waits for the disk; else it says "ask again".
        found = self._link.find(sample_id, list(request.all_token_ids), num_computed_tokens, wait=self._idle)
        return found, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        sample_id = _sample_of(request)
        if sample_id is None:
            return
        cached = self._found.pop(sample_id, 0)
        if num_external_tokens:
            table = list(blocks.get_block_ids()[0])
            self._loads.append(_Load(sample_id, table, cached, cached + num_external_tokens))
        self._link.admit(sample_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._idle = scheduler_output.total_num_scheduled_tokens == 0
        self._link.prefetch()
        loads, self._loads = self._loads, []
        filled: set[int] = set()
        for load in loads:
            self._link.load(load.sample_id, load.block_ids, load.num_cached_tokens, load.num_tokens)
            filled.update(load.block_ids)
        if loads and scheduler_output.new_block_ids_to_zero:  # what is loaded now must not be zeroed by the worker
            kept = [block for block in scheduler_output.new_block_ids_to_zero if block not in filled]
            scheduler_output.new_block_ids_to_zero = kept or None
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What is to be saved has been (`KVLink.save`): the blocks can go."""
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # -- worker --------------------------------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def release_worker_half() -> None:
    """vLLM has one worker half for all engines of a process, and asks it of engines that have no connector too: takes
    ours away when an engine is made. Those of others stay."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    if isinstance(kv_transfer_state._KV_CONNECTOR_AGENT, LongtailConnector):
        kv_transfer_state.ensure_kv_transfer_shutdown()


def _sample_of(request: Request) -> str | None:
    params = request.kv_transfer_params
    return None if params is None else params.get(PARAMETER)
