"""The model that is trained, as the trainer sees it: log-probabilities with gradients, parameters, weights to send.

Log-probabilities mean what the rollout recorded: of the output tokens under softmax(logits / temperature), the
distribution that they were sampled from (`NativeConfig.logprobs_mode="processed"`), in natural logarithms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from longtail.kernels.linear_logprobs import LOGITS_PER_CHUNK, linear_token_logprobs
from longtail.kernels.logprobs import token_logprobs
from longtail.trainer_adapter.batch import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Policy(Protocol):
    def logprobs(self, inputs: Inputs, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
        """S sequences with N output tokens -> float32 [N], with gradients where they are enabled: of inputs.labels at
        inputs.logit_index under softmax(logits / temperature). temperature: one number, or float [N]. A sequence sees
        itself alone."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those that are trained, in an order that never changes."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """What `Engine.update_weights` takes: all of the model's weights under the model's names, as they are now (not
        copies)."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For checkpoints: enough to be the same policy, bit for bit, once `load_state_dict` has read it. No two
        tensors share memory."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """ValueError, and nothing is changed, for names or shapes that do not fit."""
        ...


class Reference(Protocol):
    """What a KL penalty is against."""

    def logprobs(self, inputs: Inputs, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor: ...


class TransformersPolicy:
    """Any `transformers` causal LM.

    Sequences are padded on the right to the longest of the micro-batch: causal models, with attention or with states,
    never look there, so that no sequence sees another one or a pad. The head runs on the rows that predict output
    tokens only, `rows_per_chunk` at a time (None: 2**25 logits' worth), forward and backward, so that logits of all
    rows never exist.

    model: on its device, changed in place; trained are the parameters that require gradients (`freeze_parameters`).
    gradient_checkpointing: the layers' activations are computed again in the backward pass. Dropout is off in any case:
    the policy that is trained is the one that sampled."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        gradient_checkpointing: bool = False,
        rows_per_chunk: int | None = None,
    ) -> None:
        self.model: Any = model
        self.rows_per_chunk = rows_per_chunk or max(1, LOGITS_PER_CHUNK // max(1, int(model.config.vocab_size)))
        if gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            _without_dropout(model.train())  # checkpointing is for the training mode only
        else:
            model.eval()
        self._plain_head = self._has_plain_head()

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def logprobs(self, inputs: Inputs, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
        labels, rows = inputs.labels, self.hidden(inputs)[inputs.logit_index]
        head = self.model.get_output_embeddings()
        if self._plain_head:
            chunk = self.rows_per_chunk
            found: torch.Tensor = linear_token_logprobs(
                rows, head.weight, labels, temperature, bias=head.bias, rows_per_chunk=chunk
            )
            return found
        temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=rows.device).expand(len(labels))
        parts = [
            checkpoint(self._chunk, *part, use_reentrant=False)
            for part in zip(*(x.split(self.rows_per_chunk) for x in (rows, labels, temperatures)), strict=True)
        ]
        return torch.cat(parts) if parts else rows.new_zeros(0)

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """What the head reads, of every input token: [M, H], packed."""
        lengths = inputs.lengths
        width = int(lengths.max()) if len(lengths) else 0
        real = torch.arange(width, device=lengths.device) < lengths[:, None]
        ids = torch.zeros(real.shape, dtype=torch.int64, device=lengths.device)
        ids = ids.masked_scatter(real, inputs.input_ids)
        out: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return out[real]

    def _chunk(self, rows: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = token_logprobs(self._logits(rows), labels, temperatures)
        return found

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V], by the whole model's forward, for what it does with the logits (a scale, a soft cap)."""
        base = self.model.base_model
        own = base.__dict__.get("forward")
        base.forward = lambda *_, **__: self._output(last_hidden_state=rows[None])
        try:
            ids = torch.zeros(1, len(rows), dtype=torch.long, device=rows.device)
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            if own is None:
                del base.forward
            else:
                base.forward = own
        return logits

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        """Whether logits are the hidden states times the head's weight, and nothing else."""
        ids = torch.arange(min(4, int(self.model.config.vocab_size)), device=self.device)[None]
        out = self.model.base_model(input_ids=ids, use_cache=False)
        self._output = type(out)
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return False
        expected = self.model(input_ids=ids, use_cache=False).logits
        return torch.allclose(F.linear(out.last_hidden_state, head.weight, head.bias), expected, 1e-4, 1e-4)

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return own_tensors(self.model)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        copy_into(self.state_dict(), state)


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their names in the state dict, those that are tied once."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = {name: t for name, t in model.state_dict().items() if name not in tied and isinstance(t, torch.Tensor)}
    return tensors | others


@torch.no_grad()
def copy_into(own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit, in place. ValueError, before anything is changed, for names, shapes or dtypes that do not fit."""
    if wrong := sorted(own.keys() ^ state.keys()):
        which = "is missing" if wrong[0] in own else "is unknown"
        raise ValueError(f"state: {wrong[0]} {which} ({len(wrong)} names do not fit); is it of another model?")
    for name, tensor in own.items():
        if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
            raise ValueError(
                f"state: {name} is {state[name].dtype} {tuple(state[name].shape)}, the model has {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    for name, tensor in own.items():
        tensor.copy_(state[name])


def freeze_parameters(model: nn.Module, pattern: str) -> None:
    """Parameters whose names match this regular expression (`re.search`) are not trained. ValueError if it is none, or
    nothing would be left."""
    try:
        frozen = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"freeze {pattern!r} is no regular expression: {error}") from error
    for name, parameter in model.named_parameters():
        if frozen.search(name):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"freeze {pattern!r} leaves no parameter to train")


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():  # what attention functions are given
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
