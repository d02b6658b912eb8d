"""Trains a multi-token-prediction head on rollouts that are there already, in the trainer's shadow. (A draft model:
`spec_train_draft`, which shares the data, the clock and the optimiser.)

    rollouts -> the target's hidden states (computed again, no gradient) -> head, drafting `depth` tokens in a row
             -> loss against the target's distributions -> held-out acceptance -> a directory with the head

The loss at each position is the cross-entropy of the head's distribution against the target's at temperature 1, which
is the KL divergence up to a constant, plus `token_weight` times that against the token that the target sampled. At
draft positions after the first the head reads its own output in place of the hidden state, as it does when it drafts
(HASS, Zhang et al. 2025; EAGLE-3, Li et al. 2025).

It reads samples and writes a head; the target and its outputs never depend on it. A time budget, not a number of steps:
the learning rate falls with the time that has passed, and an interrupt ends the training early and keeps what it has.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from longtail.bench.spec_acceptance import estimate
from longtail.bench.spec_rollouts import Rollout, hold_out
from longtail.partial_rollout.engines.native.loader import load_model
from longtail.partial_rollout.engines.native.mtp_head import MTPHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """What training any drafter has. Checked at construction."""

    minutes: float = 3.0
    """Time for all of it but the estimate at the end."""
    learning_rate: float = 1e-3
    token_weight: float = 0.0
    """Of the sampled token's loss; the target's distribution says the same with less noise."""
    batch_tokens: int = 1024
    """Tokens of an optimiser step, prompts counted."""
    max_tokens: int = 200_000
    """Tokens whose hidden states are kept: 4 bytes times the hidden size each."""
    held_out: float = 0.1
    """Share of the groups that is not trained on."""
    preparation: float = 0.4
    """Most of the time that goes into hidden states; what is not reached is not trained on."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matmuls; the head's weights and their updates are float32. auto: whichever is quicker on this machine."""
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        self._at_least_one("batch_tokens", "max_tokens")
        self._positive("minutes", "learning_rate")
        for name in ("held_out", "preparation"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"precision must be auto, float32 or bfloat16, not {self.precision!r}")
        if not self.token_weight >= 0.0:
            raise ValueError(f"token_weight must be at least 0, not {self.token_weight}")

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def _positive(self, *names: str) -> None:
        for name in names:
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(FitConfig):
    """Of a multi-token-prediction head."""

    depth: int = 2
    """Draft positions that are trained."""
    vocabulary: int = 8192
    """Tokens that the head may draft, the most frequent ones; 0: all."""
    depth_decay: float = 0.7
    """Weight of each draft position's loss against the one before it."""

    def __post_init__(self) -> None:
        FitConfig.__post_init__(self)
        self._at_least_one("depth")
        self._positive("depth_decay")
        if self.vocabulary < 0:
            raise ValueError(f"vocabulary must be at least 0, not {self.vocabulary}")


@dataclasses.dataclass(slots=True)
class Example:
    """A rollout and what the target makes of it."""

    ids: torch.Tensor
    """int64 [T]."""
    prompt_len: int
    hidden: torch.Tensor
    """float32 [T, hidden], after the final norm."""


@dataclasses.dataclass(slots=True)
class Batch:
    """Examples, padded on the right."""

    ids: torch.Tensor
    """int64 [B, T]."""
    mask: torch.Tensor
    """int64 [B, T], 1 where there is a token."""
    hidden: torch.Tensor
    """float32 [B, T, hidden]."""
    learn: torch.Tensor
    """bool [B, T]: rows p whose guess is an output token after the first, p + 1 (of the last row the target's
    distribution is known, though not the token)."""

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Batch:
        longest = max(len(e.ids) for e in examples)
        ids = torch.zeros(len(examples), longest, dtype=torch.long)
        mask = torch.zeros(len(examples), longest, dtype=torch.long)
        hidden = torch.zeros(len(examples), longest, examples[0].hidden.shape[1])
        learn = torch.zeros(len(examples), longest, dtype=torch.bool)
        for i, e in enumerate(examples):
            n = len(e.ids)
            ids[i, :n], mask[i, :n], hidden[i, :n] = e.ids, 1, e.hidden
            learn[i, e.prompt_len : n] = True
        return cls(ids, mask, hidden, learn)


