"""What happened, when: the one event record that engines and the rollout emit and that a trace holds.

Times are seconds on the emitter's clock (monotonic; virtual in the simulator).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

EventKind = Literal[
    "run_start",  # detail: JSON of the run's settings
    "run_end",
    "iteration_start",  # value: policy version
    "iteration_end",  # num_seqs: complete groups handed over, num_tokens: output tokens in them
    "submit",  # a sample becomes known; num_tokens: prompt tokens
    "admit",  # a sample gets a slot; num_tokens: KV tokens it brings (prefix cache or snapshot); value: known tokens
    "first_token",
    "preempt",  # a sample loses its slot for a while; num_tokens: computed tokens; detail: out of blocks, weight update
    "pause",  # a sample is taken out on request; num_tokens: output tokens so far; value: 1 with snapshot
    "park",  # a sample's turn has ended, it waits for its environment; num_tokens: output tokens so far; value: 1 with
    # snapshot; detail: what ended the turn, where it was not EOS
    "observe",  # the environment has answered; num_tokens: of the observation; duration: waited for it
    "cut",  # output is dropped; num_tokens: of it that the policy wrote; detail: line of the ledger
    "retry",  # a failed sample starts again; value: times that it has
    "finish",  # num_tokens: output tokens; detail: finish reason
    "drafts",  # what drafting did for a sample that is done, or parked: draft tokens verified and accepted, output
    # tokens of the steps that verified them, draft_seconds; duration: its share of these steps
    "step",  # a forward pass, or several alike: see the fields below
    "save",  # KV snapshot out; num_tokens
    "restore",  # KV snapshot in; num_tokens
    "update",  # new weights in place; value: policy version
    "engine",  # one of a pool comes or goes; detail: joined, released, removed, or "lost: why"; num_seqs: samples that
    # go on elsewhere
    "share",  # an engine of a pool is told what siblings of its samples wrote elsewhere; num_tokens; num_seqs:
    # siblings; value: bytes
    "grade",  # value: reward, NaN without one; detail: the grader, and behind ": " why there is no reward
    "train",
    "evaluate",  # the policy is measured; what its engine does meanwhile is no step of the run
    "checkpoint",  # what is written down of it
    "wait",  # nothing runs: for graders or environments (detail)
    "discard",  # a group is thrown away; num_seqs: samples, num_tokens: output tokens; detail: line of the ledger
    "hand_over",  # a complete group leaves; num_seqs: samples, num_tokens: output tokens
]


@dataclasses.dataclass(slots=True)
class Event:
    kind: EventKind
    time: float
    """Start of what happened."""
    duration: float = 0.0
    """Seconds it took; 0 for an instant."""
    engine: str = ""
    sample: str = ""
    group: str = ""
    iteration: int = -1
    num_seqs: int = 0
    """step: sequences in the batch."""
    num_tokens: int = 0
    """step: query tokens (rows of the forward pass)."""
    num_prefill_tokens: int = 0
    """step: of these, tokens of prompts and of re-prefilled outputs."""
    num_context_tokens: int = 0
    """step: KV tokens read, over all sequences."""
    num_output_tokens: int = 0
    """step: tokens sampled and committed."""
    model_seconds: float = 0.0
    """step: of the duration, the forward pass and logits."""
    sample_seconds: float = 0.0
    """step: of the duration, processing logits and sampling."""
    value: float = 0.0
    detail: str = ""
    num_draft_tokens: int = 0
    """step, drafts: drafts that were verified."""
    num_accepted_tokens: int = 0
    """step, drafts: of these, accepted and committed."""
    draft_seconds: float = 0.0
    """step: of the duration, making drafts."""
    num_passes: int = 1
    """step: forward passes of the same sequences that it stands for (on a virtual clock perhaps many): the counts of
    tokens and the seconds are their sums."""


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of those who do not listen."""
