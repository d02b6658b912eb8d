"""What our connector does not use, and what it does then: damaged and foreign snapshots, too little memory, other
weights, loss by choice. The sample goes on from its tokens, and an event says why."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.kv_helpers import (
    BLOCK,
    LAYOUT,
    LONG_PROMPT,
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

from longtail.kv_manager.tier_config import TierConfig
from longtail.partial_rollout.engines.vllm import VllmEngine
from longtail.partial_rollout.engines.vllm.connector import _Load
from longtail.partial_rollout.engines.vllm.kv_link import link_of

# -- refusals ----------------------------------------------------------------------------------------------------------


def test_another_samples_or_other_tokens(saving: VllmEngine) -> None:
    one, other = sample("a", max_tokens=20), sample("b", max_tokens=20)
    expected = plain(saving, [one, other])
    saved, _ = paused(saving, [one, other], 5)
    other.snapshot = saved
    one = copy_of(one)
    one.output_ids[2] ^= 1
    one.snapshot = saved
    seen = Seen(saving)
    saving.add([one, other])
    run(saving)
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
def test_a_damaged_file(saving: VllmEngine, tmp_path: Path, damage: Any) -> None:
    expected = plain(saving, [sample("a")])["a/0"]
    tiers = use_tiers(saving, TierConfig(disk=tmp_path))
    one = sample("a")
    (saved,) = paused(saving, [one], 12)
    tiers.flush()
    own = saved.parts[-1]
    tiers.evict(saved.parts)
    assert own.file is not None and not own.in_memory
    damage(own.file)
    seen = Seen(saving)
    saving.add([one])
    run(saving)
    ((count, detail),) = seen.restores
    assert count == 0 and detail.startswith(f"refused: {own.file}: "), detail
    assert seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 11 and seen.grew("num_restored_tokens") == 0
    assert_same(one, expected)
    assert [s.kv for s in one.segments] == ["computed", "recomputed"]
    tiers.check_integrity()


def test_from_disk_beside_others_that_run(saving: VllmEngine, tmp_path: Path) -> None:
    """Nobody waits for the disk: those that run go on, and a damaged file is only its sample's."""
    samples = [sample(f"s{i}", range(10 + i, 60 + i)) for i in range(6)]
    expected = plain(saving, samples)
    tiers = use_tiers(saving, TierConfig(disk=tmp_path))
    saved = paused(saving, samples, 9)
    tiers.flush()
    tiers.evict([part for s in saved for part in s.parts])
    _flip(saved[2].parts[-1].file)  # type: ignore[arg-type]
    runner = sample("runs", max_tokens=40)
    saving.add([runner])
    run(saving, 2)
    seen = Seen(saving)
    saving.add(samples)
    run(saving)
    assert sorted((detail == "") for _, detail in seen.restores) == [False] + [True] * 5
    for one in samples:
        assert_same(one, expected[one.id])
    assert runner.finish_reason == "length"


def test_too_little_host_memory(saving: VllmEngine) -> None:
    """No room: the sample goes on from its tokens, and the event says so."""
    expected = plain(saving, [sample("a")])["a/0"]
    use_tiers(saving, TierConfig(host_bytes=1000))
    seen = Seen(saving)
    one = sample("a")
    assert paused(saving, [one], 9) == [None]
    assert [e.detail for e in seen.events if e.kind == "save"] == ["failed: no room in host memory"]
    saving.add([one])
    run(saving)
    assert_same(one, expected)
    assert seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 8


def test_host_memory_for_a_few_at_a_time(saving: VllmEngine, tmp_path: Path) -> None:
    """Saved KV goes to the disk and comes back through room for two samples."""
    samples = [sample(f"s{i}", range(10 + i, 60 + i)) for i in range(8)]
    expected = plain(saving, samples)
    block = LAYOUT.block_bytes
    tiers = use_tiers(saving, TierConfig(disk=tmp_path, host_bytes=2 * 3 * block, host_idle_bytes=0))
    saved = paused(saving, samples, 9)
    assert all(s.num_tokens >= 57 for s in saved)
    tiers.flush()
    seen = Seen(saving)
    saving.add(samples)
    run(saving)
    for one in samples:
        assert_same(one, expected[one.id])
    assert seen.restores == [(s.num_tokens, "") for s in saved] and seen.grew("num_recomputed_tokens") == 0
    assert tiers.host_used <= 6 * block


