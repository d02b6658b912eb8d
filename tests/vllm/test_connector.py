"""A request's KV, saved and brought back by our connector in a real vLLM: nothing of it is computed again, and the
sample goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm.kv_helpers import (
    BLOCK,
    LONG_PROMPT,
    SETTINGS,
    assert_same,
    copy_of,
    group,
    make_model,
    plain,
    run,
    sample,
    save_model,
)

from longtail import NativeEngine, Sample
from longtail.errors import SnapshotCorrupt
from longtail.events import Event, ignore
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engines.vllm import VllmEngine
from longtail.partial_rollout.engines.vllm.connector import _Load
from longtail.partial_rollout.engines.vllm.kv_cache import UnsupportedCache, VllmCaches
from longtail.partial_rollout.engines.vllm.kv_link import link_of

LAYOUT = Layout("kv", 2, 2, BLOCK, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(model: Path) -> VllmEngine:
    return VllmEngine(model, **SETTINGS)  # never closed: vLLM would take the process's other engines along


@pytest.fixture
def engine(built: VllmEngine) -> Iterator[VllmEngine]:
    """With tiers of its own, empty and with nothing cached; afterwards all blocks must be free."""
    assert built.saver is not None
    built.saver.tiers = Tiers()
    built.reset_prefix_cache()
    built.listener = ignore
    yield built
    built.pause(snapshot=False)
    built.check_integrity()
    assert built.core.num_free_blocks == built.core.num_blocks


def use_tiers(engine: VllmEngine, config: TierConfig) -> Tiers:
    assert engine.saver is not None
    engine.saver.tiers = tiers = Tiers(config)
    return tiers


def paused(engine: VllmEngine, samples: list[Sample], steps: int) -> list[Snapshot]:
    """Runs them so far, and pauses them; what the prefix cache has of them is forgotten."""
    engine.add(samples)
    run(engine, steps)
    engine.pause()
    engine.reset_prefix_cache()
    return [one.snapshot for one in samples]


class Seen:
    """What an engine did between two looks."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.before, self.events = engine, engine.stats(), list[Event]()
        engine.listener = self.events.append

    @property
    def restores(self) -> list[tuple[int, str]]:
        return [(e.num_tokens, e.detail) for e in self.events if e.kind == "restore"]

    def grew(self, name: str) -> int:
        return int(getattr(self.engine.stats(), name) - getattr(self.before, name))


# -- what is saved -----------------------------------------------------------------------------------------------------


