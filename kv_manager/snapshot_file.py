"""The file of a run of KV blocks: safetensors with a checksummed header.

    8 bytes   length of the head
    head      JSON: metadata["longtail"] = JSON {format, library, header, checksum}; dtype, shape and place of tensors
    data      the tensors' bytes

    header:   what the run is (`PartHeader`), compared on reading with what the reader expects
    checksum: CRC-32 of everything else in the file

Written to a temporary name, flushed to the disk and renamed, so that a file under its final name is whole unless the
medium damaged it, which the checksum finds. Nothing read is trusted: no pickle, no path from within a file, names are
of one form (`is_part_name`), the head must be byte for byte what this module writes for what is expected, and the data
are read, not mapped (a file that shrinks under a map kills the process).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from longtail.errors import SnapshotCorrupt
from longtail.files import flush
from longtail.kv_manager.encoding import Encoding, Shapes, encoded_shapes
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.part_name import TEMPORARY, is_part_name
from longtail.version import Fingerprint

FORMAT = 2
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}
_NO_CHECKSUM = "0" * 8
_MOST_HEAD = 1 << 20
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class PartHeader:
    """What a run of blocks is. SnapshotCorrupt if a field is of the wrong type or without sense."""

    sample_id: str
    """Whose it is; empty if the samples of a group share it."""
    fingerprint: Fingerprint
    """Of the weights and the arithmetic that made it."""
    group: int
    """Of layers: its place among the model's."""
    layout: Layout
    dtype: str
    """Of the cache, as torch names it without "torch."."""
    first_block: int
    """Of the sequence; state: 0."""
    num_blocks: int
    """state: 1, the slot."""
    num_tokens: int
    """Of the sequence, up to the last one that it holds."""
    digest: str
    """Of the ids of these tokens, in hex."""
    encoding: Encoding = "exact"
    """exact: the cache's bytes; int8, fp8: codes with a scale per token and head."""

    def __post_init__(self) -> None:
        layout = self.layout
        whole = (self.group, self.first_block, self.num_blocks, self.num_tokens)
        if not (
            isinstance(self.sample_id, str)
            and isinstance(self.fingerprint, str)
            and isinstance(layout, Layout)
            and layout.is_valid
            and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 40 for n in whole)
            and min(self.num_blocks, self.num_tokens) > 0
            and self._blocks_fit
            and isinstance(self.dtype, str)
            and self.dtype in _DTYPES
            and isinstance(self.digest, str)
            and _DIGEST.fullmatch(self.digest)
            and self.encoding in get_args(Encoding)
        ):
            raise SnapshotCorrupt(f"not the header of saved KV: {self}")

    @property
    def _blocks_fit(self) -> bool:
        """Whether its last token lies in its last block."""
        if self.layout.kind == "state":
            return (self.first_block, self.num_blocks) == (0, 1)
        size = self.layout.block_size
        return (self.last_block - 1) * size < self.num_tokens <= self.last_block * size

    @property
    def last_block(self) -> int:
        """One past it."""
        return self.first_block + self.num_blocks

    @property
    def shapes(self) -> Shapes:
        """Of the tensors it describes."""
        return encoded_shapes(self.num_blocks, self.layout, getattr(torch, self.dtype), self.encoding)

    @property
    def nbytes(self) -> int:
        """Of these tensors."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.shapes.values())

    @classmethod
    def from_record(cls, record: Any) -> PartHeader:
        """From a dict as JSON gives it back. SnapshotCorrupt if it is not the record of a header."""
        try:
            fields = dict(record)
            return cls(**fields | {"layout": Layout(*fields["layout"])})
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotCorrupt(f"not the header of saved KV ({error!r}): {record!r:.500}") from error


def part_tensors(header: PartHeader, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of uint8 [header.nbytes]: the header's tensors, one after the other."""
    tensors, start = {}, 0
    for name, (dtype, shape) in header.shapes.items():
        stop = start + math.prod(shape) * dtype.itemsize
        tensors[name] = buffer[start:stop].view(dtype).view(shape)
        start = stop
    return tensors


def write_part(directory: Path, name: str, header: PartHeader, tensors: Mapping[str, torch.Tensor]) -> Path:
    """-> the file, which is on the disk when this returns. OSError (a full disk, say) leaves nothing behind."""
    from longtail import __version__

    assert is_part_name(name), name
    final, temporary = directory / name, directory / f"{name}{TEMPORARY}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            head = _head(header, __version__, _NO_CHECKSUM)
            checksum = zlib.crc32(head)
            _write(descriptor, memoryview(head))
            for tensor, (dtype, shape) in zip(tensors.values(), header.shapes.values(), strict=True):
                assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), "the tensors are not the header's"
                data = _bytes(tensor)
                for start in range(0, len(data), _CHUNK):  # one pass over memory, in pieces that a cache holds
                    checksum = zlib.crc32(data[start : start + _CHUNK], checksum)
                    _write(descriptor, data[start : start + _CHUNK])
            os.lseek(descriptor, 0, os.SEEK_SET)
            _write(descriptor, memoryview(_head(header, __version__, f"{checksum:08x}")))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, final)
        flush(directory)
    except BaseException:
        for file in (temporary, final):
            with contextlib.suppress(OSError):
                file.unlink()
        raise
    return final


