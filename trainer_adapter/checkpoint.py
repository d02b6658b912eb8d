"""Checkpoints that are whole or not there, and come back bit for bit.

    DIR/step-00000012/tensors.safetensors    every tensor of the state
                      state.json             the rest of it: numbers, text, lists, dicts
                      checkpoint.json        sizes and SHA-256 of the two; written last
    DIR/.new-..., DIR/.old-...               being written, being removed

A checkpoint is written beside the others, flushed to the disk and renamed into place, so that `kill -9`, a power cut or
a full disk at any moment leaves the older ones. What is read is checked first; one that is damaged is named and left,
and the next older one is taken. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longtail.errors import LongtailError
from longtail.files import flush

FORMAT, VERSION = "longtail-checkpoint", 1
_MANIFEST, _STATE, _TENSORS = "checkpoint.json", "state.json", "tensors.safetensors"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(LongtailError):
    """A checkpoint could not be written, or none that is there can be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path
    state: dict[str, Any]
    """What `Checkpoints.save` was given."""


class Checkpoints:
    """Of one run, which only one process writes.

    keep: so many of the newest stay."""

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an integer of at least 1, not {keep!r}")
        self.directory, self.keep = Path(directory), keep
        self.damages: list[str] = []
        """What `newest` found damaged, and passed over."""

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """state: tensors, numbers, text, None, and lists, tuples and dicts of them. -> its directory, durable. Older
        ones than `keep` are removed.

        ValueError for a state with anything else in it; CheckpointError if the disk does not take it. Then those that
        are there stay."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an integer of at least 0, not {step!r}")
        tensors = _Tensors()
        text = json.dumps(_encode(dict(state), "state", tensors))
        final = self._path(step)
        fresh = self.directory / f".new-{final.name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._take_back()
            self._sweep()
            fresh.mkdir()
            self._write(fresh, step, text, tensors.by_name)
            if final.exists():
                os.rename(final, self._old(final))
            os.rename(fresh, final)
            flush(self.directory)
            shutil.rmtree(self._old(final), ignore_errors=True)
            for old in self.steps()[: -self.keep]:
                self._discard(self._path(old))
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise CheckpointError(
                f"{self.directory}: checkpoint {step} could not be written ({error}); make room or choose another "
                "directory: those that are there are whole"
            ) from error
        return final

    def _write(self, directory: Path, step: int, text: str, tensors: Mapping[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        try:
            save_file({name: _alone(tensor) for name, tensor in tensors.items()}, directory / _TENSORS)
        except Exception as error:  # its own SafetensorError for a full disk
            if isinstance(error, OSError | ValueError | TypeError):
                raise
            raise OSError(str(error)) from error
        (directory / _STATE).write_text(text)
        files = {}
        for name in (_TENSORS, _STATE):
            flush(directory / name)
            files[name] = _digest(directory / name)
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
        (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        flush(directory / _MANIFEST)
        flush(directory)

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, whole or damaged, ascending."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Checkpoint | None:
        """The newest whole one; None if there are none at all. CheckpointError if all are damaged."""
        self.damages = []
        self._take_back()
        for step in reversed(self.steps()):
            path = self._path(step)
            try:
                return Checkpoint(step, path, _read(path, step))
            except CheckpointError as error:
                self.damages.append(str(error))
        if self.damages:
            raise CheckpointError(f"{self.directory}: no checkpoint is whole: {'; '.join(self.damages)}")
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _discard(self, path: Path) -> None:
        """Out of the way in one move, so that nobody meets half of one."""
        old = self._old(path)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        shutil.rmtree(old)

    def _old(self, path: Path) -> Path:
        return path.with_name(f".old-{path.name}")

    def _take_back(self) -> None:
        """The newest one, if a process was killed between moving it out of the way and putting a later one of the same
        step in its place."""
        newest = max(self.steps(), default=-1)
        found = [_NAME.fullmatch(path.name.removeprefix(".old-")) for path in self.directory.glob(".old-step-*")]
        step = max((int(match[1]) for match in found if match), default=-1)
        if step > newest:
            final = self._path(step)
            os.rename(self._old(final), final)

    def _sweep(self) -> None:
        """Removes what a killed process left."""
        for path in self.directory.iterdir():
            if path.name.startswith((".new-step-", ".old-step-")):
                shutil.rmtree(path)


def _read(path: Path, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["version"] != VERSION or manifest["step"] != step:
            raise CheckpointError(f"{path}: no checkpoint of this longtail's format")
        for name in (_TENSORS, _STATE):
            if _digest(path / name) != manifest["files"][name]:
                raise CheckpointError(f"{path}: {name} is damaged (its checksum differs)")
        tensors = load_file(path / _TENSORS)
        state: dict[str, Any] = _decode(json.loads((path / _STATE).read_text()), tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged, or not a checkpoint ({error!r})") from error
    return state


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, contiguous, and the whole of its memory."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


# ---- a state as JSON, with its tensors beside it

_MARKS = ("$tensor", "$tuple", "$items")


class _Tensors:
    """Each once, whatever names it has (tied weights)."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._names: dict[Any, str] = {}

    def name(self, path: str, tensor: torch.Tensor) -> str:
        where = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        while path in self.by_name:  # a/b is the path of {"a": {"b": ...}} and of {"a/b": ...}
            path += "'"
        name = self._names.setdefault(where, path) if tensor.numel() else path
        if name == path:
            self.by_name[path] = tensor
        return name


def _encode(value: Any, path: str, tensors: _Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensors.name(path, value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not any(mark in value for mark in _MARKS):
            return {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
        pairs = ((_encode(key, f"{path}/key", _Tensors()), f"{path}/{key}", item) for key, item in value.items())
        return {"$items": [[key, _encode(item, where, tensors)] for key, where, item in pairs]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{path} is a {type(value).__name__}; a checkpoint takes tensors, numbers, text, lists and dicts")


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, inner),) = value.items()
        if mark == "$tensor":
            return tensors[inner]
        if mark == "$tuple":
            return tuple(_decode(item, tensors) for item in inner)
        if mark == "$items":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in inner}
    return {key: _decode(item, tensors) for key, item in value.items()}


# ---- generators of random numbers


def rng_state() -> dict[str, Any]:
    """Of the process's generators: torch's, on every device, numpy's and Python's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """ValueError: from a machine with another number of CUDA devices."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != devices:
        raise ValueError(f"the state is of {len(state['cuda'])} CUDA devices, this machine has {devices}")
    torch.set_rng_state(state["torch"])
    if devices:
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(state["python"])


@contextlib.contextmanager
def kept_rng() -> Iterator[None]:
    """The generators are afterwards as they were before, whatever draws inside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
