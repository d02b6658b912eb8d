"""What a row's sampling parameters do to its logits before a token is drawn, in vLLM's order: bans, penalties,
(temperature,) min-p, top-k, top-p.

Bans and penalties touch few tokens: they are *edits*, per row a short list of tokens with what happens to their logits
(`LogitEdits`). min-p, top-k and top-p are *filters*: they exclude (set to -inf) tokens below a threshold. Tokens that
tie with the last one kept are kept, so the result does not depend on an order of sorting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

RowEdits = tuple[np.ndarray, np.ndarray, np.ndarray]
"""One row's tokens int32, factors float32, amounts float32; no token twice."""


@dataclasses.dataclass(slots=True)
class LogitEdits:
    """Bans and penalties of a batch in CSR form: the entries of row b stand at offsets[b] .. offsets[b + 1].

    An edited logit is (x / factor if x > 0 else x * factor) - amount; an infinite amount excludes the token whatever x.
    """

    offsets: np.ndarray
    """int64 [B + 1]."""
    tokens: np.ndarray
    """int32 [N]; no token twice in a row."""
    factors: np.ndarray
    """float32 [N], above 0: the repetition penalty of a token in prompt or output, else 1."""
    amounts: np.ndarray
    """float32 [N]: frequency penalty * times in the output + presence penalty; inf for a ban."""

    @classmethod
    def stack(cls, rows: Sequence[RowEdits]) -> LogitEdits:
        """Of the rows' edits (`row_edits`), in the order of the rows of logits."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row[0]) for row in rows], out=offsets[1:])
        types = (np.int32, np.float32, np.float32)
        arrays = (np.concatenate([row[i] for row in rows] or [np.empty(0, t)]) for i, t in enumerate(types))
        return cls(offsets, *arrays)

    def row(self, b: int) -> RowEdits:
        part = slice(int(self.offsets[b]), int(self.offsets[b + 1]))
        return self.tokens[part], self.factors[part], self.amounts[part]


def row_edits(
    *,
    prompt_ids: Any = (),
    output_ids: Any = (),
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    banned: Any = (),
) -> RowEdits:
    """Penalties as in vLLM: repetition over prompt and output (CTRL, Keskar et al. 2019), presence and frequency over
    the output (OpenAI)."""
    none = np.empty(0, np.int64)
    output = np.asarray(output_ids, np.int64)
    repeated, found, counts = none, none, none
    if repetition_penalty != 1.0:
        repeated = np.unique(np.concatenate([np.asarray(prompt_ids, np.int64), output]))
    if presence_penalty != 0.0 or frequency_penalty != 0.0:
        found, counts = np.unique(output, return_counts=True)
    out = np.asarray(banned, np.int64)
    tokens = np.unique(np.concatenate([repeated, found, out]))
    factors, amounts = np.ones(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
    factors[np.searchsorted(tokens, repeated)] = repetition_penalty
    amounts[np.searchsorted(tokens, found)] = np.float32(frequency_penalty) * counts.astype(np.float32) + np.float32(
        presence_penalty
    )
    amounts[np.searchsorted(tokens, out)] = np.inf
    return tokens.astype(np.int32), factors, amounts


def edit_row(row: np.ndarray, edits: RowEdits) -> None:
    """Applies a row's bans and penalties in place. row: float32 [V]."""
    tokens, factors, amounts = edits
    x = row[tokens]
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is refused by `sample`, or excludes the token
        x = np.where(x > 0, x / factors, x * factors) - amounts
    x[amounts == np.inf] = -np.inf
    row[tokens] = x


def filter_row(row: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Excludes in place what min-p, then top-k, then top-p (over what is left, renormalised) remove; nothing for a
    greedy row. row: float32 [V]. A row that `sample` will refuse is left so that it does."""
    if temperature <= 0.0:
        return
    scale = np.float32(1.0 / temperature)
    if min_p > 0.0:
        with np.errstate(over="ignore", invalid="ignore"):
            row[row * scale < row.max() * scale + np.float32(math.log(min_p))] = -np.inf
    if 0 < top_k < row.size:
        row[row < np.partition(row, row.size - top_k)[row.size - top_k]] = -np.inf
    if top_p < 1.0 and np.isfinite(row.max()):
        kept = np.sort(row[row > -np.inf])[::-1]
        with np.errstate(over="ignore"):
            p = np.exp((kept - kept[0]).astype(np.float64) * float(scale))
        before = np.cumsum(p) - p  # probability mass ahead of each token
        last = int(np.count_nonzero(before < top_p * p.sum())) - 1
        row[row < kept[max(last, 0)]] = -np.inf


def process_logits(
    row: np.ndarray,
    *,
    prompt_ids: Any,
    output_ids: Any,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    banned: Any = (),
) -> None:
    """Applies one row's sampling parameters in place. row: float32 [V]."""
    edits = row_edits(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        banned=banned,
    )
    if len(edits[0]):
        edit_row(row, edits)
    filter_row(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
