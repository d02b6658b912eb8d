"""The audit passes what is lossless, and fails what is not: each planted fault by the check that is there for it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import pytest
import torch
from tests.bench.audit_toy import Fault, Toy
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from longtail import SamplingParams
from longtail.bench.cli import app
from longtail.bench.spec_audit import AuditConfig, AuditReport, audit, sentences, table
from longtail.bench.spec_audit_cases import OUTCOME_CASES, STREAM_CASES
from longtail.bench.spec_audit_engine import TINY_VOCAB, Completion, EngineUnderAudit, native_engine, tiny_model
from longtail.bench.spec_audit_reference import ModelReference, distribution, ends, outcome_tree
from longtail.bench.spec_audit_streams import Finding, end_problem
from longtail.kernels.sample import process_logits
from longtail.kernels.verify import verify_drafts
from longtail.partial_rollout.engines.native import verification
from longtail.partial_rollout.engines.native.sampler import Position, Sampler
from longtail.partial_rollout.engines.native.stepper import Stepper
from longtail.partial_rollout.engines.native.verification import Verdict
from longtail.version import PolicyVersion

pytestmark = pytest.mark.usefixtures("one_thread")
EOS = (2,)
QUICK = AuditConfig(
    drafters=("likely", "unlikely"),
    draft_lengths=(3,),
    stream_tokens=16,
    stream_samples=2,
    seconds=3600.0,  # what a test finds must not depend on how fast the machine is
    most_draws=1600,
    cases=("temperature 0.5", "stop ids, min_tokens"),
)
SAMPLE_BY_SAMPLE = dataclasses.replace(QUICK, cases=())
DISTRIBUTION = dataclasses.replace(QUICK, most_draws=12_000, stream_samples=1, stream_tokens=8)
"""The distribution gets every sample that it asks for."""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Handing operators of this size to a second thread costs more than they do."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture(scope="module")
def tiny() -> tuple[LlamaForCausalLM, Any]:
    return tiny_model()


@pytest.fixture(scope="module")
def reference(tiny: tuple[LlamaForCausalLM, Any]) -> ModelReference:
    return ModelReference(tiny[0])


@pytest.fixture
def native(tiny: tuple[LlamaForCausalLM, Any]) -> EngineUnderAudit:
    return native_engine(*tiny)


BY_CHI_SQUARE = dataclasses.replace(DISTRIBUTION, drafters=("unlikely",), cases=("temperature 0.5",))
MakeToy = Callable[..., Toy]


@pytest.fixture(scope="module")
def toy(reference: ModelReference) -> MakeToy:
    rows: dict = {}  # logits that all toys share

    def make(fault: Fault = "", bias: float = 0.02) -> Toy:
        made = Toy(reference, TINY_VOCAB, EOS, fault, bias)
        made._rows = rows
        return made

    return make


def failed(report: AuditReport, check: str | None = None) -> list[Finding]:
    return [f for f in report.findings if not f.passed and check in (None, f.check)]


def checks(report: AuditReport) -> set[str]:
    return {f.check for f in failed(report)}


# ---- sound engines


def test_passes_the_native_engine(native: EngineUnderAudit, reference: ModelReference) -> None:
    names = ("ngram", "group", "group>ngram", "likely", "unlikely")
    report = audit(native, reference, dataclasses.replace(QUICK, drafters=names, draft_lengths=(1, 4)))
    assert not failed(report), sentences(report)
    assert report.verdict.startswith("lossless (no difference found; a bias of at least ")
    assert {f.check for f in report.findings} == {
        "yardstick",
        "greedy",
        "streams",
        "log-probabilities",
        "ends",
        "distribution",
    }
    exact = [f for f in report.findings if f.check == "streams" and f.drafter == "unlikely"]
    assert exact[0].smallest_bias is not None
    assert exact[0].smallest_bias < 0.02
    for f in report.findings:
        if f.check == "distribution" and f.drafter in ("likely", "unlikely"):
            assert f.data["draft_coverage"] > 0.5
    tests = [f for f in report.findings if f.false_alarm]
    assert sum(f.false_alarm for f in tests) <= QUICK.false_alarm * 1.0001
    assert len(tests) == 2 * (len(names) + 1)
    json.dumps(report.as_json())
    table(report)


def test_drafters_that_run_a_model_are_audited_by_name(
    native: EngineUnderAudit, reference: ModelReference, tiny: tuple[LlamaForCausalLM, Any], tmp_path: Path
) -> None:
    close = copy.deepcopy(tiny[0])
    with torch.no_grad():
        for parameter in close.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    close.save_pretrained(tmp_path)
    names = (f"model:{tmp_path}", f"ngram>model:{tmp_path}")
    report = audit(native, reference, dataclasses.replace(QUICK, drafters=names))
    assert not failed(report), sentences(report)
    for name in names:
        drafted = [f for f in report.findings if f.check == "distribution" and f.drafter == name]
        assert all(f.data["draft_coverage"] > 0.5 and 0.3 < f.data["acceptance"] < 1.0 for f in drafted)
    with pytest.raises(ValueError, match="no drafter 'modell'"):
        native.use("modell", 1)


def test_passes_the_native_engine_in_fast_numerics(
    tiny: tuple[LlamaForCausalLM, Any], reference: ModelReference
) -> None:
    engine = native_engine(*tiny, numerics="fast")
    report = audit(engine, reference, SAMPLE_BY_SAMPLE)
    assert not failed(report), sentences(report)
    assert sum(f.check == "streams" and f.false_alarm > 0 for f in report.findings) == 3


def test_passes_rejection_sampling(toy: MakeToy, reference: ModelReference) -> None:
    """No false alarm, and the promised reach."""
    cases = ("temperature 0.5", "penalties", "stop ids, min_tokens")
    report = audit(toy(), reference, dataclasses.replace(DISTRIBUTION, cases=cases, most_draws=8000))
    assert not failed(report), sentences(report)
    biases = report.smallest_bias
    assert set(biases) == set(cases)
    assert all(bias is not None and bias < 0.06 for bias in biases.values())


# ---- planted in rejection sampling: no sample can be compared, only distributions


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("accepts too much", "distribution"),
        ("residual", "distribution"),
        ("temperature", "distribution"),
        ("after the end", "distribution"),
        ("log-probability", "log-probabilities"),
    ],
)
def test_catches_faults_of_rejection_sampling(
    toy: MakeToy, reference: ModelReference, fault: Fault, check: str
) -> None:
    report = audit(toy(fault), reference, DISTRIBUTION)
    assert check in checks(report), sentences(report)
    assert report.verdict.startswith("NOT lossless: ")
    assert all(f.drafter != "off" for f in failed(report))
    if fault != "log-probability":
        assert checks(report) <= {"distribution", "ends"}


def test_finds_the_bias_that_it_says_it_finds(toy: MakeToy, reference: ModelReference) -> None:
    """40 audits of one case at the smallest bias for 90 %: between 28 and 40 find it, outside with probability 1e-4."""
    from longtail.bench import spec_audit_distribution as d
    from longtail.bench.spec_audit_cases import outcome_cases

    sizing = d.Sizing(1e-6, 0.9, 0.05, 100_000, 0.0)
    engine = toy("accepts too much", 0.05)
    (case,) = outcome_cases(
        engine, reference, 1e-3, 0, ["temperature 1"], lambda case: sizing.draws(case, False), lambda i: False
    )
    draws = sizing.draws(case, likely=False)
    choice = d.drafters_of(case, ["unlikely"], TINY_VOCAB)["unlikely"]
    found = [d.check_distribution(engine, case, "unlikely", choice, sizing, draws, seed=seed) for seed in range(40)]
    assert 28 <= sum(not f.passed for f in found) <= 40
    assert all(f.smallest_bias is not None and f.smallest_bias == pytest.approx(0.05, rel=0.15) for f in found)


def test_blames_the_engine_if_it_is_wrong_without_drafts(toy: MakeToy, reference: ModelReference) -> None:
    report = audit(toy("hot"), reference, DISTRIBUTION)
    assert {f.drafter for f in failed(report, "distribution")} >= {"off"}
    assert "also without drafts" in report.verdict


# ---- planted in the native engine


@pytest.fixture
def accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each rejected draft is emitted after all with probability 2 %, and the rows after it are verified on."""
    rng = np.random.default_rng(0)
    original = verify_drafts

    def planted(drafts: torch.Tensor, sampled: torch.Tensor, cu_drafts: torch.Tensor) -> Any:
        starts = cu_drafts.tolist()
        for i, (start, stop) in enumerate(itertools.pairwise(starts)):
            for j in range(start, stop):  # row j + i verifies draft j
                if sampled[j + i] != drafts[j] and rng.random() < 0.02:
                    sampled[j + i] = drafts[j]
        return original(drafts, sampled, cu_drafts)

    monkeypatch.setattr(verification, "verify_drafts", planted)
    yield


