"""The file of saved KV: what is written comes back, and nothing else is ever taken for it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longtail.errors import SnapshotCorrupt
from longtail.kv_manager import snapshot_file
from longtail.kv_manager.encoding import Encoding
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.part_name import is_part_name, new_part_name
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.snapshot_file import (
    PartHeader,
    check_part,
    part_tensors,
    read_part,
    write_part,
)
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.version import Fingerprint

KV = Layout("kv", 2, 2, 16, 4)
SEVERAL_CHUNKS = Layout("kv", 30, 3, 32, 64)
NAME = "0123456789abcdef" * 2 + ".safetensors"


def header(**fields: Any) -> PartHeader:
    known: dict[str, Any] = {
        "sample_id": "g/0",
        "fingerprint": Fingerprint("A"),
        "group": 0,
        "layout": KV,
        "dtype": "float32",
        "first_block": 2,
        "num_blocks": 3,
        "num_tokens": 70,
        "digest": "ab" * 16,
    }
    return PartHeader(**known | fields)


def random_tensors(of: PartHeader, seed: int = 0) -> dict[str, torch.Tensor]:
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return part_tensors(of, torch.randint(0, 256, (of.nbytes,), dtype=torch.uint8, generator=generator))


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, PartHeader]:
    of = header()
    return write_part(tmp_path, NAME, of, random_tensors(of)), of


# ---- there and back


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["kv"]),
        ({"dtype": "bfloat16"}, ["kv"]),
        ({"dtype": "float16", "num_blocks": 1, "num_tokens": 33}, ["kv"]),
        ({"encoding": "int8"}, ["codes", "scales"]),
        ({"encoding": "fp8"}, ["codes", "scales"]),
        ({"layout": SEVERAL_CHUNKS, "first_block": 0, "num_blocks": 5, "num_tokens": 160}, ["kv"]),
        ({"layout": Layout("kv", 2, 2, 16, 4, 8)}, ["kv"]),
        ({"layout": Layout("latent", 2, 1, 16, 24)}, ["latent"]),
        ({"layout": Layout("state", 3, 1, 0, 77), "first_block": 0, "num_blocks": 1}, ["state"]),
    ],
)
def test_the_same_bits_come_back(tmp_path: Path, fields: dict[str, Any], names: list[str]) -> None:
    of = header(**fields)
    tensors = random_tensors(of)
    file = write_part(tmp_path, NAME, of, tensors)
    assert sorted(tensors) == names
    read = read_part(file, of)
    assert {n: (t.dtype, t.shape) for n, t in read.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    assert as_bytes(read) == as_bytes(tensors)
    assert check_part(file) == of
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_it_is_safetensors(tmp_path: Path, encoding: str) -> None:
    of = header(encoding=encoding)
    file = write_part(tmp_path, NAME, of, random_tensors(of))
    loaded = load_file(file)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items()} == of.shapes
    assert as_bytes(loaded) == as_bytes(random_tensors(of))
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["longtail"])
    assert set(record) == {"format", "library", "header", "checksum"}
    assert PartHeader.from_record(json.loads(record["header"])) == of


def test_names_are_new_and_of_one_form() -> None:
    names = {new_part_name() for _ in range(100)}
    assert len(names) == 100
    assert all(map(is_part_name, names))


# ---- damage


def test_a_file_cut_anywhere_is_refused(written: tuple[Path, PartHeader]) -> None:
    file, of = written
    whole = file.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    for length in {0, 1, 7, 8, 9, 100, head - 1, head, head + 1, len(whole) - 4096, len(whole) - 1}:
        file.write_bytes(whole[:length])
        for read in (lambda: read_part(file, of), lambda: check_part(file)):
            with pytest.raises(SnapshotCorrupt, match=NAME):
                read()
    file.write_bytes(whole + b"\0")
    with pytest.raises(SnapshotCorrupt, match=r"has 6\d+ bytes, not 6\d+"):
        read_part(file, of)


def test_a_flipped_bit_anywhere_is_found(written: tuple[Path, PartHeader]) -> None:
    """Every bit of the length and the head, and bits all over the data."""
    file, of = written
    whole = file.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    data = [head, head + 1, *range(head + 5, len(whole), 997), len(whole) - 1]
    with file.open("r+b", buffering=0) as raw:
        for position in [*range(head), *data]:
            for bit in range(8) if position < head else (position % 8,):
                os.pwrite(raw.fileno(), bytes([whole[position] ^ 1 << bit]), position)
                for read in (lambda: read_part(file, of), lambda: check_part(file)):
                    with pytest.raises(SnapshotCorrupt):
                        read()
            os.pwrite(raw.fileno(), whole[position : position + 1], position)
    read_part(file, of)


@pytest.mark.parametrize(
    "fields",
    [
        {"sample_id": "g/1"},
        {"fingerprint": Fingerprint("B")},
        {"layout": KV._replace(dim=8)},
        {"layout": KV._replace(heads=4, dim=2)},  # of the same size
        {"layout": KV._replace(window=8)},
        {"group": 1},
        {"dtype": "bfloat16"},
        {"first_block": 1, "num_tokens": 60},
        {"num_tokens": 71},
        {"digest": "cd" * 16},
        {"encoding": "int8"},
        {"encoding": "fp8"},
    ],
)
def test_what_holds_something_else_is_refused(written: tuple[Path, PartHeader], fields: dict[str, Any]) -> None:
    file, _ = written
    with pytest.raises(SnapshotCorrupt, match="holds something else"):
        read_part(file, header(**fields))


def replace_head(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    content = json.loads(whole[8 : 8 + length])
    record = json.loads(content["__metadata__"]["longtail"])
    change(record)
    content["__metadata__"]["longtail"] = json.dumps(record)
    text = json.dumps(content).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(format=1), "has format 1, this version reads 2"),
        (lambda record: record.update(format="2"), "has format 2"),
        (lambda record: record.pop("checksum"), "is not a snapshot"),
        (lambda record: record.update(header=None), "holds something else"),
        (lambda record: record.update(extra=1), "head is damaged"),
        (lambda record: record.update(library="9"), "head is damaged"),
        (lambda record: record.update(checksum="00000000"), "head is damaged"),
    ],
)
def test_a_forged_head_is_refused(written: tuple[Path, PartHeader], change: Any, message: str) -> None:
    file, of = written
    replace_head(file, change)
    with pytest.raises(SnapshotCorrupt, match=message):
        read_part(file, of)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    of, file = header(), tmp_path / NAME
    foreign: dict[str, bytes] = {
        "empty": b"",
        "text": b"hello",
        "huge head": (1 << 62).to_bytes(8, "little") + b"{}",
        "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
        "not utf-8": (4).to_bytes(8, "little") + b"\xff\xfe\x00\x01",
        "a number": (1).to_bytes(8, "little") + b"7",
        "pickle": b"\x80\x04\x95" + b"x" * 64,
    }
    for content in foreign.values():
        file.write_bytes(content)
        with pytest.raises(SnapshotCorrupt, match="is not a snapshot of longtail"):
            read_part(file, of)
    save_file({"kv": torch.zeros(3)}, file)
    with pytest.raises(SnapshotCorrupt, match="is not a snapshot of longtail"):
        check_part(file)


def test_what_is_no_file_is_refused(tmp_path: Path, written: tuple[Path, PartHeader]) -> None:
    file, of = written
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for name, message in (
        ("missing", "No such file"),
        ("directory", "is not a file"),
        ("link", "cannot be read"),
        ("pipe", "is not a file"),
    ):
        with pytest.raises(SnapshotCorrupt, match=message):
            read_part(tmp_path / name, of)


def test_a_file_that_shrinks_while_it_is_read(written: tuple[Path, PartHeader]) -> None:
    file, of = written

    def allocate(nbytes: int) -> torch.Tensor:
        os.truncate(file, 5000)
        return torch.empty(nbytes, dtype=torch.uint8)

    with pytest.raises(SnapshotCorrupt, match="ends after"):
        read_part(file, of, allocate)


# ---- a full disk, and a kill


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("open", 0),
        ("write", 0),  # the head,
        ("write", 1),  # the data,
        ("write", 2),  # the head again
        ("lseek", 0),
        ("fsync", 0),
        ("replace", 0),
        ("directory", 0),
        ("fsync", 1),
    ],
)
def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, nth: int) -> None:
    of = header()
    target = snapshot_file if call == "directory" else os
    name = "flush" if call == "directory" else call
    true, calls = getattr(target, name), []

    def full(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == nth + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return true(*args)

    monkeypatch.setattr(target, name, full)
    with pytest.raises(OSError, match="No space left"):
        write_part(tmp_path, NAME, of, random_tensors(of))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    assert write_part(tmp_path, NAME, of, random_tensors(of)).name == NAME


def test_a_write_that_takes_only_a_part_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of, write = header(), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    file = write_part(tmp_path, NAME, of, random_tensors(of))
    assert as_bytes(read_part(file, of)) == as_bytes(random_tensors(of))


def test_a_kill_before_the_rename_leaves_what_nobody_reads(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:  # the child dies where the file would get its name
        os.replace = lambda *args: os._exit(9)
        write_part(tmp_path, NAME, header(), random_tensors(header()))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    (left,) = os.listdir(tmp_path)
    assert left == f"{NAME}.tmp"
    assert not is_part_name(left)
    with pytest.raises(SnapshotCorrupt, match="cannot be read"):
        read_part(tmp_path / NAME, header())


# ---- records


def record(**fields: Any) -> dict[str, Any]:
    part = {"file": NAME, "header": dataclasses.asdict(header(first_block=0, num_tokens=40))}
    known = {"fingerprint": "A", "layouts": [KV], "num_tokens": 40, "digest": "ab" * 16, "parts": [part]}
    return json.loads(json.dumps(known | fields))


def test_a_record_finds_its_snapshot_again(tmp_path: Path) -> None:
    of = header(first_block=0, num_tokens=40)
    write_part(tmp_path, NAME, of, random_tensors(of))
    tiers = Tiers(TierConfig(disk=tmp_path))
    snapshot = Snapshot.from_record("g/0", record(), tmp_path, tiers)
    assert snapshot.is_durable
    assert json.loads(json.dumps(snapshot.to_record())) == record()
    assert as_bytes(tiers.load(snapshot.parts[0])) == as_bytes(random_tensors(of))
    del snapshot
    tiers.close()
    assert os.listdir(tmp_path) == [NAME]  # the file is its store's


@pytest.mark.parametrize(
    "name",
    [
        f"../{NAME}",
        f"/tmp/{NAME}",
        f"a/{NAME}",
        f"{NAME}.tmp",
        f"{NAME}\n",
        NAME.upper(),
        "",
        "..",
        NAME[1:],
        NAME.encode().hex(),
        None,
        7,
        [NAME],
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path: Path, name: Any) -> None:
    (damaged := record())["parts"][0]["file"] = name
    with pytest.raises(SnapshotCorrupt, match=r"snapshot of g/0: .* is not the name of a KV file"):
        Snapshot.from_record("g/0", damaged, tmp_path, Tiers())


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "text",
        {},
        record(parts=None),
        record(parts=[None]),
        record(parts=[{"file": NAME}]),
        record(fingerprint=7),
        record(layouts=None),
        record(layouts=[KV, None]),
        record(layouts=[["other", *KV[1:]]]),
        record(num_tokens="40"),
        record(num_tokens=float("inf")),
        record(digest=7),
        record(digest="xy"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, damaged: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match="snapshot of g/0"):
        Snapshot.from_record("g/0", damaged, tmp_path, Tiers())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_id", 1),
        ("fingerprint", None),
        ("layout", ["kv", 2, 2, 16]),
        ("layout", ["k", 2, 2, 16, 4]),
        ("layout", [["kv"], 2, 2, 16, 4]),
        ("layout", 5),
        ("layout", ["kv", 2, 2, 16, 4.0]),
        ("layout", ["kv", 2, 2, 16, -4]),
        ("layout", ["kv", 2, 2, 0, 4]),
        ("layout", ["kv", 2, 2, 16, 4, -1]),
        ("layout", ["latent", 2, 2, 16, 4]),
        ("layout", ["latent", 2, 1, 16, 4, 8]),
        ("layout", ["state", 2, 1, 16, 4]),
        ("layout", ["state", 2, 1, 0, 4]),  # of a state there are no three blocks
        ("group", -1),
        ("group", "0"),
        ("dtype", "float64"),
        ("dtype", "nn"),
        ("dtype", ["float32"]),
        ("first_block", -1),
        ("first_block", 1),
        ("num_blocks", 0),
        ("num_blocks", True),
        ("num_blocks", 1e300),
        ("num_blocks", 1 << 70),
        ("num_tokens", "40"),
        ("num_tokens", 49),
        ("digest", "ab"),
        ("encoding", "int4"),
        ("encoding", []),
        ("unknown", 1),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    (damaged := record())["parts"][0]["header"][field] = value
    with pytest.raises(SnapshotCorrupt, match="snapshot of g/0"):
        Snapshot.from_record("g/0", damaged, tmp_path, Tiers())
