"""The chaos of tests/partial_rollout/test_chaos.py with a real vLLM underneath, and steps that break off inside it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.partial_rollout.test_chaos import RULES, SETTINGS, Chaos, check_end
from tests.vllm.kv_helpers import SETTINGS as ENGINE
from tests.vllm.kv_helpers import make_model, sample, save_model

from longtail import LongtailError, SamplingParams
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.vllm import VllmEngine


@functools.cache
def weights(seed: int) -> dict[str, Any]:
    return make_model(seed).state_dict()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    return VllmEngine(save_model(tmp_path_factory.mktemp("model")), **ENGINE | {"kv_cache_bytes": 11 << 15})  # preempts


class VllmChaos(Chaos):
    """built: the engine, which outlives the chaos; it is as it was when `restore` has been called."""

    most = 70

    def __init__(self, built: VllmEngine, name: str, seed: int, **settings: Any) -> None:
        self.built, self.breaks_in, self.broken = built, 0, 0
        self.originals = built.now, built.step, built.core.step
        super().__init__(name, seed, **settings)

    def make_engine(self, clock: VirtualClock) -> VllmEngine:
        engine, rng = self.built, self.rng
        saver = engine.saver
        assert saver is not None
        keep = rng.random() < 0.5
        engine.config = dataclasses.replace(engine.config, kv_on_update="keep" if keep else "recompute")
        saver.keep_older, saver.tiers = keep, Tiers(TierConfig(host_bytes=rng.choice([None, 30 * 32768])))
        engine.reset_prefix_cache()
        engine.now = engine._journal.now = clock.now
        step, core_step = engine.step, engine.core.step

        def timed(**options: Any) -> Any:
            clock.advance_to(clock.now() + 1.0)
            return step(**options)

        def breaking(**options: Any) -> Any:
            self.breaks_in -= 1
            emitted = core_step(**options)  # vLLM has counted its tokens, and nobody hears of them
            if self.breaks_in == 0:
                self.broken += 1
                raise LongtailError("planted")
            return emitted

        engine.step, engine.core.step = timed, breaking  # type: ignore[method-assign]
        return engine

    def restore(self) -> None:
        self.built.now, self.built.step, self.built.core.step = self.originals  # type: ignore[method-assign]
        self.built._journal.now = self.originals[0]

    def params(self, n: int) -> SamplingParams:
        return SamplingParams(n=n, max_tokens=self.rng.randint(1, 60), stop_token_ids=tuple(range(20)), temperature=1.0)

    def weights(self) -> dict[str, Any]:
        return weights(self.rng.randrange(3))

    def collect(self, **options: Any) -> None:
        if self.rng.random() < 0.2:
            self.breaks_in = self.rng.randint(1, 12)
        super().collect(**options)


@pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")
@pytest.mark.parametrize(("name", "rules"), zip(SETTINGS, RULES, strict=True))
def test_chaos(built: VllmEngine, name: str, rules: str) -> None:
    chaos = VllmChaos(built, name, 0, **RULES[rules])
    before = built.stats()
    try:
        chaos.run(1000)  # times 7
        check_end(chaos)
        stats = built.stats()
        for name in ("num_restored_tokens", "num_recomputed_tokens"):
            assert getattr(stats, name) > getattr(before, name), name
        assert chaos.broken > 3
    finally:
        built.pause(snapshot=False)
        chaos.restore()


def test_broken_steps_lose_no_token(built: VllmEngine) -> None:
    """A step that breaks off is done again, with the same tokens; the saved KV of a moment before stays good."""
    saver = built.saver
    assert saver is not None

    built.reset_prefix_cache()
    plain, one = sample("a", max_tokens=30), sample("a", max_tokens=30)
    built.add([plain])
    while built.has_work:
        built.step()
    built.add([one])
    for _ in range(5):
        built.step()
    built.pause()
    built.reset_prefix_cache()
    assert one.snapshot is not None
    built.add([one])
    core_step = built.core.step

    def breaking(**options: Any) -> Any:
        core_step(**options)
        raise LongtailError("planted")

    built.core.step = breaking  # type: ignore[method-assign]
    try:
        with pytest.raises(LongtailError, match="planted"):
            built.step()  # it had been admitted in this step, with its KV loaded
    finally:
        built.core.step = core_step  # type: ignore[method-assign]
    built.check_integrity()
    while built.has_work:
        built.step()
        built.check_integrity()
    assert one.output_ids == plain.output_ids
    assert [s.kv for s in one.segments] == ["computed", "restored"]
