"""What a trace says: pandas in, pandas out, no state. `summary` is what `summary.json` holds.

Every function takes the frame of `read_trace` (events of one or more runs) and reports times in seconds since the
start of the run. Each has a picture in `longtail.bench.plots`. The words (DESIGN.md section 2):

- *tail*: the last 10 % of samples to finish. The 90th percentile sample is the one of nearest rank: of n finishes in
  order, number ceil(0.9 n). *Tail time*: from its finish to the last finish, over the samples that finish in one
  iteration; a run's tail time is the sum over its iterations.
- *bubble*: slot-seconds without a sequence. An iteration generates from its first admission to its last release; all
  its slot-seconds are that time x the engine's slots.
- *occupied*: a slot belongs to a sample from `admit` to its next `pause`, `park`, `preempt` or `finish`.
- *trained*: handed over, in complete groups. *Pending*: generated, kept, not handed over when the run ends.
"""

from __future__ import annotations

from longtail.bench.analysis.account import BESIDE, LINES, ledger, staleness
from longtail.bench.analysis.base import nearest_rank, rows
from longtail.bench.analysis.overview import compare, summary
from longtail.bench.analysis.parts import GENERATE, PARTS, SWITCH, breakdown
from longtail.bench.analysis.rounds import iterations, lengths
from longtail.bench.analysis.slots import TRACKS, active, intervals, runs, timeline
from longtail.bench.analysis.tail import CAUSES, REMOVABLE, tail_attribution, tail_by_iteration, what_if

__all__ = [
    "BESIDE",
    "CAUSES",
    "GENERATE",
    "LINES",
    "PARTS",
    "REMOVABLE",
    "SWITCH",
    "TRACKS",
    "active",
    "breakdown",
    "compare",
    "intervals",
    "iterations",
    "ledger",
    "lengths",
    "nearest_rank",
    "rows",
    "runs",
    "staleness",
    "summary",
    "tail_attribution",
    "tail_by_iteration",
    "timeline",
    "what_if",
]
