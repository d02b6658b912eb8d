"""A request's KV, saved and brought back by our connector in a real vLLM: nothing of it is computed again, and the
sample goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm.kv_helpers import (
    BLOCK,
    LAYOUT,
    LONG_PROMPT,
    SETTINGS,
    Seen,
    assert_same,
    copy_of,
    group,
    make_model,
    paused,
    plain,
    run,
    sample,
    use_tiers,
)

from longtail import NativeEngine, Sample
from longtail.errors import SnapshotCorrupt
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engines.vllm import VllmEngine
from longtail.partial_rollout.engines.vllm.kv_cache import UnsupportedCache, VllmCaches

NATIVE: dict[str, Any] = {"block_size": BLOCK, "kv_cache_bytes": 1 << 22, "max_model_len": 256}

# -- what is saved -----------------------------------------------------------------------------------------------------


def test_saved_blocks_are_the_models_keys_and_values(saving: VllmEngine) -> None:
    """In kv_manager's layout: the same numbers as the native engine's, up to rounding."""
    one = sample("a", temperature=0.0)
    (saved,) = paused(saving, [one], 20)
    assert saved.layouts == (LAYOUT,) and saved.num_tokens == one.num_tokens - 1
    native = NativeEngine(make_model(), version=saving.version, **NATIVE)
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
    seen = Seen(saving)
    saving.add([other])
    run(saving, 1)
    assert seen.restores == [(0, "refused: saved KV of a/0 is of other weights")]
    native.add([one])
    native.step()
    assert one.segments[-1].kv == "recomputed"


def test_native_and_vllm_take_each_others_kv_by_choice(saving: VllmEngine) -> None:
    """kv_on_update="keep" takes KV of other weights or arithmetic: the form is one, the numbers nearly so."""
    saver = saving.saver
    assert saver is not None
    expected = plain(saving, [sample("a", temperature=0.0)])["a/0"]
    native = NativeEngine(make_model(), version=saving.version, kv_on_update="keep", **NATIVE)
    one = sample("a", temperature=0.0)
    (saved,) = paused(saving, [one], 20)
    native.add([one])
    native.step()
    assert native.stats().num_restored_tokens == saved.num_tokens and native.stats().num_recomputed_tokens == 0
    for _ in range(9):
        native.step()
    native.pause()
    seen = Seen(saving)
    saver.keep_older = True
    try:
        saving.add([one])
        run(saving)
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


def test_a_groups_prompt_is_saved_once(saving: VllmEngine) -> None:
    samples = group("g", n=3).samples
    saved = paused(saving, samples, 8)
    assert len({id(s.parts[0]) for s in saved}) == 1 and len({id(s.parts[1]) for s in saved}) == 3
    header = saved[0].parts[0].header
    assert (header.sample_id, header.num_blocks, header.num_tokens) == ("", 2, 2 * BLOCK)
    assert [s.parts[1].header.sample_id for s in saved] == [one.id for one in samples]


# -- continuation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [1, 31, 33, 70])
def test_a_cut_anywhere_recomputes_nothing(saving: VllmEngine, prompt: int, temperature: float) -> None:
    """Cuts before, at and behind the end of a block."""
    ids = LONG_PROMPT[:prompt]
    expected = plain(saving, [sample("a", ids, temperature=temperature)])["a/0"]
    for cut in (1, 2, 31, 32, 33, 59):
        one = sample("a", ids, temperature=temperature)
        (saved,) = paused(saving, [one], cut)
        assert saved is not None and len(one.output_ids) == cut
        assert saved.num_tokens == prompt + cut - 1  # the last block's part included; the last token has no KV
        seen = Seen(saving)
        saving.add([one])
        run(saving)
        assert seen.restores == [(prompt + cut - 1, "")]
        assert seen.grew("num_restored_tokens") == prompt + cut - 1
        assert seen.grew("num_recomputed_tokens") == seen.grew("num_cached_tokens") == 0
        assert [e.num_prefill_tokens for e in seen.events if e.kind == "step"] == [0] * (60 - cut)
        assert_same(one, expected)
        assert [s.kv for s in one.segments] == ["computed", "restored"] and one.snapshot is None


def test_what_the_device_still_has_is_not_loaded(saving: VllmEngine) -> None:
    """The full blocks are in vLLM's prefix cache, the partial last one comes from the snapshot."""
    one = sample("a")
    saving.add([one])
    run(saving, 10)
    saving.pause()
    seen = Seen(saving)
    saving.add([one])
    run(saving, 1)
    assert seen.grew("num_cached_tokens") == 2 * BLOCK
    assert seen.grew("num_restored_tokens") == one.num_tokens - 2 - 2 * BLOCK
    assert seen.grew("num_recomputed_tokens") == 0


