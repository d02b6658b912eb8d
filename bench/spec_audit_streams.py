"""The checks sample by sample: greedy equality, streams, log-probabilities, ends.

One run without drafts is the yardstick; each drafter and draft length then runs the same requests in another order and
other batches. Log-probabilities are also held against the reference, which the engine has no part in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from longtail.bench.spec_audit_cases import StreamCase
from longtail.bench.spec_audit_engine import AuditDrafter, AuditedEngine, Completion, DraftChoice
from longtail.bench.spec_audit_reference import Reference, Tokens, distribution, ends, sequence_logprobs
from longtail.bench.spec_audit_statistics import poisson_limit
from longtail.sampling_params import SamplingParams

OFF = "off"
"""The engine without drafts: a control that says whether the engine, and not its drafting, is at fault."""


@dataclasses.dataclass(slots=True)
class Finding:
    """One check's result."""

    check: str
    case: str
    drafter: str
    passed: bool
    statistic: str
    """What was measured, in words and numbers."""
    samples: int
    false_alarm: float
    """Probability with which an engine without fault fails here; 0: never."""
    detail: str = ""
    """The first differences, if it failed."""
    smallest_bias: float | None = None
    """Accepting wrong drafts with this probability would have been found here with the target probability."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


MEANING = {
    "yardstick": "If it fails, the engine's log-probabilities without drafts are not those of the model: its forward "
    "pass or its sampling rules differ from transformers' and vLLM's, and no comparison below means much.",
    "greedy": "If it fails, drafts change the most likely token: rejected drafts are kept, the verification looks at "
    "the wrong row, or KV of rejected drafts is read.",
    "streams": "If it fails, a sample depends on the drafts or on the batch: drafts are accepted that do not match, "
    "noise is not tied to seed and position, or KV or penalties of rejected drafts stay behind.",
    "log-probabilities": "If it fails, a trainer would learn with wrong importance ratios: the reported value is of "
    "another row, of the drafter, or of an unprocessed distribution.",
    "ends": "If it fails, an end inside a draft is handled wrongly: tokens after it are emitted, min_tokens is "
    "ignored, or the cap is overrun.",
    "distribution": "If it fails, drafted samples do not follow the model's distribution: wrong drafts are accepted, "
    "the residual is wrong, or sampling parameters are not applied to draft positions.",
}


def audit_drafters(engine: AuditedEngine, cases: Sequence[StreamCase], plain: Sequence[Completion]) -> dict[str, Any]:
    """`likely` guesses what the sample said without drafts and errs at three places in ten; `unlikely` guesses
    arbitrary tokens."""
    known: dict[Tokens, dict[Tokens, int]] = {}
    for case, seen in zip(cases, plain, strict=True):
        own = known.setdefault(case.prompt, {})
        for i, token in enumerate(seen.tokens):
            if (i * 7 + case.seed) % 10 < 7:
                own[tuple(seen.tokens[:i])] = token

    def book(prompt: Tokens, output: Tokens) -> int | None:
        return known.get(prompt, {}).get(output)

    return {
        "likely": AuditDrafter("likely", engine.vocab_size, book),
        "unlikely": AuditDrafter("unlikely", engine.vocab_size, lambda prompt, output: None),
    }


class StreamAudit:
    """Runs the requests without drafts, and compares. level: false-alarm rate of each statistical check; power: with
    which `smallest_bias` is found."""

    def __init__(
        self,
        engine: AuditedEngine,
        reference: Reference,
        cases: Sequence[StreamCase],
        *,
        tolerance: float,
        level: float,
        power: float,
    ) -> None:
        self.engine, self.reference, self.cases = engine, reference, list(cases)
        self.tolerance, self.level, self.power = tolerance, level, power
        self._scores: dict[tuple[Tokens, int], np.ndarray] = {}
        engine.use(None)
        self.plain = self._run(self.cases, None)

    def extend(self, cases: Sequence[StreamCase]) -> None:
        self.engine.use(None)
        self.plain += self._run(cases, None)
        self.cases += cases

    def yardstick(self) -> Finding:
        """The reported log-probabilities without drafts against the reference's."""
        worst, tokens, where = self._score(self.plain)
        return Finding(
            "yardstick",
            "all requests",
            OFF,
            worst <= self.tolerance,
            f"largest difference of log-probabilities to the reference {worst:.2g} (allowed {self.tolerance:g}) over "
            f"{tokens:,} tokens",
            len(self.plain),
            0.0,
            where,
            data={"reference": worst},
        )

    def compare(self, name: str, choice: DraftChoice | None, lengths: Sequence[int], seed: int) -> Iterator[Finding]:
        """name: of the drafter; lengths: of its drafts, each a run of its own."""
        found = _Differences()
        for i, length in enumerate(lengths):
            rng = np.random.default_rng([seed, i])
            self.engine.use(choice, length)
            size = (len(self.cases), 24, 7)[i % 3]
            got = self._run(self.cases, rng, size)
            self._differences(found, got, length)
            if not self._claims_match(length):
                # What a rejection sampler draws depends on its drafts, and so on the batch if its drafter shares.
                self.engine.use(choice, length)
                again = self._run(self.cases, np.random.default_rng([seed, i]), size)
                for case, a, b in zip(self.cases, got, again, strict=True):
                    if (a.tokens, a.logprobs) != (b.tokens, b.logprobs):
                        found.add("streams", case, length, f"{_differs(a.tokens, b.tokens)} between two runs")
        self.engine.use(None)
        yield from self._findings(name, found, len(lengths) * len(self.cases), lengths)

    # -- one run ------------------------------------------------------------------------------------------------------

    def _run(
        self, cases: Sequence[StreamCase], rng: np.random.Generator | None, size: int | None = None
    ) -> list[Completion]:
        """In order, or one drawn from rng, in batches of `size` or at once. -> in the order of cases"""
        order = np.arange(len(cases)) if rng is None else rng.permutation(len(cases))
        size = size or max(len(cases), 1)
        out: dict[int, Completion] = {}
        for start in range(0, len(cases), size):
            part = order[start : start + size].tolist()
            chosen = [cases[i] for i in part]
            made = self.engine.generate(
                [c.prompt for c in chosen], [c.params for c in chosen], [c.seed for c in chosen]
            )
            out |= dict(zip(part, made, strict=True))
        return [out[i] for i in range(len(cases))]

    def _claims_match(self, length: int) -> bool:
        """Whether samples have to be those of the run without drafts; length: of the drafts, 0 for none."""
        return self.engine.verification == "match" or length == 0

    def _differences(self, found: _Differences, got: Sequence[Completion], length: int) -> None:
        match = self._claims_match(length)
        for case, a, b in zip(self.cases, got, self.plain, strict=True):
            found.rejected += a.decided()[1]
            same = _common(a.tokens, b.tokens)
            found.tokens += same
            differs = a.tokens != b.tokens
            # One of them may have ended where the other goes on: an end is no near-tie.
            tie = not self.engine.exact and same < min(len(a.tokens), len(b.tokens))
            if case.greedy and differs:
                gap = self._gap(case, a.tokens, b.tokens, same) if tie else math.inf
                if not gap <= 2.0 * self.tolerance:
                    found.add("greedy", case, length, f"{_differs(a.tokens, b.tokens)}, {gap:.3g} apart in logits")
            elif match and differs:
                found.flips += tie
                found.add("streams" if not tie else "flips", case, length, _differs(a.tokens, b.tokens))
            if match and not differs and (a.finish_reason, a.stop_reason) != (b.finish_reason, b.stop_reason):
                found.add(
                    "ends", case, length, f"{a.finish_reason} {a.stop_reason!r}, without drafts {b.finish_reason}"
                )
            if problem := end_problem(a, case.params, self.engine):
                found.add("ends", case, length, problem)
            left, right = np.array(a.logprobs[:same]), np.array(b.logprobs[:same])
            if len(a.logprobs) != len(a.tokens):
                found.add("log-probabilities", case, length, f"{len(a.logprobs)} values for {len(a.tokens)} tokens")
            elif same and (match or case.greedy):
                off = np.abs(np.subtract(left, right, out=np.zeros(same), where=left != right))
                at = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
                found.logprob = max(found.logprob, float(np.nan_to_num(off[at], nan=np.inf)))
                if not off[at] <= (0.0 if self.engine.exact else self.tolerance):
                    found.add("log-probabilities", case, length, f"token {at}: {left[at]!r}, not {right[at]!r}")
        worst, _, where = self._score(got)
        found.reference = max(found.reference, worst)
        if not worst <= self.tolerance:
            found.put("log-probabilities", f"draft length {length}, {where}")

    def _score(self, got: Sequence[Completion]) -> tuple[float, int, str]:
        """-> the largest difference to the reference, tokens compared, and where it is"""
        worst, tokens, where = 0.0, 0, ""
        for i, (case, made) in enumerate(zip(self.cases, got, strict=True)):
            key = (tuple(made.tokens), i)
            if key not in self._scores:
                self._scores[key] = sequence_logprobs(
                    self.reference, case.prompt, made.tokens, case.params, self.engine.eos
                )
            want, have = self._scores[key], np.array(made.logprobs[: len(made.tokens)])
            tokens += len(have)
            if len(have) == len(want) and len(want):
                # a token that one of them says cannot come is as far off as can be
                known = np.isfinite(have) & np.isfinite(want)
                off = np.abs(np.subtract(have, want, out=np.full(len(want), np.inf), where=known))
                at = int(np.argmax(off))
                if off[at] > worst:
                    worst = float(off[at])
                    where = f"{case.name}, token {at}: {have[at]:.6f}, the reference says {want[at]:.6f}"
        return worst, tokens, where if worst > self.tolerance else ""

    def _gap(self, case: StreamCase, a: list[int], b: list[int], at: int) -> float:
        """Reference logits of two greedy tokens, apart."""
        row = self.reference.next_logits([[*case.prompt, *b[:at]]])[0]
        logprobs, _ = distribution(row, case.prompt, b[:at], case.params, self.engine.eos)
        return float(abs(logprobs[a[at]] - logprobs[b[at]]))

    # -- results ------------------------------------------------------------------------------------------------------

    def _findings(self, name: str, found: _Differences, samples: int, lengths: Sequence[int]) -> Iterator[Finding]:
        match, exact = self._claims_match(max(lengths)), self.engine.exact
        case = "draft lengths " + ", ".join(map(str, lengths)) if name != OFF else "other batches"

        def finding(check: str, statistic: str, false_alarm: float = 0.0, problem: str = "", **more: Any) -> Finding:
            found_here = found.first.get(check, [])
            detail = "; ".join([*([problem] if problem else []), *found_here])
            passed = not found_here and not problem
            return Finding(check, case, name, passed, statistic, samples, false_alarm, detail, **more)

        allowed = "" if exact else f", but for near-ties of {2 * self.tolerance:g}"
        greedy = sum(c.greedy for c in self.cases) * len(lengths)
        yield finding("greedy", f"{found.count('greedy')} of {greedy} greedy samples differ{allowed}")
        if match and not exact:
            # Two samples of noise-coupled distributions that are d apart in total variation differ with probability at
            # most 2 d (Daliri et al. 2024), and log-probabilities that are t apart give d <= (exp(t) - 1) / 2 ~ t / 2.
            mean = found.tokens * math.expm1(self.tolerance)
            limit = poisson_limit(mean, self.level)
            problem = f"{found.flips} streams leave their path" if found.flips >= limit else ""
            detail = found.first.get("flips", [])
            yield finding(
                "streams",
                f"{found.flips} of {samples} samples leave the stream without drafts (rounding allows {limit - 1}) in "
                f"{found.tokens:,} tokens",
                self.level,
                "; ".join([problem, *detail]) if problem else "",
            )
        elif match:
            # Wrong drafts that were rejected: had each been accepted with probability x, one would have been seen.
            bias = 1.0 - (1.0 - self.power) ** (1.0 / found.rejected) if found.rejected else None
            yield finding(
                "streams",
                f"{found.count('streams')} of {samples} samples differ; {found.rejected:,} drafts were rejected",
                smallest_bias=bias,
            )
        else:
            yield finding("streams", f"{found.count('streams')} of {samples} samples differ between two equal runs")
        to_plain = f"to the run without drafts {found.logprob:.2g} (allowed {0 if exact else self.tolerance:g}), "
        yield finding(
            "log-probabilities",
            f"largest difference {to_plain if match else ''}to the reference {found.reference:.2g} "
            f"(allowed {self.tolerance:g})",
            data={"reference": found.reference},
        )
        yield finding(
            "ends", f"{found.count('ends')} of {samples} samples end in another way or place than they have to"
        )