def test_what_is_loaded_is_not_zeroed(saving: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a worker zeroes new blocks at the beginning of a step, those that were filled before are taken out."""
    connector: Any = saving.core.scheduler.connector
    loaded = []
    monkeypatch.setattr(saving.saver, "load", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr(connector, "_loads", [_Load("a/0", [4, 7, 5], 32, 70)])
    out: Any = SimpleNamespace(total_num_scheduled_tokens=1, new_block_ids_to_zero=[3, 7, 5, 9])
    connector.build_connector_meta(out)
    assert out.new_block_ids_to_zero == [3, 9] and loaded == [("a/0", [4, 7, 5], 32, 70)]
    assert connector._loads == []


def test_a_link_of_another_process() -> None:
    with pytest.raises(ValueError, match="there is no such KVLink in this process"):
        link_of("0" * 32)

# -- other weights -----------------------------------------------------------------------------------------------------


def test_other_weights(saving: VllmEngine) -> None:
    one = sample("a")
    (saved,) = paused(saving, [one], 9)
    before = saved.fingerprint
    saving.update_weights(make_model(1).state_dict(), saving.version + 1)
    seen = Seen(saving)
    saving.add([one])
    run(saving, 5)
    assert seen.restores == [(0, "refused: saved KV of a/0 is of other weights")]
    assert seen.grew("num_recomputed_tokens") == len(LONG_PROMPT) + 8
    saving.pause()
    assert one.snapshot.fingerprint != before and [s.kv for s in one.segments] == ["computed", "recomputed"]
    saving.reset_prefix_cache()
    saving.add([one])
    run(saving)
    assert seen.restores[-1] == (len(LONG_PROMPT) + 13, "")
    # Back to the first weights: what they saved is of use again.
    saving.update_weights(make_model(0).state_dict(), saving.version + 1)
    two = sample("b")
    (saved,) = paused(saving, [two], 9)
    assert saved.fingerprint == before


def test_an_update_while_it_waits(saving: VllmEngine) -> None:
    one = sample("a")
    paused(saving, [one], 9)
    saving.add([one])
    saving.update_weights(make_model(2).state_dict(), saving.version + 1)
    seen = Seen(saving)
    run(saving)
    assert seen.restores == [(0, "refused: saved KV of a/0 is of other weights")]


def test_older_kv_by_choice(saving: VllmEngine) -> None:
    """kv_on_update="keep": it is used, the segment says so, no other sample finds it, and what comes of it is neither
    the old weights' KV nor the new ones'."""
    saver = saving.saver
    assert saver is not None
    one, sibling = group("g", n=2).samples
    (saved,) = paused(saving, [one], 9)
    saving.update_weights(make_model(3).state_dict(), saving.version + 1)
    saver.keep_older = True
    try:
        seen = Seen(saving)
        saving.add([one])
        run(saving, 3)
        assert seen.restores == [(saved.num_tokens, "")] and one.segments[-1].kv == "kept"
        saving.add([sibling])
        run(saving, 3)
        assert seen.grew("num_cached_tokens") == 0 and sibling.segments[-1].kv == "computed"
        saving.pause()
        assert one.snapshot.fingerprint == f"{saved.fingerprint}+{saver.fingerprint}"
        assert sibling.snapshot.fingerprint == saver.fingerprint
        assert one.snapshot.parts[0].header.sample_id == one.id  # nor does a sibling in the tiers
        saving.add([one, sibling])
        run(saving)
        assert [s.kv for s in one.segments] == ["computed", "kept"]
        assert [s.kv for s in sibling.segments] == ["computed", "restored"]
    finally:
        saver.keep_older = False


def test_lossy_by_choice(saving: VllmEngine) -> None:
    saver = saving.saver
    assert saver is not None
    expected = plain(saving, [sample("a", temperature=0.0)])["a/0"]
    saver.encoding = "int8"
    try:
        one = sample("a", temperature=0.0)
        (saved,) = paused(saving, [one], 20)
        assert not saved.is_exact and saved.nbytes < 0.3 * 3 * LAYOUT.block_bytes
        copy = copy_of(one)
        copy.snapshot = saved
        saving.add([one])
        run(saving, 5)
        assert one.segments[-1].kv == "approximate"
        close = zip(one.logprobs[20:25], expected.logprobs[20:25], strict=True)
        assert one.output_ids[20:22] == expected.output_ids[20:22] and all(abs(a - b) < 0.2 for a, b in list(close)[:2])
        saving.pause()
        saver.encoding = "exact"
        seen = Seen(saving)
        saving.reset_prefix_cache()
        saving.add([copy])
        run(saving)
        ((count, detail),) = seen.restores
        assert count == 0 and "less exact than the settings ask" in detail
        assert_same(copy, expected)
    finally:
        saver.encoding = "exact"