def read_part(
    file: Path, expected: PartHeader, allocate: Callable[[int], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a file that holds exactly what is expected. SnapshotCorrupt says what is wrong with it.
    allocate: bytes -> uint8 [bytes]."""
    with _opened(file) as descriptor:
        head = _read_head(file, descriptor)
        found, library, checksum = _parse(file, head)
        if found != (record := _record(expected)):
            raise SnapshotCorrupt(f"{file}: holds something else: {found}, not {record}")
        _check_head(file, descriptor, head, expected, library, checksum)
        buffer = torch.empty(expected.nbytes, dtype=torch.uint8) if allocate is None else allocate(expected.nbytes)
        _read_data(file, descriptor, _bytes(buffer), expected, library, checksum)
    return part_tensors(expected, buffer)


def check_part(file: Path) -> PartHeader:
    """What an undamaged file holds. SnapshotCorrupt if it is damaged."""
    with _opened(file) as descriptor:
        head = _read_head(file, descriptor)
        found, library, checksum = _parse(file, head)
        try:
            header = PartHeader.from_record(json.loads(found))
        except (ValueError, RecursionError) as error:
            raise SnapshotCorrupt(f"{file}: is not a snapshot of longtail") from error
        _check_head(file, descriptor, head, header, library, checksum)
        _read_data(file, descriptor, memoryview(bytearray(_CHUNK)), header, library, checksum)
    return header


# -- the head ----------------------------------------------------------------------------------------------------------


def _record(header: PartHeader) -> str:
    return json.dumps(dataclasses.asdict(header), sort_keys=True)


def _head(header: PartHeader, library: str, checksum: str) -> bytes:
    """The file up to the data, length included."""
    record = {"format": FORMAT, "library": library, "header": _record(header), "checksum": checksum}
    content: dict[str, Any] = {"__metadata__": {"longtail": json.dumps(record)}}
    start = 0
    for name, (dtype, shape) in header.shapes.items():
        stop = start + math.prod(shape) * dtype.itemsize
        kind = _DTYPES[str(dtype).removeprefix("torch.")]
        content[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse(file: Path, head: bytes) -> tuple[str, str, str]:
    """-> the header's record, the library's version, the checksum."""
    try:
        record = json.loads(json.loads(head[8:])["__metadata__"]["longtail"])
        if record["format"] != FORMAT:
            raise SnapshotCorrupt(f"{file}: has format {record['format']}, this version reads {FORMAT}")
        return str(record["header"]), str(record["library"]), str(record["checksum"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotCorrupt(f"{file}: is not a snapshot of longtail") from error


def _read_head(file: Path, descriptor: int) -> bytes:
    length = int.from_bytes(start := os.read(descriptor, 8), "little")
    if len(start) < 8 or length > _MOST_HEAD:
        raise SnapshotCorrupt(f"{file}: is not a snapshot of longtail")
    return start + os.read(descriptor, length)


def _check_head(file: Path, descriptor: int, head: bytes, header: PartHeader, library: str, checksum: str) -> None:
    if head != _head(header, library, checksum):
        raise SnapshotCorrupt(f"{file}: the head is damaged")
    size, whole = os.fstat(descriptor).st_size, len(head) + header.nbytes
    if size != whole:
        raise SnapshotCorrupt(f"{file}: has {size} bytes, not {whole}")


def _read_data(
    file: Path, descriptor: int, buffer: memoryview, header: PartHeader, library: str, checksum: str
) -> None:
    """Fills the buffer; one that is too small is filled again and again."""
    found, done = zlib.crc32(_head(header, library, _NO_CHECKSUM)), 0
    while done < header.nbytes:
        start = done if len(buffer) >= header.nbytes else 0
        count = os.readv(descriptor, [buffer[start : start + min(_CHUNK, header.nbytes - done)]])
        if count == 0:
            raise SnapshotCorrupt(f"{file}: ends after {done} of {header.nbytes} bytes of data")
        found = zlib.crc32(buffer[start : start + count], found)
        done += count
    if f"{found:08x}" != checksum:
        raise SnapshotCorrupt(f"{file}: the checksum differs, the file is damaged")


# -- the system --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    """A descriptor of a regular file; what the system refuses is SnapshotCorrupt."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # no way out, no waiting for a pipe
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SnapshotCorrupt(f"{file}: is not a file")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SnapshotCorrupt(f"{file}: cannot be read ({error})") from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
