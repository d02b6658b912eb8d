"""The native engine over tiers: whatever way the KV takes through host memory and disk, and whatever becomes of it
there, tokens and log-probabilities are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run

from longtail import NativeEngine, Sample
from longtail.events import Event
from longtail.kv_manager import tiers as tiers_module
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.snapshot_file import read_part
from longtail.kv_manager.tier_config import TierConfig

BLOCK = 2 * 2 * 2 * 16 * 16 * 4  # layers, k and v, kv heads, block size, head dim, float32
LENGTHS = (30, 47, 64)


def make_samples(n: int = 2, tokens: int = 24) -> list[Sample]:
    groups = [group(f"g{i}", prompt(length, i), n=n, max_tokens=tokens, seed=i) for i, length in enumerate(LENGTHS)]
    return [sample for g in groups for sample in g.samples]


@functools.cache
def undisturbed(make_engine: EngineMaker) -> dict[str, Sample]:
    samples = make_samples()
    run(make_engine(), samples)
    return {s.id: s for s in samples}


def finish(engine: NativeEngine, samples: list[Sample]) -> None:
    engine.add([s for s in samples if s.status == "paused"])
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def evict(engine: NativeEngine) -> None:
    """Everything that is on disk leaves host memory, as if the budget were small."""
    engine.tiers.flush()
    while engine.tiers.is_working:  # a read that a pause left behind
        engine.tiers.wait(engine.tiers.changes)
    with engine.tiers._changed:
        for stored in [s for s in engine.tiers._resident if s.evictable]:
            engine.tiers._evict(stored)


def kinds(sample: Sample) -> list[str]:
    return [segment.kv for segment in sample.segments]


class Gate:
    """Holds every read of a file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reads, read = threading.Event(), 0, read_part

        def held(*args: Any) -> Any:
            self.reads += 1
            assert self.open.wait(30)
            return read(*args)

        monkeypatch.setattr(tiers_module, "read_part", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


# ---- the ways of KV


@pytest.mark.parametrize("host_blocks", [None, 9, 6])
def test_pause_and_resume_through_the_disk(make_engine: EngineMaker, tmp_path: Path, host_blocks: int | None) -> None:
    """The longest sample has 6 blocks. What has no room in host memory goes to disk and comes back."""
    config = TierConfig(disk=tmp_path, host_bytes=None if host_blocks is None else host_blocks * BLOCK)
    engine = make_engine(tiers=config, enable_prefix_caching=False)
    samples = make_samples()
    run(engine, samples, until=5)
    for _ in range(3):
        engine.pause()
        assert all(s.snapshot is not None for s in samples)
        engine.tiers.flush()
        assert all(s.snapshot.is_durable for s in samples)
        evict(engine)
        assert engine.tiers.host_used == 0
        engine.add(samples)
        for _ in range(3):
            engine.step()
            engine.check_integrity()
    finish(engine, samples)
    assert engine.stats().num_recomputed_tokens == 0
    for sample in samples:
        assert_same(sample, undisturbed(make_engine)[sample.id])
        assert kinds(sample)[-1] == "restored"
    engine.tiers.close()
    assert engine.tiers.host_used == engine.tiers.disk_used == 0
    engine.tiers.close()
    assert list(tmp_path.iterdir()) == []


def test_without_host_memory_samples_go_on_from_their_tokens(make_engine: EngineMaker, tmp_path: Path) -> None:
    events: list[Event] = []
    config = TierConfig(disk=tmp_path, host_bytes=0)
    engine = make_engine(tiers=config, enable_prefix_caching=False, listener=events.append)
    samples = make_samples()
    run(engine, samples, until=5)
    engine.pause()
    saves = [e for e in events if e.kind == "save"]
    assert len(saves) == len(samples)
    assert {(e.num_tokens, e.detail) for e in saves} == {(0, "failed: no room in host memory")}
    finish(engine, samples)
    for sample in samples:
        assert_same(sample, undisturbed(make_engine)[sample.id])
        assert kinds(sample) == ["computed", "recomputed"]


def test_a_snapshot_for_which_there_will_be_no_room_is_refused(make_engine: EngineMaker, tmp_path: Path) -> None:
    """Left by an engine with more memory."""
    first = make_engine(tiers=TierConfig(disk=tmp_path))
    samples = make_samples(n=1)
    run(first, samples, until=5)
    first.pause()
    first.tiers.flush()
    records = {}
    for sample in samples:
        sample.snapshot.keep()
        records[sample.id] = sample.snapshot.to_record()
    events: list[Event] = []
    second = make_engine(tiers=TierConfig(disk=tmp_path, host_bytes=4 * BLOCK), listener=events.append)
    for sample in samples:
        sample.snapshot = Snapshot.from_record(sample.id, records[sample.id], tmp_path, second.tiers)
    finish(second, samples)
    for sample in samples:
        assert_same(sample, undisturbed(make_engine)[sample.id])
    # 35, 52 and 69 tokens: 3, 4 and 5 blocks
    assert [kinds(s)[1] for s in samples] == ["restored", "restored", "recomputed"]
    refused = [e for e in events if e.kind == "restore" and e.detail]
    assert [(e.sample, e.num_tokens) for e in refused] == [("g2/0", 0)]
    assert refused[0].detail.startswith("refused: no room in host memory for 40960 bytes of saved KV")


def test_another_engine_restores_what_this_one_holds(make_engine: EngineMaker, tmp_path: Path) -> None:
    """A part stays with the tiers that made it, whoever loads it."""
    first = make_engine(tiers=TierConfig(disk=tmp_path / "a", host_bytes=20 * BLOCK))
    second = make_engine(tiers=TierConfig(disk=tmp_path / "b", host_bytes=6 * BLOCK))
    samples = make_samples(n=1)
    run(first, samples, until=5)
    first.pause()
    evict(first)
    finish(second, samples)
    for sample in samples:
        assert_same(sample, undisturbed(make_engine)[sample.id])
        assert kinds(sample) == ["computed", "restored"]
    assert first.tiers.host_used == first.tiers.disk_used == second.tiers.disk_used == 0


# ---- no step waits


def test_no_step_waits_for_the_disk_while_another_can_run(make_engine: EngineMaker, tmp_path: Path, gate: Gate) -> None:
    engine = make_engine(tiers=TierConfig(disk=tmp_path), enable_prefix_caching=False)
    waits, runs = make_samples(n=1)[1:]
    run(engine, [waits], until=5)
    engine.pause()
    evict(engine)
    engine.add([waits, runs])
    while not runs.is_done:
        engine.step()  # returns, though the read does not
    assert gate.reads == 1
    assert (waits.status, len(waits.output_ids)) == ("waiting", 5)
    threading.Timer(0.2, gate.open.set).start()
    output = engine.step()  # nothing else can run: it waits
    assert output.num_output_tokens == 1
    finish(engine, [waits])
    for sample in (waits, runs):
        assert_same(sample, undisturbed(make_engine)[sample.id])
    assert kinds(waits) == ["computed", "restored"]


def test_pause_and_abort_during_a_read(make_engine: EngineMaker, tmp_path: Path, gate: Gate) -> None:
    engine = make_engine(tiers=TierConfig(disk=tmp_path, host_bytes=20 * BLOCK), enable_prefix_caching=False)
    samples = make_samples(n=1)
    run(engine, samples, until=5)
    engine.pause()
    evict(engine)
    free = engine.stats().num_free_blocks
    other = group("o", prompt(20, 9), max_tokens=40).samples[0]
    engine.add([*samples, other])
    engine.step()
    engine.abort([samples[0].id])
    engine.pause([samples[1].id])
    assert [part._stored.pins for part in samples[1].snapshot.parts] == [0]
    gate.open.set()
    engine.tiers.flush()
    engine.pause([other.id], snapshot=False)
    while not samples[2].is_done:
        engine.step()
        engine.check_integrity()
    assert samples[1].snapshot is not None
    assert kinds(samples[2]) == ["computed", "restored"]
    assert engine.stats().num_free_blocks == free
    finish(engine, samples)
    assert_same(samples[1], undisturbed(make_engine)[samples[1].id])
    assert_same(samples[2], undisturbed(make_engine)[samples[2].id])
    engine.tiers.close()
    assert engine.tiers.host_used == engine.tiers.disk_used == 0
    assert all(stored.pins == 0 for stored in engine.tiers._stored)


# ---- damage


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "swapped"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_file_means_going_on_from_the_tokens(
    make_engine: EngineMaker, tmp_path: Path, damage: str, part: int
) -> None:
    events: list[Event] = []
    engine = make_engine(tiers=TierConfig(disk=tmp_path), listener=events.append)
    samples = make_samples(n=1)
    run(engine, samples, until=5)
    engine.pause()
    evict(engine)
    engine.reset_prefix_cache()
    file = samples[1].snapshot.parts[part].file
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "flipped":
        data = bytearray(file.read_bytes())
        data[-1000] ^= 16
        file.write_bytes(data)
    else:
        file.write_bytes(samples[2].snapshot.parts[part].file.read_bytes())
    finish(engine, samples)
    for sample in samples:
        assert_same(sample, undisturbed(make_engine)[sample.id])
    assert [kinds(s)[1] for s in samples] == ["restored", "recomputed", "restored"]
    (refused,) = [e for e in events if e.kind == "restore" and e.detail]
    assert refused.sample == "g1/0"
    assert refused.detail.startswith(f"refused: {file}: ")


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_over_tiers(make_engine: EngineMaker, tmp_path: Path, seed: int) -> None:
    """Pauses, preemptions (22 blocks for up to 36), evictions, damage at random moments, samples that come and go."""
    choose = random.Random(seed)
    host = choose.choice([None, 6, 12, 30])
    engine = make_engine(
        tiers=TierConfig(
            disk=tmp_path,
            host_bytes=None if host is None else host * BLOCK,
            disk_bytes=choose.choice([None, None, 20 * BLOCK]),
            eviction=choose.choice(["lru", "longest-remaining"]),
        ),
        kv_cache_bytes=22 * BLOCK,
        max_model_len=128,
        max_num_batched_tokens=40,
        enable_prefix_caching=choose.random() < 0.7,
    )
    samples = make_samples()
    while not all(s.is_done for s in samples):
        outside = [s for s in samples if s.status in ("paused", "waiting") and s.id not in engine._sequences]
        engine.add(choose.sample(outside, choose.randint(0, len(outside))))
        for _ in range(choose.randint(1, 5)):
            engine.step()
            engine.check_integrity()
        inside = list(engine._sequences)
        engine.pause(choose.sample(inside, choose.randint(0, len(inside))), snapshot=choose.random() < 0.8)
        if choose.random() < 0.3:
            engine.reset_prefix_cache()
        if choose.random() < 0.3:
            evict(engine)
        files = sorted(tmp_path.glob("*.safetensors"))
        if files and choose.random() < 0.3:
            file = choose.choice(files)
            how, data = choose.randrange(3), bytearray()
            with contextlib.suppress(FileNotFoundError):  # the tier's own thread may just have removed it
                data += file.read_bytes()
            if how == 0 or not data:
                file.unlink(missing_ok=True)
            elif how == 1:
                file.write_bytes(data[: choose.randrange(len(data))])
            else:
                data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
                file.write_bytes(data)
    for sample in samples:
        assert_same(sample, undisturbed(make_engine)[sample.id])
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    engine.tiers.close()
    assert engine.tiers.host_used == engine.tiers.disk_used == 0


# ---- weights


@pytest.mark.parametrize("place", ["device", "host", "disk"])
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_an_update_in_every_tier(make_engine: EngineMaker, tmp_path: Path, place: str, on_update: str) -> None:
    """The rest of an interrupted sample under new weights, and a fresh sample of the same prompt."""
    other = make_model("llama", seed=1)
    weights = {name: p.detach() for name, p in other.named_parameters()}
    engine = make_engine(tiers=TierConfig(disk=tmp_path), kv_on_update=on_update)
    sample = group("g", prompt(40), max_tokens=24).samples[0]
    run(engine, [sample], until=6)
    if place != "device":
        engine.pause()
    if place == "disk":
        evict(engine)
    engine.update_weights(weights, 1)
    finish(engine, [sample])
    sibling = group("g", prompt(40), max_tokens=24, n=2).samples[1]
    run(engine, [sibling])
    expected = group("g", prompt(40), max_tokens=24, n=2).samples[1]
    run(make_engine(other), [expected])
    assert_same(sibling, expected)  # nothing of the old weights' KV, in either case
    assert kinds(sample)[1:] == ["kept" if on_update == "keep" else "recomputed"]
    assert engine.stats().num_restored_tokens == (45 if on_update == "keep" and place != "device" else 0)
    if on_update == "recompute":  # the same as a sample with these tokens that never saw the old weights
        fresh = group("g", prompt(40), max_tokens=24).samples[0]
        for token, logprob in zip(sample.output_ids[:6], sample.logprobs[:6], strict=True):
            fresh.append(token, logprob, 0, "e", "computed")  # type: ignore[arg-type]
        run(make_engine(other), [fresh])
        assert fresh.output_ids == sample.output_ids
        assert torch.equal(torch.tensor(fresh.logprobs), torch.tensor(sample.logprobs))


def test_a_store_of_other_weights_is_of_no_use(make_engine: EngineMaker, tmp_path: Path) -> None:
    """Files on disk that another run left: neither snapshot nor prompt is used."""
    first = make_engine(tiers=TierConfig(disk=tmp_path))
    sample = group("g", prompt(40), max_tokens=24).samples[0]
    run(first, [sample], until=6)
    first.pause()
    first.tiers.flush()
    sample.snapshot.keep()
    record = sample.snapshot.to_record()
    other = make_model("llama", seed=1)
    second = make_engine(other, tiers=TierConfig(disk=tmp_path))
    sample.snapshot = Snapshot.from_record(sample.id, record, tmp_path, second.tiers)
    sibling = group("g", prompt(40), max_tokens=24, n=2).samples[1]
    run(second, [sample, sibling])
    assert kinds(sample) == ["computed", "recomputed"]
    assert second.stats().num_restored_tokens == 0
    expected = group("g", prompt(40), max_tokens=24, n=2).samples[1]
    run(make_engine(other), [expected])
    assert_same(sibling, expected)


# ---- shared prompts


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_later_sibling_takes_the_saved_prompt(make_engine: EngineMaker, tmp_path: Path, place: str) -> None:
    engine = make_engine(tiers=TierConfig(disk=tmp_path))
    first, second = group("g", prompt(70), n=2, max_tokens=10, seed=3).samples
    run(engine, [first], until=5)
    engine.pause()
    engine.reset_prefix_cache()
    if place == "disk":
        evict(engine)
    rows: list[Event] = []
    engine.listener = rows.append
    run(engine, [second])
    assert sum(e.num_tokens for e in rows if e.kind == "step") == 70 - 64 + 9
    assert engine.stats().num_cached_tokens == 64
    assert kinds(second) == ["computed"]
    whole = generate(make_engine(), group("g", prompt(70), n=2, max_tokens=10, seed=3))
    finish(engine, [first])
    for got, expected in zip((first, second), whole, strict=True):
        assert_same(got, expected)


# ---- int8 and fp8


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_lossy_kv_says_so_and_touches_nobody_else(make_engine: EngineMaker, tmp_path: Path, encoding: str) -> None:
    engine = make_engine(tiers=TierConfig(disk=tmp_path), snapshot_encoding=encoding)
    samples = make_samples(n=1)
    run(engine, samples, until=5)
    whole = sum(-(-(length + 4) // 16) for length in LENGTHS) * BLOCK
    engine.pause()
    assert sum(s.snapshot.nbytes for s in samples) == whole // 4 + whole // 16
    for _ in range(2):
        evict(engine)
        engine.reset_prefix_cache()
        engine.add(samples)
        for _ in range(4):
            engine.step()
        engine.pause()
    finish(engine, samples)
    for sample in samples:
        expected = undisturbed(make_engine)[sample.id]
        assert sample.output_ids[:5] == expected.output_ids[:5]
        assert kinds(sample) == ["computed", "approximate"]
    siblings = [s for s in make_samples() if s.index == 1]  # their prompts' KV is exact: computed before, or again
    run(engine, siblings)
    for sample in siblings:
        assert_same(sample, undisturbed(make_engine)[sample.id])
