"""Fits a `CostModel` to the events of a trace, and says how far off it is.

**Which form.** Candidates: padded rows to a multiple of 1, 4 or 8, a straight line in them or a curve with knots, with
or without a term for the KV that prompts read. Each is cross-validated over stretches of the run (neighbouring steps
are alike, so single steps left out would flatter it); the simplest whose loss is within one standard error of the best
is taken (Breiman et al. 1984).

**Outliers.** Machines are shared: now and then a step takes ten times its time. The coefficients come from residuals
relative to the predicted time with Huber's loss (k = 1.345 robust standard deviations), so that a slow step counts as
one and not as ten, and small batches count as much as large ones. But a makespan is a sum, and a sum holds its stalls:
`scale` then multiplies the whole so that predicted and measured total agree. `stalls="drop"` leaves steps beyond STALL
times their prediction out altogether, where the trace's machine was disturbed and the predicted one will not be.

**Own seconds.** A step's drafting, and saves, restores and updates inside it, are costs of their own, not the pass's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.bench.cost_model import CostModel, StepModel, Transfer, features

if TYPE_CHECKING:
    import pandas as pd

HUBER = 1.345
STALL = 3.0
MIN_STEPS = 50
MOST_STEPS = 10_000
"""More are thinned evenly for the fit; totals are of all."""
DRIFT = 1.5
FOLDS, STRETCHES = 5, 20
IMPORTED = "imported"
"""`detail` of steps that `trace_import` made up from requests: they are not passes."""
_INSIDE = ("save", "restore", "update")


@dataclasses.dataclass(frozen=True)
class Steps:
    """Step events of a trace, in order; float64 [n] each. One may stand for several passes: the counts and seconds are
    then those of their mean. seconds: the pass's own; between: to the next event, NaN where there was no work or
    something else was measured."""

    seqs: np.ndarray
    rows: np.ndarray
    context: np.ndarray
    prefill: np.ndarray
    seconds: np.ndarray
    between: np.ndarray
    passes: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: Any) -> Steps:
        return Steps(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class _Form:
    row_multiple: int
    knots: tuple[int, ...]
    prefill_context: bool

    @property
    def complexity(self) -> tuple[int, int]:
        return len(self.knots) + self.prefill_context, self.row_multiple != 1


def fit(df: pd.DataFrame, *, runs: Sequence[str] | None = None, stalls: str = "keep", label: str = "") -> CostModel:
    """df: events, as `read_trace` gives them. runs: those to use; None: all. `report` of the result holds steps, form,
    in_sample and cross_validated (median and p90 of |predicted / measured - 1| over steps, total: predicted / measured
    sum - 1), by_batch (the same by sequences, cross-validated), stalls, drift, and findings (sentences).

    ValueError if there are fewer than MIN_STEPS steps, for imported steps, or a run that is not there."""
    if stalls not in ("keep", "drop"):
        raise ValueError(f'stalls must be "keep" or "drop", not {stalls!r}')
    df = _choose(df, runs)
    steps = steps_of(df)
    if len(steps) < MIN_STEPS:
        raise ValueError(
            f"the trace holds {len(steps)} usable steps, and a fit needs {MIN_STEPS}; calibrate on a longer run"
        )
    slow = _stalled(steps)
    if stalls == "drop":
        steps = steps[~slow["which"]]
    thin = _thin(steps)
    form, predicted = _choose_form(thin)
    step = _fit_form(thin, form)
    step = dataclasses.replace(step, scale=_scale(steps, step))
    gaps = steps.between[np.isfinite(steps.between)]
    between = float(gaps.mean()) if len(gaps) else 0.0
    within = step.many(steps.seqs, steps.rows, steps.context)
    report = {
        "steps": len(steps),
        "runs": [str(name) for name in df["run"].unique()],
        "stalls": {"kept": stalls == "keep"} | {name: slow[name] for name in ("steps", "share", "worst")},
        "form": {"row_multiple": form.row_multiple, "knots": len(form.knots), "prefill_context": form.prefill_context},
        "in_sample": errors(within * steps.passes, steps.seconds * steps.passes),
        "cross_validated": errors(predicted * thin.passes, thin.seconds * thin.passes),
        "by_batch": _by_batch(thin, predicted),
        "drift": _drift(within, steps.seconds),
    }
    report["findings"] = _findings(steps, report)
    return CostModel(
        step=dataclasses.replace(step, between=between),
        source="fitted",
        label=label,
        save=_transfer(df, "save"),
        restore=_transfer(df, "restore"),
        update=_mean(df, "update"),
        grade=_mean(df, "grade"),
        train=_mean(df, "train"),
        draft_token=_draft_token(df),
        report=report,
    )


def _choose(df: pd.DataFrame, runs: Sequence[str] | None) -> pd.DataFrame:
    there = [str(name) for name in df["run"].unique()]
    if missing := [name for name in runs or () if name not in there]:
        raise ValueError(f"run {', '.join(missing)} is not in the trace; it holds {', '.join(there)}")
    return df if runs is None else df[df["run"].isin(list(runs))]


def steps_of(df: pd.DataFrame) -> Steps:
    """The passes of all runs and engines, those without a sequence or a duration left out."""
    taken = df[df["kind"] == "step"]
    if (taken["detail"] == IMPORTED).any():
        raise ValueError(
            "the steps of an imported trace are made up from requests and tell nothing of a pass; calibrate on a trace "
            "of `longtail bench`"
        )
    parts = [_steps_of_engine(part) for part in _by_engine(df)]
    columns = [np.concatenate([getattr(p, field.name) for p in parts]) for field in dataclasses.fields(Steps)]
    steps = Steps(*columns)
    good = (steps.seqs >= 1) & (steps.rows >= 1) & (steps.seconds > 0.0) & np.isfinite(steps.seconds)
    return steps[good]


def _by_engine(df: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Of each run and engine with steps: its events, and the rollout's, which name no engine."""
    for _, events in df.groupby("run", sort=False):
        engines = events.loc[events["kind"] == "step", "engine"].unique()
        for engine in engines if len(engines) else [""]:
            own = events["engine"] == engine
            yield events[own | ((events["engine"] == "") & (events["kind"] != "step"))]


