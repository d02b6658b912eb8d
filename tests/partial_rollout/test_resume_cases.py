"""What a cut must not change: caps, stops, counts, versions."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run
from transformers import PreTrainedTokenizerFast

from longtail import Event, NativeEngine, PolicyVersion, Sample
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache
from longtail.sample import KVSource


def cut_and_resume(engine: NativeEngine, sample: Sample, cut: int, snapshot: bool = True) -> Sample:
    run(engine, [sample], until=cut)
    if engine.has_work:
        engine.pause(snapshot=snapshot)
        run(engine, [sample])
    return sample


@pytest.mark.parametrize("cuts", [[5], [1, 2, 3], [19], [7, 11, 13]])
def test_cap_counts_tokens_over_all_segments(make_engine: EngineMaker, cuts: list[int]) -> None:
    engine = make_engine()
    sample = group("a", prompt(9), max_tokens=20).samples[0]
    for cut in cuts:
        run(engine, [sample], until=cut)
        engine.pause()
    run(engine, [sample])
    assert len(sample.output_ids) == 20 and sample.finish_reason == "length"
    assert len(sample.segments) == 2  # the segments after the first are all restored ones of one engine and version
    assert [len(s) for s in sample.segments] == [cuts[0], 20 - cuts[0]]


def test_stop_string_that_straddles_a_cut(make_engine: EngineMaker, letters: PreTrainedTokenizerFast) -> None:
    free = generate(make_engine(), group("a", prompt(9), max_tokens=30))[0]
    text = letters.decode(free.output_ids)
    assert len(text) == 30
    stop = text[11:15]  # completed by output token 14
    engine = make_engine(tokenizer=letters)
    whole = generate(engine, group("a", prompt(9), max_tokens=30, stop=["no such text", stop]))[0]
    assert (len(whole.output_ids), whole.finish_reason, whole.stop_reason) == (15, "stop", stop)
    for cut in (10, 11, 12, 13, 14):
        for snapshot in (True, False):
            sample = group("a", prompt(9), max_tokens=30, stop=["no such text", stop]).samples[0]
            assert_same(cut_and_resume(engine, sample, cut, snapshot), whole)


def test_stop_string_is_ignored_before_min_tokens(make_engine: EngineMaker, letters: PreTrainedTokenizerFast) -> None:
    free = generate(make_engine(), group("a", prompt(9), max_tokens=30))[0]
    stop = letters.decode(free.output_ids[3:5])
    engine = make_engine(tokenizer=letters)
    early = generate(engine, group("a", prompt(9), max_tokens=30, stop=stop))[0]
    assert len(early.output_ids) == 5
    late = generate(engine, group("a", prompt(9), max_tokens=30, stop=stop, min_tokens=6))[0]
    # An occurrence that was passed over does not end the sample when min_tokens is reached.
    assert len(late.output_ids) == 30 and late.output_ids == free.output_ids


def test_min_tokens_counts_tokens_of_earlier_segments(make_engine: EngineMaker) -> None:
    engine = make_engine()
    stops = list(range(3, 250))  # about half of the vocabulary: without min_tokens the sample ends at once
    params = {"stop_token_ids": stops, "min_tokens": 12, "max_tokens": 40}
    whole = generate(engine, group("a", prompt(9), **params))[0]
    assert 12 < len(whole.output_ids) < 40 and whole.finish_reason == "stop"
    assert whole.stop_reason == whole.output_ids[-1] and not set(whole.output_ids[:12]) & set(stops)
    for cut in range(1, len(whole.output_ids)):
        assert_same(cut_and_resume(engine, group("a", prompt(9), **params).samples[0], cut), whole)


def test_penalties_count_tokens_of_earlier_segments(make_engine: EngineMaker) -> None:
    engine = make_engine()
    params = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "temperature": 0.0, "max_tokens": 40}
    plain = generate(engine, group("a", prompt(9), temperature=0.0, max_tokens=40))[0]
    whole = generate(engine, group("a", prompt(9), **params))[0]
    assert whole.output_ids != plain.output_ids  # the penalties matter on this prompt
    for cut in range(1, 40, 3):
        sample = group("a", prompt(9), **params).samples[0]
        assert_same(cut_and_resume(engine, sample, cut, snapshot=bool(cut % 2)), whole)


def test_cut_at_the_cap_or_at_eos_is_finished(make_engine: EngineMaker) -> None:
    engine = make_engine()
    capped = group("a", prompt(9), max_tokens=5).samples[0]
    run(engine, [capped], until=5)
    assert capped.status == "finished" and capped.finish_reason == "length" and not engine.has_work
    free = generate(engine, group("b", prompt(9), max_tokens=20))[0]
    eos = free.output_ids[7]
    ended = group("b", prompt(9), max_tokens=20, stop_token_ids=[eos]).samples[0]
    run(engine, [ended], until=20)
    at = free.output_ids.index(eos) + 1
    assert len(ended.output_ids) == at and ended.finish_reason == "stop" and ended.snapshot is None
    with pytest.raises(ValueError, match="is finished"):
        engine.add([capped])
    # Handed in by somebody who does not know that it has ended:
    for sample in (capped, ended):
        sample.status, sample.finish_reason = "paused", None
        with pytest.raises(ValueError, match="already ended"):
            engine.add([sample])


def test_eos_of_the_model_ends_a_sample(make_engine: EngineMaker) -> None:
    free = generate(make_engine(), group("a", prompt(9), max_tokens=30))[0]
    model = make_model("llama")
    model.generation_config.eos_token_id = [free.output_ids[6], 1]
    engine = make_engine(model)
    sample = generate(engine, group("a", prompt(9), max_tokens=30, ignore_eos=False))[0]
    assert sample.finish_reason == "stop" and sample.stop_reason is None
    assert sample.output_ids == free.output_ids[: free.output_ids.index(free.output_ids[6]) + 1]


def test_context_end_is_a_length_finish(make_engine: EngineMaker) -> None:
    engine = make_engine(max_model_len=32)
    sample = generate(engine, group("a", prompt(20), max_tokens=100))[0]
    assert len(sample.output_ids) == 12 and sample.finish_reason == "length"


def other_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    return dict(make_model("llama", seed=seed).state_dict())


def test_tokens_after_an_update_are_those_of_the_new_weights(make_engine: EngineMaker) -> None:
    """recompute: the rest of a sample is what an engine with the new weights makes of the same beginning."""
    engine = make_engine()
    sample, waiting = (group(n, prompt(9, i), max_tokens=20).samples[0] for i, n in enumerate("ab"))
    run(engine, [sample], until=8)
    engine.add([waiting])
    engine.update_weights(other_weights(), 1)
    engine.check_integrity()
    run(engine)
    assert sample.versions == [0] * 8 + [1] * 12 and waiting.versions == [1] * 20
    assert [(s.start, s.end, s.version, s.kv) for s in sample.segments] == [
        (0, 8, 0, "computed"),
        (8, 20, 1, "recomputed"),
    ]
    fresh = make_engine(make_model("llama", seed=1))
    again = group("a", prompt(9), max_tokens=20).samples[0]
    for token, logprob in zip(sample.output_ids[:8], sample.logprobs[:8], strict=True):
        again.append(token, logprob, PolicyVersion(0), "native", "computed")
    again.status = "paused"
    run(fresh, [again])
    assert_same(again, sample)


def test_no_block_of_the_old_weights_is_found_after_an_update(make_engine: EngineMaker) -> None:
    engine = make_engine()
    generate(engine, group("a", prompt(50)))
    cached = engine.stats().num_cached_tokens
    generate(engine, group("b", prompt(50)))
    assert engine.stats().num_cached_tokens == cached + 49  # the same prompt is found under the same weights
    engine.update_weights(other_weights(), 1)
    after = generate(engine, group("c", prompt(50)))[0]
    assert engine.stats().num_cached_tokens == cached + 49
    assert_same(after, generate(make_engine(make_model("llama", seed=1)), group("c", prompt(50)))[0])


def test_snapshot_of_older_weights_is_not_used(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = group("a", prompt(30), max_tokens=20).samples[0]
    run(engine, [sample], until=8)
    engine.pause()
    assert sample.snapshot is not None
    engine.update_weights(other_weights(), 3)
    events: list[Event] = []
    engine.listener = events.append
    run(engine, [sample])
    (refused,) = [e for e in events if e.kind == "restore"]
    assert engine.stats().num_restored_tokens == refused.num_tokens == 0
    assert refused.detail == f"refused: saved KV of {sample.id} is of other weights"
    assert sample.segments[-1].kv == "recomputed" and sample.versions[8:] == [3] * 12


@pytest.mark.parametrize("fingerprint_versions", [False, True])
def test_equal_weights_under_another_version(make_engine: EngineMaker, fingerprint_versions: bool) -> None:
    """Their KV is good, unless updates are to cost what they cost with other weights; the sample is the same."""
    alone = generate(make_engine(), group("a", prompt(30), max_tokens=20))[0]
    engine = make_engine(fingerprint_versions=fingerprint_versions)
    sample = group("a", prompt(30), max_tokens=20).samples[0]
    run(engine, [sample], until=8)
    engine.pause()
    engine.update_weights(make_model("llama").state_dict(), 1)
    run(engine, [sample])
    assert sample.segments[-1].kv == ("recomputed" if fingerprint_versions else "restored")
    assert sample.output_ids == alone.output_ids and sample.logprobs == alone.logprobs


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "running"])
def test_kept_kv_is_recorded(make_engine: EngineMaker, paused: bool) -> None:
    engine = make_engine(kv_on_update="keep")
    sample = group("a", prompt(30), max_tokens=20).samples[0]
    run(engine, [sample], until=8)
    if paused:
        engine.pause()
    engine.update_weights(other_weights(), 1)
    recomputed = engine.stats().num_recomputed_tokens
    run(engine, [sample] if paused else [])
    expected: list[KVSource] = ["computed", "kept"]
    assert [s.kv for s in sample.segments] == expected
    assert engine.stats().num_recomputed_tokens == recomputed
    # Mixed KV is nobody else's: the same prompt is computed anew.
    cached = engine.stats().num_cached_tokens
    fresh = generate(engine, group("b", prompt(30)))[0]
    assert engine.stats().num_cached_tokens == cached
    assert_same(fresh, generate(make_engine(make_model("llama", seed=1)), group("b", prompt(30)))[0])


def test_update_during_a_step_does_not_relabel_tokens(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = group("a", prompt(9), max_tokens=20).samples[0]
    run(engine, [sample], until=5)
    before = generate(make_engine(), group("a", prompt(9), max_tokens=20))[0]
    in_forward, forward = threading.Event(), engine.decoder.forward

    def update() -> None:
        in_forward.wait()
        engine.update_weights(other_weights(), 1)

    updated = threading.Thread(target=update)

    def slow_forward(batch: ForwardBatch, cache: Cache) -> torch.Tensor:
        in_forward.set()
        updated.join(timeout=0.3)  # the update has every chance to come in between
        return forward(batch, cache)

    engine.decoder.forward = slow_forward  # type: ignore[method-assign]
    updated.start()
    engine.step()
    engine.decoder.forward = forward  # type: ignore[method-assign]
    updated.join()
    assert engine.version == 1
    assert sample.versions == [0] * 6 and sample.output_ids == before.output_ids[:6]
    run(engine)
    assert sample.versions == [0] * 6 + [1] * 14


def test_misfit_weights_change_nothing(make_engine: EngineMaker) -> None:
    engine = make_engine()
    expected = generate(engine, group("a", prompt(9)))[0]
    weights = other_weights()
    short = {k: v for k, v in weights.items() if "layers.1.mlp.up_proj" not in k}
    wrong = weights | {"model.norm.weight": torch.ones(3)}
    cases: list[tuple[dict, str]] = [
        (short, "model.layers.1.mlp.up_proj.weight"),
        (wrong, r"model.norm.weight has shape \(3,\)"),
        (weights | {"model.extra": torch.ones(1)}, "model.extra"),
        (weights | {"model.norm.weight": weights["model.norm.weight"].numpy()}, "model.norm.weight must be a floating"),
        (weights | {"model.norm.weight": torch.ones(64, dtype=torch.long)}, "model.norm.weight must be a floating"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.update_weights(bad, 1)
    for version in (0, -1, 1.5, None, True):
        with pytest.raises(ValueError, match="version"):
            engine.update_weights(weights, version)  # type: ignore[arg-type]
    assert engine.version == 0
    engine.reset_prefix_cache()
    assert_same(generate(engine, group("a", prompt(9)))[0], expected)


def test_logits_without_an_answer_fail_their_sample_only(make_engine: EngineMaker) -> None:
    """One embedding is NaN: the sample whose prompt holds it fails and says where, the other one is exact."""
    expected = generate(make_engine(), group("good", prompt(9, 1), max_tokens=6))[0]
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied: the output stays finite
        model.model.embed_tokens.weight[500] = torch.nan
    model.config.tie_word_embeddings = False
    engine = make_engine(model, numerics="fast")
    assert 500 not in prompt(9, 1) + expected.output_ids
    bad, good = group("bad", [5, 500, 7]).samples[0], group("good", prompt(9, 1), max_tokens=6).samples[0]
    run(engine, [bad, good])
    assert (bad.status, bad.finish_reason, bad.output_ids) == ("failed", "error", [])
    assert bad.failure == "sampling output token 0: the logits have NaN or +inf"
    assert good.output_ids == expected.output_ids
    assert engine.stats().num_output_tokens == 6


@pytest.mark.parametrize("kind", ["admit", "first_token", "step", "finish"])
def test_a_listener_that_raises_changes_no_sample(make_engine: EngineMaker, kind: str) -> None:
    expected = {s.id: s for s in generate(make_engine(), *(group(f"g{i}", prompt(9 + i, i)) for i in range(4)))}
    heard: list[Event] = []
    raised: list[Event] = []

    def listener(event: Event) -> None:
        if event.kind == kind and len(raised) < 3:
            raised.append(event)
            raise OSError("no space left on device")
        heard.append(event)

    engine = make_engine(listener=listener)
    samples = [group(f"g{i}", prompt(9 + i, i)).samples[0] for i in range(4)]
    engine.add(samples)
    while engine.has_work:
        try:
            engine.step()
        except OSError:
            engine.check_integrity()
    assert len(raised) == 3
    finished = [e for e in [*heard, *raised] if e.kind == "finish"]
    assert len(finished) == 4  # no event was swallowed by the error of another
    for sample in samples:
        assert_same(sample, expected[sample.id])


def test_an_interrupt_in_a_step_changes_no_sample(make_engine: EngineMaker) -> None:
    """Wherever it strikes between the forward pass and the last commit, the step is simply done again."""
    expected = {s.id: s for s in generate(make_engine(), *(group(f"g{i}", prompt(9 + i, i)) for i in range(4)))}
    for strike in range(5):
        engine = make_engine()
        samples = [group(f"g{i}", prompt(9 + i, i)).samples[0] for i in range(4)]
        run(engine, samples, until=6)
        commit, calls = engine.stepper._commit, list[Any]()

        def interrupted(*args: Any, commit: Any = commit, calls: list = calls, strike: int = strike) -> None:
            calls.append(args)
            if len(calls) == strike + 1:
                raise KeyboardInterrupt
            commit(*args)

        engine.stepper._commit = interrupted  # type: ignore[method-assign, assignment]
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                engine.step()
            engine.check_integrity()
        assert calls
        run(engine)
        for sample in samples:
            assert_same(sample, expected[sample.id])


def test_events_of_slots_pair_up_and_counts_are_rows(make_engine: EngineMaker) -> None:
    """In a pool too small for its samples: each admission has one leave, and what was re-prefilled was computed."""
    events: list[Event] = []
    one = make_engine().kv.bytes_per_block
    engine = make_engine(kv_cache_bytes=17 * one, max_model_len=256, listener=events.append)
    samples = [group(f"g{i}", prompt(60, i), max_tokens=30).samples[0] for i in range(6)]
    run(engine, samples)
    kinds = Counter(e.kind for e in events)
    assert kinds["preempt"] == engine.stats().num_preemptions > 0
    assert kinds["admit"] == kinds["preempt"] + kinds["finish"] == kinds["preempt"] + 6
    slots: dict[str, bool] = {}
    for event in events:
        if event.kind in ("admit", "preempt", "finish"):
            assert slots.get(event.sample, False) == (event.kind != "admit")
            slots[event.sample] = event.kind == "admit"
    stats = engine.stats()
    assert stats.num_restored_tokens == sum(e.num_tokens for e in events if e.kind == "restore")
    rows = sum(e.num_tokens for e in events if e.kind == "step")
    needed = sum(60 + 30 - 1 for _ in samples)
    assert rows == needed + stats.num_recomputed_tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "interface"])
def test_updated_engine_equals_one_made_of_the_new_weights(
    make_engine: EngineMaker, kind: str, fused: bool | None
) -> None:
    """Tied and untied heads, fused projections and single ones, both ways of running a model."""
    engine = make_engine(make_model(kind), fused=fused)
    before = generate(engine, group("a", prompt(9)))[0]
    engine.update_weights(make_model(kind, seed=1).state_dict(), 1)
    after = generate(engine, group("b", prompt(9)))[0]
    fresh = generate(make_engine(make_model(kind, seed=1), fused=fused), group("b", prompt(9)))[0]
    assert_same(after, fresh)
    assert before.output_ids != after.output_ids
    engine.update_weights(make_model(kind).state_dict(), 2)
    assert_same(generate(engine, group("a", prompt(9)))[0], before)  # and back
