"""Weights from a directory, as `save_pretrained` and the trainers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.trainer_adapter.server.fields import BadRequest

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


def load_weights(directory: str, field: str) -> dict[str, torch.Tensor]:
    """The state dict in the *.safetensors of a directory: those that its index names, or all. Copied to memory: the
    trainer may write the next one over it. BadRequest if it is not there or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(directory)
    if not path.is_dir():
        raise BadRequest(f"{field}: {directory!r} is no directory on the server's machine", field)
    try:
        if (path / INDEX).is_file():
            index: Any = json.loads((path / INDEX).read_text())
            files = sorted({path / name for name in index["weight_map"].values()})
        else:
            files = sorted(path.glob("*.safetensors"))
        if not files:
            raise BadRequest(f"{field}: {directory!r} holds no *.safetensors", field)
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            if file.parent != path:
                raise BadRequest(f"{field}: the index of {directory!r} names a file outside of it", field)
            weights |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise BadRequest(f"{field}: the weights in {directory!r} cannot be read: {error!r}", field) from error
    return weights