class _Differences:
    """What the runs of one drafter brought."""

    def __init__(self) -> None:
        self.tokens = self.rejected = self.flips = 0
        self.logprob: float = 0.0
        self.reference: float = 0.0
        self.first: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, check: str, case: StreamCase, length: int, what: str) -> None:
        self.put(check, f"{case.name}, draft length {length}: {what}")

    def put(self, check: str, what: str) -> None:
        self._counts[check] = self._counts.get(check, 0) + 1
        shown = self.first.setdefault(check, [])
        if len(shown) < 3:
            shown.append(what)

    def count(self, check: str) -> int:
        return self._counts.get(check, 0)


def end_problem(made: Completion, params: SamplingParams, engine: AuditedEngine) -> str | None:
    """Why this sample cannot have ended as it did: it goes on after an end, lacks one, or names another one."""
    n, eos = len(made.tokens), engine.eos
    if n == 0:
        return "no tokens"
    if params.max_tokens is not None and n > params.max_tokens:
        return f"{n} tokens, above the cap {params.max_tokens}"
    for i in range(1, n + 1):
        by_token = ends(made.tokens[:i], params, eos)
        by_string = stop_string(made.tokens[:i], params, engine.decode)
        if (by_token or by_string is not None) and i < n:
            what = made.tokens[i - 1] if by_token else by_string
            return f"{n - i} tokens after the end, token {i - 1} ({what!r})"
    if by_token or by_string is not None:
        is_eos = not params.ignore_eos and made.tokens[-1] in eos
        reason = None if by_token and is_eos else made.tokens[-1] if by_token else by_string
        if made.finish_reason != "stop":
            return f"ends with {made.finish_reason}, not stop"
        if made.stop_reason != reason:
            return f"ends with stop reason {made.stop_reason!r}, not {reason!r}"
        return None
    if made.finish_reason != "length":
        return f"ends with {made.finish_reason} {made.stop_reason!r} at token {n - 1}, where nothing ends"
    if params.max_tokens is not None and n < params.max_tokens:
        return f"ends with length after {n} of {params.max_tokens} tokens"
    return None


def stop_string(
    tokens: Sequence[int], params: SamplingParams, decode: Callable[[Sequence[int]], str] | None
) -> str | None:
    """The stop string that the last token completes."""
    if not params.stop or decode is None or len(tokens) < max(params.min_tokens, 1):
        return None
    # A character whose bytes are not all there yet is no text; it counts once it is complete.
    before, text = len(decode(tokens[:-1]).rstrip("\ufffd")), decode(tokens)
    for s in params.stop:
        if text.find(s, max(before - len(s) + 1, 0)) >= 0:
            return s
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


def _differs(a: Sequence[int], b: Sequence[int]) -> str:
    at = _common(a, b)
    return f"token {at} is {a[at] if at < len(a) else 'missing'}, not {b[at] if at < len(b) else 'missing'}"
