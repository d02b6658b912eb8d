"""`ExactPolicy`: the policy that a trainer changes, whose log-probabilities are those of the rollout bit for bit.

What the engine records of a token, and what this computes again from weights and tokens alone:

    logprobs_mode "processed" (the default): log softmax(processed logits / temperature)[token]. Bans (min_tokens),
        penalties, and then min-p, top-k and top-p have changed the logits: the distribution that was sampled from.
        At temperature 0 (greedy) the temperature counts as 1.
    logprobs_mode "raw": log softmax(logits)[token].

Penalties and the temperature have a derivative. What min-p, top-k and top-p keep is a set that jumps as the weights
change: the gradient is that of the kept tokens' distribution, the set held fixed, and a token that the present weights
would exclude has the log-probability -inf (ratio 0).

Equal bits need the engine's weights, and KV that was made by them: of a token that was sampled on KV of older weights
(`kv_on_update="keep"`), or from a lossy snapshot, the record is of a mixture that no weights give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from longtail.errors import ExactNumericsUnavailable, UnsupportedModel
from longtail.kernels.logprobs import token_logprobs
from longtail.kernels.sample import SampleBatch, processed_logits
from longtail.partial_rollout.engines.native.adapters import Weights, check_adapters, is_adapted, plain_model
from longtail.partial_rollout.engines.native.decoder import FusedDecoder, weights_of
from longtail.partial_rollout.engines.native.differentiable import PackedSequences
from longtail.partial_rollout.engines.native.interface import InterfaceDecoder
from longtail.partial_rollout.engines.native.loader import Probe, check_weights, probe_ids
from longtail.partial_rollout.engines.native.sampler import Position, Sampler
from longtail.partial_rollout.engines.native.training_forward import (
    FusedForward,
    InterfaceForward,
    TrainingForward,
    twin_of,
)
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.native.engine import NativeEngine

LOGITS_AT_ONCE = 1 << 25
"""Logits that exist at a time, about: 128 MiB, and as much again for their gradient."""

PROBED = 24
"""Tokens, at least, on which bits and gradients are compared when a policy is made."""


class Packed(Protocol):
    """Prompts and outputs of S sequences, one after the other (`trainer_adapter.batch.Inputs`)."""

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [M]."""
        ...

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [S], prompt and output."""
        ...

    @property
    def prompt_lengths(self) -> torch.Tensor:
        """int64 [S]."""
        ...

    @property
    def logit_index(self) -> torch.Tensor:
        """int64 [N]: the rows of the input whose logits predict the N output tokens."""
        ...

    @property
    def labels(self) -> torch.Tensor:
        """int64 [N]: the output tokens."""
        ...


class ExactPolicy:
    """model: a causal LM of `transformers` in float32 on the CPU, or a `peft` model of one with LoRA layers. Its own
    parameters are trained: any optimiser of torch changes them, and they are read anew in each pass. engine: in exact
    numerics, with the same weights now; what is kept of it is its arithmetic, not its weights.

    checkpointing: in the backward pass compute each layer again from its input, which is then all that is kept of it.
    check: compare bits with the engine, and gradients with the model's own forward pass, on a few tokens.

    Memory: the model's parameters and their gradients. The engine has its own copy of the weights and goes on with the
    old ones until `engine.update_weights(policy.weights(), version)`. One layer is packed at a time, within the pass.

    ValueError: a model that is not float32 on the CPU, an engine that is not exact or has other weights.
    UnsupportedModel: adapters that cannot be merged, or an architecture for which the check finds other gradients than
    the model's own. ExactNumericsUnavailable: it finds other bits than the engine's.
    """

    def __init__(
        self, model: nn.Module, engine: NativeEngine, *, checkpointing: bool = False, check: bool = True
    ) -> None:
        if engine.config.numerics != "exact":
            raise ValueError(f"engine: its numerics are {engine.config.numerics!r}; make it with numerics='exact'")
        for name, tensor in model.named_parameters():
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError(
                    f"model: {name} is {tensor.dtype} on {tensor.device}; the exact pass is float32 on the CPU: load "
                    "it with dtype=torch.float32"
                )
        self.model = model
        self._plain = plain_model(model)
        check_adapters(self._plain)
        self._weights = Weights(self._plain)
        decoder = engine.decoder
        # Another model is told by its names and shapes, not by other bits.
        check_weights(decoder.parameter_shapes(), self._weights)
        self._rule, self._block_size, self._vocab = engine.row_rule, engine.config.block_size, engine.spec.vocab_size
        self._longest = engine.spec.max_positions
        self._raw = engine.config.logprobs_mode == "raw"
        self._sampler = Sampler(engine.spec.eos_token_ids, self._raw)
        twin = twin_of(self._plain)
        ids = probe_ids(engine.spec, PROBED)
        expected = _ordinary_gradients(twin, ids, self.parameters()) if check else None
        self._forward: TrainingForward
        if isinstance(decoder, FusedDecoder):
            self._forward = FusedForward(decoder, self._weights, checkpointing)
        else:
            assert isinstance(decoder, InterfaceDecoder)
            self._forward = InterfaceForward(decoder, twin, self._rule, checkpointing)
        if expected is not None:
            self._check(engine, ids, expected)

    # -- the policy protocol

    def logprobs(
        self,
        inputs: Packed,
        *,
        temperature: float | torch.Tensor = 1.0,
        params: Sequence[SamplingParams] | None = None,
    ) -> torch.Tensor:
        """float32 [N]: log-probability of each output token, as the engine records it, with gradients to `parameters`.

        temperature: of sampling, one or one a token, float [N]; params: what each of the S sequences was sampled with,
        where that is more than a temperature (then `temperature` is not read). With `logprobs_mode="raw"` neither
        counts. An observation's is what a policy would give it; the engine records 0.0.

        Whatever sequences are packed together, and in which order, a token's bits are its own. ValueError: a sequence
        without a prompt, longer than the model's positions, or with a token outside of the vocabulary."""
        lengths = inputs.lengths.tolist()
        if min(inputs.prompt_lengths.tolist(), default=1) < 1:
            raise ValueError("inputs.prompt_lengths: a sequence has no prompt; it needs at least one token")
        if max(lengths, default=0) > self._longest:
            raise ValueError(f"inputs.lengths: {max(lengths)} tokens, the model has {self._longest} positions")
        ids, labels = inputs.input_ids, inputs.labels
        if not len(labels):
            return torch.zeros(0)
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab:
            raise ValueError(f"inputs.input_ids must lie in 0..{self._vocab - 1}, the model's vocabulary")
        sampling = None if params is None or self._raw else _Sampling(self._sampler, inputs, params)
        if sampling is not None:
            temperatures = sampling.temperatures
        else:
            given = torch.as_tensor(1.0 if self._raw else temperature, dtype=torch.float32)
            temperatures = given.expand(len(labels)).contiguous()
        rows = PackedSequences.build(ids, lengths, self._rule, self._block_size)
        hidden = self._forward.hidden(rows)[inputs.logit_index]
        step = max(LOGITS_AT_ONCE // self._vocab, 1)
        parts = []
        for start in range(0, len(labels), step):
            piece = slice(start, start + step)
            batch = None if sampling is None else sampling.batch(piece)
            own = hidden[piece], labels[piece], temperatures[piece], batch
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._head, *own, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._head(*own))
        return torch.cat(parts)

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def weights(self) -> dict[str, torch.Tensor]:
        """For `engine.update_weights`: all weights by the names of the plain model, adapters merged. What is not merged
        is the parameter itself, not a copy: the next optimiser step changes it."""
        with torch.no_grad():
            return {name: weight.detach() for name, weight in self._weights.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For checkpoints, tied tensors once, not copied: all weights; of an adapted model what is trained."""
        if any(is_adapted(module) for module in self._plain.modules()):
            return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return weights_of(self.model)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """In place. ValueError, and nothing is changed, for names, shapes or dtypes that do not fit."""
        own = self.state_dict()
        if wrong := sorted(own.keys() ^ state.keys()):
            which = "missing" if wrong[0] in own else "unknown"
            raise ValueError(f"state: {wrong[0]} is {which}; is it of this model?")
        for name, tensor in own.items():
            if (found := state[name]).shape != tensor.shape or found.dtype != tensor.dtype:
                raise ValueError(
                    f"state: {name} is {found.dtype} {tuple(found.shape)}, the model has {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    # -- from hidden states to log-probabilities

    def _head(
        self, hidden: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, batch: SampleBatch | None
    ) -> torch.Tensor:
        count = len(hidden)
        logits = self._forward.logits(F.pad(hidden, (0, 0, 0, self._rule.padded(count) - count)))[:count]
        if batch is not None:
            logits = _Processed.apply(logits, batch)
        logprobs: torch.Tensor = token_logprobs(logits, labels, temperatures)
        return logprobs

    # -- the check

    def _check(self, engine: NativeEngine, ids: torch.Tensor, expected: dict[str, torch.Tensor | None]) -> None:
        kind = type(self._plain).__name__
        n = len(ids)
        want = Probe(engine.decoder, self._rule, self._block_size).run([(ids.tolist(), [n - 2, 1, 1])])[0]
        rows = PackedSequences.build(torch.cat([ids[:5], ids]), [5, n], self._rule, self._block_size)
        with torch.no_grad():
            hidden = self._forward.hidden(rows)[5 : 5 + n]
            got = self._forward.logits(F.pad(hidden, (0, 0, 0, self._rule.padded(n) - n)))[:n]
        if not torch.equal(got, want):
            error = (got - want).abs().max().item()
            if not error <= 1e-3 * max(1.0, want.abs().max().item()):
                raise ValueError(
                    f"engine: its weights are not the model's (logits differ by {error:.3g}); give both the same ones, "
                    "or update the engine's before the policy is made"
                )
            raise ExactNumericsUnavailable(
                f"model: the trainer's pass of {kind} gives other bits than the engine's (logits differ by {error:.3g})"
            )
        loss = self._probe_loss(ids)
        found = dict(zip(expected, _gradients(loss, self.parameters()), strict=True))
        whole = sum(float(g.double().square().sum()) for g in expected.values() if g is not None) ** 0.5
        for (name, g), own in zip(expected.items(), found.values(), strict=True):
            zero = torch.zeros(())
            a, b = (zero if x is None else x for x in (own, g))
            if not float((a - b).norm()) <= 1e-3 * float(b.norm()) + 1e-5 * whole:
                raise UnsupportedModel(
                    f"model: the exact pass of {kind} gives {name} another gradient than the model's own pass "
                    f"(norm of the difference {float((a - b).norm()):.3g}, of the gradient {float(b.norm()):.3g}); "
                    "train it with an ordinary forward pass, and measure the mismatch"
                )

    def _probe_loss(self, ids: torch.Tensor) -> torch.Tensor:
        rows = PackedSequences.build(ids, [len(ids)], self._rule, self._block_size)
        hidden = self._forward.hidden(rows)[: len(ids) - 1]
        return _weighed(self._head(hidden, ids[1:], torch.ones(len(ids) - 1), None))


class _Sampling:
    """What the output tokens were sampled with."""

    def __init__(self, sampler: Sampler, inputs: Packed, params: Sequence[SamplingParams]) -> None:
        lengths, prompts = inputs.lengths.tolist(), inputs.prompt_lengths.tolist()
        if len(params) != len(lengths):
            raise ValueError(f"params: {len(params)} for {len(lengths)} sequences; give one each")
        self._sampler = sampler
        self._samples: list[Sample] = []
        self._outputs: list[list[int]] = []
        for ids, prompt, own in zip(inputs.input_ids.split(lengths), prompts, params, strict=True):
            known = ids.tolist()
            self._samples.append(
                Sample(id="", group_id="", index=0, prompt_ids=tuple(known[:prompt]), params=own, seed=0)
            )
            self._outputs.append(known[prompt:])
        self._rows = [(s, i) for s, output in enumerate(self._outputs) for i in range(len(output))]

    @property
    def temperatures(self) -> torch.Tensor:
        """float32 [N]."""
        return torch.tensor([self._samples[s].params.temperature for s, _ in self._rows])

    def batch(self, piece: slice) -> SampleBatch:
        """Of some of the N rows, by what came before each."""
        return self._sampler.batch([Position(self._samples[s], self._outputs[s][:i]) for s, i in self._rows[piece]])


class _Processed(torch.autograd.Function):
    """Bans, penalties and filters of each row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        ctx.slopes = []
        if batch.edits is not None:
            for i in range(len(logits)):
                tokens, factors, _ = batch.edits.row(i)
                if len(tokens):
                    where, factor = torch.from_numpy(tokens).long(), torch.from_numpy(factors)
                    x = logits[i, where]
                    ctx.slopes.append((i, where, torch.where(x > 0, 1 / factor, factor)))
        out = processed_logits(logits.detach(), batch)
        return out.clone() if out.data_ptr() == logits.data_ptr() else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.slopes:  # what is excluded has gradient 0 from behind
            grad = grad.clone()
            for i, where, slope in ctx.slopes:
                grad[i, where] *= slope
        return grad, None


def _weighed(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss that no symmetry makes small."""
    return (logprobs * torch.linspace(-1, 1.5, len(logprobs))).sum()


def _gradients(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[torch.Tensor | None]:
    return torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()


def _ordinary_gradients(
    model: Any, ids: torch.Tensor, parameters: Sequence[nn.Parameter]
) -> dict[str, torch.Tensor | None]:
    """By the model's own forward pass."""
    model.set_experts_implementation("eager")
    names = {id(p): name for name, p in model.named_parameters()}
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    loss = _weighed(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0])
    found = _gradients(loss, parameters)
    return {names[id(p)]: g for p, g in zip(parameters, found, strict=True)}
