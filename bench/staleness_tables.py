"""`longtail bench staleness` as tables and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def tables(result: dict[str, Any]) -> list[Table]:
    shown = [_drift(result), _trainer(result), _healing(result)]
    return [*shown, *([_time(result)] if result["time"] else [])]


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    out = Table(title=title, title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="right" if i else "left", no_wrap=True)
    return out


def _drift(result: dict[str, Any]) -> Table:
    contexts = result["contexts"]
    positions = sum(c["new"] for c in contexts)
    out = _table(
        f"Drift of kept KV, a token; {len(contexts)} contexts, {positions:,} positions",
        *("versions", "age", "weights moved", "KL keep", "KL policy", "keep / policy", "greedy changed"),
    )
    out.caption = (
        "keep: the newest version on KV that is so old, against KV of its own. policy: what the updates themselves\n"
        "changed. Weights moved: relative L2 norm. mixed: KV of every version in turn; its policy is the oldest one."
    )
    for first, row in _rows(result):
        if first:
            out.add_section()
        keep = row["keep"]
        out.add_row(
            row["series"] if first else "",
            _age(row),
            f"{row['weight_change']:.1e}",
            _with_error(keep["kl"], keep["kl_se"]),
            f"{row['policy']['kl']:.1e}",
            _percent(row["share_of_policy"]),
            _percent(keep["greedy_changed"]),
        )
    return out


def _trainer(result: dict[str, Any]) -> Table:
    length = max(c["new"] for c in result["contexts"])
    out = _table(
        "What a trainer meets: recorded log-probabilities under keep against its own forward pass",
        *(
            "versions",
            "age",
            "|error| mean",
            "p99",
            "max",
            "ratio off by > 0.2",
            f"ESS of {length} tokens",
            "of policy",
        ),
    )
    out.caption = (
        f"ESS: effective sample size of the importance weights of {length} tokens in a row; of policy: that of tokens\n"
        "which the older version sampled. Below: the model's own forward pass against the engine's, same weights."
    )
    for first, row in _rows(result):
        if first:
            out.add_section()
        out.add_row(row["series"] if first else "", _age(row), *_errors(row["keep"]), f"{row['policy']['ess_run']:.4f}")
    out.add_section()
    for row in result["reference"]:
        out.add_row(row["dtype"], "", *_errors(row), "")
    return out


def _errors(found: dict[str, Any]) -> list[str]:
    cells = [f"{found[name]:.1e}" for name in ("error_mean", "error_p99", "error_max")]
    return [*cells, _percent(found["outside_clip"]), f"{found['ess_run']:.4f}"]


def _healing(result: dict[str, Any]) -> Table:
    """Of the oldest age and the mixed history."""
    spans = [_span(part) for part in result["drift"][0]["by_distance"]]
    out = _table("KL keep by distance from the last stale position (its share of KL policy)", "versions", "age", *spans)
    oldest = max(row["age"] for row in result["drift"])
    for row in result["drift"]:
        if row["age"] == oldest:
            cells = [f"{p['kl']:.1e} ({_percent(p['share_of_policy'])})" for p in row["by_distance"]]
            out.add_row(row["series"], _age(row), *cells)
    return out


def _time(result: dict[str, Any]) -> Table:
    settings, about = result["settings"], result["machine"]
    iteration = [str(n) for n in settings["iteration"]]
    out = _table(
        f"Time of recompute after an update, {settings['live']} live samples; medians of pairs",
        *("tokens each", "recompute", "keep", "decode step", "in tokens", "a token"),
        *(f"at {n}" for n in iteration),
    )
    out.caption = (
        f"{about['cpu']}, {about['threads']} threads\n"
        "From the update until every sample has one token more. In tokens: what could have been decoded in\n"
        "the time lost. A token: its recompute against decoding one. At n: time lost, as a share, if each\n"
        "sample decodes n tokens between two updates. CPU: seconds of all threads, other processes disturb them less."
    )
    for row in result["time"]:
        for clock in ("wall", "cpu"):
            found = row[clock]
            seconds = [f"{found[f'{name}_seconds']['p50']:.2f} s" for name in ("recompute", "keep", "decode_step")]
            shares = [_percent(found["share_of_iteration"][n]["p50"]) for n in iteration]
            name = f"{row['length']:,}" if clock == "wall" else "  CPU"
            lost = f"{found['decoded_tokens']['p50']:,.0f}"
            out.add_row(name, *seconds, lost, _percent(found["recompute_over_decode"]["p50"]), *shares)
    return out


def findings(result: dict[str, Any]) -> list[str]:
    """What the tables say, in sentences."""
    lines = []
    rounding = next(row for row in result["reference"] if row["dtype"] == "bfloat16")
    oldest = max(row["age"] for row in result["drift"])
    for row in result["drift"]:
        if row["history"] != "age" or row["age"] != oldest:
            continue
        keep, versions = row["keep"], f"{oldest} versions" if oldest > 1 else "1 version"
        times = keep["error_mean"] / rounding["error_mean"] if rounding["error_mean"] else None
        against = "" if times is None else f", {_times(times)} what bfloat16 does to the same weights"
        lines.append(
            f"{row['series']}: KV {versions} old is off by {keep['error_mean']:.1e} nats a token{against}; it is "
            f"{_percent(row['share_of_policy'])} of the change of the policy (KL), and "
            f"costs {_percent(1 - keep['ess_run'])} of the effective samples of a continuation."
        )
    if result["time"]:
        row = result["time"][-1]
        found, n = row["wall"], str(result["settings"]["iteration"][0])
        last = str(result["settings"]["iteration"][-1])
        lines.append(
            f"Recompute of {row['live']} samples of {row['length']} tokens takes as long as decoding "
            f"{found['decoded_tokens']['p50']:,.0f} tokens: {_percent(found['share_of_iteration'][n]['p50'])} of the "
            f"time if there is an update every {n} tokens of a sample, "
            f"{_percent(found['share_of_iteration'][last]['p50'])} every {last}."
        )
        if result["load"] > result["machine"]["cores"] + 1:
            lines.append(
                f"The machine was busy (load average {result['load']:.1f}, {result['machine']['cores']} cores): take "
                "the times as rough. Drift does not depend on it."
            )
    return lines


def _rows(result: dict[str, Any]) -> list[tuple[bool, dict[str, Any]]]:
    """Each row of drift, and whether it is the first of its series."""
    seen: set[str] = set()
    out = []
    for row in result["drift"]:
        out.append((row["series"] not in seen, row))
        seen.add(row["series"])
    return out


def _age(row: dict[str, Any]) -> str:
    return f"{row['age']}" if row["history"] == "age" else f"mixed ({row['mean_age']:.1f})"


def _span(part: dict[str, Any]) -> str:
    return f"{part['from']}" if part["from"] == part["to"] else f"{part['from']}-{part['to']}"


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.1e}" if error is None else f"{value:.1e} ± {error:.0e}"


def _times(factor: float) -> str:
    return f"{factor:.2g} times"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    percent = 100 * share
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.2g} %"
