"""Where drafting pays."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from longtail.bench import analysis
from longtail.bench.plots.style import INK, RUN_COLOURS, new_figure, styled, titled


@styled
def speculation(df: pd.DataFrame) -> Figure:
    """One row a batch size and drafter: batch, drafter, acceptance, break_even (missing: nothing pays), speedup.
    Left: measured acceptance against the break-even; right: expected speed-up. Both over the batch size."""
    figure, (left, right) = new_figure(3.1, 1, columns=2)
    batches = sorted(df["batch"].unique())
    even = pd.to_numeric(df["break_even"]).fillna(1.0).groupby(df["batch"]).min().reindex(batches)
    left.plot(batches, even, color=INK, linewidth=1.3, linestyle="--")
    left.fill_between(batches, even, 1.0, color=INK, alpha=0.09, linewidth=0)
    handles: list[Any] = []
    names = list(dict.fromkeys(df["drafter"]))
    for index, name in enumerate(names):
        own = df[df["drafter"] == name].sort_values("batch")
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        wider = 1.0 * (len(names) - 1 - index)  # seen where a later line lies on it
        style: dict[str, Any] = {"color": colour, "linewidth": 1.3 + wider, "marker": "o", "markersize": 3.5 + wider}
        left.plot(own["batch"], own["acceptance"], **style)
        right.plot(own["batch"], own["speedup"], **style)
        handles.append(Patch(color=colour, label=name))
    handles.append(Patch(color=INK, alpha=0.16, linewidth=0, label="above the break-even: drafting pays"))
    right.axhline(1.0, color=INK, linewidth=0.7, linestyle=":")
    left.set(ylim=(0, 1), ylabel="acceptance of a draft token")
    right.set(ylim=(0.9, max(1.5, 1.05 * float(df["speedup"].max()))), ylabel="expected speed-up (x)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlabel("sequences that decode at once")
    return titled(figure, _where_it_pays(df), handles)


def _where_it_pays(df: pd.DataFrame) -> str:
    best = max(analysis.rows(df), key=lambda row: float(row.speedup))
    paying = df[df["speedup"] > 1.01]["batch"]
    if not len(paying):
        return "Drafting does not pay at any of these batch sizes"
    return (
        f"Drafting pays up to batch {paying.max()}; most at batch {best.batch}, {best.speedup:.1f}x with {best.drafter}"
    )
