"""Drafters that run a model with a KV cache of their own: a smaller model, or some of the target's own layers.

    propose: catch up with what was committed -> one pass a draft position, all samples together -> drafts

Each draft token is sampled as the target samples: the same noise (a function of seed and output position), penalties,
bans and filters. Where two distributions are close, the same noise mostly gives the same token (Gumbel coupling), so
that match verification accepts with a probability of at least (1 - TV) / (1 + TV), TV being their total variation
distance (Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").
Under verification by rejection the noise is the drafter's own.

KV of one sequence:

    committed tokens, computed      | ahead: computed too, the last committed tokens and drafts
    seq.num_computed_tokens ------->| what the target commits of these is kept, the others are written again

The memory is bounded: a sample that finds no room gets no drafts; those not asked for lately make room first.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from longtail.kernels.linear import RowRule
from longtail.kernels.sample import processed_logits, sample
from longtail.kv_manager.manager import KVManager
from longtail.partial_rollout.engines.native import loader
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache, make_kv
from longtail.partial_rollout.engines.native.decoder import Decoder
from longtail.partial_rollout.engines.native.numerics import Numerics
from longtail.partial_rollout.engines.native.sampler import Position, Sampler
from longtail.partial_rollout.engines.native.scheduler import Scheduled
from longtail.partial_rollout.engines.native.target import Target
from longtail.sample import Sample
from longtail.sequence import Sequence as EngineSequence
from longtail.spec_decode.drafter import Draft, DraftRequest
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_KEY = np.uint64(0x6C6F6E677461696C)
"""Drafts for rejection are drawn under seed ^ DRAFT_KEY: independent of all that the target draws under the seed."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """A sequence with KV."""

    seq: EngineSequence
    ahead: list[int] = dataclasses.field(default_factory=list)
    """Tokens behind seq.num_computed_tokens that are computed as well; see above."""

    @property
    def missing(self) -> list[int]:
        """Committed tokens that are not computed."""
        return self.seq.token_ids[self.seq.num_computed_tokens + len(self.ahead) :]


@dataclasses.dataclass(slots=True, eq=False)
class _Guess:
    """What one call makes for one sample."""

    held: Held
    length: int
    """Tokens to draft."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    probs: list[float] = dataclasses.field(default_factory=list)
    distributions: list[torch.Tensor] = dataclasses.field(default_factory=list)
    is_over: bool = False
    """The sample would end with the last token, or nothing can be drawn."""


