"""Weights in flight: which version made a token, on whose KV, and that nobody finds KV of other weights. The native
engine, which is held to the bit, says what is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import group, prompt
from tests.vllm.conftest import EngineMaker, assert_same, generate, local, run
from transformers import LlamaForCausalLM

from longtail import NativeEngine, Sample
from longtail.events import Event
from longtail.partial_rollout.engine import Engine

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights(tiny: LlamaForCausalLM) -> list[Weights]:
    """The first are the model's own."""
    own = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    torch.manual_seed(5)
    return [own, *({n: t + 0.05 * torch.randn_like(t) for n, t in own.items()} for _ in range(2))]


@pytest.fixture(params=["recompute", "keep"])
def engines(
    request: pytest.FixtureRequest, make_vllm: EngineMaker, tiny: LlamaForCausalLM, weights: list[Weights]
) -> Iterator[tuple[Any, NativeEngine]]:
    """vLLM and the native engine, at one version, with the first weights."""
    ours = make_vllm(kv_on_update=request.param)
    native = NativeEngine(
        tiny, kv_cache_bytes=4 << 20, version=int(ours.version), kv_on_update=request.param, fingerprint_versions=True
    )
    yield ours, native
    ours.pause()


def test_update_in_flight(engines: tuple[Any, NativeEngine], weights: list[Weights]) -> None:
    """Two updates under samples that run, are paused, and wait. In lockstep."""
    first = engines[0].version
    made: list[list[Sample]] = []
    for engine in engines:
        samples = [group(f"g{i}", prompt(21 + 20 * i, i), max_tokens=70).samples[0] for i in range(4)]
        made.append(samples)
        engine.add(samples[:3])
        for number in (1, 2):
            for _ in range(15):
                engine.step()
                engine.check_integrity()
            engine.pause([samples[1].id], snapshot=False)
            engine.update_weights(weights[number], first + number)
            engine.check_integrity()
            engine.add([samples[1], *samples[3 : 3 + (number == 1)]])
        while engine.has_work:
            engine.step()
            engine.check_integrity()
    keep = engines[0].config.kv_on_update == "keep"
    for ours, native in zip(*made, strict=True):
        assert_same(ours, native)
        assert ours.versions == native.versions
        assert [(s.start, s.end, s.version) for s in ours.segments] == [
            (s.start, s.end, s.version) for s in native.segments
        ]
    assert made[0][0].versions == [first] * 15 + [first + 1] * 15 + [first + 2] * 40
    assert [s.kv for s in made[0][0].segments] == ["computed", *["kept" if keep else "recomputed"] * 2]
    assert [s.kv for s in made[0][1].segments] == ["computed", "recomputed", "recomputed"]


def test_no_stale_prefix(engines: tuple[Any, NativeEngine], weights: list[Weights]) -> None:
    """The prompt's blocks are there, made by older weights, and are not found; those of the new ones are."""
    ours, native = engines
    samples = group("a", prompt(100), n=2, max_tokens=8).samples
    run(ours, samples[:1])
    before = ours.stats().num_cached_tokens
    run(ours, group("b", prompt(100), max_tokens=8).samples)
    assert ours.stats().num_cached_tokens - before == 96, "the cache does not work: the test would show nothing"
    for engine in engines:
        engine.update_weights(weights[1], int(native.version) + 1)
    before = ours.stats().num_cached_tokens
    run(ours, samples[1:])
    assert ours.stats().num_cached_tokens == before
    expected = group("a", prompt(100), n=2, max_tokens=8).samples[1]
    native.add([expected])
    while native.has_work:
        native.step()
    assert_same(samples[1], expected)
    run(ours, group("c", prompt(100), max_tokens=8).samples)
    assert ours.stats().num_cached_tokens - before == 96


def test_update_while_samples_wait(make_vllm: EngineMaker, weights: list[Weights]) -> None:
    """More samples than slots: those that wait come from the new weights alone, in their order."""
    engine = make_vllm(max_num_seqs=2)
    version = engine.version
    events: list[Event] = []
    engine.listener = events.append
    samples = [group(f"g{i}", prompt(21, i), max_tokens=12).samples[0] for i in range(6)]
    engine.add(samples)
    for _ in range(5):
        engine.step()
    engine.update_weights(weights[0], version + 1)
    run(engine)
    engine.listener = lambda event: None
    assert [set(s.versions) for s in samples] == [{version, version + 1}] * 2 + [{version + 1}] * 4
    firsts = dict.fromkeys(e.sample for e in events if e.kind == "admit")
    assert list(firsts) == [s.id for s in samples]
    assert [e.detail for e in events if e.kind == "preempt"] == ["weight update"] * 2


