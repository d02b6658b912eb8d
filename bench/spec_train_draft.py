"""Trains a small draft model on rollouts that are there already, in the trainer's shadow.

    rollouts -> the target's hidden states (computed again, no gradient) -> draft model -> loss against the target's
             distributions -> held-out acceptance, before and after -> a model's directory: drafter "model:DIR"

It begins as some of the target's own layers with the target's embedding, final norm and LM head, or as any model with
the target's vocabulary. The loss at each output position is the cross-entropy of its distribution against the target's
at temperature 1, which is the KL divergence up to a constant (distillation, Hinton et al. 2015; of draft models:
DistillSpec, Zhou et al. 2024, whose data are the target's samples, as here), plus `token_weight` times that against the
token that the target sampled. Over a large vocabulary the LM head costs more than all layers, so each optimiser step
learns at `rows` positions of its batch, drawn at random; the layers run over all of them.

Embedding and LM head stay as they are: most of the memory of such a model, and what the layers are fitted to.

It reads samples and writes a model; the target and its outputs never depend on it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from longtail.bench.spec_acceptance import estimate_draft
from longtail.bench.spec_rollouts import Rollout
from longtail.bench.spec_train import Batch, FitConfig, Progress, both_parts, fit, precision_of, split, trained_on
from longtail.partial_rollout.engines.native.loader import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 1
ABOUT = "draft.json"
"""In the model's directory: version and record."""
POSITIONS = 4
"""Drafts in a row of the estimate."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(FitConfig):
    """Of a draft model."""

    layers: int = 4
    """Of the target that it begins with, where it does not begin as another model."""
    rows: int = 256
    """Positions of a batch that an optimiser step learns at."""

    def __post_init__(self) -> None:
        FitConfig.__post_init__(self)
        self._at_least_one("layers", "rows")


@dataclasses.dataclass(slots=True)
class TrainedDraft:
    model: PreTrainedModel
    version: int
    """Times that it was trained."""
    record: dict[str, Any]
    """How."""

    def save(self, directory: str | Path, tokenizer: str | None = None) -> None:
        """A whole model takes the place of the one before: two renames, and a kill between them leaves both beside
        the directory. tokenizer: where to take one from, if there is one, which makes it a model to use alone.
        ValueError if the directory holds something else."""
        directory = Path(directory)
        if directory.exists() and not (directory / ABOUT).is_file() and any(directory.iterdir()):
            raise ValueError(f"out: {directory} holds something that is no draft model of ours; name another directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
            new, old = Path(temporary) / "new", Path(temporary) / "old"
            self.model.save_pretrained(new)
            if tokenizer is not None:
                from transformers import AutoTokenizer

                with contextlib.suppress(OSError, ValueError):  # drafting takes none
                    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(new)
            about = {"format": FORMAT, "kind": "draft", "version": self.version, "record": self.record}
            (new / ABOUT).write_text(json.dumps(about, indent=1, default=str) + "\n")
            if directory.exists():
                os.rename(directory, old)
            os.rename(new, directory)


def version_of(source: str | Path) -> int:
    """Of a draft model's directory; 0 for any other model."""
    path = Path(source) / ABOUT
    if not path.is_file():
        return 0
    try:
        return int(json.loads(path.read_text())["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"start: {path} cannot be read: {error!r}") from error


def train_draft(
    target: str | Path | PreTrainedModel,
    rollouts: Sequence[Rollout],
    out: str | Path | None = None,
    config: DraftConfig | None = None,
    *,
    start: str | Path | PreTrainedModel | None = None,
    progress: Progress = lambda text: None,
) -> TrainedDraft:
    """-> the draft model; saved to `out` if given. start: a model with the target's vocabulary to begin with, one
    trained before (its version + 1) or any other; None: `config.layers` layers of the target. ValueError for another
    vocabulary, and for rollouts of another one, or too few."""
    config = config or DraftConfig()
    begin = time.perf_counter()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, source = load_model(target)
    torch.manual_seed(config.seed)
    if start is None:
        draft, version = some_layers(model, spread(len(_layers(model)), config.layers)), 0
        origin = f"{config.layers} layers of the target"
    else:
        draft, found = load_model(start)
        version = 0 if found is None else version_of(found)
        origin = found or type(draft).__name__
        _check_vocabulary(draft, model)
    longest = draft.config.get_text_config().max_position_embeddings
    train, held_out = split(model, [r for r in rollouts if len(r.ids) <= longest], config)
    config = dataclasses.replace(config, precision=precision_of(config.precision))
    examples, tested = both_parts(model, train, held_out, config, begin, progress)
    progress("estimating the acceptance before training")
    before = estimate_draft(draft, model, tested, POSITIONS, seed=config.seed)
    generator = torch.Generator().manual_seed(config.seed)

    def loss(batch: Batch, share: float) -> torch.Tensor:
        return loss_of(draft, model, batch, config, generator)

    for parameter in draft.parameters():
        parameter.requires_grad_(True)
    for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
    learns = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    record = fit(draft, learns, loss, examples, config, begin, progress)
    progress("estimating the acceptance on what was held out")
    record |= {
        "trained_on": trained_on(train, examples),
        "started_from": origin,
        "parameters": {"all": sum(p.numel() for p in draft.parameters()), "trained": sum(p.numel() for p in learns)},
        "held_out_before": before,
        "held_out": estimate_draft(draft, model, tested, POSITIONS, seed=config.seed),
    }
    trained = TrainedDraft(draft, version + 1, record)
    if out is not None:
        trained.save(out, source)
    return trained


def loss_of(
    draft: PreTrainedModel, model: PreTrainedModel, batch: Batch, config: DraftConfig, generator: torch.Generator
) -> torch.Tensor:
    """Mean over output positions, `config.rows` of them at random; in nats."""
    base: Any = draft.base_model
    rows = batch.learn.nonzero()
    if len(rows) > config.rows:
        rows = rows[torch.randperm(len(rows), generator=generator)[: config.rows]]
    i, p = rows[:, 0], rows[:, 1]
    out = base(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).last_hidden_state
    heads: list[Any] = [model.get_output_embeddings(), draft.get_output_embeddings()]
    with torch.no_grad():
        wanted = torch.softmax(heads[0](batch.hidden[i, p]).float(), dim=-1)
    logits = heads[1](out[i, p]).float()
    loss = F.cross_entropy(logits, wanted)
    if config.token_weight:
        known = F.pad(batch.mask[:, 1:], (0, 1))[i, p].bool()
        ahead = F.pad(batch.ids[:, 1:], (0, 1))[i, p]
        loss = loss + config.token_weight * F.cross_entropy(logits[known], ahead[known])
    return loss


# ---- what it begins as


def spread(count: int, wanted: int) -> list[int]:
    """Of `count` layers the first ones and the last, `wanted` in all: the first read the embedding, the last writes
    what the LM head reads. ValueError if there are not so many."""
    if wanted > count:
        raise ValueError(f"layers: the target has {count} layers, not {wanted}")
    return [*range(wanted - 1), count - 1]


@torch.no_grad()
def some_layers(model: PreTrainedModel, chosen: Sequence[int]) -> PreTrainedModel:
    """A model of the same class with these layers, and embedding, final norm and LM head, copied. ValueError for a
    model whose layers cannot stand alone in a config."""
    from transformers import AutoModelForCausalLM

    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    for name, value in list(text.to_dict().items()):
        if isinstance(value, list) and len(value) == count and name != "architectures":  # something of each layer
            setattr(text, name, [value[i] for i in chosen])
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = sum(i < text.first_k_dense_replace for i in chosen)
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = [n for n, i in enumerate(chosen) if i in text.mlp_only_layers]
    text.num_hidden_layers = len(chosen)
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own: Any = draft.base_model
    base: Any = model.base_model
    pairs = [
        (draft.get_input_embeddings(), model.get_input_embeddings()),
        (draft.get_output_embeddings(), model.get_output_embeddings()),
        (own.norm, base.norm),
        *zip(own.layers, [base.layers[i] for i in chosen], strict=True),
    ]
    for to, source in pairs:
        try:
            to.load_state_dict(source.state_dict())
        except RuntimeError as error:
            raise ValueError(
                f"layers: layers {', '.join(map(str, chosen))} of a {text.model_type} make no model of their own "
                f"({error}); begin with a smaller model instead (start)"
            ) from error
    return draft.eval()


def _layers(model: PreTrainedModel) -> Any:
    base: Any = model.base_model
    if not hasattr(base, "layers") or not hasattr(base, "norm"):
        raise ValueError(
            f"layers: a {model.config.model_type} has no layers and norm of the usual names; begin with a smaller "
            "model instead (start)"
        )
    return base.layers


def _check_vocabulary(draft: PreTrainedModel, model: PreTrainedModel) -> None:
    own, wanted = (m.config.get_text_config().vocab_size for m in (draft, model))
    if own != wanted:
        raise ValueError(
            f"start: it has a vocabulary of {own} tokens, the target one of {wanted}; begin with a model that has the "
            "target's tokenizer"
        )