def test_catches_wrong_drafts_accepted(
    accepts_too_much: None, native: EngineUnderAudit, reference: ModelReference
) -> None:
    report = audit(native, reference, SAMPLE_BY_SAMPLE)
    assert {"streams", "greedy"} <= checks(report)
    assert all(f.drafter != "off" for f in failed(report))


def test_catches_wrong_drafts_accepted_by_chi_square_alone(
    accepts_too_much: None, native: EngineUnderAudit, reference: ModelReference
) -> None:
    native.verification = "rejection"
    report = audit(native, reference, BY_CHI_SQUARE)
    (found,) = failed(report, "distribution")
    assert found.drafter == "unlikely"
    assert found.data["p_value"] < found.false_alarm


def test_catches_wrong_drafts_accepted_in_fast_numerics(
    accepts_too_much: None, tiny: tuple[LlamaForCausalLM, Any], reference: ModelReference
) -> None:
    engine = native_engine(*tiny, numerics="fast")
    report = audit(engine, reference, dataclasses.replace(SAMPLE_BY_SAMPLE, stream_samples=4))
    assert {"streams", "greedy"} <= checks(report)


def test_catches_a_temperature_ignored_for_drafts(
    native: EngineUnderAudit, reference: ModelReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Sampler.batch

    def planted(self: Sampler, positions: list[Position]) -> Any:
        batch = original(self, positions)
        ahead = np.array([bool(p.ahead) for p in positions])
        batch.temperatures = np.where(ahead, 1.0, batch.temperatures)
        return batch

    monkeypatch.setattr(Sampler, "batch", planted)
    report = audit(native, reference, dataclasses.replace(QUICK, cases=("temperature 0.5",)))
    assert {"streams", "greedy", "log-probabilities", "distribution"} <= checks(report)
    assert all(f.drafter != "off" for f in failed(report))


def test_catches_a_token_after_the_end(
    native: EngineUnderAudit, reference: ModelReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Stepper._commit

    def planted(self: Stepper, outcome: Any, verdict: Verdict, version: PolicyVersion) -> None:
        original(self, outcome, verdict, version)
        left = len(verdict.tokens) - outcome.emitted
        if outcome.end is not None and left:
            sample, seq = outcome.seq.sample, outcome.seq
            i = outcome.emitted
            sample.append(verdict.tokens[i], verdict.logprobs[i], version, self.engine, seq.kv)
            seq.token_ids.append(verdict.tokens[i])

    monkeypatch.setattr(Stepper, "_commit", planted)
    report = audit(native, reference, SAMPLE_BY_SAMPLE)
    assert {"streams", "ends"} <= checks(report)
    assert any("tokens after the end" in f.detail for f in failed(report, "ends"))


def test_catches_a_wrong_logprob_of_the_bonus_token(
    native: EngineUnderAudit, reference: ModelReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Stepper._commit

    def planted(self: Stepper, outcome: Any, verdict: Verdict, version: PolicyVersion) -> None:
        if len(verdict.logprobs) > 3:
            wrong = float(np.nextafter(np.float32(verdict.logprobs[-1]), np.float32(1.0)))  # by a single bit
            verdict = dataclasses.replace(verdict, logprobs=[*verdict.logprobs[:-1], wrong])
        original(self, outcome, verdict, version)

    monkeypatch.setattr(Stepper, "_commit", planted)
    report = audit(native, reference, SAMPLE_BY_SAMPLE)
    assert checks(report) == {"log-probabilities"}
    assert {f.drafter for f in failed(report)} == {"likely"}


def test_catches_a_model_that_is_another(tiny: tuple[LlamaForCausalLM, Any], native: EngineUnderAudit) -> None:
    other = LlamaForCausalLM(tiny[0].config).eval()
    other.load_state_dict(tiny[0].state_dict())
    with torch.no_grad():
        cast(Any, other.lm_head.weight)[7] += 0.01
    report = audit(native, ModelReference(other), SAMPLE_BY_SAMPLE)
    assert "yardstick" in checks(report)


# ---- the yardstick itself


@pytest.mark.parametrize("name", [*STREAM_CASES, *OUTCOME_CASES])
def test_distribution_is_that_of_the_sampling_rules(name: str) -> None:
    """Written down twice: here in float64, in kernels/process_logits.py in float32."""
    params = SamplingParams(**({"top_k": 5} | (STREAM_CASES.get(name) or OUTCOME_CASES[name])))
    rng = np.random.default_rng(0)
    for length in (0, 3, 20):
        logits = (3 * rng.standard_normal(50)).astype(np.float32)
        prompt, output = rng.integers(0, 50, 9).tolist(), rng.integers(0, 50, length).tolist()
        got, margin = distribution(logits.astype(np.float64), prompt, output, params, EOS)
        assert margin > 1e-4
        row = logits.copy()
        early = length < params.min_tokens and not params.ignore_eos
        process_logits(
            row,
            prompt_ids=prompt,
            output_ids=output,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            banned=EOS if early else (),
        )
        z = row.astype(np.float64) / (params.temperature or 1.0)
        want = z - np.logaddexp.reduce(z)
        assert np.array_equal(got == -np.inf, want == -np.inf)
        assert np.allclose(got[got > -np.inf], want[want > -np.inf], atol=1e-5)


class Ladder:
    """Logits by hand: token t has log-probability proportional to log(t + 1), and tokens repeat nothing."""

    def next_logits(self, sequences: Any) -> np.ndarray:
        return np.log(np.tile(np.arange(1.0, 5.0), (len(sequences), 1)))

    def logits(self, tokens: Any, start: int) -> np.ndarray:
        return self.next_logits(tokens[start:])


def test_outcome_tree_by_hand() -> None:
    """Tokens 1, 2, 3 with probabilities 2/9, 3/9, 4/9; 3 ends from the second token on."""
    params = SamplingParams(top_k=3, stop_token_ids=(3,), ignore_eos=True, max_tokens=4, min_tokens=1)
    tree = outcome_tree(Ladder(), [0], dataclasses.replace(params, min_tokens=0), (), 2)
    assert tree.outcomes == pytest.approx(
        {(3,): 4 / 9, (1, 1): 4 / 81, (1, 2): 6 / 81, (1, 3): 8 / 81, (2, 1): 6 / 81, (2, 2): 9 / 81, (2, 3): 12 / 81}
    )
    assert tree.margin == pytest.approx(np.log(2.0))
    late = outcome_tree(Ladder(), [0], params, (), 2)
    assert sum(late.outcomes.values()) == pytest.approx(1.0)
    assert (3,) not in late.outcomes  # banned as the first token, so that 0 comes in
    assert late.outcomes[0, 3] == pytest.approx(1 / 6 * 4 / 9)
    guess = tree.guess(likely=False)
    assert guess((0,), (1,)) == 1
    assert guess((9,), (1,)) is None
    biased = dict(zip(tree.outcomes, tree.biased(guess, 0.5), strict=True))
    assert biased[3,] == pytest.approx(4 / 9)  # the first token is never drafted
    assert biased[1, 1] == pytest.approx(2 / 9 * (0.5 * 2 / 9 + 0.5))
    assert biased[2, 3] == pytest.approx(3 / 9 * 0.5 * 4 / 9)


def test_end_problems_by_hand(native: EngineUnderAudit) -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=(7,), min_tokens=2)
    assert ends([7, 7], params, EOS)
    assert not ends([7], params, EOS)
    for tokens, reason, stop, problem in (
        ([5, 6, 8, 9], "length", None, None),
        ([7, 6, 7], "stop", 7, None),
        ([5, 6, 2], "stop", None, None),
        ([5, 2, 8, 9], "length", None, "2 tokens after the end, token 1 (2)"),
        ([5, 6, 8, 9, 9], "length", None, "5 tokens, above the cap 4"),
        ([5, 6], "length", None, "ends with length after 2 of 4 tokens"),
        ([5, 7], "stop", None, "ends with stop reason None, not 7"),
        ([5, 7], "length", None, "ends with length, not stop"),
        ([7], "stop", 7, "ends with stop 7 at token 0, where nothing ends"),
        ([], "length", None, "no tokens"),
    ):
        assert end_problem(Completion(tokens, [], reason, stop), params, native) == problem
    assert native.decode is not None
    text = SamplingParams(max_tokens=4, stop=(native.decode([5, 6]),))
    assert end_problem(Completion([5, 6], [], "stop", text.stop[0]), text, native) is None
    assert end_problem(Completion([5, 6, 8, 9], [], "length"), text, native) is not None


def test_completion_decided() -> None:
    """Tokens 10 11 12 13; drafts from 1 on: 11 99 rejected; from 3 on: 13, and one beyond the end."""
    made = Completion([10, 11, 12, 13], [], "length", drafts=[(1, [11, 99, 5]), (3, [13, 14])])
    assert made.decided() == (2, 1)
    assert made.decided(1, 3) == (1, 1)
    assert made.decided(3) == (1, 0)


# ---- configuration and command line


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drafters": ()}, "drafters must be one or more different names"),
        ({"drafters": ("off",)}, "drafters must be"),
        ({"effect": 0.0}, "effect must lie between 0 and 1"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"draft_lengths": (0,)}, "draft_lengths must be"),
        ({"cases": ("warm",)}, "no case 'warm'; there are temperature 0.5"),
    ],
)
def test_config_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuditConfig(**fields)


