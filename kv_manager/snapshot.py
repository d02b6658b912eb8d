"""A sequence's saved KV. An accelerator: what it holds can always be recomputed from the tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.errors import SnapshotCorrupt, SnapshotMismatch
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.part_name import is_part_name
from longtail.kv_manager.snapshot_file import PartHeader
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from longtail.kv_manager.part import Part
from longtail.kv_manager.tiers import Tiers


def token_digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What the model's layers keep of the first `num_tokens` tokens of a sample. The parts are in order of the groups
    of layers; those of a group lie one after the other, from the first block that the group needs on."""

    sample_id: str
    fingerprint: Fingerprint
    """Of the weights that made the KV."""
    layouts: tuple[Layout, ...]
    """Of the model's groups of layers."""
    num_tokens: int
    """KV positions it holds."""
    digest: bytes
    """Of the token ids at those positions."""
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Of all its parts, shared ones included, wherever they are."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_exact(self) -> bool:
        """Whether a restore brings the same bits back."""
        return all(part.header.encoding == "exact" for part in self.parts)

    @property
    def is_durable(self) -> bool:
        """Whether it is whole on the disk."""
        return all(part.file is not None for part in self.parts)

    @property
    def is_being_written(self) -> bool:
        """Whether it may become durable without anybody's doing."""
        return any(part.is_being_written for part in self.parts)

    @property
    def failure(self) -> str | None:
        """What went wrong with one of its parts: why it is not durable, or cannot be restored."""
        return next((part.failure for part in self.parts if part.failure is not None), None)

    def keep(self) -> None:
        """Its files are a store's, that has or is about to have its record."""
        for part in self.parts:
            part.keep()

    def check(self, sample_id: str, token_ids: Sequence[int], layouts: tuple[Layout, ...], dtype: str) -> None:
        """Raises SnapshotMismatch unless this is the KV of the first `num_tokens` of these tokens in these layouts, and
        every part is what it is said to be. The caller, who may have chosen to keep older KV, compares `fingerprint`
        with the present weights."""
        if self.sample_id != sample_id:
            raise SnapshotMismatch(f"snapshot of sample {self.sample_id} offered to sample {sample_id}")
        if self.layouts != layouts:
            raise SnapshotMismatch(f"snapshot of {sample_id} has layout {self.layouts}, the cache has {layouts}")
        if self.num_tokens > len(token_ids) or token_digest(token_ids[: self.num_tokens]) != self.digest:
            raise SnapshotMismatch(f"snapshot of {sample_id} covers other tokens than the sample holds")
        for header in (part.header for part in self.parts):
            if (header.fingerprint, header.dtype) != (self.fingerprint, dtype) or not (
                header.group < len(layouts) and header.layout == layouts[header.group]
            ):
                raise SnapshotMismatch(f"snapshot of {sample_id} has a part of other weights or of another cache")
            if header.sample_id not in ("", sample_id):
                raise SnapshotMismatch(f"snapshot of {sample_id} has a part of sample {header.sample_id}")
            held = token_ids[: header.num_tokens]
            if len(held) < header.num_tokens or token_digest(held).hex() != header.digest:
                raise SnapshotMismatch(f"snapshot of {sample_id} has a part of other tokens")
        for group, layout in enumerate(layouts):
            headers = [part.header for part in self.parts if part.header.group == group]
            block = layout.first_kept(self.num_tokens)
            for header in headers:
                if header.first_block != block:
                    raise SnapshotMismatch(f"snapshot of {sample_id} has parts that do not lie one after the other")
                block = header.last_block
            # A state is that of one position.
            enough = headers and headers[-1].num_tokens >= self.num_tokens
            if not enough or (layout.kind == "state" and headers[-1].num_tokens != self.num_tokens):
                raise SnapshotMismatch(f"snapshot of {sample_id} does not hold its {self.num_tokens} tokens")

    def to_record(self) -> dict[str, Any]:
        """What finds it again in a later process, as JSON can say it. It must be durable."""
        parts = []
        for part in self.parts:
            assert part.file is not None, self.sample_id
            parts.append({"file": part.file.name, "header": dataclasses.asdict(part.header)})
        return {
            "fingerprint": self.fingerprint,
            "layouts": self.layouts,
            "num_tokens": self.num_tokens,
            "digest": self.digest.hex(),
            "parts": parts,
        }

    @classmethod
    def from_record(cls, sample_id: str, record: Any, directory: Path, tiers: Tiers) -> Snapshot:
        """The inverse of `to_record`; the files lie in `directory`. Nothing in a record is trusted: SnapshotCorrupt if
        it is not of the right form."""
        try:
            parts = []
            for part in record["parts"]:
                if not is_part_name(part["file"]):
                    raise SnapshotCorrupt(f"{part['file']!r} is not the name of a KV file")
                parts.append(tiers.adopt(PartHeader.from_record(part["header"]), directory / part["file"]))
            fingerprint, num_tokens = record["fingerprint"], record["num_tokens"]
            layouts = tuple(Layout(*layout) for layout in record["layouts"])
            if not isinstance(fingerprint, str) or type(num_tokens) is not int:
                raise TypeError("fingerprint or num_tokens")
            if not all(layout.is_valid for layout in layouts):
                raise TypeError("layouts")
            digest = bytes.fromhex(record["digest"])
        except SnapshotCorrupt as error:
            raise SnapshotCorrupt(f"snapshot of {sample_id}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotCorrupt(f"snapshot of {sample_id}: its record is damaged ({error!r})") from error
        return cls(sample_id, Fingerprint(fingerprint), layouts, num_tokens, digest, tuple(parts))