def test_saved_blocks_are_the_models_keys_and_values(engine: VllmEngine, model: Path) -> None:
    """In kv_manager's layout: the same numbers as the native engine's, up to rounding."""
    one = sample("a", temperature=0.0)
    (saved,) = paused(engine, [one], 20)
    assert saved.layouts == (LAYOUT,) and saved.num_tokens == one.num_tokens - 1
    native = NativeEngine(make_model(), block_size=BLOCK, kv_cache_bytes=1 << 22, max_model_len=256, threads=1)
    other = sample("a", temperature=0.0)
    native.add([other])
    for _ in range(20):
        native.step()
    native.pause()
    assert other.output_ids == one.output_ids
    assert other.snapshot.layouts == saved.layouts and other.snapshot.num_tokens == saved.num_tokens
    used = saved.num_tokens - len(LONG_PROMPT) // BLOCK * BLOCK
    for ours, theirs in zip(saved.parts, other.snapshot.parts, strict=True):
        a, b = (part.tiers.load(part)["kv"] for part in (ours, theirs))
        if ours is saved.parts[-1]:  # of the last block, what is written
            a, b = (_tokens(x)[:used] for x in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    # The weights are the same, the arithmetic is not: neither takes the other's KV for its own.
    assert other.snapshot.fingerprint != saved.fingerprint
    seen = Seen(engine)
    engine.add([other])
    run(engine, 1)
    assert seen.restores == [(0, "refused: saved KV of a/0 is of other weights")]
    native.add([one])
    native.step()
    assert one.segments[-1].kv == "recomputed"


def test_native_and_vllm_take_each_others_kv_by_choice(engine: VllmEngine) -> None:
    """kv_on_update="keep" takes KV of other weights or arithmetic: the form is one, the numbers nearly so."""
    saver = engine.saver
    assert saver is not None
    expected = plain(engine, [sample("a", temperature=0.0)])["a/0"]
    native = NativeEngine(
        make_model(), block_size=BLOCK, kv_cache_bytes=1 << 22, max_model_len=256, threads=1, kv_on_update="keep"
    )
    one = sample("a", temperature=0.0)
    (saved,) = paused(engine, [one], 20)
    native.add([one])
    native.step()
    assert native.stats().num_restored_tokens == saved.num_tokens and native.stats().num_recomputed_tokens == 0
    for _ in range(9):
        native.step()
    native.pause()
    seen = Seen(engine)
    saver.keep_older = True
    try:
        engine.add([one])
        run(engine)
    finally:
        saver.keep_older = False
    assert seen.restores == [(len(LONG_PROMPT) + 29, "")] and seen.grew("num_recomputed_tokens") == 0
    assert [(s.engine, s.kv) for s in one.segments] == [("vllm", "computed"), ("native", "kept"), ("vllm", "kept")]
    assert_same(one, expected)


def _tokens(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, layers, 2, heads, size * dim] -> [tokens, everything of a token]."""
    keys = blocks[:, :, 0].unflatten(-1, (32, BLOCK)).movedim(-1, 1)
    values = blocks[:, :, 1].unflatten(-1, (BLOCK, 32)).movedim(-2, 1)
    return torch.stack([keys, values], 2).flatten(0, 1)


def test_placement_is_read_off_and_not_assumed() -> None:
    """A kernel that packs a block in its own way, in bfloat16, in blocks of half the size of vLLM's."""

    class Kernel:
        def __init__(self, order: torch.Tensor) -> None:
            self.order = order

        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            size = cache.shape[2]
            assert torch.equal(slots, torch.arange(size))
            cache.view(-1)[self.order] = torch.cat([key.flatten(), value.flatten()])

    class Loses(Kernel):
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            super().do_kv_cache_update(layer, key * 0.5, value, cache, slots)

    heads, size, dim = 3, 16, 8
    generator = torch.Generator().manual_seed(0)
    layer = type("Layer", (), {})()
    layer.impl = Kernel(torch.randperm(2 * heads * size * dim, generator=generator))
    cache = torch.zeros(10, heads, size, 2 * dim, dtype=torch.bfloat16)
    device = VllmCaches([layer], [cache], dim, 2 * size)
    assert device.layout == Layout("kv", 1, heads, size, dim) and device.dtype == "bfloat16"
    assert device.blocks_of([3, 1]) == [6, 7, 2, 3]
    keys, values = (torch.randn(size, heads, dim, generator=generator).bfloat16() for _ in range(2))
    layer.impl.do_kv_cache_update(layer, keys, values, cache[6:7], torch.arange(size))
    out = {"kv": torch.zeros(1, *device.layout.block_shape, dtype=torch.bfloat16)}
    device.read([6], out)
    assert torch.equal(out["kv"][0, 0, 0].view(heads, dim, size), keys.permute(1, 2, 0))
    assert torch.equal(out["kv"][0, 0, 1].view(heads, size, dim), values.permute(1, 0, 2))
    device.write([9], out["kv"])
    assert torch.equal(cache[9], cache[6])
    layer.impl = Loses(layer.impl.order)
    with pytest.raises(UnsupportedCache, match="does not keep keys and values as they are"):
        VllmCaches([layer], [cache], dim, size)
    with pytest.raises(UnsupportedCache, match="keep different things"):
        VllmCaches([layer] * 2, [cache, cache[:, :2]], dim, size)
    with pytest.raises(UnsupportedCache, match="cannot be saved"):
        VllmCaches([layer], [cache.to(torch.uint8)], dim, size)


def test_a_groups_prompt_is_saved_once(engine: VllmEngine) -> None:
    samples = group("g", n=3).samples
    saved = paused(engine, samples, 8)
    assert len({id(s.parts[0]) for s in saved}) == 1 and len({id(s.parts[1]) for s in saved}) == 3
    header = saved[0].parts[0].header
    assert (header.sample_id, header.num_blocks, header.num_tokens) == ("", 2, 2 * BLOCK)
    assert [s.parts[1].header.sample_id for s in saved] == [one.id for one in samples]


# -- continuation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [1, 31, 33, 70])
def test_a_cut_anywhere_recomputes_nothing(engine: VllmEngine, prompt: int, temperature: float) -> None:
    """Cuts before, at and behind the end of a block."""
    ids = LONG_PROMPT[:prompt]
    expected = plain(engine, [sample("a", ids, temperature=temperature)])["a/0"]
    for cut in (1, 2, 31, 32, 33, 59):
        one = sample("a", ids, temperature=temperature)
        (saved,) = paused(engine, [one], cut)
        assert saved is not None and len(one.output_ids) == cut
        assert saved.num_tokens == prompt + cut - 1  # the last block's part included; the last token has no KV
        seen = Seen(engine)
        engine.add([one])
        run(engine)
        assert seen.restores == [(prompt + cut - 1, "")]
        assert seen.grew("num_restored_tokens") == prompt + cut - 1
        assert seen.grew("num_recomputed_tokens") == seen.grew("num_cached_tokens") == 0
        assert [e.num_prefill_tokens for e in seen.events if e.kind == "step"] == [0] * (60 - cut)
        assert_same(one, expected)
        assert [s.kv for s in one.segments] == ["computed", "restored"] and one.snapshot is None


def test_what_the_device_still_has_is_not_loaded(engine: VllmEngine) -> None:
    """The full blocks are in vLLM's prefix cache, the partial last one comes from the snapshot."""
    one = sample("a")
    engine.add([one])
    run(engine, 10)
    engine.pause()
    seen = Seen(engine)
    engine.add([one])
    run(engine, 1)
    assert seen.grew("num_cached_tokens") == 2 * BLOCK
    assert seen.grew("num_restored_tokens") == one.num_tokens - 2 - 2 * BLOCK
    assert seen.grew("num_recomputed_tokens") == 0


def test_many_at_once(engine: VllmEngine) -> None:
    """Three times as many as there are slots, paused and resumed together again and again."""
    prompts = [range(10 + i, 10 + i + 3 + 9 * i % 70) for i in range(12)]
    groups = [group(f"g{i}", p, n=2, max_tokens=30 + i) for i, p in enumerate(prompts)]
    samples = [one for g in groups for one in g.samples]
    expected = plain(engine, samples)
    seen = Seen(engine)
    engine.add(samples)
    while engine.has_work:
        run(engine, 7)
        left = engine.pause()
        engine.reset_prefix_cache()
        engine.add(left)
    for one in samples:
        assert_same(one, expected[one.id])
    assert seen.grew("num_recomputed_tokens") == 0 and seen.grew("num_restored_tokens") > 2000
    assert all(detail == "" for _, detail in seen.restores)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_another_samples_or_other_tokens(engine: VllmEngine) -> None:
    one, other = sample("a", max_tokens=20), sample("b", max_tokens=20)
    expected = plain(engine, [one, other])
    saved, _ = paused(engine, [one, other], 5)
    other.snapshot = saved
    one = copy_of(one)
    one.output_ids[2] ^= 1
    one.snapshot = saved
    seen = Seen(engine)
    engine.add([one, other])
    run(engine)
    assert [detail for _, detail in seen.restores] == [
        "refused: snapshot of a/0 covers other tokens than the sample holds",
        "refused: snapshot of sample a/0 offered to sample b/0",
    ]
    assert seen.grew("num_recomputed_tokens") == 2 * (len(LONG_PROMPT) + 4) - 2 * BLOCK  # one shares the other's prompt
    assert_same(other, expected["b/0"])
    assert [s.kv for s in other.segments] == ["computed", "recomputed"]


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 64
    file.write_bytes(data)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def _delete(file: Path) -> None:
    file.unlink()


def _swap(file: Path) -> None:
    """For another sound one: of the prompt."""
    others = [f for f in file.parent.iterdir() if f != file]
    file.write_bytes(others[0].read_bytes())


@pytest.mark.parametrize("damage", [_flip, _truncate, _delete, _swap])
def test_a_damaged_file(engine: VllmEngine, tmp_path: Path, damage: Any) -> None:
    expected = plain(engine, [sample("a")])["a/0"]
    tiers = use_tiers(engine, TierConfig(disk=tmp_path))
    one = sample("a")
    (saved,) = paused(engine, [one], 12)
    tiers.flush()
    own = saved.parts[-1]
    tiers.evict(saved.parts)
    assert own.file is not None and not own.in_memory
    damage(own.file)
    seen = Seen(engine)
    engine.add([one])
    run(engine)
    ((count, detail),) = seen.restores
    assert count == 0 and detail.startswith(f"refused: {own.file}: "), detail
    assert seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 11 and seen.grew("num_restored_tokens") == 0
    assert_same(one, expected)
    assert [s.kv for s in one.segments] == ["computed", "recomputed"]
    tiers.check_integrity()


def test_from_disk_beside_others_that_run(engine: VllmEngine, tmp_path: Path) -> None:
    """Nobody waits for the disk: those that run go on, and a damaged file is only its sample's."""
    samples = [sample(f"s{i}", range(10 + i, 60 + i)) for i in range(6)]
    expected = plain(engine, samples)
    tiers = use_tiers(engine, TierConfig(disk=tmp_path))
    saved = paused(engine, samples, 9)
    tiers.flush()
    tiers.evict([part for s in saved for part in s.parts])
    _flip(saved[2].parts[-1].file)  # type: ignore[arg-type]
    runner = sample("runs", max_tokens=40)
    engine.add([runner])
    run(engine, 2)
    seen = Seen(engine)
    engine.add(samples)
    run(engine)
    assert sorted((detail == "") for _, detail in seen.restores) == [False] + [True] * 5
    for one in samples:
        assert_same(one, expected[one.id])
    assert runner.finish_reason == "length"


def test_too_little_host_memory(engine: VllmEngine) -> None:
    """No room: the sample goes on from its tokens, and the event says so."""
    expected = plain(engine, [sample("a")])["a/0"]
    use_tiers(engine, TierConfig(host_bytes=1000))
    seen = Seen(engine)
    one = sample("a")
    assert paused(engine, [one], 9) == [None]
    assert [e.detail for e in seen.events if e.kind == "save"] == ["failed: no room in host memory"]
    engine.add([one])
    run(engine)
    assert_same(one, expected)
    assert seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 8


def test_host_memory_for_a_few_at_a_time(engine: VllmEngine, tmp_path: Path) -> None:
    """Saved KV goes to the disk and comes back through room for two samples."""
    samples = [sample(f"s{i}", range(10 + i, 60 + i)) for i in range(8)]
    expected = plain(engine, samples)
    block = LAYOUT.block_bytes
    tiers = use_tiers(engine, TierConfig(disk=tmp_path, host_bytes=2 * 3 * block, host_idle_bytes=0))
    saved = paused(engine, samples, 9)
    assert all(s.num_tokens >= 57 for s in saved)
    tiers.flush()
    seen = Seen(engine)
    engine.add(samples)
    run(engine)
    for one in samples:
        assert_same(one, expected[one.id])
    assert seen.restores == [(s.num_tokens, "") for s in saved] and seen.grew("num_recomputed_tokens") == 0
    assert tiers.host_used <= 6 * block


def test_what_is_loaded_is_not_zeroed(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker zeroes new blocks at the beginning of a step, those that were filled before are taken out."""
    connector: Any = engine.core.scheduler.connector
    loaded = []
    monkeypatch.setattr(engine.saver, "load", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr(connector, "_loads", [_Load("a/0", [4, 7, 5], 32, 70)])
    out: Any = SimpleNamespace(total_num_scheduled_tokens=1, new_block_ids_to_zero=[3, 7, 5, 9])
    connector.build_connector_meta(out)
    assert out.new_block_ids_to_zero == [3, 9] and loaded == [("a/0", [4, 7, 5], 32, 70)]
    assert connector._loads == []


def test_a_link_of_another_process() -> None:
    with pytest.raises(ValueError, match="there is no such KVLink in this process"):
        link_of("0" * 32)


# -- several engines ---------------------------------------------------------------------------------------------------


def test_several_engines_in_one_process(engine: VllmEngine, model: Path) -> None:
    """A sample goes from one to another with its KV; an engine without a connector runs beside them."""
    expected = plain(engine, [sample("a")])["a/0"]
    other = VllmEngine(model, **SETTINGS, name="other")
    without = VllmEngine(model, **SETTINGS, name="without", save_kv=False)
    assert without.tiers is None and other.tiers is not None and other.tiers is not engine.tiers
    one = sample("a")
    for i, host in enumerate([engine, other, engine, other]):
        seen = Seen(host)
        host.add([one])
        run(host, 9)
        host.pause()
        if i:
            assert seen.restores == [(len(LONG_PROMPT) + 9 * i - 1, "")] and seen.grew("num_recomputed_tokens") == 0
        host.reset_prefix_cache()
    seen = Seen(without)
    without.add([one])
    run(without, 9)
    without.pause()
    assert one.snapshot is None and seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 35
    assert [d for _, d in seen.restores] == ["refused: this engine saves no KV (save_kv, or several workers)"]
    other.add([one])
    run(other)
    assert_same(one, expected)
    kinds = [(s.engine, s.kv) for s in one.segments]
    assert kinds[:4] == [("vllm", "computed"), ("other", "restored"), ("vllm", "restored"), ("other", "restored")]
    assert kinds[4:] == [("without", "recomputed"), ("other", "recomputed")]
    for host in (other, without):
        host.check_integrity()
        assert host.core.num_free_blocks == host.core.num_blocks


# -- random ------------------------------------------------------------------------------------------------------------


def test_no_block_leaks(engine: VllmEngine, tmp_path: Path) -> None:
    """A thousand random adds, pauses with and without KV, aborts and steps."""
    rng = random.Random(3)
    use_tiers(engine, TierConfig(disk=tmp_path, host_bytes=40 * LAYOUT.block_bytes))
    outside: list[Sample] = []
    inside: dict[str, Sample] = {}
    count = 0
    for _ in range(1000):
        action = rng.random()
        if action < 0.2:
            outside.append(sample(f"r{count}", range(10, 11 + rng.randrange(90)), max_tokens=rng.randint(1, 60)))
            count += 1
        if action < 0.45 and outside:
            chosen = [outside.pop(rng.randrange(len(outside))) for _ in range(min(len(outside), rng.randint(1, 3)))]
            engine.add(chosen)
            inside |= {one.id: one for one in chosen}
        elif action < 0.6 and inside:
            ids = rng.sample(sorted(inside), min(len(inside), rng.randint(1, 4)))
            outside += engine.pause(ids, snapshot=rng.random() < 0.8)
            inside = {i: one for i, one in inside.items() if i not in ids}
        elif action < 0.65 and inside:
            one = rng.choice(sorted(inside))
            engine.abort([one])
            del inside[one]
        elif action < 0.68:
            engine.reset_prefix_cache()
        else:
            for one in engine.step().finished:
                del inside[one.id]
        engine.check_integrity()
    engine.pause(snapshot=False)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks and count > 100
    del outside[:]
    assert engine.saver is not None
    engine.saver.tiers.flush()
    engine.saver.tiers.tidy()
    assert engine.saver.tiers.host_used == engine.saver.tiers.disk_used == 0


# -- other weights -----------------------------------------------------------------------------------------------------
# Last: from here on the engine has them.


def test_other_weights(engine: VllmEngine) -> None:
    one = sample("a")
    (saved,) = paused(engine, [one], 9)
    before = saved.fingerprint
    engine.update_weights(make_model(1).state_dict(), engine.version + 1)
    seen = Seen(engine)
    engine.add([one])
    run(engine, 5)
    assert seen.restores == [(0, "refused: saved KV of a/0 is of other weights")]
    assert seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 8
    engine.pause()
    assert one.snapshot.fingerprint != before and [s.kv for s in one.segments] == ["computed", "recomputed"]
    engine.reset_prefix_cache()
    engine.add([one])
    run(engine)
    assert seen.restores[-1] == (len(LONG_PROMPT) + 13, "")
    # Back to the first weights: what they saved is of use again.
    engine.update_weights(make_model(0).state_dict(), engine.version + 1)
    two = sample("b")
    (saved,) = paused(engine, [two], 9)
    assert saved.fingerprint == before


def test_an_update_while_it_waits(engine: VllmEngine) -> None:
    one = sample("a")
    paused(engine, [one], 9)
    engine.add([one])
    engine.update_weights(make_model(2).state_dict(), engine.version + 1)
    seen = Seen(engine)
    run(engine)
    assert seen.restores == [(0, "refused: saved KV of a/0 is of other weights")]


def test_older_kv_by_choice(engine: VllmEngine) -> None:
    """kv_on_update="keep": it is used, the segment says so, no other sample finds it, and what comes of it is neither
    the old weights' KV nor the new ones'."""
    saver = engine.saver
    assert saver is not None
    one, sibling = group("g", n=2).samples
    (saved,) = paused(engine, [one], 9)
    engine.update_weights(make_model(3).state_dict(), engine.version + 1)
    saver.keep_older = True
    try:
        seen = Seen(engine)
        engine.add([one])
        run(engine, 3)
        assert seen.restores == [(saved.num_tokens, "")] and one.segments[-1].kv == "kept"
        engine.add([sibling])
        run(engine, 3)
        assert seen.grew("num_cached_tokens") == 0 and sibling.segments[-1].kv == "computed"
        engine.pause()
        assert one.snapshot.fingerprint == f"{saved.fingerprint}+{saver.fingerprint}"
        assert sibling.snapshot.fingerprint == saver.fingerprint
        assert one.snapshot.parts[0].header.sample_id == one.id  # nor does a sibling in the tiers
        engine.add([one, sibling])
        run(engine)
        assert [s.kv for s in one.segments] == ["computed", "kept"]
        assert [s.kv for s in sibling.segments] == ["computed", "restored"]
    finally:
        saver.keep_older = False


def test_lossy_by_choice(engine: VllmEngine) -> None:
    saver = engine.saver
    assert saver is not None
    expected = plain(engine, [sample("a", temperature=0.0)])["a/0"]
    saver.encoding = "int8"
    try:
        one = sample("a", temperature=0.0)
        (saved,) = paused(engine, [one], 20)
        assert not saved.is_exact and saved.nbytes < 0.3 * 3 * LAYOUT.block_bytes
        copy = copy_of(one)
        copy.snapshot = saved
        engine.add([one])
        run(engine, 5)
        assert one.segments[-1].kv == "approximate"
        close = zip(one.logprobs[20:25], expected.logprobs[20:25], strict=True)
        assert one.output_ids[20:22] == expected.output_ids[20:22] and all(abs(a - b) < 0.2 for a, b in list(close)[:2])
        engine.pause()
        saver.encoding = "exact"
        seen = Seen(engine)
        engine.reset_prefix_cache()
        engine.add([copy])
        run(engine)
        ((count, detail),) = seen.restores
        assert count == 0 and "less exact than the settings ask" in detail
        assert_same(copy, expected)
    finally:
        saver.encoding = "exact"


def test_a_record_of_another_process(engine: VllmEngine, tmp_path: Path) -> None:
    """A snapshot that lies in other tiers, found by its record alone; and one whose record is of another form."""
    one = sample("a")
    expected = plain(engine, [one])["a/0"]
    tiers = use_tiers(engine, TierConfig(disk=tmp_path))
    (saved,) = paused(engine, [one], 9)
    tiers.flush()
    saved.keep()
    record = saved.to_record()
    one = copy_of(one)
    use_tiers(engine, TierConfig())
    del saved
    later = Tiers(TierConfig(disk=tmp_path))
    one.snapshot = Snapshot.from_record("a/0", record, tmp_path, later)
    seen = Seen(engine)
    engine.add([one])
    run(engine)
    assert seen.restores == [(len(LONG_PROMPT) + 8, "")]
    assert_same(one, expected)
    record["parts"][0]["file"] = "../../etc/passwd"
    with pytest.raises(SnapshotCorrupt):
        Snapshot.from_record("a/0", record, tmp_path, later)