_SUMS = ("num_tokens", "num_context_tokens", "num_prefill_tokens")
"""Over the passes of an event."""


def _steps_of_engine(events: pd.DataFrame) -> Steps:
    is_step = (events["kind"] == "step").to_numpy()
    steps = events[is_step]
    start, duration = (steps[name].to_numpy(np.float64) for name in ("time", "duration"))
    own = duration - steps["draft_seconds"].to_numpy(np.float64) - _inside(events, start, start + duration)
    passes = steps["num_passes"].to_numpy(np.float64) if "num_passes" in steps else np.ones(len(steps))
    passes = np.maximum(passes, 1.0)
    rows, context, prefill = (steps[name].to_numpy(np.float64) / passes for name in _SUMS)
    between = _between(events, is_step, start, start + duration)
    return Steps(steps["num_seqs"].to_numpy(np.float64), rows, context, prefill, own / passes, between, passes)


def _inside(events: pd.DataFrame, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Seconds of saves, restores and updates that began in each step."""
    inner = events[events["kind"].isin(_INSIDE)]
    time, seconds = (inner[name].to_numpy(np.float64) for name in ("time", "duration"))
    step = np.searchsorted(start, time, side="right") - 1
    hit = (step >= 0) & (time < end[np.maximum(step, 0)]) if len(end) else np.zeros(len(time), bool)
    return np.bincount(step[hit], weights=seconds[hit], minlength=len(start))


def _between(events: pd.DataFrame, is_step: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """From each step to the next of its iteration while a sequence kept its slot; NaN where anything else was timed."""
    kind = events["kind"].to_numpy(object)
    change = np.where(kind == "admit", 1, np.where(np.isin(kind, ("pause", "preempt", "finish", "park")), -1, 0))
    running = np.cumsum(change)
    timed = ~is_step & (events["duration"].to_numpy(np.float64) > 0.0) & (kind != "drafts")
    barred = np.cumsum(timed | np.isin(kind, ("iteration_start", "iteration_end", "run_start", "run_end")))
    at = np.flatnonzero(is_step)
    gaps = np.full(len(at), np.nan)
    for i, (here, there) in enumerate(itertools.pairwise(at)):
        if barred[here] == barred[there] and running[here : there + 1].min() >= 1:
            gaps[i] = max(start[i + 1] - end[i], 0.0)
    return gaps


# --- fitting


def nnls(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |A x - b|; A: [n, k]. The active-set method of Lawson and Hanson (1974, chapter 23)."""
    norms = np.linalg.norm(A, axis=0)
    norms[norms == 0.0] = 1.0
    Q, R = np.linalg.qr(A / norms)
    target = Q.T @ b
    x = np.zeros(A.shape[1])
    free = np.zeros(A.shape[1], bool)
    tolerance = 1e-10 * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(10 * A.shape[1]):
        gradient = np.where(free, -np.inf, R.T @ (target - R @ x))
        best = int(gradient.argmax())
        if not gradient[best] > tolerance:
            break
        free[best] = True
        while True:
            z = np.zeros_like(x)
            z[free] = np.linalg.lstsq(R[:, free], target, rcond=None)[0]
            falls = free & (z <= 0.0)
            if not falls.any():
                x = z
                break
            x = x + float((x[falls] / (x[falls] - z[falls])).min()) * (z - x)
            free &= x > 1e-14 * max(float(x.max()), 1e-300)
            x[~free] = 0.0
            if not free.any():
                break
    solution: np.ndarray = x / norms
    return solution


def robust_nnls(A: np.ndarray, b: np.ndarray, rounds: int = 12) -> np.ndarray:
    """`nnls` of relative residuals (b - A x) / (A x) under Huber's loss, by reweighting. b > 0."""
    size, weight = b.copy(), np.ones(len(b))
    x = np.zeros(A.shape[1])
    for _ in range(rounds):
        root = np.sqrt(weight) / size
        before, x = x, nnls(A * root[:, None], b * root)
        if np.abs(x - before).max() <= 1e-7 * x.max():
            break
        predicted = np.maximum(A @ x, 1e-3 * np.median(b))
        relative = (b - predicted) / predicted
        spread = max(1.4826 * float(np.median(np.abs(relative))), 1e-9)
        weight = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(relative), 1e-300))
        size = predicted
    return x


