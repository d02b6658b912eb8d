"""Rows of six logits with what each sampling parameter leaves of them, by hand; shared by the tests of every path."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from longtail.kernels.sample import LogitEdits, SampleBatch, row_edits

INF = math.inf
PROBS = (0.4, 0.2, 0.2, 0.1, 0.06, 0.04)
LOGITS = tuple(math.log(p) for p in PROBS)
ALL = (0, 1, 2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    kept: tuple[int, ...]
    """Tokens that may be drawn."""
    logits: tuple[float, ...] = LOGITS
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edits: dict[str, Any] = dataclasses.field(default_factory=dict)
    edited: tuple[float, ...] | None = None
    """The logits after bans and penalties, where there are any."""
    fault: str | None = None


CASES = [
    Case("nothing", ALL),
    Case("top_k_1", (0,), top_k=1),
    Case("top_k_2_ties", (0, 1, 2), top_k=2),
    Case("top_k_4", (0, 1, 2, 3), top_k=4),
    Case("top_k_5", (0, 1, 2, 3, 4), top_k=5),
    Case("top_k_V", ALL, top_k=6),
    Case("top_k_above_V", ALL, top_k=1_000_000),
    Case("top_k_of_equal_logits", ALL, logits=(2.0,) * 6, top_k=1),
    Case("top_k_zeros_of_both_signs", (1, 4), logits=(-1.0, 0.0, -2.0, -3.0, -0.0, -1.0), top_k=1),
    Case("top_k_negative_logits", (2, 5), logits=(-5.0, -4.0, -1.0, -6.0, -3.0, -2.0), top_k=2),
    Case("top_p_1e-6", (0,), top_p=1e-6),
    Case("top_p_1e-6_ties", (1, 3), logits=(0.0, 2.0, 1.0, 2.0, 0.0, 0.0), top_p=1e-6),
    Case("top_p_1e-6_all_equal", ALL, logits=(0.0,) * 6, top_p=1e-6),
    Case("top_p_0.39", (0,), top_p=0.39),
    Case("top_p_0.41_ties", (0, 1, 2), top_p=0.41),
    Case("top_p_0.79", (0, 1, 2), top_p=0.79),
    Case("top_p_0.81", (0, 1, 2, 3), top_p=0.81),
    Case("top_p_0.95", (0, 1, 2, 3, 4), top_p=0.95),
    Case("top_p_0.97", ALL, top_p=0.97),
    Case("top_p_1", ALL, top_p=1.0),
    Case("top_p_cold", (0,), top_p=0.6, temperature=0.5),  # 0.4^2 is 0.627 of the sum of squares
    Case("top_p_hot", (0, 1, 2, 3), top_p=0.7, temperature=2.0),  # 0.276, 0.195, 0.195, 0.138, 0.107, 0.087
    Case("min_p_1", (0,), min_p=1.0),
    Case("min_p_1_ties", (0, 5), logits=(1.0, 0.0, -INF, 0.5, 0.0, 1.0), min_p=1.0),
    Case("min_p_0.51", (0,), min_p=0.51),
    Case("min_p_0.49", (0, 1, 2), min_p=0.49),
    Case("min_p_0.24", (0, 1, 2, 3), min_p=0.24),
    Case("min_p_cold", (0,), min_p=0.26, temperature=0.5),
    Case("top_k_then_top_p", (0, 1, 2), top_k=4, top_p=0.85),  # of 0.9: 0.444, 0.222, 0.222, 0.111
    Case("top_p_0.85_without_top_k", (0, 1, 2, 3), top_p=0.85),
    Case("min_p_then_top_p", (0,), min_p=0.49, top_p=0.45),  # of 0.8: 0.5, 0.25, 0.25
    Case("min_p_then_top_k", (0, 1, 2), min_p=0.24, top_k=2),
    Case("min_p_leaves_fewer_than_top_k", (0, 1, 2), min_p=0.49, top_k=5),
    Case("all_three", (0,), min_p=0.24, top_k=3, top_p=0.45),
    Case("greedy", (0,), temperature=0.0),
    Case("greedy_ties", (1,), logits=(0.0, 3.0, 3.0, 1.0, 3.0, 0.0), temperature=0.0),
    Case("greedy_with_filters", (0,), temperature=0.0, top_k=1, top_p=0.1, min_p=1.0),
    Case("excluded", (0, 3), logits=(0.0, -INF, -INF, 1.0, -INF, -INF)),
    Case("excluded_fewer_than_top_k", (0, 3), logits=(0.0, -INF, -INF, 1.0, -INF, -INF), top_k=3),
    Case("excluded_top_p", (0, 3), logits=(0.0, -INF, -INF, 1.0, -INF, -INF), top_p=0.9),
    Case("one_left", (5,), logits=(-INF,) * 5 + (-80.0,), top_k=2, top_p=0.5, min_p=0.5),
    Case("huge", (1,), logits=(-1e30, 1e30, 0.0, 1e29, -INF, 5.0)),
    Case("huge_filters", (1, 3), logits=(-1e30, 1e30, 0.0, 1e30, -INF, 5.0), top_k=4, top_p=0.9, min_p=0.1),
    Case("huge_negative", (0, 2), logits=(-1e30, -2e30, -1e30, -3e30, -3e30, -INF), top_p=0.7),
    Case("huge_greedy", (1,), logits=(-1e30, 1e30, 0.0, 1e30, -INF, 5.0), temperature=0.0),
    Case("tiny", ALL, logits=tuple(1e-30 * i for i in ALL)),
    Case("tiny_top_k", (4, 5), logits=tuple(1e-30 * i for i in ALL), top_k=2),
    Case("tiny_top_p", (3, 4, 5), logits=tuple(1e-30 * i for i in ALL), top_p=0.4),
    Case("ban", (1, 2, 3, 4, 5), edits={"banned": (0,)}, edited=(-INF, *LOGITS[1:])),
    Case("ban_then_top_k", (1, 2), edits={"banned": (0,)}, edited=(-INF, *LOGITS[1:]), top_k=1),
    Case("ban_of_nan", (1, 2, 3, 4, 5), (math.nan, *LOGITS[1:]), edits={"banned": (0,)}, edited=(-INF, *LOGITS[1:])),
    Case("ban_of_inf", (2,), (INF, 1, 2, 0, 0, 0), top_p=0.3, edits={"banned": (0,)}, edited=(-INF, 1, 2, 0, 0, 0)),
    Case(
        "penalties",
        ALL,
        (8.0, 8.0, -1.0, 8.0, 4.0, 6.5),
        edits={
            "prompt_ids": (0, 2),
            "output_ids": (1, 1, 2),
            "repetition_penalty": 2.0,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
        },
        edited=(4.0, 2.75, -2.75, 8.0, 4.0, 6.5),
    ),
    Case(
        "penalties_then_greedy",
        (1,),
        (3.0, 2.0, 1.0, 0.0, 0.0, 0.0),
        temperature=0.0,
        edits={"output_ids": (0,), "presence_penalty": 1.5},
        edited=(1.5, 2.0, 1.0, 0.0, 0.0, 0.0),
    ),
    Case(
        "ban_and_penalty_of_one_token",
        (1,),
        (1.0, 0.0, -INF, -INF, -INF, -INF),
        edits={"banned": (0,), "output_ids": (0, 0), "frequency_penalty": -2.0, "repetition_penalty": 0.5},
        edited=(-INF, 0.0, -INF, -INF, -INF, -INF),
    ),
    Case("nan", (), (0.0, 1.0, math.nan, 0.0, 0.0, 0.0), fault="NaN or \\+inf"),
    Case("nan_filtered", (), (0.0, 1.0, math.nan, 0.0, 0.0, 0.0), top_k=1, top_p=0.5, min_p=0.5, fault="NaN or"),
    Case("nan_greedy", (), (math.nan, 1.0, 2.0, 0.0, 0.0, 0.0), temperature=0.0, fault="NaN or"),
    Case("inf", (), (0.0, 1.0, INF, 0.0, 0.0, 0.0), fault="or \\+inf"),
    Case("inf_top_p", (), (0.0, 1.0, INF, 0.0, 0.0, 0.0), top_p=0.5, fault="or \\+inf"),
    Case("all_nan", (), (math.nan,) * 6, top_k=2, top_p=0.5, fault="NaN or"),
    Case("all_excluded", (), (-INF,) * 6, fault="no token left"),
    Case("all_excluded_filtered", (), (-INF,) * 6, top_k=2, top_p=0.5, min_p=0.1, fault="no token left"),
    Case("all_excluded_greedy", (), (-INF,) * 6, temperature=0.0, fault="no token left"),
    Case("all_banned", (), edits={"banned": ALL}, edited=(-INF,) * 6, fault="no token left"),
    Case("overflow_by_temperature", (), (3e33, 0.0, 0.0, 0.0, 0.0, 0.0), temperature=1e-6, fault="or \\+inf"),
]


def logits_of(cases: list[Case], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([case.logits for case in cases], dtype=torch.float64).to(dtype)


def batch_of(cases: list[Case], seed: int = 0) -> SampleBatch:
    """A row a case; its seed and position depend on its place."""
    rng = np.random.default_rng(seed)
    return SampleBatch(
        np.array([case.temperature for case in cases], np.float32),
        rng.integers(0, 2**64, len(cases), dtype=np.uint64),
        rng.integers(0, 2**33, len(cases), dtype=np.int64),
        np.array([case.top_k for case in cases], np.int32),
        np.array([case.top_p for case in cases], np.float32),
        np.array([case.min_p for case in cases], np.float32),
        LogitEdits.stack([row_edits(**case.edits) for case in cases]),
    )


def check_draw(case: Case, token: int, logprob: float) -> None:
    """The token is one of the kept ones, and its log-probability is that of the kept ones renormalised: a token kept
    too many, or one too few, shows in it."""
    assert token in case.kept, case.name
    t = float(np.float32(case.temperature or 1.0))
    x = np.array(case.logits if case.edited is None else case.edited, np.float32).astype(np.float64) / t
    x -= x.max()
    left = x if case.temperature == 0 else x[list(case.kept)]
    expected = x[token] - np.logaddexp.reduce(left)
    np.testing.assert_allclose(logprob, expected, rtol=1e-5, atol=1e-5, err_msg=case.name)


def rows_of(batch: SampleBatch, rows: Any) -> SampleBatch:
    """The batch of some of its rows, in that order."""
    assert batch.top_k is not None and batch.top_p is not None and batch.min_p is not None and batch.edits is not None
    return SampleBatch(
        batch.temperatures[rows],
        batch.seeds[rows],
        batch.positions[rows],
        batch.top_k[rows],
        batch.top_p[rows],
        batch.min_p[rows],
        LogitEdits.stack([batch.edits.row(int(i)) for i in rows]),
    )


def random_batch(rows: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, SampleBatch]:
    """Logits [rows, vocab] like a model's (a peak over a broad floor) and every mixture of parameters."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    logits[np.arange(rows), rng.integers(0, vocab, rows)] += 8
    edits = [
        row_edits(
            prompt_ids=rng.integers(0, vocab, 40),
            output_ids=rng.integers(0, vocab, 20),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, -0.3])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            banned=rng.integers(0, vocab, rng.choice([0, 3])) if vocab > 100 else (),
        )
        for _ in range(rows)
    ]
    batch = SampleBatch(
        rng.choice(np.array([0.0, 0.5, 1.0, 1.0, 1.7], np.float32), rows),
        rng.integers(0, 2**64, rows, dtype=np.uint64),
        rng.integers(0, 2**33, rows, dtype=np.int64),
        rng.choice(np.array([0, 0, 1, 20, 2 * vocab // 3], np.int32), rows),
        rng.choice(np.array([1.0, 0.3, 0.9, 0.999], np.float32), rows),
        rng.choice(np.array([0.0, 0.0, 0.02, 0.4], np.float32), rows),
        LogitEdits.stack(edits),
    )
    return torch.from_numpy(logits), batch
