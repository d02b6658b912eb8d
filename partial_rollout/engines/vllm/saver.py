"""Saves the KV of paused requests and brings it back: the link to the connector, and what tells KV of these weights.

The fingerprint is of the weights as the model holds them (names, shapes and all bytes, in the model's dtype) and of
what else decides the KV: the architecture's settings, vLLM's version, dtypes, the kind of device. It is the same for a
checkpoint that is loaded and for a state dict with the same numbers, so that a process that comes back with a trainer's
checkpoint can use what an earlier one saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from longtail.kv_manager.encoding import Encoding
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engines.vllm.config import VllmSettings
from longtail.partial_rollout.engines.vllm.kv_cache import UnsupportedCache, open_caches
from longtail.partial_rollout.engines.vllm.kv_link import Admission, KVLink
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from longtail.partial_rollout.engines.vllm.core import Core
    from longtail.partial_rollout.engines.vllm.stay import Stay

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")


class KVSaver(KVLink):
    """One an engine. Called between passes, in the process where vLLM's core is."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        encoding: Encoding = "exact",
        keep_older: bool = False,
        by_version: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        name: str | None = None,
    ) -> None:
        """by_version: the version of the weights counts besides what they are."""
        super().__init__(tiers, Fingerprint(""), encoding=encoding, keep_older=keep_older, clock=clock, name=name)
        self._by_version = by_version
        self._arithmetic, self._dtype, self._tied = "", torch.float32, False
        self._core: Any = None

    def engine_args(self) -> Mapping[str, Any]:
        """Fields of vLLM's EngineArgs."""
        return {"kv_transfer_config": self.config()}

    def start(self, core: Core, version: int) -> None:
        """The engine has its core, with the weights of its checkpoint."""
        self._core = core
        self.open(core.config, core.scheduler.kv_cache_config, core.runner.model, version)

    def open(self, config: VllmConfig, kv_cache_config: KVCacheConfig, model: Any, version: int) -> None:
        """The caches are there. model: the worker's."""
        from longtail.partial_rollout.engines.vllm.connector import release_worker_half

        release_worker_half()
        try:
            self.device, self.unavailable = open_caches(config, kv_cache_config), None
        except UnsupportedCache as error:
            self.device, self.unavailable = None, str(error)
        self._know(config)
        weights = _checkpoint(config, model)
        self.fingerprint = Fingerprint(uuid.uuid4().hex) if weights is None else self._of(weights, version)

    def _know(self, config: VllmConfig) -> None:
        self._arithmetic, self._dtype = _arithmetic(config), config.model_config.dtype
        self._tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))

    def save_request(self, stay: Stay) -> Snapshot | None:
        """The KV of a sample that is about to leave; None if there is no room."""
        return self.save(stay.sample, self._core.block_table(stay.request_id), stay.num_computed_tokens)

    def admitted(self, stay: Stay, told: Admission | None) -> Admission:
        """What the request found when it got its blocks. told: by the core's process."""
        return self.admission(stay.sample.id)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """These are in place."""
        self.weights_updated(self._of(weights.items(), version))

    def _of(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> Fingerprint:
        """CRC-32 of every tensor, in the model's dtype."""
        found: dict[str, str] = {}
        for name, tensor in weights:
            if "inv_freq" in name or (self._tied and name == "lm_head.weight"):
                continue
            data = tensor.detach().to(self._dtype).contiguous().cpu().view(-1).view(torch.uint8).numpy().data
            found[name] = f"{name}{tuple(tensor.shape)}{zlib.crc32(data):08x}"
        suffix = f" version {version}" if self._by_version else ""
        digest = hashlib.blake2b((self._arithmetic + suffix).encode(), digest_size=12)
        for name in sorted(found):
            digest.update(found[name].encode())
        return Fingerprint(digest.hexdigest())


def make_saver(config: VllmSettings, tiers: TierConfig | None, clock: Callable[[], float]) -> KVSaver | None:
    """None where no KV is to be saved, or where it lies in several processes."""
    if not config.save_kv or any(config.engine_args.get(name, 1) != 1 for name in PARALLEL):
        return None
    kind = KVSaver
    if config.core == "process":
        from longtail.partial_rollout.engines.vllm.remote_saver import RemoteSaver

        kind = RemoteSaver
    return kind(
        Tiers(tiers),
        encoding=config.snapshot_encoding,
        keep_older=config.kv_on_update == "keep",
        by_version=config.fingerprint_versions,
        clock=clock,
    )


def _arithmetic(config: VllmConfig) -> str:
    """What besides the weights decides the KV."""
    from vllm import __version__

    model, cache = config.model_config, config.cache_config
    left_out = ("_name_or_path", "transformers_version", "dtype")
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in left_out}
    kinds = (model.dtype, cache.cache_dtype, model.quantization, config.device_config.device_type)
    return f"vllm {__version__} {kinds} {sorted(settings.items(), key=str)}"


def _checkpoint(config: VllmConfig, model: Any) -> Iterable[tuple[str, torch.Tensor]] | None:
    """Name and tensor of all that the model was loaded from; None where vLLM's loader does not read tensors (its KV is
    then of use in this process only)."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(dataclasses.replace(config.load_config, use_tqdm_on_load=False))
    return loader.get_all_weights(config.model_config, model) if hasattr(loader, "get_all_weights") else None
