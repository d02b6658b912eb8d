"""vLLM's weight transfer from a trainer in the same process, or through a directory: its backend "longtail".

    VllmEngine.update_weights                                   workers
    checked -> start_weight_update -> update_weights({"tensors": ...} or {"directory": ...}) -> finish_weight_update
            -> the weight version

Where longtail is installed, any vLLM takes weights so: `LLM(..., weight_transfer_config={"backend": "longtail"})`,
then its own `start_weight_update()`, `update_weights({"update_info": {"tensors": state_dict}})` and
`finish_weight_update(weight_version=)`. Names are those of `transformers`; workers keep copies, in the model's dtype
and layout. Its prefix cache does not know of weights: `reset_prefix_cache(reset_running_requests=True)`.

Imported by vLLM where it makes the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from longtail.partial_rollout.engines.vllm.weights import parameter_shapes


@dataclasses.dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclasses.dataclass
class Weights(WeightTransferUpdateInfo):
    """One of the two. A tied LM head may be left out."""

    tensors: Mapping[str, torch.Tensor] | None = None
    """By name; of this process."""
    directory: str | None = None
    """With .safetensors files, which every worker reads."""

    def __post_init__(self) -> None:
        if (self.tensors is None) == (self.directory is None):
            raise ValueError("update_info: give tensors (of this process) or a directory, one of the two")


class InProcessTransfer(WeightTransferEngine[Nothing, Weights]):
    """A worker's side."""

    init_info_cls = Nothing
    update_info_cls = Weights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ties: dict[str, str] | None = None

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    @torch.inference_mode()
    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    @torch.inference_mode()
    def receive_weights(self, update_info: Weights) -> None:
        try:
            if update_info.tensors is not None:
                self._load(update_info.tensors)
            else:
                self._load(_read(Path(str(update_info.directory))))
        except BaseException:
            # vLLM leaves its model taken apart, and could not load into it again. What it holds now is of no use, but
            # all of it is replaced by the next update.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """A tied LM head as well: a CPU's workers hold a packed copy of it, which the embedding would not renew."""
        if self._ties is None:
            _, self._ties = parameter_shapes(self.model_config.hf_config)
        tied = {name: weights[first] for name, first in self._ties.items() if first in weights}
        complete: Iterable[tuple[str, torch.Tensor]] = {**weights, **tied}.items()
        self.model.load_weights(complete)

    @torch.inference_mode()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def _read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"update_info: directory {directory} has no .safetensors file")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
