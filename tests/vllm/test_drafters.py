"""longtail's drafters inside vLLM: what they know, what the controller decides, and what is counted, against vLLM's own
account of the same requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.spec_helpers import MAX_DRAFTS, MAX_MODEL_LEN, Made, add, finish, run, save_tiny, vllm_on

from longtail.partial_rollout.engines.vllm.drafters import (
    PROPOSER,
    Proposer,
    attach,
    counts_of,
    is_vllms_own,
    speculative_config,
)
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.controller import ControllerConfig, FixedLength, Plan
from longtail.spec_decode.drafter import Draft, DraftRequest
from longtail.spec_decode.metrics import Counts
from longtail.spec_decode.speculation import DrafterDropped

PROMPT = (5, 6, 7, 8) * 4
OTHERS = ((9, 10, 11, 12, 13), (40, 41, 42) * 3, tuple(range(20, 60)))


# ---- names


def test_names_become_vllms_configuration() -> None:
    ours = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 5}
    for name in (None, "group", "ngram", "group>ngram"):
        assert speculative_config(name, 5) == ours
    assert speculative_config("vllm-ngram", 3)["method"] == "ngram"
    assert speculative_config("suffix", 6) == {"method": "suffix", "num_speculative_tokens": 6}
    assert speculative_config("model:some/dir", 3) == {
        "method": "draft_model",
        "model": "some/dir",
        "num_speculative_tokens": 3,
    }
    assert speculative_config("eagle:dir", 2)["method"] == "eagle"
    assert speculative_config("eagle3:dir", 2)["method"] == "eagle3"
    assert speculative_config("mtp", 1) == {"method": "mtp", "num_speculative_tokens": 1}
    assert speculative_config("mtp:dir", 1)["model"] == "dir"
    assert not is_vllms_own("ngram")  # the one of longtail, which can be changed at any moment


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grup", "did you mean 'group'"),
        ("group>vllm-ngram", "a method of vLLM"),
        ("suffix>group", "a method of vLLM"),
        ("model", "names no model"),
        ("eagle:", "names no model"),
        ("suffix:dir", "takes no model"),
        ("self:0,1", "native engine"),
    ],
)
def test_names_that_mean_nothing(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        speculative_config(name)


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_max_drafts_is_checked(count: Any) -> None:
    with pytest.raises(ValueError, match="max_drafts"):
        speculative_config("group", count)


# ---- in an engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    with vllm_on(model, "group") as made:
        yield made


@pytest.fixture
def proposer(llm: Any) -> Iterator[Proposer]:
    """Nothing drafts yet; afterwards nothing of a request may be left."""
    found = attach(llm)
    found.use(None)
    found.version = type(found.version)(0)
    yield found
    found.use(None)
    run(llm, [(3, 4)], max_tokens=1)
    assert not found._samples and not found._asked


def plain(llm: Any, proposer: Proposer, prompts: Sequence[Sequence[int]], **fields: Any) -> list[list[int]]:
    proposer.use(None)
    return [made.tokens for made in run(llm, prompts, **fields)]


def same_account(proposer: Proposer, made: Sequence[Made]) -> Counts:
    """Of each request what longtail counted is what vLLM counted. -> all of them together"""
    total = Counts()
    for one in made:
        ours, theirs = proposer.leave(one.request), counts_of(one.metrics)
        assert (ours.steps, ours.drafted, ours.accepted) == (theirs.steps, theirs.drafted, theirs.accepted)
        assert ours.emitted == ours.accepted + ours.steps
        total.add(ours)
    assert (total.steps, total.drafted, total.accepted) == (
        proposer.total.steps,
        proposer.total.drafted,
        proposer.total.accepted,
    )
    return total


def test_a_sibling_is_drafted_from_what_the_first_one_wrote(llm: Any, proposer: Proposer) -> None:
    want = plain(llm, proposer, [PROMPT])[0]
    proposer.use("group", FixedLength(MAX_DRAFTS))
    first = run(llm, [PROMPT])
    learnt = same_account(proposer, first)
    sibling = run(llm, [PROMPT])
    did = proposer.leave(sibling[0].request)
    assert first[0].tokens == sibling[0].tokens == want
    assert did.drafted == did.accepted > learnt.accepted  # greedy: it writes what its sibling wrote
    assert did.steps <= -(-len(want) // (MAX_DRAFTS + 1)) + 1


def test_a_group_learns_while_it_runs(llm: Any, proposer: Proposer) -> None:
    """A sibling that comes later is drafted from one that still runs; another prompt's sample is not."""
    proposer.use("group", FixedLength(MAX_DRAFTS))
    early = add(llm, PROMPT, max_tokens=60)
    for _ in range(12):
        llm.llm_engine.step()
    late = add(llm, PROMPT, max_tokens=20)
    other = add(llm, OTHERS[0], max_tokens=20)
    made = finish(llm, [early, late, other])
    assert made[1].tokens == made[0].tokens[:20]
    behind, foreign = proposer.leave(made[1].request), proposer.leave(made[2].request)
    assert behind.accepted == behind.drafted >= 12
    assert foreign.accepted < behind.accepted


