"""Proves or refutes from outside that an engine's drafting is lossless: `longtail spec audit`.

    yardstick            log-probabilities without drafts = those of a forward pass of transformers
    greedy, streams      the same requests with each drafter, in other batches: the same samples (match), or with the
                         same drafts the same samples (rejection)
    log-probabilities    of every token, against the run without drafts and against the model
    ends                 stop ids, stop strings, EOS, min_tokens, caps: nothing after the first, and that one is named
    distribution         all outcomes of the first tokens under top-k 3, chi-square

The engine only has to generate (`spec_audit_engine.AuditedEngine`). A verdict of "lossless" says how large a fault
would have been found; all false alarms together have probability `false_alarm`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from longtail.bench.spec_audit_cases import (
    DEPTH,
    OUTCOME_CASES,
    OutcomeCase,
    outcome_cases,
    stop_string_cases,
    stream_cases,
)
from longtail.bench.spec_audit_distribution import Sizing, check_distribution, drafters_of
from longtail.bench.spec_audit_engine import AuditedEngine, DraftChoice
from longtail.bench.spec_audit_reference import Reference
from longtail.bench.spec_audit_streams import MEANING, OFF, Finding, StreamAudit, audit_drafters

if TYPE_CHECKING:
    from rich.table import Table

OWN_DRAFTERS = ("likely", "unlikely")
"""The audit's: one is often right, the other hardly ever."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Checked at construction."""

    drafters: tuple[str, ...] = ("ngram", "group", *OWN_DRAFTERS)
    """The engine's by name (as `make_drafter` takes them), and the audit's own: likely, unlikely."""
    draft_lengths: tuple[int, ...] = (1, 3, 5)
    """Of the checks sample by sample."""
    seconds: float = 120.0
    """Time for the whole audit; it ends earlier if it has what it needs. The checks sample by sample always run in
    full; where time is short the distribution gets fewer samples, and the verdict a larger bias."""
    effect: float = 0.02
    """Probability of accepting a wrong draft that is to be found,"""
    power: float = 0.99
    """with this probability."""
    false_alarm: float = 1e-6
    """Of the whole audit; split evenly over its statistical tests (Bonferroni)."""
    tolerance: float = 1e-3
    """What rounding may do to a log-probability, against the reference and in fast numerics."""
    stream_tokens: int = 32
    """Output tokens of a sample in the checks sample by sample,"""
    stream_samples: int = 4
    """and how many there are of each of their cases."""
    most_draws: int = 100_000
    """Samples of one test of the distribution at the most."""
    cases: tuple[str, ...] = tuple(OUTCOME_CASES)
    """Of the distribution."""
    only_greedy: bool = False
    """Greedy samples alone, in batches of greedy samples: nothing is drawn, and no distribution tested."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.drafters or len(set(self.drafters)) < len(self.drafters) or OFF in self.drafters:
            raise ValueError(f"drafters must be one or more different names, not {', '.join(self.drafters) or 'none'}")
        for name in ("effect", "power", "false_alarm"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")
        for name in ("seconds", "tolerance"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name, low in (("stream_tokens", 8), ("stream_samples", 1), ("most_draws", 100), ("seed", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.draft_lengths or min(self.draft_lengths) < 1:
            raise ValueError(f"draft_lengths must be one or more lengths of at least 1, not {self.draft_lengths}")
        if unknown := [name for name in self.cases if name not in OUTCOME_CASES]:
            raise ValueError(f"cases: no case {unknown[0]!r}; there are {', '.join(OUTCOME_CASES)}")


@dataclasses.dataclass(slots=True)
class AuditReport:
    engine: str
    verification: str
    exact: bool
    config: AuditConfig
    findings: list[Finding]
    seconds: float
    left_out: tuple[str, ...] = ()
    """What was not audited: sampling parameters that the engine does not take, stop strings."""

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def smallest_bias(self) -> dict[str, float | None]:
        """For each case of the distribution: accepting wrong drafts with this probability would have been found with
        the configured power by the drafter under which it shows most. None: by none."""
        found: dict[str, float | None] = {}
        for f in self.findings:
            if f.check == "distribution" and f.drafter != OFF:
                known = [b for b in (found.get(f.case), f.smallest_bias) if b is not None]
                found[f.case] = min(known, default=None)
        return found

    @property
    def verdict(self) -> str:
        failed = [f for f in self.findings if not f.passed]
        if not failed:
            return f"lossless (no difference found; {self._reach()})"
        drafted, plain = [f for f in failed if f.drafter != OFF], [f for f in failed if f.drafter == OFF]
        said = []
        for check in dict.fromkeys(f.check for f in failed):
            own = [f for f in drafted if f.check == check]
            if own:
                names = ", ".join(dict.fromkeys(f.drafter for f in own))
                cases = ", ".join(dict.fromkeys(f.case for f in own)) if check == "distribution" else ""
                said.append(f"{check} with {names}{f' ({cases})' if cases else ''}")
        if plain:
            checks = ", ".join(dict.fromkeys(f.check for f in plain))
            said.append(f"also without drafts: {checks}; look for the fault in the engine before its drafting")
        return f"NOT lossless: {'; '.join(said)}"

    def _reach(self) -> str:
        biases = self.smallest_bias
        power = f"with probability {self.config.power:.0%}"
        exact = [f.smallest_bias for f in self.findings if f.check == "streams" and f.smallest_bias is not None]
        if any(bias is None for bias in biases.values()):
            blind = ", ".join(case for case, bias in biases.items() if bias is None)
            reach = f"too few drafts were verified to say what bias would have been found in: {blind}"
        elif biases:
            worst = max(b for b in biases.values() if b is not None)
            reach = f"a bias of at least {worst:.2%} would have been found in any of its cases {power}"
        else:
            reach = "the distribution was not tested"
        if exact:
            reach += f"; one of {min(exact):.2%} by the comparison of samples"
        return reach

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "verification": self.verification,
            "exact": self.exact,
            "lossless": self.passed,
            "verdict": self.verdict,
            "false_alarm": self.config.false_alarm,
            "smallest_bias": self.smallest_bias,
            "left_out": list(self.left_out),
            "seconds": self.seconds,
            "config": dataclasses.asdict(self.config),
            "meaning": MEANING,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def audit(
    engine: AuditedEngine,
    reference: Reference,
    config: AuditConfig | None = None,
    *,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> AuditReport:
    """ValueError if the engine does not take the configured drafters; RuntimeError if it fails a sample."""
    config = config or AuditConfig()
    own = [name for name in config.drafters if name in OWN_DRAFTERS]
    if own and not engine.takes_drafters:
        raise ValueError(f"drafters: engine {engine.name} takes only its own drafters, not the audit's {own[0]!r}")
    start = clock()
    drawn = len(config.cases) * (len(config.drafters) + 1)
    flips = 0 if engine.exact else 1 + len(config.drafters) * (engine.verification == "match")
    level = config.false_alarm / max(drawn + flips, 1)
    progress("samples without drafts")
    findings = _streams(engine, reference, config, level, progress)
    # What rounding does to a token's probability, as measured.
    noise = min(max(f.data.get("reference", 0.0) for f in findings), config.tolerance)
    if not config.only_greedy:
        findings += _distribution(engine, reference, config, level, noise, lambda: clock() - start, progress)
    left_out = list(engine.refuses)
    if engine.decode is None:
        left_out.append("stop strings")
    if config.only_greedy:
        left_out.append("temperatures above 0")
    elif tested := {f.case for f in findings if f.check == "distribution"}:
        left_out += [f"distribution: {name}" for name in config.cases if name not in tested]
    else:
        left_out.append("the distribution")
    seconds = clock() - start
    return AuditReport(engine.name, engine.verification, engine.exact, config, findings, seconds, tuple(left_out))


def _streams(
    engine: AuditedEngine,
    reference: Reference,
    config: AuditConfig,
    level: float,
    progress: Callable[[str], None],
) -> list[Finding]:
    cases = stream_cases(engine, config.stream_tokens, config.stream_samples, config.seed, config.only_greedy)
    compared = StreamAudit(engine, reference, cases, tolerance=config.tolerance, level=level, power=config.power)
    if engine.decode is not None:
        compared.extend(stop_string_cases(cases, compared.plain, engine.decode))
    own = audit_drafters(engine, compared.cases, compared.plain)
    findings = [compared.yardstick()]
    progress("other batches, without drafts")
    findings += compared.compare(OFF, None, (0,), config.seed)
    for i, name in enumerate(config.drafters):
        progress(f"sample by sample: {name}")
        findings += compared.compare(name, own.get(name, name), config.draft_lengths, config.seed + 101 * (i + 1))
    return findings


def _distribution(
    engine: AuditedEngine,
    reference: Reference,
    config: AuditConfig,
    level: float,
    noise: float,
    elapsed: Callable[[], float],
    progress: Callable[[str], None],
) -> list[Finding]:
    sizing = Sizing(level, config.power, config.effect, config.most_draws, DEPTH * noise)
    progress("outcome trees")
    unlikely = "unlikely" in config.drafters
    begin, share = elapsed(), 0.1 * config.seconds / max(len(config.cases), 1)
    cases = outcome_cases(
        engine,
        reference,
        config.tolerance,
        config.seed,
        config.cases,
        draws=lambda case: sizing.draws(case, likely=not unlikely),
        enough=lambda i: elapsed() > begin + (i + 1) * share,
    )
    tests: list[tuple[OutcomeCase, str, DraftChoice | None, int]] = []
    for case in cases:
        draws = sizing.draws(case, likely=not unlikely)
        chosen: dict[str, DraftChoice | None] = dict(drafters_of(case, config.drafters, engine.vocab_size))
        for name, choice in [*chosen.items(), (OFF, None)]:
            # `unlikely` is the one that finds small biases; the others need not repeat what it can do better.
            few = name == OFF or (unlikely and name != "unlikely")
            tests.append((case, name, choice, math.ceil(draws / 4) if few else draws))
    findings: list[Finding] = []
    for i, (case, name, choice, draws) in enumerate(tests):
        progress(f"distribution, {case.name}: {name}, up to {draws:,} samples")
        # The time left, shared out by the samples that are still to come.
        until = elapsed() + (config.seconds - elapsed()) * draws / sum(test[3] for test in tests[i:])
        findings.append(
            check_distribution(
                engine,
                case,
                name,
                choice,
                sizing,
                draws,
                seed=config.seed * 1000 + i,
                enough=lambda until=until: elapsed() > until,  # type: ignore[misc]
            )
        )
    return findings


def table(report: AuditReport) -> Table:
    from rich.table import Table

    made = Table(title=f"Audit of {report.engine} ({report.verification})", title_justify="left")
    for column in ("check", "case", "drafter", "", "samples", "statistic", "false alarm", "finds"):
        made.add_column(column, justify="right" if column in ("samples", "false alarm", "finds") else "left")
    for f in report.findings:
        mark = "[green]ok[/green]" if f.passed else "[red]FAILED[/red]"
        alarm = f"{f.false_alarm:.1e}" if f.false_alarm else "0"
        bias = "" if f.smallest_bias is None else f"{f.smallest_bias:.2%}"
        made.add_row(f.check, f.case, f.drafter, mark, f"{f.samples:,}", f.statistic, alarm, bias)
    return made


def sentences(report: AuditReport) -> list[str]:
    """What failed and what that means, and the verdict."""
    failed = [f for f in report.findings if not f.passed]
    said = [f"{f.check}, {f.case}, {f.drafter}: {f.detail}" for f in failed]
    said += [f"{check}: {MEANING[check]}" for check in dict.fromkeys(f.check for f in failed)]
    said.append(
        f"An engine without fault fails this audit with probability at most {report.config.false_alarm:.0e}. "
        f'"finds": accepting wrong drafts with this probability would have been found there with probability '
        f"{report.config.power:.0%}."
    )
    if report.left_out:
        said.append(f"Not audited on this engine: {', '.join(report.left_out)}.")
    said.append(report.verdict)
    return said


def parse_names(option: str, text: str) -> tuple[str, ...]:
    names: Sequence[str] = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"{option}: a name is missing in {text!r}; write for example ngram,group")
    return tuple(names)
