"""The speed of saving and restoring KV, each against the plain copy of the same bytes in the same run.

    save to host      vs  memcpy of as many bytes between memory that is in use already
    save to disk      vs  dd if=/dev/zero conv=fsync of as many bytes to the same directory
    restore           vs  the same memcpy; from host memory, and from files that are not in the page cache
    restore + step    vs  computing the KV again (needs a model)

Within a repeat the contestants run one after the other, and a ratio is taken within a repeat only. The first save of a
process finds no memory to use again: it is a row of its own.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.engine_bench import BenchFailed, EngineBenchConfig, load_model, quantiles, ratios, snapshot_row
from longtail.bench.machine import describe
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from longtail.kv_manager.manager import KVManager
    from longtail.kv_manager.snapshot import Snapshot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVBenchConfig:
    """Checked at construction. Layout: SmolLM2-135M's."""

    directory: str | Path
    """On the disk to measure; nothing is left there."""
    model: str | Path | None = None
    """For restore against recompute: a name that `longtail model` knows, a directory or a hub id; None: left out."""
    sequences: int = 32
    shortest: int = 1024
    """Tokens."""
    longest: int = 4096
    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 32
    resume_tokens: int = 2048
    repeats: int = 3
    threads: int = 2

    def __post_init__(self) -> None:
        sizes = ("sequences", "shortest", "layers", "kv_heads", "head_dim", "block_size", "resume_tokens")
        for name in (*sizes, "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.longest < self.shortest:
            raise ValueError(f"longest must be at least shortest ({self.shortest}), not {self.longest}")

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, evenly from shortest to longest."""
        steps = max(self.sequences - 1, 1)
        return [self.shortest + (self.longest - self.shortest) * i // steps for i in range(self.sequences)]


def run(config: KVBenchConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """-> {settings, machine, versions, rows} of plain values."""
    import torch

    from longtail import __version__

    torch.set_num_threads(config.threads)
    rows = copy_rows(config, progress)
    if config.model is not None:
        progress(f"resume, {config.resume_tokens} tokens")
        rows.append(resume_row(config))
    return {
        "settings": dataclasses.asdict(config) | {"directory": str(config.directory), "model": str(config.model)},
        "machine": describe(),
        "versions": {"torch": torch.__version__, "longtail": __version__},
        "rows": rows,
    }


def copy_rows(config: KVBenchConfig, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    from longtail.kv_manager.tier_config import TierConfig
    from longtail.kv_manager.tiers import Tiers

    kv, sequences = filled(config)
    nbytes = sum(len(seq.block_tables[0]) for seq in sequences) * kv.bytes_per_block
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        gc.collect()
        start = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    kv.tiers = Tiers(TierConfig(host_idle_bytes=2 * nbytes))
    for repeat in range(config.repeats + 1):
        progress(f"host memory, repeat {repeat}")
        if repeat:
            timed("memcpy", copier(kv, sequences))
        snapshots = timed("save host" if repeat else "first save", lambda: save_all(kv, sequences))
        if repeat:
            restore_all(kv, sequences, snapshots, timed, "restore host")
        snapshots = None
    with tempfile.TemporaryDirectory(dir=config.directory) as name:
        kv.tiers = Tiers(TierConfig(disk=name, host_idle_bytes=2 * nbytes))
        for repeat in range(config.repeats):
            progress(f"disk, repeat {repeat + 1}")
            if repeat % 2 == 0:  # what the disk does for the one may fall into the time of the other
                timed("dd", lambda: dd(Path(name), nbytes))
            snapshots = timed("save disk", lambda: save_all(kv, sequences))
            if not all(s.is_durable for s in snapshots):
                raise BenchFailed(f"not everything could be written to {config.directory}: {list(kv.tiers.failures)}")
            snapshots = [on_disk_only(kv, s) for s in snapshots]
            restore_all(kv, sequences, snapshots, timed, "restore disk")
            snapshots = None
            for file in Path(name).iterdir():
                file.unlink()
            if repeat % 2:
                timed("dd", lambda: dd(Path(name), nbytes))
        kv.tiers.close()
    compared = {"save host": "memcpy", "restore host": "memcpy", "save disk": "dd", "restore disk": "memcpy"}
    return [row(name, nbytes, times, compared.get(name), seconds) for name, times in seconds.items()]


def row(
    name: str, nbytes: int, times: list[float], other: str | None, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    out: dict[str, Any] = {"measure": name, "bytes": nbytes, "seconds": times}
    out["gib_per_second"] = quantiles([nbytes / t / 2**30 for t in times])
    if other is not None:  # bandwidth over bandwidth
        out["ratio"] = {other: ratios(seconds[other], times)}
    return out


def filled(config: KVBenchConfig) -> tuple[KVManager, list[Sequence]]:
    """A cache full of numbers, the blocks of the sequences mixed as they are after a while of serving."""
    import torch

    from longtail.kv_manager.layout import Layout
    from longtail.kv_manager.manager import KVManager

    lengths = config.lengths
    kv = KVManager(
        [Layout("kv", config.layers, config.kv_heads, config.block_size, config.head_dim)],
        [sum(-(-n // config.block_size) for n in lengths)],
        fingerprint=Fingerprint("bench"),
        prefix_caching=False,
    )
    noise = torch.randn(kv.groups[0].cache[0].shape)
    for i, block in enumerate(kv.groups[0].cache):
        torch.add(noise, i, out=block)
    sequences = []
    for i, n in enumerate(lengths):
        sample = Sample(
            id=str(i), group_id=str(i), index=0, prompt_ids=tuple(range(n)), params=SamplingParams(), seed=0
        )
        sequences.append(Sequence(sample))
        kv.attach(sequences[-1])
    while any(seq.num_computed_tokens < seq.num_tokens for seq in sequences):  # block by block in turn
        for seq in sequences:
            seq.num_computed_tokens = min(seq.num_computed_tokens + config.block_size, seq.num_tokens)
            if not kv.reserve(seq, seq.num_computed_tokens):
                raise BenchFailed("the cache is too small")
    return kv, sequences


def copier(kv: KVManager, sequences: list[Sequence]) -> Callable[[], None]:
    """Copies as many bytes as the sequences hold, one sequence at a time, to memory that is in use."""
    import torch

    counts = [len(seq.block_tables[0]) for seq in sequences]
    target = torch.ones(max(counts), *kv.groups[0].cache.shape[1:])

    def work() -> None:
        first = 0
        for count in counts:
            target[:count].copy_(kv.groups[0].cache[first : first + count])
            first += count

    return work


def save_all(kv: KVManager, sequences: list[Sequence]) -> list[Snapshot]:
    """Until they are on the disk, where there is one."""
    snapshots = [kv.save(seq) for seq in sequences]
    kv.tiers.flush()
    if None in snapshots:
        raise BenchFailed(f"a sequence could not be saved: {kv.tiers.failures[-1]}")
    return [snapshot for snapshot in snapshots if snapshot is not None]


def restore_all(
    kv: KVManager, sequences: list[Sequence], snapshots: list[Snapshot], timed: Callable[..., Any], name: str
) -> None:
    cache = kv.groups[0].cache
    before = [cache[seq.block_tables[0][-1]].clone() for seq in sequences]
    for seq in sequences:
        kv.release(seq)
        kv.attach(seq)

    def work() -> None:
        for seq, snapshot in zip(sequences, snapshots, strict=True):
            if not kv.restore(seq, snapshot):
                raise BenchFailed("the cache is too small")

    timed(name, work)
    if not all((cache[seq.block_tables[0][-1]] == last).all() for seq, last in zip(sequences, before, strict=True)):
        raise BenchFailed("what was restored is not what was saved")


def on_disk_only(kv: KVManager, snapshot: Snapshot) -> Snapshot:
    """The same snapshot as a later process finds it: neither in our memory nor in the page cache."""
    from longtail.kv_manager.snapshot import Snapshot
    from longtail.kv_manager.tier_config import TierConfig
    from longtail.kv_manager.tiers import Tiers

    snapshot.keep()
    record = snapshot.to_record()
    directory = kv.tiers.directory
    assert directory is not None
    for part in snapshot.parts:
        assert part.file is not None
        descriptor = os.open(part.file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return Snapshot.from_record(snapshot.sample_id, record, directory, Tiers(TierConfig(disk=directory)))


def dd(directory: Path, nbytes: int) -> None:
    file = directory / "dd"
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={nbytes}", "iflag=count_bytes", "conv=fsync"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"dd failed: {done.stderr}")
    file.unlink()


def resume_row(config: KVBenchConfig) -> dict[str, Any]:
    """Restore and the next token, against computing all KV again and the next token."""
    assert config.model is not None
    engine = EngineBenchConfig(
        model=config.model,
        batches=(1,),
        peers=(),
        numerics=("exact",),
        repeats=config.repeats,
        threads=config.threads,
        snapshot_tokens=config.resume_tokens,
    )
    found = snapshot_row(engine, load_model(engine), "exact")
    times = {name: values["p50"] for name, values in found["milliseconds"].items()}
    return {
        "measure": "resume",
        "tokens": config.resume_tokens,
        "milliseconds": found["milliseconds"],
        "times_cheaper": {
            "restore and step": times["recompute"] / (times["restore"] + times["step"]),
            "save, restore and step": times["recompute"] / times["resume"],
        },
    }