def unroll(head: MTPHead, batch: Batch, embeds: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
    """What the head says at each draft position, float32 [B, T, hidden]; row p's guess is token p + 1. At the first it
    reads the target's hidden states, then its own output of the row before, attending to rows that do likewise (when
    it drafts, older rows are on the target's: an approximation, of training and estimate)."""
    states = batch.hidden
    for _ in range(depth):
        out = head(F.pad(states[:, :-1], (0, 0, 1, 0)), embeds, batch.mask)
        yield out
        states = out


def train_mtp(
    target: str | Path | PreTrainedModel,
    rollouts: Sequence[Rollout],
    out: str | Path | None = None,
    config: TrainConfig | None = None,
    *,
    start: MTPHead | None = None,
    progress: Progress = lambda text: None,
) -> MTPHead:
    """-> the head, with `record` filled; saved to `out` if given. start: a head to go on with (its version + 1), of
    this target. ValueError for rollouts of another vocabulary, or too few."""
    config = config or TrainConfig()
    begin = time.perf_counter()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, _ = load_model(target)
    if start is not None:
        start.check_target(model.config)
    train, held_out = split(model, rollouts, config)
    torch.manual_seed(config.seed)
    head = start
    if head is None:
        head = MTPHead(model.config, _vocabulary(train, model.config.vocab_size, config.vocabulary))
        head.start_from(model)
    config = dataclasses.replace(config, precision=precision_of(config.precision))
    examples, tested = both_parts(model, train, held_out, config, begin, progress)
    embed = model.get_input_embeddings()

    def loss(batch: Batch, share: float) -> torch.Tensor:
        with torch.no_grad():
            embeds = embed(batch.ids)
        # The first half of the time goes into the first draft alone, on which all others depend.
        return loss_of(head, model, batch, embeds, config, 1 if share < 0.5 else config.depth)

    record = fit(head, head.trainable(), loss, examples, config, begin, progress)
    progress("estimating the acceptance on what was held out")
    head.version += 1
    head.record = record | {
        "trained_on": trained_on(train, examples),
        "held_out": estimate(head, model, tested, max(config.depth, 4), seed=config.seed),
    }
    if out is not None:
        head.save(out)
    return head


def split(
    model: PreTrainedModel, rollouts: Sequence[Rollout], config: FitConfig
) -> tuple[list[Rollout], list[Rollout]]:
    """-> (training, held out), of what the target can read. ValueError for rollouts of another vocabulary, or too
    few."""
    train, held_out = hold_out(_fitting(model, rollouts), config.held_out, config.seed)
    if not train or not held_out:
        raise ValueError("samples: training needs at least two groups, one of them to hold out")
    return train, held_out


def both_parts(
    model: PreTrainedModel,
    train: Sequence[Rollout],
    held_out: Sequence[Rollout],
    config: FitConfig,
    begin: float,
    progress: Progress,
) -> tuple[list[Example], list[Example]]:
    """The target's hidden states of both, in the share of the time that began at `begin` that is theirs."""
    seconds = 60.0 * config.minutes * config.preparation
    tested = prepare(model, held_out[:64], config, limit=begin + seconds / 4.0)
    return prepare(model, train, config, begin + seconds, progress), tested


def trained_on(train: Sequence[Rollout], examples: Sequence[Example]) -> dict[str, int]:
    return {
        "groups": len({r.group for r in train}),
        "samples": len(examples),
        "tokens": sum(len(e.ids) for e in examples),
        "newest_version": max(r.version for r in train),
    }


def precision_of(wanted: Literal["auto", "float32", "bfloat16"]) -> Literal["float32", "bfloat16"]:
    if wanted != "auto":
        return wanted
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16) * 2:  # the first ones warm up
        a = torch.ones(512, 512, dtype=dtype)
        start = time.perf_counter()
        F.linear(a, a)
        seconds[dtype] = time.perf_counter() - start
    return "bfloat16" if seconds[torch.bfloat16] < 0.8 * seconds[torch.float32] else "float32"


def matmuls(config: FitConfig) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16")