def _fit_form(steps: Steps, form: _Form) -> StepModel:
    columns = features(steps.seqs, steps.rows, steps.context, form.knots, form.row_multiple)
    used = np.array([True, True, True, form.prefill_context] + [True] * (len(form.knots) + 1))
    x = np.zeros(columns.shape[1])
    x[used] = robust_nnls(columns[:, used], steps.seconds)
    base, per_seq, per_context, per_prefill_context, *per_row = x.tolist()
    return StepModel(
        base=base,
        per_seq=per_seq,
        per_row=tuple(per_row),
        knots=form.knots,
        per_context=per_context,
        per_prefill_context=per_prefill_context,
        row_multiple=form.row_multiple,
    )


def _scale(steps: Steps, step: StepModel) -> float:
    predicted = step.many(steps.seqs, steps.rows, steps.context)
    total = float((predicted * steps.passes).sum())
    return float((steps.seconds * steps.passes).sum()) / total if total > 0.0 else 1.0


def over(seconds: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """seconds / predicted, float64 [n]; infinite where nothing is predicted, as few steps can have it."""
    return np.divide(seconds, predicted, out=np.full(len(seconds), np.inf), where=predicted > 0.0)


def _thin(steps: Steps) -> Steps:
    return steps[np.linspace(0, len(steps) - 1, min(len(steps), MOST_STEPS)).astype(int)]


def _choose_form(steps: Steps) -> tuple[_Form, np.ndarray]:
    """-> the form, and float64 [n]: each step's seconds as predicted by a fit to the other folds."""
    fold = np.arange(len(steps)) * STRETCHES // len(steps) % FOLDS
    results = []
    for form in _forms(steps):
        predicted, loss = np.empty(len(steps)), np.empty(FOLDS)
        for k in range(FOLDS):
            train, test = steps[fold != k], steps[fold == k]
            step = _fit_form(train, form)
            quiet = step.many(test.seqs, test.rows, test.context)
            loss[k] = np.minimum(np.abs(over(test.seconds, quiet) - 1.0), 1.0).mean()
            predicted[fold == k] = quiet * _scale(train, step)
        results.append((form, predicted, loss))
    best = min(results, key=lambda result: float(result[2].mean()))[2]
    for form, predicted, loss in sorted(results, key=lambda result: result[0].complexity):
        worse = loss - best
        if worse.mean() <= worse.std(ddof=1) / np.sqrt(FOLDS):
            return form, predicted
    raise AssertionError("the best form is within any distance of itself")


def _forms(steps: Steps) -> Iterable[_Form]:
    prompts = bool((steps.rows > steps.seqs).sum() >= 2 * FOLDS)
    for multiple in (1, 4, 8):
        for knots in dict.fromkeys(((), _knots(steps.rows, multiple))):
            yield _Form(multiple, knots, False)
            if prompts:
                yield _Form(multiple, knots, True)


def _knots(rows: np.ndarray, multiple: int) -> tuple[int, ...]:
    """Powers of two x multiple with at least 2 % of the steps, and 10, on either side and since the last."""
    padded = -(-rows // multiple) * multiple
    least = max(10, len(rows) // 50)
    knots: list[int] = []
    knot, low = multiple, 0
    while (padded > knot).sum() >= least:
        if ((padded > low) & (padded <= knot)).sum() >= least:
            knots.append(knot)
            low = knot
        knot *= 2
    return tuple(knots)


# --- the other costs


def _transfer(df: pd.DataFrame, kind: str) -> Transfer | None:
    events = df[(df["kind"] == kind) & (df["duration"] > 0.0)]
    if len(events) == 0:
        return None
    tokens, seconds = events["num_tokens"].to_numpy(np.float64), events["duration"].to_numpy(np.float64)
    if len(events) < 3 or len(np.unique(tokens)) < 2:
        return Transfer(per_token=float(seconds.sum() / tokens.sum())) if tokens.sum() else Transfer(seconds.mean())
    A = np.column_stack([np.ones(len(tokens)), tokens])
    x = robust_nnls(A, seconds)
    x = x * (seconds.sum() / max(float((A @ x).sum()), 1e-300))
    return Transfer(*x.tolist())


def _mean(df: pd.DataFrame, kind: str) -> float | None:
    seconds = df.loc[df["kind"] == kind, "duration"]
    return float(seconds.mean()) if len(seconds) else None


def _draft_token(df: pd.DataFrame) -> float | None:
    steps = df[df["kind"] == "step"]
    tokens = float(steps["num_draft_tokens"].sum())
    return float(steps["draft_seconds"].sum()) / tokens if tokens else None


# --- how far off


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """median, p90: of |predicted / measured - 1|; total: of the sums, signed."""
    relative = np.abs(predicted / measured - 1.0)
    middle, high = np.quantile(relative, (0.5, 0.9), method="inverted_cdf")
    return {"median": float(middle), "p90": float(high), "total": float(predicted.sum() / measured.sum() - 1.0)}


def _by_batch(steps: Steps, predicted: np.ndarray) -> list[dict[str, Any]]:
    """Bins of sequences: 1, 2, 3-4, 5-8, ..."""
    result = []
    bins = np.ceil(np.log2(steps.seqs)).astype(int)
    for number in np.unique(bins):
        inside = bins == number
        seqs = steps.seqs[inside]
        passes = steps.passes[inside]
        row: dict[str, Any] = {"from": int(seqs.min()), "to": int(seqs.max()), "steps": int(inside.sum())}
        row["mean_seconds"] = float(np.average(steps.seconds[inside], weights=passes))
        result.append({**row, **errors(predicted[inside] * passes, steps.seconds[inside] * passes)})
    return result


def _stalled(steps: Steps) -> dict[str, Any]:
    """Steps beyond STALL x what a quiet machine takes: which (bool [n]), how many, their excess as a share of all
    seconds, the worst one's."""
    quiet = _fit_form(_thin(steps), _Form(1, _knots(steps.rows, 1), False)).many(steps.seqs, steps.rows, steps.context)
    slow = steps.seconds > STALL * quiet
    excess = ((steps.seconds - quiet) * steps.passes)[slow]
    total = float((steps.seconds * steps.passes).sum())
    worst = float(excess.max()) / total if len(excess) else 0.0
    return {"which": slow, "steps": int(slow.sum()), "share": float(excess.sum()) / total, "worst": worst}


def _range(row: dict[str, Any]) -> str:
    return str(row["to"]) if row["from"] == row["to"] else f"{row['from']} to {row['to']}"


def _drift(predicted: np.ndarray, measured: np.ndarray) -> list[float]:
    """Measured over predicted seconds, medians of the fastest and of the slowest of STRETCHES stretches of the trace:
    equal on a machine of constant speed."""
    ratios = [float(np.median(part)) for part in np.array_split(over(measured, predicted), STRETCHES)]
    return [min(ratios), max(ratios)]


def _findings(steps: Steps, report: dict[str, Any]) -> list[str]:
    found = []
    if not (steps.rows > steps.seqs).any():
        found.append("No step computes a prompt: what prompts cost is a guess from the rows of decode passes.")
    elif (steps.rows == steps.rows[0]).all() or (steps.seqs == steps.seqs[0]).all():
        found.append("All steps have one batch size: any other is extrapolated.")
    stalls = report["stalls"]
    if stalls["kept"] and stalls["worst"] > 0.01:
        found.append(
            f"One stalled step holds {stalls['worst']:.1%} of the time, {stalls['steps']} of them "
            f"{stalls['share']:.1%}; with --stalls drop they do not count."
        )
    low, high = report["drift"]
    if high > DRIFT * low:
        found.append(
            f"The machine's speed drifted: stretches of the trace took {low:.2f} to {high:.2f} of what the model says. "
            "What came from the load is then partly in the coefficients; calibrate on a quiet machine."
        )
    found += [
        f"Batches of {_range(row)} are predicted {row['total']:+.0%} off in total."
        for row in report["by_batch"]
        if abs(row["total"]) > 0.1 and row["steps"] >= 20
    ]
    return found