class DecoderDrafter:
    """Owns its KV. kv_cache_bytes: memory for it; None: half of what the engine has. A step computes at most as many
    tokens as one of the engine's to catch up with what was committed (a prompt, a resumed sample)."""

    def __init__(self, name: str, kv_cache_bytes: int | None) -> None:
        if kv_cache_bytes is not None and kv_cache_bytes < 1:
            raise ValueError(f"kv_cache_bytes must be at least 1, or None for half of the engine's: {kv_cache_bytes}")
        self.name = name
        self.kv_cache_bytes = kv_cache_bytes
        self.decoder: Decoder | None = None
        self.kv: KVManager | None = None
        self._held: OrderedDict[str, Held] = OrderedDict()  # the one asked for last is last
        self._has_warned = False

    def _start(self, target: Target, decoder: Decoder, rule: RowRule, fingerprint: str) -> None:
        """Begins anew, for this engine. ValueError if there is not room for one sample."""
        config = target.config
        budget = config.kv_cache_bytes // 2 if self.kv_cache_bytes is None else self.kv_cache_bytes
        if decoder.spec.states:
            raise ValueError(
                f"drafter {self.name}: the model has layers with a recurrent or convolutional state, which cannot be "
                "rolled back when a draft is rejected; use another model"
            )
        try:
            self.kv = make_kv(
                decoder.spec,
                budget=budget,
                block_size=config.block_size,
                longest=min(target.max_model_len, decoder.spec.max_positions),
                max_num_seqs=config.max_num_seqs,
                max_rows=config.max_num_batched_tokens + config.max_num_seqs * config.block_size,  # a block for drafts
                fingerprint=Fingerprint(fingerprint),
                prefix_caching=config.enable_prefix_caching,
            )
        except ValueError as error:
            raise ValueError(f"drafter {self.name}: {error} (the drafter's own kv_cache_bytes)") from error
        self.decoder, self.rule, self.max_rows = decoder, rule, config.max_num_batched_tokens
        self._cache = Cache.of(self.kv)
        self._held.clear()
        self._is_drawn = config.verification == "rejection"
        # What ends a sample is the target's to say.
        self._sampler = Sampler(target.decoder.spec.eos_token_ids, raw_logprobs=False)

    def _reset(self, fingerprint: str) -> None:
        """The weights are other ones: no KV is kept."""
        if self.kv is not None:
            for sample_id in list(self._held):
                self._release(sample_id)
            self.kv.set_fingerprint(Fingerprint(fingerprint))

    def _follow(self) -> None:
        """Called before drafts are made: brings the weights up to date, where they are the target's."""

    # -- the drafter protocol -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if self.decoder is None:
            raise ValueError(f"drafter {self.name}: it belongs to no engine yet; give it to one (use_drafter)")
        self._follow()
        guesses = self._enter(requests)
        ready = self._catch_up([guess for guess in guesses if guess is not None])
        while ready := [guess for guess in ready if len(guess.tokens) < guess.length and not guess.is_over]:
            logits = self._forward([(guess.held, guess.tokens[-1:]) for guess in ready], list(range(len(ready))))
            self._draw(ready, logits)
        return [Draft([], self.name) if guess is None else self._draft(guess) for guess in guesses]

    def observe(self, sample: Sample, num_new: int) -> None:
        """It catches up when it is asked."""

    def forget(self, sample_id: str) -> None:
        if sample_id in self._held:
            self._release(sample_id)

    def check_integrity(self) -> None:
        """AssertionError if blocks do not add up, or anything is held for other than the samples that it knows."""
        if self.kv is not None:
            self.kv.check_integrity([held.seq for held in self._held.values()])

    # -- room ---------------------------------------------------------------------------------------------------------

    def _enter(self, requests: Sequence[DraftRequest]) -> list[_Guess | None]:
        """For each request a sequence with the blocks that it needs; None where there is no room, or nothing to do."""
        assert self.decoder is not None and self.kv is not None
        guesses: list[_Guess | None] = [None] * len(requests)
        asked = [r.sample.id for r in requests]
        known = [i for i, r in enumerate(requests) if self._is_known(r.sample)]
        for i in known:
            if asked[i] not in self._held:  # had to make room
                continue
            held = self._held[asked[i]]
            self._sync(held)
            # Earlier ones go first; those behind have not got what they need for this call.
            behind = [asked[j] for j in reversed(known) if j > i]
            guesses[i] = self._guess(held, requests[i].max_tokens, asked, behind)
        computing = {g.held.seq.sample.group_id for g in guesses if g is not None and self._computes_prompt(g.held)}
        for i, request in enumerate(requests):
            group = request.sample.group_id
            # The blocks of a group's prompt are computed once: siblings wait for the first one's.
            if i in known or request.max_tokens < 1 or group in computing:
                continue
            held = Held(EngineSequence(request.sample))
            self.kv.attach(held.seq)
            self._held[asked[i]] = held
            guesses[i] = self._guess(held, request.max_tokens, asked, [])
            if guesses[i] is not None and self._computes_prompt(held):
                computing.add(group)
        return guesses

    def _is_known(self, sample: Sample) -> bool:
        """Whether KV is held for this sample; brings the tokens up to date. KV of another sample of the same id, or of
        one that went on elsewhere with other tokens, is dropped."""
        held = self._held.get(sample.id)
        if held is None:
            return False
        seq = held.seq
        before = seq.token_ids
        if seq.sample is not sample:  # it may have come back from a store
            known = [*sample.prompt_ids, *sample.output_ids]
            if seq.sample.prompt_ids != sample.prompt_ids or known[: len(before)] != before:
                self._release(sample.id)
                return False
            seq.sample = sample
        before += sample.output_ids[len(before) - len(sample.prompt_ids) :]
        return True

    def _sync(self, held: Held) -> None:
        """What was committed of what is computed counts; the rest is rolled back. The last known token is left to
        compute."""
        assert self.kv is not None
        seq = held.seq
        rest = seq.token_ids[seq.num_computed_tokens : -1]
        pairs = zip(rest, held.ahead, strict=False)
        self.kv.advance(seq, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        held.ahead = []

    def _guess(self, held: Held, length: int, asked: list[str], behind: list[str]) -> _Guess | None:
        """None, and nothing held, if there is no room even without those not asked for, and those behind."""
        assert self.decoder is not None and self.kv is not None
        seq = held.seq
        length = min(length, self.decoder.spec.max_positions - seq.num_tokens + 1)  # the last draft is not computed
        if length < 1:
            return None
        self._held.move_to_end(seq.sample.id)
        needed = min(seq.num_tokens + length - 1, seq.num_computed_tokens + self.max_rows + length)
        if self.kv.reserve(seq, needed):
            return _Guess(held, length)
        live = set(asked)
        idle = [sample_id for sample_id in self._held if sample_id not in live]
        for victim in (*idle, *behind):
            if victim in self._held:
                self._release(victim)
                if self.kv.reserve(seq, needed):
                    return _Guess(held, length)
        self._release(seq.sample.id)
        return None

    def _computes_prompt(self, held: Held) -> bool:
        """Whether blocks that its siblings could share are not computed yet."""
        assert self.kv is not None
        seq, size = held.seq, self.kv.block_size
        return self.kv.prefix_caching and seq.num_computed_tokens < (len(seq.sample.prompt_ids) - 1) // size * size

    def _release(self, sample_id: str) -> None:
        assert self.kv is not None
        self.kv.release(self._held.pop(sample_id).seq)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _catch_up(self, guesses: list[_Guess]) -> list[_Guess]:
        """Computes what the sequences lack, those first that lack least. -> those that have their first token."""
        budget = self.max_rows
        parts, ready, rows = [], [], []
        for guess in sorted(guesses, key=lambda g: len(g.held.missing)):
            tokens = guess.held.missing
            if budget == 0:
                break
            parts.append((guess.held, tokens[:budget]))
            budget -= len(parts[-1][1])
            if len(parts[-1][1]) == len(tokens):
                ready.append(guess)
                rows.append(self.max_rows - budget - 1)
        if parts:
            logits = self._forward(parts, rows)
            self._draw(ready, logits)
        return ready

    def _forward(self, parts: list[tuple[Held, list[int]]], rows: list[int]) -> torch.Tensor:
        """Computes these tokens behind what each sequence has. -> logits of these rows."""
        assert self.decoder is not None
        logits = self.decoder.forward(self._batch(parts, rows), self._cache)
        for held, tokens in parts:
            held.ahead += tokens
        return logits[: len(rows)]

    def _batch(self, parts: list[tuple[Held, list[int]]], rows: list[int]) -> ForwardBatch:
        assert self.decoder is not None and self.kv is not None
        computed = [held.seq.num_computed_tokens for held, _ in parts]
        try:
            for held, _ in parts:
                held.seq.num_computed_tokens += len(held.ahead)
            scheduled = [Scheduled(held.seq, 0, tokens) for held, tokens in parts]
            return ForwardBatch.build(scheduled, self.kv, self.decoder.spec, self.rule, rows)
        finally:
            for (held, _), count in zip(parts, computed, strict=True):
                held.seq.num_computed_tokens = count

    def _draw(self, guesses: list[_Guess], logits: torch.Tensor) -> None:
        """The next token of each. logits: float32 [guesses, vocabulary], changed."""
        if not guesses:
            return
        batch = self._sampler.batch([Position(guess.held.seq.sample, guess.tokens) for guess in guesses])
        if self._is_drawn:
            batch.seeds = batch.seeds ^ DRAFT_KEY
        processed = processed_logits(logits, batch, in_place=True)
        faults: dict[int, str] = {}
        done = dataclasses.replace(batch, top_k=None, top_p=None, min_p=None, edits=None)
        tokens, logprobs = sample(processed, done, faults)
        if faults:
            self._warn(faults)
        for i, guess in enumerate(guesses):
            if i in faults:
                guess.is_over = True
                continue
            token = int(tokens[i])
            guess.tokens.append(token)
            if self._is_drawn:
                # It goes on to its full length whatever it draws: see `Draft.distributions`.
                guess.distributions.append(distribution(processed[i], float(batch.temperatures[i])))
            else:
                guess.probs.append(float(np.exp(logprobs[i])))
                guess.is_over = self._ends(guess.held.seq.sample, token)

    def _ends(self, sample: Sample, token: int) -> bool:
        """Whether the sample would end with this draft: it was banned if it were too early."""
        p = sample.params
        return token in p.stop_token_ids or (not p.ignore_eos and token in self._sampler.eos_token_ids)

    def _draft(self, guess: _Guess) -> Draft:
        if self._is_drawn and guess.tokens:
            return Draft(guess.tokens, self.name, distributions=torch.stack(guess.distributions))
        return Draft(guess.tokens, self.name, guess.probs)

    def _warn(self, faults: dict[int, str]) -> None:
        if not self._has_warned:
            self._has_warned = True
            what = next(iter(faults.values()))
            logger.warning("drafter %s: its logits have %s; samples get no drafts where that is so", self.name, what)


class ModelDrafter(DecoderDrafter):
    """Any model with the target's vocabulary, smaller than the target to be of use.

    model: as `NativeEngine`'s. numerics: exact: a draft does not depend on which other samples are drafted for.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        name: str = "draft_model",
        kv_cache_bytes: int | None = None,
        numerics: Numerics = "exact",
        fused: bool | None = None,
    ) -> None:
        super().__init__(name, kv_cache_bytes)
        loaded, source = loader.load_model(model)
        self.source = source or type(loaded).__name__
        self._own, self._own_rule = loader.build_decoder(loaded, numerics, fused=fused)
        self._updates = 0

    def bind(self, target: Target) -> None:
        own, wanted = self._own.spec.vocab_size, target.decoder.spec.vocab_size
        if own != wanted:
            raise ValueError(
                f"drafter {self.name}: {self.source} has a vocabulary of {own} tokens, the target one of {wanted}; use "
                "a draft model with the target's tokenizer"
            )
        self._start(target, self._own, self._own_rule, f"{self.name}/{self._updates}")

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """weights: a complete state dict of the draft model (a tied LM head may be left out). ValueError, with nothing
        changed, if it does not fit. Between steps only."""
        checked = loader.check_weights(self._own.parameter_shapes(), weights)
        with torch.no_grad():
            self._own.load_weights(checked)
        self._updates += 1
        self._reset(f"{self.name}/{self._updates}")


class SelfDrafter(DecoderDrafter):
    """Some of the target's own layers, its final norm and its head (Zhang et al. 2023, "Draft & Verify: lossless large
    language model acceleration via self-speculative decoding"). Shares the target's weights and follows its updates.

    layers: indices of those that run; None: the first half. (Of SmolLM2-135M's 30 layers the first 15 agree with the
    model on 12 % of its tokens, every second one on 2 %: a model that was not trained for it bears little skipping.)
    """

    def __init__(
        self, layers: Sequence[int] | None = None, *, name: str = "self", kv_cache_bytes: int | None = None
    ) -> None:
        super().__init__(name, kv_cache_bytes)
        if layers is not None and (not layers or list(layers) != sorted(set(layers)) or layers[0] < 0):
            raise ValueError(f"layers must be indices in rising order, each once, not {list(layers)}")
        self.layers = None if layers is None else tuple(layers)

    def bind(self, target: Target) -> None:
        count = len(target.decoder.spec.layers)
        self._chosen = tuple(range((count + 1) // 2)) if self.layers is None else self.layers
        if self._chosen[-1] >= count:
            raise ValueError(f"drafter {self.name}: layers names {self._chosen[-1]}, the target has {count} layers")
        self._target, self._weights = target, target.kv.fingerprint
        self._start(target, target.decoder.subset(self._chosen), target.rule, self._weights)

    def _follow(self) -> None:
        if self._target.kv.fingerprint != self._weights:
            self._weights = self._target.kv.fingerprint
            self.decoder = self._target.decoder.subset(self._chosen)
            self._reset(self._weights)


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits: float32 [V], processed -> float32 [V], what is sampled from; greedy: all of it on the largest logit, of
    equal ones that with the lowest id."""
    if temperature <= 0.0:
        greedy = torch.zeros_like(logits)
        greedy[int(logits.argmax())] = 1.0
        return greedy
    return torch.softmax(logits / temperature, dim=-1)