def _fitting(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> list[Rollout]:
    config: Any = model.config.get_text_config()
    for r in rollouts:
        if max(r.ids) >= config.vocab_size:
            raise ValueError(
                f"samples: group {r.group} has token {max(r.ids)}, the target's vocabulary {config.vocab_size} tokens; "
                "were they made by another model?"
            )
    return [r for r in rollouts if 2 < len(r.ids) <= config.max_position_embeddings]


def _vocabulary(rollouts: Sequence[Rollout], size: int, wanted: int) -> torch.Tensor | None:
    """The tokens that come most often, then those of the lowest ids, which tokenizers made first."""
    if wanted == 0 or wanted >= size:
        return None
    counts = Counter(token for r in rollouts for token in r.output_ids)
    chosen = [token for token, _ in counts.most_common(wanted)]
    taken = set(chosen)
    chosen += [token for token in range(size) if token not in taken][: wanted - len(chosen)]
    return torch.tensor(sorted(chosen))


@torch.no_grad()
def prepare(
    model: PreTrainedModel,
    rollouts: Sequence[Rollout],
    config: FitConfig,
    limit: float = math.inf,
    progress: Progress = lambda text: None,
) -> list[Example]:
    """The target's hidden states, until `limit` (of time.perf_counter) or config.max_tokens; at least one batch."""
    base: Any = model.base_model
    examples: list[Example] = []
    tokens = 0
    for chunk in _batches([(r, len(r.ids)) for r in rollouts], max(config.batch_tokens, 2048)):
        if examples and (time.perf_counter() > limit or tokens >= config.max_tokens):
            break
        longest = max(len(r.ids) for r in chunk)
        ids, mask = (torch.zeros(len(chunk), longest, dtype=torch.long) for _ in range(2))
        for i, r in enumerate(chunk):
            ids[i, : len(r.ids)], mask[i, : len(r.ids)] = torch.tensor(r.ids), 1
        with matmuls(config):
            hidden = base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.float()
        for i, r in enumerate(chunk):
            n = len(r.ids)
            examples.append(Example(ids[i, :n], len(r.prompt_ids), hidden[i, :n].clone()))
            tokens += n
        progress(f"hidden states of the target: {tokens:,} tokens")
    return examples


def _batches(items: Sequence[tuple[Any, int]], most: int) -> Iterator[list[Any]]:
    """In order, of at most `most` tokens with padding (or one item)."""
    batch: list[Any] = []
    longest = 0
    for item, length in items:
        if batch and max(longest, length) * (len(batch) + 1) > most:
            yield batch
            batch, longest = [], 0
        batch.append(item)
        longest = max(longest, length)
    if batch:
        yield batch


def fit(
    module: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    loss_of: Callable[[Batch, float], torch.Tensor],
    examples: list[Example],
    config: FitConfig,
    start: float,
    progress: Progress,
) -> dict[str, Any]:
    """Trains these parameters until the time that began at `start` (of time.perf_counter) is over. loss_of: of a batch
    and the share of the training's time that has passed. -> for the record: steps, mean loss of the last ones, seconds.
    Ctrl-C ends it early."""
    begin, deadline = time.perf_counter(), start + 60.0 * config.minutes
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    module.train()
    steps, recent = 0, 0.0
    generator = torch.Generator().manual_seed(config.seed)
    try:
        for batch in _epochs(examples, config.batch_tokens, generator):
            share = (time.perf_counter() - begin) / max(deadline - begin, 1e-9)
            if share >= 1.0 and steps:
                break
            rate = min((steps + 1) / 20, 1.0) * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0))))
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate
            with matmuls(config):
                loss = loss_of(batch, share)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            if not torch.isfinite(norm):
                raise ValueError(
                    f"training: the gradient is {float(norm)} at step {steps + 1}; lower the learning rate"
                )
            optimizer.step()
            steps += 1
            recent = float(loss.detach()) if steps == 1 else 0.95 * recent + 0.05 * float(loss.detach())
            progress(f"training: step {steps}, loss {recent:.3f}, {100 * min(share, 1.0):.0f} % of the time")
    except KeyboardInterrupt:
        progress(f"interrupted at step {steps}: keeping what was learnt")
    module.eval()
    return {
        "settings": dataclasses.asdict(config),
        "steps": steps,
        "loss": recent,
        "seconds": {"prepare": begin - start, "train": time.perf_counter() - begin},
        "time": time.time(),
    }


def _epochs(examples: list[Example], most: int, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for start in range(0, len(order), 64):  # of like length within 64, so that little is padding
            part = sorted(order[start : start + 64], key=lambda i: len(examples[i].ids))
            for chunk in _batches([(examples[i], len(examples[i].ids)) for i in part], most):
                yield Batch.of(chunk)


def loss_of(
    head: MTPHead, model: PreTrainedModel, batch: Batch, embeds: torch.Tensor, config: TrainConfig, depth: int
) -> torch.Tensor:
    """Mean over output tokens and draft positions, weighted; in nats."""
    learn = batch.learn
    with torch.no_grad():
        wanted = torch.softmax(logits_of(head, model, batch.hidden[learn]), dim=-1)
        tokens, known = _sampled(head, batch)
    total: torch.Tensor = torch.zeros(())
    weights = 0.0
    for j, out in enumerate(unroll(head, batch, embeds, depth)):
        logits = logits_of(head, model, out[learn])
        weight = config.depth_decay**j
        loss = F.cross_entropy(logits, wanted)
        if config.token_weight:
            loss = loss + config.token_weight * F.cross_entropy(logits[known], tokens[known])
        total, weights = total + weight * loss, weights + weight
    return total / weights


def _sampled(head: MTPHead, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row to learn: the sampled token ahead, as an index of the head's vocabulary, and whether it has it
    at all."""
    ahead = F.pad(batch.ids[:, 1:], (0, 1))[batch.learn]
    known = F.pad(batch.mask[:, 1:], (0, 1))[batch.learn].bool()
    if head.vocabulary is None:
        return ahead, known
    index = torch.searchsorted(head.vocabulary, ahead).clamp(max=len(head.vocabulary) - 1)
    return index, known & (head.vocabulary[index] == ahead)


def logits_of(head: MTPHead, model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """hidden: [N, hidden] -> float32 [N, the head's vocabulary], through the target's LM head."""
    lm_head: Any = model.get_output_embeddings()
    if head.vocabulary is None:
        logits: torch.Tensor = lm_head(hidden)
        return logits.float()
    rows = lm_head.weight.detach()[head.vocabulary]
    bias = None if lm_head.bias is None else lm_head.bias.detach()[head.vocabulary]
    return F.linear(hidden, rows, bias).float()
