"""What `sample` needs to know of each row of logits, and how it reports rows from which nothing can be drawn."""

from __future__ import annotations

import dataclasses

import numpy as np

from longtail.kernels._checks import check_temperatures
from longtail.kernels.process_logits import LogitEdits

BROKEN, EMPTY = 1, 2
FAULTS = {BROKEN: "NaN or +inf", EMPTY: "no token left to sample (every logit is -inf)"}
"""What a row's status says; 0 is a row with a token. Divided by the temperature counts: an overflow is +inf."""


@dataclasses.dataclass(slots=True)
class SampleBatch:
    """Per row of logits; arrays of length B. A parameter that is None is off for every row."""

    temperatures: np.ndarray
    """float32 (or float64, which the filters of the CPU path then divide by), at least 1e-6; 0 is greedy."""
    seeds: np.ndarray
    """uint64."""
    positions: np.ndarray
    """int64; output position of the token to be sampled."""
    top_k: np.ndarray | None = None
    """int32: keep the k most likely tokens; 0 or at least V keeps all."""
    top_p: np.ndarray | None = None
    """float32 or float64, above 0: keep the smallest set of what top-k left whose probability reaches this; from 1 on
    it keeps all."""
    min_p: np.ndarray | None = None
    """float32 or float64, 0 to 1: drop tokens less likely than this share of the most likely one."""
    edits: LogitEdits | None = None
    """Bans and penalties."""

    def check(self, rows: int, vocab: int) -> None:
        """ValueError if an array does not fit logits of [rows, vocab], or a filter has no meaning."""
        for field in ("temperatures", "seeds", "positions", "top_k", "top_p", "min_p"):
            array = getattr(self, field)
            if array is not None and array.shape != (rows,):
                raise ValueError(f"sample: {field} has shape {array.shape}, but the logits have {rows} rows")
        check_temperatures("sample", self.temperatures)
        if self.top_p is not None and not (self.top_p > 0).all():
            raise ValueError("sample: top_p must be above 0 in every row; use temperature 0 for greedy decoding")
        if self.min_p is not None and not ((self.min_p >= 0) & (self.min_p <= 1)).all():
            raise ValueError("sample: min_p must be in [0, 1] in every row")
        e = self.edits
        if e is None:
            return
        if e.offsets.shape != (rows + 1,) or not len(e.tokens) == len(e.factors) == len(e.amounts) == e.offsets[-1]:
            raise ValueError(f"sample: edits do not fit {rows} rows; build them with LogitEdits.stack, one entry a row")
        if len(e.tokens) and not (e.tokens.min() >= 0 and e.tokens.max() < vocab):
            raise ValueError(f"sample: edits name a token id outside the vocabulary of {vocab}")

    def edited(self) -> np.ndarray:
        """bool [B]: rows with bans or penalties."""
        if self.edits is None:
            return np.zeros(len(self.temperatures), bool)
        return np.diff(self.edits.offsets) > 0

    def filtered(self, vocab: int) -> np.ndarray:
        """bool [B]: rows with a filter that is on. Greedy rows have none."""
        on = np.zeros(len(self.temperatures), bool)
        if self.top_k is not None:
            on |= (self.top_k > 0) & (self.top_k < vocab)
        if self.top_p is not None:
            on |= self.top_p < 1
        if self.min_p is not None:
            on |= self.min_p > 0
        return on & (self.temperatures > 0)


def report_faults(
    tokens: np.ndarray, logprobs: np.ndarray, status: np.ndarray, faults: dict[int, str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Raises ValueError for the first row whose status is not 0, or, with `faults`, puts each such row there and marks
    its result (token -1, log-probability NaN)."""
    for row in np.flatnonzero(status).tolist():
        what = FAULTS[int(status[row])]
        if faults is None:
            raise ValueError(f"logits row {row} has {what}; check the weights and the sampling parameters")
        faults[row] = what
        tokens[row], logprobs[row] = -1, np.nan
    return tokens, logprobs