@pytest.mark.parametrize("drafter", ["group", "ngram", "group>ngram"])
def test_greedy_samples_do_not_change_and_counts_agree(llm: Any, proposer: Proposer, drafter: str) -> None:
    prompts = [PROMPT, PROMPT, *OTHERS]
    want = plain(llm, proposer, prompts, max_tokens=40)
    proposer.use(drafter, FixedLength(MAX_DRAFTS))
    made = run(llm, prompts, max_tokens=40)
    assert [one.tokens for one in made] == want
    total = same_account(proposer, made)
    assert total.drafted > 0
    report = proposer.speculation.report()  # type: ignore[union-attr]
    assert sum(d["drafted"] for d in report["drafters"].values()) == total.drafted


def test_counts_agree_where_samples_are_drawn_and_end_early(llm: Any, proposer: Proposer) -> None:
    prompts = [PROMPT] * 8 + list(OTHERS)
    proposer.use("group>ngram", FixedLength(3))
    made = run(llm, prompts, temperature=0.7, top_k=5, max_tokens=30, ignore_eos=False, stop_token_ids=[7, 60])
    assert any(len(one.tokens) < 30 for one in made)
    drafted = 0
    for one in made:
        ours, theirs = proposer.leave(one.request), counts_of(one.metrics)
        assert (ours.steps, ours.drafted) == (theirs.steps, theirs.drafted)
        assert ours.accepted <= theirs.accepted  # of drafts behind the end none is counted
        drafted += ours.drafted
    assert drafted > 0


class Fixed(FixedLength):
    """Row i of the batch gets i drafts; a record of what was decided."""

    def plan(self, acceptance: Any, batch: int, *args: Any, **kwargs: Any) -> Plan:
        return Plan([min(len(a), i) for i, a in enumerate(acceptance)], "drafted")