def test_many_at_once(saving: VllmEngine) -> None:
    """Three times as many as there are slots, paused and resumed together again and again."""
    prompts = [range(10 + i, 10 + i + 3 + 9 * i % 70) for i in range(12)]
    groups = [group(f"g{i}", p, n=2, max_tokens=30 + i) for i, p in enumerate(prompts)]
    samples = [one for g in groups for one in g.samples]
    expected = plain(saving, samples)
    seen = Seen(saving)
    saving.add(samples)
    while saving.has_work:
        run(saving, 7)
        left = saving.pause()
        saving.reset_prefix_cache()
        saving.add(left)
    for one in samples:
        assert_same(one, expected[one.id])
    assert seen.grew("num_recomputed_tokens") == 0 and seen.grew("num_restored_tokens") > 2000
    assert all(detail == "" for _, detail in seen.restores)

# -- several engines ---------------------------------------------------------------------------------------------------


def test_several_engines_in_one_process(saving: VllmEngine, saving_model: Path) -> None:
    """A sample goes from one to another with its KV; an engine without a connector runs beside them."""
    expected = plain(saving, [sample("a")])["a/0"]
    other = VllmEngine(saving_model, **SETTINGS, name="other")
    without = VllmEngine(saving_model, **SETTINGS, name="without", save_kv=False)
    assert without.tiers is None and other.tiers is not None and other.tiers is not saving.tiers
    one = sample("a")
    for i, host in enumerate([saving, other, saving, other]):
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


def test_no_block_leaks(saving: VllmEngine, tmp_path: Path) -> None:
    """A thousand random adds, pauses with and without KV, aborts and steps."""
    rng = random.Random(3)
    use_tiers(saving, TierConfig(disk=tmp_path, host_bytes=40 * LAYOUT.block_bytes))
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
            saving.add(chosen)
            inside |= {one.id: one for one in chosen}
        elif action < 0.6 and inside:
            ids = rng.sample(sorted(inside), min(len(inside), rng.randint(1, 4)))
            outside += saving.pause(ids, snapshot=rng.random() < 0.8)
            inside = {i: one for i, one in inside.items() if i not in ids}
        elif action < 0.65 and inside:
            aborted = rng.choice(sorted(inside))
            saving.abort([aborted])
            del inside[aborted]
        elif action < 0.68:
            saving.reset_prefix_cache()
        else:
            for one in saving.step().finished:
                del inside[one.id]
        saving.check_integrity()
    saving.pause(snapshot=False)
    stats = saving.stats()
    assert stats.num_free_blocks == stats.num_blocks and count > 100
    del outside[:]
    assert saving.saver is not None
    saving.saver.tiers.flush()
    saving.saver.tiers.tidy()
    assert saving.saver.tiers.host_used == saving.saver.tiers.disk_used == 0


def test_a_record_of_another_process(saving: VllmEngine, tmp_path: Path) -> None:
    """A snapshot that lies in other tiers, found by its record alone; and one whose record is of another form."""
    one = sample("a")
    expected = plain(saving, [one])["a/0"]
    tiers = use_tiers(saving, TierConfig(disk=tmp_path))
    (saved,) = paused(saving, [one], 9)
    tiers.flush()
    saved.keep()
    record = saved.to_record()
    one = copy_of(one)
    use_tiers(saving, TierConfig())
    del saved
    later = Tiers(TierConfig(disk=tmp_path))
    one.snapshot = Snapshot.from_record("a/0", record, tmp_path, later)
    seen = Seen(saving)
    saving.add([one])
    run(saving)
    assert seen.restores == [(len(LONG_PROMPT) + 8, "")]
    assert_same(one, expected)
    record["parts"][0]["file"] = "../../etc/passwd"
    with pytest.raises(SnapshotCorrupt):
        Snapshot.from_record("a/0", record, tmp_path, later)