def test_the_engine_keeps_a_copy(make_vllm: EngineMaker, weights: list[Weights]) -> None:
    """A trainer changes its tensors in place."""
    engine = make_vllm()
    mine = {name: tensor.clone() for name, tensor in weights[1].items() if name != "lm_head.weight"}  # which is tied
    engine.update_weights(mine, engine.version + 1)
    expected = generate(engine, group("a", prompt(21)))[0]
    for tensor in mine.values():
        tensor.zero_()
    engine.reset_prefix_cache()
    assert_same(generate(engine, group("a", prompt(21)))[0], expected)
    engine.update_weights(weights[0], engine.version + 1)
    assert generate(engine, group("a", prompt(21)))[0].output_ids != expected.output_ids


def test_weights_that_do_not_fit_change_nothing(make_vllm: EngineMaker, weights: list[Weights]) -> None:
    engine = make_vllm()
    version = engine.version
    expected = generate(engine, group("a", prompt(21)))[0]
    name = "model.layers.1.mlp.up_proj.weight"
    bad: list[tuple[dict, int, str]] = [
        ({n: t for n, t in weights[1].items() if n != name}, version + 1, "missing"),
        (weights[1] | {"model.extra": torch.zeros(1)}, version + 1, "no parameter model.extra"),
        (weights[1] | {name: torch.zeros(3, 3)}, version + 1, r"has shape \(3, 3\)"),
        (weights[1], version, "above the current"),
        (weights[1], True, "must be an integer"),
    ]
    for given, number, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.update_weights(given, number)
    assert engine.version == version
    assert_same(generate(engine, group("a", prompt(21)))[0], expected)


def test_an_update_that_fails_half_way(
    make_vllm: EngineMaker, weights: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is generated with weights of which nobody knows what they are."""
    engine = make_vllm()
    sample = group("a", prompt(21)).samples[0]
    run(engine, [sample], until=5)

    def broken(*_: object, **__: object) -> None:
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "rpc", broken)
        with pytest.raises(OSError, match="planted"):
            engine.update_weights(weights[1], engine.version + 1)
    with pytest.raises(RuntimeError, match="repeat update_weights"):
        engine.step()
    version = engine.version
    assert len(sample.output_ids) == 5
    engine.update_weights(weights[0], version + 1)
    run(engine)
    assert sample.versions == [version] * 5 + [version + 1] * 27


def test_a_model_whose_weights_are_no_numbers(make_vllm: EngineMaker, weights: list[Weights]) -> None:
    """Samples fail, each at its boundary; the engine goes on."""
    engine = make_vllm()
    sample = group("a", prompt(21)).samples[0]
    run(engine, [sample], until=5)
    nan = weights[0] | {"model.norm.weight": torch.full((64,), float("nan"))}
    engine.update_weights(nan, engine.version + 1)
    finished: list[Sample] = []
    while engine.has_work:
        finished += engine.step().finished
    assert finished == [sample] and sample.status == "failed" and len(sample.output_ids) == 5
    assert sample.failure == "sampling output token 5: the logits have NaN or +inf"
    engine.update_weights(weights[0], engine.version + 1)
    assert generate(engine, group("a", prompt(21)))[0].finish_reason == "length"


def test_engines_agree_on_the_protocol(make_vllm: EngineMaker) -> None:
    engine: Engine = make_vllm()
    assert engine.name == "vllm" and engine.tiers is not None and engine.num_free_slots == 8


def test_by_file(make_vllm: EngineMaker, weights: list[Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    """As to workers in processes of their own. And vLLM's own count of versions is ours."""
    engine = make_vllm()
    engine.update_weights(weights[1], engine.version + 1)
    expected = generate(engine, group("a", prompt(21)))[0]
    engine.update_weights(weights[0], engine.version + 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.core), "runner", None)
        engine._updater.load(engine._updater.check(weights[1]), engine.version)
    engine.reset_prefix_cache()
    assert_same(generate(engine, group("a", prompt(21)))[0], expected)
    engine.update_weights(weights[0], engine.version + 1)
    assert local(engine).llm.get_weight_version() == str(engine.version)


def test_paused_samples_keep_their_kv(make_vllm: EngineMaker, weights: list[Weights]) -> None:
    """By choice, as far as the prefix cache has it. What is new finds none of it; what is forgotten is gone."""
    for forget in (False, True):
        engine = make_vllm(kv_on_update="keep", save_kv=False)
        sample = group("a", prompt(70), max_tokens=30).samples[0]
        run(engine, [sample], until=10)
        engine.pause()
        if forget:
            engine.reset_prefix_cache()
        engine.update_weights(weights[1], engine.version + 1)
        before = engine.stats().num_cached_tokens
        run(engine, [sample], until=20)
        assert engine.stats().num_cached_tokens - before == (0 if forget else 64)
        assert [s.kv for s in sample.segments] == ["computed", "recomputed" if forget else "kept"]
        before = engine.stats().num_cached_tokens
        run(engine, group("b", prompt(70), max_tokens=3).samples)
        assert engine.stats().num_cached_tokens - before == (64 if forget else 0)
