"""Figures of a trace: titles say the finding, axes carry units, colours are safe for the colour-blind."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from longtail.bench.plots.bars import counterfactuals, tail_causes, time_breakdown, token_ages, token_ledger
from longtail.bench.plots.speculation import speculation
from longtail.bench.plots.style import INK, PAPER, RUN_COLOURS, save, svg
from longtail.bench.plots.timelines import active_sequences, response_lengths, slot_timeline


def all_figures(df: pd.DataFrame) -> dict[str, Figure]:
    """Name -> figure, in the order of a report."""
    return {
        "tail": tail_causes(df),
        "what-if": counterfactuals(df),
        "slots": slot_timeline(df),
        "active": active_sequences(df),
        "breakdown": time_breakdown(df),
        "ledger": token_ledger(df),
        "staleness": token_ages(df),
        "lengths": response_lengths(df),
    }


__all__ = [
    "INK",
    "PAPER",
    "RUN_COLOURS",
    "active_sequences",
    "all_figures",
    "counterfactuals",
    "response_lengths",
    "save",
    "slot_timeline",
    "speculation",
    "svg",
    "tail_causes",
    "time_breakdown",
    "token_ages",
    "token_ledger",
]
