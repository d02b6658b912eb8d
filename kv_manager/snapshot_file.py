"""The file of a run of KV blocks: safetensors with a checksummed header.

    metadata["longtail"]: JSON {format, library, header, checksum}
        header:   what the run is (see `PartHeader`), compared on reading with what the reader expects
        checksum: CRC-32 of the header's JSON and of every tensor's bytes

Written to a temporary name, flushed to the disk and renamed, so that a file under its final name is whole unless the
medium damaged it, which the checksum finds. Nothing read is trusted: no pickle, no path from within a file, and names
are of one form (`is_part_name`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longtail.errors import SnapshotCorrupt
from longtail.version import Fingerprint

FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")


@dataclasses.dataclass(frozen=True, slots=True)
class PartHeader:
    """What a run of blocks is."""

    fingerprint: Fingerprint
    """Of the weights and the arithmetic that made it."""
    layout: tuple[int, ...]
    """(layers, kv heads, block size, head dim) of the cache."""
    dtype: str
    """Of the cache, as torch names it without "torch."."""
    first_block: int
    """Of the sequence."""
    num_blocks: int
    digest: str
    """Of the token ids up to the last one that it holds, in hex."""
    encoding: str = "exact"
    """exact: the cache's bytes; int8: codes with a scale per token and head."""


def new_part_name() -> str:
    return f"{uuid.uuid4().hex}.safetensors"


def is_part_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def write_part(directory: Path, name: str, header: PartHeader, tensors: Mapping[str, torch.Tensor]) -> Path:
    """-> the file, which is on the disk when this returns. OSError (a full disk, say) leaves nothing behind."""
    from longtail import __version__

    assert is_part_name(name), name
    text = _text(header)
    record = {"format": FORMAT, "library": __version__, "header": text, "checksum": _checksum(text, tensors)}
    final, temporary = directory / name, directory / f"{name}.tmp"
    try:
        try:
            save_file(dict(tensors), temporary, metadata={"longtail": json.dumps(record)})
        except SafetensorError as error:  # its way to say that the system refused
            raise OSError(str(error)) from error
        _sync(temporary)
        os.replace(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(directory)
    return final


def read_part(file: Path, expected: PartHeader) -> dict[str, torch.Tensor]:
    """The tensors of a file that holds exactly what is expected. SnapshotCorrupt says what is wrong with it."""
    try:
        with safe_open(file, framework="pt") as opened:
            record = _record(file, opened.metadata())
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise SnapshotCorrupt(f"{file}: cannot be read ({error})") from error
    if _checksum(record["header"], tensors) != record["checksum"]:
        raise SnapshotCorrupt(f"{file}: the checksum differs, the file is damaged")
    if record["header"] != _text(expected):
        raise SnapshotCorrupt(f"{file}: holds something else: {record['header']}, not {_text(expected)}")
    return tensors


def check_part(file: Path) -> None:
    """SnapshotCorrupt if a file is damaged, whatever it holds."""
    try:
        with safe_open(file, framework="pt") as opened:
            record = _record(file, opened.metadata())
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SnapshotCorrupt(f"{file}: cannot be read ({error})") from error
    if _checksum(record["header"], tensors) != record["checksum"]:
        raise SnapshotCorrupt(f"{file}: the checksum differs, the file is damaged")


def _record(file: Path, metadata: Mapping[str, str] | None) -> dict[str, str]:
    try:
        record = json.loads((metadata or {})["longtail"])
        if record["format"] != FORMAT:
            raise SnapshotCorrupt(f"{file}: has format {record['format']}, this version reads {FORMAT}")
        return {"header": str(record["header"]), "checksum": str(record["checksum"])}
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotCorrupt(f"{file}: is not a snapshot of longtail") from error


def _text(header: PartHeader) -> str:
    return json.dumps(dataclasses.asdict(header), sort_keys=True)


def _checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    value = zlib.crc32(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
