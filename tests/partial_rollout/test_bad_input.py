"""Bad input: a ValueError that names the field and the fix, and nothing taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.partial_rollout.conftest import (
    SIZES,
    VOCAB,
    EngineMaker,
    generate,
    group,
    make_model,
    prompt,
    run,
)
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    GemmaConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    T5Config,
)

from longtail import ExactNumericsUnavailable, Group, NativeEngine, Sample, SamplingParams, UnsupportedModel


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt_ids is empty"),
        (list(range(3, 300)), "prompt_ids has 297 tokens.*max_model_len 256"),
        ([5, VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([5, -1], "prompt_ids must be non-negative integers, not -1"),
    ],
)
def test_prompt(make_engine: EngineMaker, ids: list[int], message: str) -> None:
    engine = make_engine()
    good = group("good", prompt(5)).samples
    with pytest.raises(ValueError, match=message):
        engine.add([*good, *Group.from_prompt("bad", ids, SamplingParams(max_tokens=5)).samples])
    assert not engine.has_work and good[0].status == "waiting"  # none were taken


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("n", 0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_tokens", -1),
    ],
)
def test_sampling_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model: .* is not a model directory.*longtail model smollm2-135m"):
        NativeEngine(tmp_path)
    with pytest.raises(ValueError, match=r"model: .*no-such-model"):
        NativeEngine("/no-such-model")


def test_unknown_and_impossible_settings(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match=r"NativeConfig has no field max_seqs; the fields are: .*max_num_seqs"):
        make_engine(max_seqs=3)
    cases: list[tuple[dict, str]] = [
        ({"numerics": "exactly"}, "numerics must be one of exact, fast"),
        ({"block_size": 20}, "block_size must be a multiple of 16"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens 4 is below max_num_seqs 8"),
        ({"kv_cache_bytes": 10_000}, "raise kv_cache_bytes or lower max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            make_engine(**settings)


def test_same_sample_twice_and_unknown_ids(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = group("a", prompt(5)).samples[0]
    with pytest.raises(ValueError, match="two samples have the same id"):
        engine.add([sample, sample])
    engine.add([sample])
    with pytest.raises(ValueError, match="already in the engine"):
        engine.add([sample])
    with pytest.raises(ValueError, match="sample_ids: 'nobody' is not in the engine"):
        engine.pause([sample.id, "nobody"])
    assert engine.has_work  # the known one was not paused half-way


def test_an_id_named_twice_counts_once(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.add(group("a", prompt(5), n=2).samples)
    engine.step()
    assert len(engine.pause(["a/0", "a/0"])) == 1
    assert len(engine.abort(["a/1", "a/1"])) == 1
    assert not engine.has_work


@pytest.mark.parametrize("seed", [-1, 2**64, None, 1.5, True])
def test_seed_of_a_sample(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be an integer of 64 bits"):
        Sample(id="a", group_id="g", index=0, prompt_ids=(1,), params=SamplingParams(), seed=seed)  # type: ignore[arg-type]


def test_largest_seed_runs(make_engine: EngineMaker) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    samples = [
        Sample(id=f"{seed}", group_id=f"{seed}", index=0, prompt_ids=tuple(prompt(5)), params=params, seed=seed)
        for seed in (0, 2**63, 2**64 - 1)
    ]
    run(make_engine(), samples)
    assert len({tuple(s.output_ids) for s in samples}) == 3


def test_eos_outside_the_vocabulary_is_no_eos(make_engine: EngineMaker) -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = 50256
    sample = generate(make_engine(model), group("a", prompt(5), min_tokens=2, max_tokens=4, ignore_eos=False))[0]
    assert len(sample.output_ids) == 4


def test_stop_strings_without_a_tokenizer(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        make_engine().add(group("a", prompt(5), stop="x").samples)


def test_sample_of_a_newer_policy(make_engine: EngineMaker) -> None:
    sample = group("a", prompt(5)).samples[0]
    sample.append(7, -0.1, 4, "elsewhere", "computed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens of version 4, newer than the engine's 0"):
        make_engine().add([sample])


def test_records_of_unequal_length() -> None:
    with pytest.raises(ValueError, match="output_ids, logprobs and versions must have one length"):
        Sample(
            id="a", group_id="g", index=0, prompt_ids=(1,), params=SamplingParams(), seed=0, output_ids=[3], logprobs=[]
        )


# Angles that depend on the longest position in the batch: a sample would depend on its neighbours.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


def test_models_it_cannot_run_are_refused() -> None:
    for config, message in [
        (T5Config(d_model=64), "encoder-decoder"),
        (Llama4TextConfig(**SIZES), "layers of type chunked_attention"),
        (DeepseekV3Config(**SIZES, index_topk=2048), r"index_topk.*sparse attention"),
        (LlamaConfig(**SIZES, rope_parameters=LONGROPE), "rotary embeddings of type longrope"),
    ]:
        from longtail.partial_rollout.engines.native.loader import check_supported

        with pytest.raises(UnsupportedModel, match=message):
            check_supported(config)


OTHERS: dict[str, tuple[type, dict]] = {
    "gemma": (GemmaConfig, SIZES),  # scaled embeddings, norm with 1 + weight
    "cohere": (CohereConfig, SIZES),  # parallel attention and MLP, interleaved rotary, LayerNorm
    "gpt2": (GPT2Config, {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_it_runs_without_knowing_them(make_engine: EngineMaker, kind: str) -> None:
    """Through the attention interface; where exact numerics cannot be had, that is said and fast works."""
    config_class, fields = OTHERS[kind]
    config = config_class(**(fields | {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    try:
        engine = make_engine(model)
    except ExactNumericsUnavailable as error:
        assert kind == "gpt2" and 'use numerics="fast"' in str(error)
        engine = make_engine(model, numerics="fast")
    ids = prompt(20)
    sample = generate(engine, group("a", ids, temperature=0.0))[0]
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    assert sample.output_ids == want[0, 20:].tolist()


def test_a_decoder_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_engine: EngineMaker
) -> None:
    from longtail.partial_rollout.engines.native import decoder

    monkeypatch.setattr(decoder, "silu_mul", lambda x: x.chunk(2, dim=-1)[1].contiguous())
    with pytest.raises(UnsupportedModel, match="computes other logits than LlamaForCausalLM itself"):
        make_engine()
