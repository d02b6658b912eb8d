"""How often a trained drafter's tokens would be accepted, estimated on rollouts that it has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longtail.bench.spec_train import Example
    from longtail.partial_rollout.engines.native.mtp_head import MTPHead


def coupled_match(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p, q: float [N, V], distributions -> float [N]: the probability that the target, sampling p, and the drafter,
    sampling q with the same Gumbel noise, draw the same token.

    Token x wins both races where E_x / p_x and E_x / q_x (E exponential, kernels/sample.py) are the smallest of all,
    so where E_y > E_x max(p_y / p_x, q_y / q_x) for all y: with probability 1 / sum_y max(p_y / p_x, q_y / q_x)
    (Daliri, Musco, Suresh 2024, "Coupling without communication").

    The sum costs V for each x; x are taken in order of min(p, q) until what is left out is below 1e-3, at most 64.
    """
    overlap = torch.minimum(p, q)
    total = torch.zeros(len(p), dtype=p.dtype)
    mass, order = overlap.topk(min(64, p.shape[1]), dim=1)
    for k in range(order.shape[1]):
        if float((overlap.sum(1) - mass[:, :k].sum(1)).max()) < 1e-3:
            break
        x = order[:, k : k + 1]
        px, qx = p.gather(1, x), q.gather(1, x)
        live = ((px > 0) & (qx > 0)).squeeze(1)
        px, qx = px.clamp(min=1e-30), qx.clamp(min=1e-30)
        total += torch.where(live, 1.0 / torch.maximum(p / px, q / qx).sum(1), torch.zeros(len(p), dtype=p.dtype))
    return total


@torch.no_grad()
def estimate(
    head: MTPHead,
    model: PreTrainedModel,
    examples: Sequence[Example],
    depth: int,
    *,
    temperatures: Sequence[float] = (1.0, 0.7),
    max_rows: int = 500,
    seed: int = 0,
) -> dict[str, Any]:
    """At each draft position, given that those before it are right: `greedy`, how often the likeliest tokens agree;
    `rejection`, sum min(p, q), the acceptance of rejection sampling (Leviathan et al. 2023); `match`, that of match
    verification with shared noise. For each temperature, with the tokens a verify step yields on average (bonus
    counted) where so many drafts are made as there are positions. Over max_rows positions drawn at random."""
    from longtail.bench.spec_train import Batch, logits_of, unroll

    agreement = _Agreement(temperatures, depth)
    for example, places in _places(examples, depth - 1, max_rows, seed):
        batch = Batch.of([example])
        target = _target_logits(model, example, places)
        embeds = model.get_input_embeddings()(batch.ids)
        for j, out in enumerate(unroll(head, batch, embeds, depth)):
            drafted = logits_of(head, model, out[0][places])
            if head.vocabulary is not None:
                full = torch.full_like(target, -torch.inf)
                full[:, head.vocabulary] = drafted
                drafted = full
            agreement.add(j, target, drafted)
    return agreement.report(depth)


@torch.no_grad()
def estimate_draft(
    draft: PreTrainedModel,
    model: PreTrainedModel,
    examples: Sequence[Example],
    depth: int,
    *,
    temperatures: Sequence[float] = (1.0, 0.7),
    max_rows: int = 500,
    seed: int = 0,
) -> dict[str, Any]:
    """`estimate` for a draft model. It reads its own drafts as it reads what the target wrote, so that all positions
    have one acceptance where those before are right."""
    agreement = _Agreement(temperatures, 1)
    for example, places in _places(examples, 0, max_rows, seed):
        base: Any = draft.base_model
        lm_head: Any = draft.get_output_embeddings()
        out = base(input_ids=example.ids[None], use_cache=False).last_hidden_state
        agreement.add(0, _target_logits(model, example, places), lm_head(out[0][places]).float())
    return agreement.report(depth)


def _places(
    examples: Sequence[Example], first: int, max_rows: int, seed: int
) -> Iterator[tuple[Example, torch.Tensor]]:
    """Rows at random, as many of each example, of those that guess an output token after the first; none before row
    `first`."""
    generator = torch.Generator().manual_seed(seed)
    most = -(-max_rows // max(len(examples), 1))
    for example in examples:
        places = torch.arange(max(example.prompt_len, first), len(example.ids))
        places = places[torch.randperm(len(places), generator=generator)[:most]]
        if len(places):
            yield example, places


def _target_logits(model: PreTrainedModel, example: Example, places: torch.Tensor) -> torch.Tensor:
    lm_head: Any = model.get_output_embeddings()
    logits: torch.Tensor = lm_head(example.hidden[places]).float()
    return logits


class _Agreement:
    """Sums over rows, for each temperature and position."""

    def __init__(self, temperatures: Sequence[float], positions: int) -> None:
        self._sums = {t: torch.zeros(positions, 3, dtype=torch.float64) for t in temperatures}
        self._rows = 0

    def add(self, position: int, target: torch.Tensor, drafted: torch.Tensor) -> None:
        """Logits, float32 [N, V], of the same rows."""
        self._rows += len(target) if position == 0 else 0
        greedy = (target.argmax(-1) == drafted.argmax(-1)).double().sum()
        for t, sums in self._sums.items():
            p, q = torch.softmax(target / t, -1), torch.softmax(drafted / t, -1)
            match = coupled_match(p, q).double().sum()
            sums[position] += torch.stack([greedy, torch.minimum(p, q).double().sum(), match])

    def report(self, depth: int) -> dict[str, Any]:
        """Of `depth` drafts in a row; beyond the positions that were told apart as at the last of them."""
        result: dict[str, Any] = {"rows": self._rows, "temperatures": {}}
        for t, sums in self._sums.items():
            means = sums / max(self._rows, 1)
            means = torch.cat([means, means[-1:].expand(depth - len(means), -1)])
            entry: dict[str, Any] = {}
            for name, rates in zip(("greedy", "rejection", "match"), means.T.tolist(), strict=True):
                length, product = 1.0, 1.0
                for rate in rates:
                    product *= rate
                    length += product
                entry[name] = {"by_position": rates, "acceptance_length": length}
            result["temperatures"][str(t)] = entry
        return result
