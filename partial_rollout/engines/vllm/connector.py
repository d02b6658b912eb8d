"""vLLM's KV connector of longtail: saves the KV of requests that are aborted to be continued, and brings it back.

vLLM loads it by this module's path (`KVLink.config`). It translates between vLLM's two roles and the link:

    scheduler   get_num_new_matched_tokens -> link.find; update_state_after_alloc -> link.admit; the load goes into
                the step's metadata. bind_kv_cache_manager -> link.table
    worker      register_kv_caches -> link.device; start_load_kv -> link.load

Both roles run in one process with the engine (one worker, no tensor or pipeline parallelism). Saving is the engine's
call to the link, between steps: it copies at once, on the stream on which the KV was written, so that vLLM need not
hold a block back.
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

from longtail.partial_rollout.engines.vllm.kv_cache import UnsupportedCache, VllmCaches
from longtail.partial_rollout.engines.vllm.kv_link import PARAMETER, link_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclasses.dataclass
class Load:
    sample_id: str
    block_ids: list[int]
    """All of the request's."""
    num_cached_tokens: int
    """Whole blocks of vLLM's own, which stay as they are."""
    num_tokens: int
    """Up to which the KV is loaded."""


@dataclasses.dataclass
class Loads(KVConnectorMetadata):
    """Of one step."""

    loads: list[Load]


class LongtailConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size > 1:
            raise ValueError(
                "saved KV is of one worker; with tensor_parallel_size or pipeline_parallel_size above 1 make the "
                "engine without a KVLink (samples then continue from their tokens)"
            )
        self._link = link_of(self._kv_transfer_config.get_from_extra_config("link", None))
        self._loads: list[Load] = []
        self._found: dict[str, int] = {}
        """Tokens of vLLM's own prefix cache, by request."""
        self._idle = True
        """The last step had nothing to do."""

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        link = self._link
        try:
            link.device, link.unavailable = self._open(kv_caches), None
        except UnsupportedCache as error:
            link.device, link.unavailable = None, str(error)

    def _open(self, kv_caches: dict[str, torch.Tensor]) -> VllmCaches:
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise UnsupportedCache(f"the layers of this model keep {len(groups)} different things")
        spec, names = groups[0].kv_cache_spec, groups[0].layer_names
        dims = {getattr(spec, "head_size", None), getattr(spec, "head_size_v", None)}
        if len(dims) != 1 or None in dims:
            raise UnsupportedCache(f"its layers keep {type(spec).__name__}, not keys and values of one size")
        modules = self._vllm_config.compilation_config.static_forward_context
        caches = [kv_caches[name] for name in names]
        return VllmCaches([modules[name] for name in names], caches, dims.pop(), spec.block_size)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            device = self._link.device
            assert isinstance(device, VllmCaches)
            first = load.num_cached_tokens // device.layout.block_size
            self._link.load(load.sample_id, device.blocks_of(load.block_ids), first, load.num_tokens)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loading is done when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved while a request runs."""

    def wait_for_save(self) -> None:
        """Saving is done when `request_finished` returns."""

    # -- scheduler -----------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Saved KV is an accelerator: nothing waits for it."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)

        def table(request_id: str) -> list[int]:
            device = self._link.device
            assert isinstance(device, VllmCaches)
            return device.blocks_of(kv_cache_manager.get_block_ids(request_id)[0])

        self._link.table = table

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
            self._loads.append(Load(sample_id, table, cached, cached + num_external_tokens))
        self._link.admit(sample_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._idle = scheduler_output.total_num_scheduled_tokens == 0
        self._link.prefetch()
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What is to be saved has been (`KVLink.save`): the blocks can go."""
        return False, None


def _sample_of(request: Request) -> str | None:
    params = request.kv_transfer_params
    return None if params is None else params.get(PARAMETER)
