"""`longtail spec audit --engine vllm`: refutes stock vLLM with statistics, and passes it corrected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longtail.bench.cli import app
from longtail.bench.spec_audit import AuditConfig, AuditReport, audit
from longtail.bench.spec_audit_engine import tiny_model
from longtail.bench.spec_audit_reference import ModelReference
from longtail.bench.spec_audit_vllm import TINY, VllmSize, VllmUnderAudit, by_counter
from longtail.partial_rollout.engines.vllm import correction


def audited(directory: Path, corrected: bool, without: str | None = None, **fields: Any) -> AuditReport:
    """without: the one correction that is left out."""
    model, tokenizer = tiny_model(**TINY[corrected])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    subject = VllmUnderAudit(directory, corrected=corrected)
    try:
        if without is not None:
            correction.undo()
            correction.correct([c.name for c in correction.CORRECTIONS if c.name != without])
        return audit(subject, ModelReference(model), AuditConfig(**fields))
    finally:
        subject.close()
        correction.correct()


def failed(report: AuditReport) -> set[tuple[str, str]]:
    return {(f.check, f.drafter) for f in report.findings if not f.passed}


def test_refutes_stock_vllm_with_statistics(tmp_path: Path) -> None:
    report = audited(
        tmp_path, False, drafters=("likely", "unlikely"), cases=("temperature 1",), draft_lengths=(1, 3), seconds=12.0
    )
    assert not report.passed
    assert "NOT lossless" in report.verdict
    tests = {f.drafter: f for f in report.findings if f.check == "distribution"}
    for name in ("likely", "unlikely"):
        assert not tests[name].passed
        assert tests[name].data["p_value"] < 1e-12  # a chi-square test of known probabilities
    assert ("log-probabilities", "unlikely") in failed(report)
    assert all(drafter != "off" for _, drafter in failed(report))  # it is the drafting
    assert "top_k" in report.left_out and "top_p" in report.left_out


def test_passes_corrected_vllm(tmp_path: Path) -> None:
    """Every case and drafter; false alarms: one in a million runs."""
    report = audited(tmp_path, True, draft_lengths=(1, 3), seconds=24.0)
    assert report.passed, report.verdict
    assert {f.case for f in report.findings if f.check == "distribution"} == set(report.config.cases)
    assert report.left_out == ("min_p", "stop strings")
    drafted = [f for f in report.findings if f.check == "distribution" and f.drafter == "unlikely"]
    assert all(f.data["draft_coverage"] > 0.5 for f in drafted)
    assert all(f.smallest_bias is not None and f.smallest_bias < 0.5 for f in drafted)


@pytest.mark.parametrize("corrected", [False, True])
def test_passes_greedy_with_and_without_correction(corrected: bool, tmp_path: Path) -> None:
    report = audited(tmp_path, corrected, only_greedy=True, draft_lengths=(1, 3))
    assert report.passed, report.verdict
    assert {f.check for f in report.findings} == {"yardstick", "greedy", "streams", "log-probabilities", "ends"}
    assert "temperatures above 0" in report.left_out


def test_finds_that_bonus_tokens_are_banned_too_long(tmp_path: Path) -> None:
    """A fault that no issue of vLLM told of: this audit found it."""
    report = audited(
        tmp_path,
        True,
        without=correction.MIN_TOKENS,
        drafters=("likely", "unlikely"),
        cases=("stop ids, min_tokens",),
        draft_lengths=(3,),
        seconds=12.0,
    )
    assert {check for check, _ in failed(report)} == {"distribution"}
    assert all(drafter != "off" for _, drafter in failed(report))


def test_passes_the_engine_as_it_is(tmp_path: Path) -> None:
    """By counter: drafts change no sample at all; every parameter and stop strings are in it."""
    model, tokenizer = tiny_model(**TINY[True])
    model.save_pretrained(tmp_path)
    subject, engine = by_counter(tmp_path, tokenizer)
    try:
        report = audit(subject, ModelReference(model), AuditConfig(draft_lengths=(1, 3), seconds=20.0))
    finally:
        engine.close()
    assert report.passed, report.verdict
    assert report.verification == "match" and report.left_out == ()
    streams = [f for f in report.findings if f.check == "streams" and f.drafter != "off"]
    assert len(streams) == 4 and all("leave the stream" in f.statistic for f in streams)


def test_audits_vllms_own_method(tmp_path: Path) -> None:
    report = audited(
        tmp_path, True, drafters=("vllm-ngram",), cases=("temperature 0.5",), draft_lengths=(3,), seconds=10.0
    )
    assert report.passed, report.verdict
    assert {f.drafter for f in report.findings} == {"off", "vllm-ngram"}


def test_the_command_says_it_with_its_status(tmp_path: Path) -> None:
    arguments = ["spec", "audit", "--engine", "vllm", "--model", "tiny", "--drafter", "likely", "--seconds", "5"]
    for extra, status in ((["--uncorrected"], 1), (["--uncorrected", "--greedy"], 0)):
        out = tmp_path / "report.json"
        result = CliRunner().invoke(app, [*arguments, *extra, "--out", str(out)])
        assert result.exit_code == status, result.output
        report = json.loads(out.read_text())
        assert report["lossless"] == (status == 0)
        assert report["engine"] == "vllm"
    correction.correct()


def test_refuses_drafts_longer_than_the_engine_takes(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(**TINY[True])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    subject = VllmUnderAudit(tmp_path, size=VllmSize(slots=4, max_drafts=2))
    try:
        with pytest.raises(ValueError, match="above the 2 drafts"):
            subject.use("ngram", 3)
    finally:
        subject.close()
