"""Weights from a directory, as `save_pretrained` and the trainers write them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.trainer_adapter.server.fields import BadRequest

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


def load_weights(directory: str, field: str, roots: Sequence[str] = ("/",)) -> dict[str, torch.Tensor]:
    """The state dict in the *.safetensors of a directory: those that its index names, or all. Copied to memory: the
    trainer may write the next one over it. roots: directories that it, and each of its files, has to be in or below.
    BadRequest if it is not there or damaged, with status 403 if it is outside of the roots."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _within(Path(directory), field, roots)
    if not os.path.isdir(path):  # nor is one that cannot be looked at, or has no possible name
        raise BadRequest(f"{field}: {directory!r} is no directory on the server's machine", field)
    try:
        if (path / INDEX).is_file():
            index: Any = json.loads(_within(path / INDEX, field, roots).read_text())
            files = sorted({path / name for name in index["weight_map"].values()})
        else:
            files = sorted(path.glob("*.safetensors"))
        if not files:
            raise BadRequest(f"{field}: {directory!r} holds no *.safetensors", field)
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            if file.parent != path:
                raise BadRequest(f"{field}: the index of {directory!r} names a file outside of it", field)
            found = _within(file, field, roots)
            weights |= {name: tensor.clone() for name, tensor in load_file(found).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise BadRequest(f"{field}: the weights in {directory!r} cannot be read: {error!r}", field) from error
    return weights


def _within(path: Path, field: str, roots: Sequence[str]) -> Path:
    """What it is when all links are followed. BadRequest if that is in none of the roots: before it is looked at, so
    that nobody learns what there is."""
    try:
        found = path.resolve()
        if any(found.is_relative_to(Path(root).resolve()) for root in roots):
            return found
    except (OSError, ValueError, RuntimeError) as error:  # no possible name, links in a circle
        raise BadRequest(f"{field}: {str(path)!r} is no path: {error}", field) from error
    if not roots:
        fix = "this server listens beyond its machine and takes weights from nowhere; start it with --weights-root DIR"
    else:
        fix = f"weights are read below {', '.join(roots)} only (--weights-root)"
    raise BadRequest(f"{field}: {str(path)!r} may not be read: {fix}", field, 403)