class Constant:
    """Always proposes the same token."""

    name = "constant"

    def __init__(self, token: int = 9) -> None:
        self.token = token
        self.seen: list[tuple[Sample, list[int], list[int]]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for request in requests:
            sample = request.sample
            self.seen.append((sample, list(sample.output_ids), [int(v) for v in sample.versions]))
        return [Draft([self.token] * request.max_tokens, self.name) for request in requests]

    def observe(self, sample: Sample, num_new: int) -> None: ...

    def forget(self, sample_id: str) -> None: ...


def test_each_row_gets_as_many_drafts_as_the_controller_says(llm: Any, proposer: Proposer) -> None:
    proposer.use(Constant(), Fixed(MAX_DRAFTS))
    scheduled: list[dict[str, list[int]]] = []
    execute = proposer._runner.execute_model

    def recorded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled.append({k: list(v) for k, v in scheduler_output.scheduled_spec_decode_tokens.items()})
        return execute(scheduler_output, *args, **kwargs)

    proposer._runner.execute_model = recorded
    try:
        made = run(llm, [PROMPT] * 4, max_tokens=6, temperature=1.0)
    finally:
        proposer._runner.execute_model = execute
    second = scheduled[1]  # the first pass computes the prompts
    assert [len(second.get(one.request, [])) for one in made] == [0, 1, 2, 3]
    assert proposer.leave(made[0].request).drafted == 0


def test_the_controller_can_decide_against_drafts(llm: Any, proposer: Proposer) -> None:
    """Drafts that are never right are soon not made any more."""
    proposer.use(Constant(token=0), ControllerConfig(max_drafts=MAX_DRAFTS))
    made = run(llm, [PROMPT] * 8, max_tokens=100)
    total = same_account(proposer, made)
    assert total.accepted <= total.drafted < 8 * 100
    report = proposer.speculation.report()  # type: ignore[union-attr]
    reasons = {reason for batch in report["batches"] for reason in batch["steps"]}
    assert reasons & {"does not pay", "cost of drafting", "loss bound", "measuring"}


def test_a_resumed_response_belongs_to_the_prompt_it_began_with(llm: Any, proposer: Proposer) -> None:
    drafter = Constant()
    proposer.use(drafter, FixedLength(2))
    before = [30, 31, 32]
    state = {"num_prompt_tokens": len(PROMPT), "params": {"max_tokens": 10, "ignore_eos": True}}
    made = run(llm, [[*PROMPT, *before]], max_tokens=7, extra_args={"longtail": state})
    sample, first, _ = drafter.seen[0]
    assert sample.prompt_ids == PROMPT
    assert sample.params == SamplingParams(max_tokens=10, ignore_eos=True)
    assert first == [*before, made[0].tokens[0]]
    assert all(len(output) + 2 <= 10 for _, output, _ in drafter.seen[:-1])


def test_a_sample_has_the_version_of_the_weights(llm: Any, proposer: Proposer) -> None:
    drafter = Constant()
    proposer.use(drafter, FixedLength(1))
    name = add(llm, PROMPT, max_tokens=8)
    llm.llm_engine.step()
    llm.llm_engine.step()
    proposer.weights_updated(3)
    finish(llm, [name])
    versions = drafter.seen[-1][2]
    assert versions == sorted(versions)
    assert set(versions) == {0, 3}


def test_a_drafter_that_fails_is_dropped(llm: Any, proposer: Proposer) -> None:
    want = plain(llm, proposer, [PROMPT])

    class Broken(Constant):
        name = "broken"

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            if len(self.seen) > 3:
                raise RuntimeError("out of ideas")
            return super().propose(requests)

    proposer.use(Broken(), FixedLength(2))
    with pytest.warns(DrafterDropped, match="out of ideas"):
        assert [one.tokens for one in run(llm, [PROMPT])] == want


def test_goes_up_to_the_models_length(llm: Any, proposer: Proposer) -> None:
    """Near it vLLM would draft token 0 for all; a row at its end must not keep the others from their drafts."""
    long, short = tuple(range(3, 90)), PROMPT
    want = plain(llm, proposer, [long, short], max_tokens=100)
    assert len(want[0]) == MAX_MODEL_LEN - len(long)
    proposer.use("group", FixedLength(MAX_DRAFTS))
    run(llm, [short], max_tokens=100)
    made = run(llm, [long, short], max_tokens=100)
    assert [one.tokens for one in made] == want
    did = proposer.leave(made[1].request)
    assert did.drafted == did.accepted and did.steps <= 100 // (MAX_DRAFTS + 1) + 2


def test_an_aborted_request_leaves_nothing(llm: Any, proposer: Proposer) -> None:
    proposer.use("group", FixedLength(2))
    gone, stays = add(llm, PROMPT, max_tokens=50), add(llm, OTHERS[0], max_tokens=10)
    for _ in range(4):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([gone[0]])
    finish(llm, [stays])
    proposer.leave(gone[1])
    assert gone[1] not in proposer._samples
    assert proposer.speculation is not None
    assert gone[1] not in proposer.speculation._by_sample


def test_who_drafts_changes_in_the_middle(llm: Any, proposer: Proposer) -> None:
    want = plain(llm, proposer, [PROMPT, OTHERS[2]], max_tokens=40)
    names = [add(llm, prompt, max_tokens=40) for prompt in (PROMPT, OTHERS[2])]
    for choice in ("group", None, "ngram"):
        proposer.use(choice, None if choice is None else FixedLength(3))
        for _ in range(3):
            llm.llm_engine.step()
    assert [one.tokens for one in finish(llm, names)] == want


def test_wrong_uses_say_what_to_do(llm: Any, proposer: Proposer) -> None:
    with pytest.raises(ValueError, match="max_drafts 5 is above the 4"):
        proposer.use("group", FixedLength(5))
    with pytest.raises(ValueError, match="did you mean 'group'"):
        proposer.use("grop")
    with pytest.raises(ValueError, match="another runner"):
        proposer.attach(object())
    assert attach(llm) is proposer


# ---- vLLM's own methods; an engine each, after the others are done


@pytest.mark.parametrize("name", ["vllm-ngram", "model"])
def test_vllms_own_methods_draft_and_are_counted(model: Path, name: str) -> None:
    with vllm_on(model, f"model:{model}" if name == "model" else name) as own:
        with pytest.raises(ValueError, match="not made for longtail's drafters"):
            attach(own)
        made = run(own, [PROMPT, *OTHERS], max_tokens=30)
    for one in made:
        did = counts_of(one.metrics)
        assert 0 <= did.accepted <= did.drafted
        assert did.emitted == did.accepted + did.steps <= len(one.tokens)
        if name == "model":  # the model drafts for itself
            assert did.drafted > 0 and did.accepted >= 0.5 * did.drafted
    assert sum(counts_of(one.metrics).drafted for one in made) > 0
    assert counts_of(None) == Counts()
