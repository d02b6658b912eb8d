"""`longtail bench --engine vllm --alone`: vLLM driven by itself makes the strategies' samples."""

from __future__ import annotations

import pytest

from longtail.bench.run import BenchConfig, BenchResult, run
from longtail.bench.spec_audit_engine import tiny_model
from longtail.bench.vllm_alone import COUNTER, OWN

STRATEGIES = ("sync", "over-issue:groups=2,extra=2")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    directory = tmp_path_factory.mktemp("tiny")
    model, tokenizer = tiny_model(head_dim=32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    config = BenchConfig(
        model=str(directory),
        tasks="chain_sum",
        engine="vllm",
        alone=True,
        strategies=STRATEGIES,
        iterations=3,
        prompts=2,
        group_size=2,
        slots=3,
        max_tokens=40,
        temperature=1.0,
    )
    return run(config)


def test_it_makes_the_samples_of_the_strategies(result: BenchResult) -> None:
    assert result.summary["identical_tokens"] is True
    assert list(result.summary["runs"]) == [COUNTER, OWN, *STRATEGIES]
    for name in (COUNTER, *STRATEGIES):
        assert len(result.samples[name]) == 12
        for sample_id, sample in result.samples[name].items():
            assert sample.output_ids == result.samples[COUNTER][sample_id].output_ids
    own = result.samples[OWN]
    assert any(own[i].output_ids != sample.output_ids for i, sample in result.samples[COUNTER].items())
    lengths = {len(sample.output_ids) for sample in result.samples[COUNTER].values()}
    assert len(lengths) > 2, "all samples are alike: nothing is shown"


def test_its_numbers_add_up(result: BenchResult) -> None:
    frame, runs = result.frame, result.summary["runs"]
    assert result.summary["compare"][COUNTER]["tokens_per_second"] == 1.0
    for name in (COUNTER, OWN):
        made = sum(len(sample.output_ids) for sample in result.samples[name].values())
        numbers = runs[name]
        assert numbers["complete"] and numbers["samples_trained"] == numbers["samples_finished"] == 12
        assert numbers["tokens_generated"] == numbers["tokens_trained"] == made
        assert numbers["tokens_unaccounted"] == numbers["tokens_wasted"] == numbers["tokens_pending"] == 0
        assert numbers["staleness"] == {"0": made}  # every batch is trained on before the next weights
        assert numbers["grades_failed"] == 0 and numbers["mean_reward"] is not None
        events = frame[frame["run"] == name]
        steps = events[events["kind"] == "step"]
        assert steps["num_seqs"].max() == 3 and steps["num_output_tokens"].max() <= 3
        assert (events["kind"] == "update").sum() == 2
        prompts = sum(len(sample.prompt_ids) for sample in result.samples[name].values())
        admits = events[events["kind"] == "admit"]
        assert len(admits) == 12
        cached = admits["num_tokens"].sum()
        assert steps["num_prefill_tokens"].sum() == prompts - cached
        assert steps["num_tokens"].sum() == prompts - cached + made - 12  # the last token of a sample is never read


def test_saved_kv_counts_by_version(result: BenchResult) -> None:
    """Updates leave the weights as they are; what was made before one is computed again all the same."""
    late = {name: [s for s in result.samples[name].values() if len(set(s.versions)) > 1] for name in STRATEGIES}
    assert not late[STRATEGIES[0]] and late[STRATEGIES[1]]
    for sample in late[STRATEGIES[1]]:
        assert {segment.kv for segment in sample.segments[1:]} == {"recomputed"}
    assert result.summary["runs"][STRATEGIES[1]]["tokens_restored"] == 0


def test_alone_is_of_vllm() -> None:
    with pytest.raises(ValueError, match="alone: it is vLLM that runs alone"):
        BenchConfig(alone=True)
