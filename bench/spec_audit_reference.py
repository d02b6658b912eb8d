"""What an engine ought to sample, computed without it: a plain forward pass of `transformers`, the sampling parameters
written down once more in float64, and from both the tree of all outcomes of the first few tokens.

    prompt -> {token: p} -> {token: p} -> ... -> an outcome: `depth` tokens, or fewer if the sample ended
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tokens = tuple[int, ...]
Book = Callable[[Tokens, Tokens], int | None]
"""(prompt, output so far) -> the token that a drafter guesses next, or None: it has nothing to say."""


class Reference(Protocol):
    """A model's logits; nothing that an engine under audit computes."""

    def next_logits(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Sequences of one length -> float64 [n, V], after the last token of each."""
        ...

    def logits(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """-> float64 [len(tokens) - start, V]: those that choose tokens[start:]; start >= 1."""
        ...


class ModelReference:
    """A `transformers` model, in its own dtype."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def next_logits(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            made = [
                self.model(torch.tensor(sequences[i : i + 32]), logits_to_keep=1, use_cache=False).logits[:, -1]
                for i in range(0, len(sequences), 32)
            ]
        found: np.ndarray = torch.cat(made).double().numpy()
        return found

    def logits(self, tokens: Sequence[int], start: int) -> np.ndarray:
        import torch

        with torch.inference_mode():
            out = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0, start - 1 : -1]
        found: np.ndarray = out.double().numpy()
        return found


def banned(params: SamplingParams, eos: Tokens, length: int) -> Tokens:
    """Tokens that may not come after `length` output tokens: those that would end the sample before min_tokens."""
    if length >= params.min_tokens:
        return ()
    return params.stop_token_ids if params.ignore_eos else (*eos, *params.stop_token_ids)


def distribution(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, eos: Tokens
) -> tuple[np.ndarray, float]:
    """What a token is sampled from. logits: float64 [V] -> log-probabilities float64 [V], -inf for what is excluded,
    and how much a logit may move without changing what is excluded (a greedy row: the winner). In vLLM's order: bans,
    penalties, temperature, min-p, top-k, top-p; a greedy row has temperature 1 and no filters."""
    z = np.array(logits, np.float64)
    if params.repetition_penalty != 1.0:
        seen = np.unique([*prompt, *output]).astype(np.int64)
        z[seen] = np.where(z[seen] > 0, z[seen] / params.repetition_penalty, z[seen] * params.repetition_penalty)
    if len(output):
        tokens, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        z[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    z[list(banned(params, eos, len(output)))] = -math.inf
    if params.temperature == 0.0:
        second, first = np.partition(z, -2)[-2:]
        return _log_softmax(z), float(first - second)
    z /= params.temperature
    margin = math.inf
    if params.min_p > 0.0:
        limit = z.max() + math.log(params.min_p)
        margin = min(margin, float(np.abs(z - limit).min()))
        z[z < limit] = -math.inf
    if 0 < params.top_k < len(z):
        below, last = np.partition(z, -params.top_k - 1)[[-params.top_k - 1, -params.top_k]]
        margin = min(margin, float(last - below) if last > -math.inf else math.inf)
        z[z < last] = -math.inf
    if params.top_p < 1.0:
        order = np.argsort(-z, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(np.exp(_log_softmax(z)[order]))[:-1]])
        margin = min(margin, float(np.abs(before[1:] - params.top_p).min()))
        z[order[before >= params.top_p]] = -math.inf
    return _log_softmax(z), margin


def sequence_logprobs(
    reference: Reference, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, eos: Tokens
) -> np.ndarray:
    """Log-probability of each output token given those before it, teacher-forced. -> float64 [len(output)]; -inf for a
    token that the parameters exclude."""
    if not output:
        return np.empty(0)
    rows = reference.logits([*prompt, *output], len(prompt))
    return np.array(
        [distribution(row, prompt, output[:i], params, eos)[0][output[i]] for i, row in enumerate(rows)], np.float64
    )


def ends(output: Sequence[int], params: SamplingParams, eos: Tokens) -> bool:
    """Whether the last token ends the sample, by EOS or a stop id."""
    if len(output) < max(params.min_tokens, 1):
        return False
    return output[-1] in params.stop_token_ids or (not params.ignore_eos and output[-1] in eos)


@dataclasses.dataclass(slots=True)
class OutcomeTree:
    """Every outcome of the first `depth` output tokens, and its probability."""

    prompt: Tokens
    depth: int
    children: dict[Tokens, dict[int, float]]
    """Output so far -> next tokens and their probabilities. What is not in it is an outcome."""
    outcomes: dict[Tokens, float]
    margin: float
    """The least that a logit may move before a token joins or leaves the tree."""

    @property
    def probs(self) -> np.ndarray:
        """float64 [K], in the order of `outcomes`."""
        p = np.array(list(self.outcomes.values()))
        return p / p.sum()

    def outcome(self, output: Sequence[int]) -> Tokens:
        return tuple(output[: self.depth])

    def guess(self, likely: bool) -> Book:
        """Guesses the most likely token at every place in the tree, or the least likely one that can come."""
        choose = max if likely else min

        def book(prompt: Tokens, output: Tokens) -> int | None:
            found = self.children.get(output) if prompt == self.prompt else None
            return None if found is None else choose(found, key=found.__getitem__)

        return book

    def biased(self, guess: Book, bias: float) -> np.ndarray:
        """Probabilities as in `probs` if a wrong draft were accepted with probability `bias`: at every place after the
        first token (nothing is drafted before it) the guessed token d has p(d) + bias * (1 - p(d))."""
        made = []
        for outcome in self.outcomes:
            p = 1.0
            for i, token in enumerate(outcome):
                here = self.children[outcome[:i]][token]
                draft = guess(self.prompt, outcome[:i]) if i else None
                if draft is not None:
                    here = here * (1.0 - bias) + (bias if token == draft else 0.0)
                p *= here
            made.append(p)
        q = np.array(made)
        found: np.ndarray = q / q.sum()
        return found


def outcome_tree(
    reference: Reference, prompt: Sequence[int], params: SamplingParams, eos: Tokens, depth: int
) -> OutcomeTree:
    prompt = tuple(prompt)
    children: dict[Tokens, dict[int, float]] = {}
    outcomes: dict[Tokens, float] = {}
    margin = math.inf
    open_: dict[Tokens, float] = {(): 1.0}
    for _ in range(depth):
        following: dict[Tokens, float] = {}
        rows = reference.next_logits([[*prompt, *output] for output in open_]) if open_ else ()
        for (output, p), row in zip(open_.items(), rows, strict=True):
            logprobs, near = distribution(row, prompt, output, params, eos)
            margin = min(margin, near)
            kept = np.flatnonzero(logprobs > -math.inf).tolist()
            children[output] = {token: math.exp(logprobs[token]) for token in kept}
            for token, q in children[output].items():
                longer = (*output, token)
                (outcomes if ends(longer, params, eos) else following)[longer] = p * q
        open_ = following
    return OutcomeTree(prompt, depth, children, outcomes | open_, margin)


def _log_softmax(z: np.ndarray) -> np.ndarray:
    shifted = z - z.max()
    made: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return made