def test_refuses_its_drafters_where_the_engine_takes_none(toy: MakeToy, reference: ModelReference) -> None:
    engine = toy()
    engine.takes_drafters = False
    with pytest.raises(ValueError, match="takes only its own drafters, not the audit's 'likely'"):
        audit(engine, reference, QUICK)


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["spec", "audit", *map(str, arguments)], env={"COLUMNS": "200"})


def test_command_passes(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "audit.json"
    result = command("--model", "tiny", "--seconds", 0.1, "--drafter", "ngram,unlikely", "--out", out, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(out.read_text())
    assert found["lossless"]
    assert found["verdict"] == json.loads(result.stdout.splitlines()[-1])["verdict"]
    assert "lossless (no difference found" in result.output
    assert found["machine"]["torch"] == torch.__version__


def test_command_fails_with_status_1(accepts_too_much: None) -> None:
    result = command("--model", "tiny", "--seconds", 0.1, "--drafter", "unlikely")
    assert result.exit_code == 1, (result.output, result.exception)
    assert "NOT lossless: " in result.output
    assert "streams: If it fails" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "needs vLLM, which is not installed"),
        (["--uncorrected"], "settings of vLLM"),
        (["--engine", "sglang"], "engine must be one of native, vllm"),
        (["--numerics", "double"], "numerics must be exact or fast"),
        (["--drafter", "ngram,"], "a name is missing"),
        (["--drafter", "ngrams", "--model", "tiny"], "no drafter 'ngrams'; did you mean 'ngram'"),
        (["--effect", "2"], "effect must lie between"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
