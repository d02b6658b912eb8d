"""What the audit needs of an engine (`AuditedEngine`), an adapter for the engines of this project, and the audit's own
drafters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from longtail.bench.spec_audit_reference import Book, Tokens
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.choice import FirstOf, make_drafter
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from longtail.partial_rollout.engine import Engine
    from longtail.partial_rollout.engines.native.target import Target

Verification = Literal["match", "rejection"]
DraftChoice = str | Drafter
"""A drafter of the engine by its name, or one of the audit's."""


@dataclasses.dataclass(slots=True)
class Completion:
    """One sample as an engine gives it back."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token, under the distribution that it was sampled from."""
    finish_reason: str
    """"stop" or "length"; anything else is a failure."""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it."""
    drafts: list[tuple[int, list[int]]] | None = None
    """(output tokens before it, its tokens) of every draft proposed, in order; None if the engine does not tell."""

    def decided(self, start: int = 0, stop: int | None = None) -> tuple[int, int]:
        """-> draft tokens that the verification accepted, and rejected, at output positions in [start, stop)."""
        accepted = rejected = 0
        stop = len(self.tokens) if stop is None else min(stop, len(self.tokens))
        for first, draft in self.drafts or ():
            for i, token in enumerate(draft, first):
                if i >= stop:
                    break
                same = self.tokens[i] == token
                if i >= start:
                    accepted, rejected = accepted + same, rejected + (not same)
                if not same:
                    break
        return accepted, rejected


class AuditedEngine(Protocol):
    """An engine seen from outside: it generates, with one drafter or another, or without."""

    name: str
    verification: Verification
    """match: claims that drafting changes no sample; rejection: claims that it changes no distribution."""
    exact: bool
    """Claims bit-equal tokens and log-probabilities whatever else runs; else up to rounding."""
    vocab_size: int
    eos: Tokens
    takes_drafters: bool
    """Whether `use` takes the audit's drafters besides the engine's own."""
    refuses: tuple[str, ...]
    """Sampling parameters that it does not take: they are left out of the requests, and the report says so."""
    decode: Callable[[Sequence[int]], str] | None
    """For stop strings; None: they are not audited."""

    def use(self, drafter: DraftChoice | None, length: int = 0) -> None:
        """Drafts from here on up to `length` tokens a step with a fresh drafter; None: no drafts."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Completion]:
        """One sample for each prompt, all in one batch, in order. RuntimeError if a sample fails."""
        ...


class AuditDrafter:
    """Guesses what a book says, to the end of the draft, and where it says nothing an arbitrary token: a pure function
    of prompt and output, independent of the noise with which the target samples."""

    def __init__(self, name: str, vocab_size: int, book: Book) -> None:
        self.name, self.vocab_size, self.book = name, vocab_size, book

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            prompt, output = request.sample.prompt_ids, tuple(request.sample.output_ids)
            tokens: list[int] = []
            for _ in range(request.max_tokens):
                token = self.book(prompt, output)
                tokens.append(arbitrary(output, self.vocab_size) if token is None else token)
                output = (*output, tokens[-1])
            drafts.append(Draft(tokens, self.name))
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        pass

    def forget(self, sample_id: str) -> None:
        pass


def arbitrary(output: Tokens, below: int) -> int:
    """A number that depends on the output, and on nothing else."""
    mixed = 2166136261
    for token in output[-4:]:
        mixed = (mixed ^ (token + len(output))) * 16777619 & 0xFFFFFFFF
    return (mixed >> 8) % below


class Recorder:
    """Notes what a drafter proposes."""

    def __init__(self, drafter: Drafter, notes: dict[str, list[tuple[int, list[int]]]]) -> None:
        self.drafter, self.notes, self.name = drafter, notes, drafter.name

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self.drafter.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if draft.tokens:
                entry = (len(request.sample.output_ids), list(draft.tokens))
                self.notes.setdefault(request.sample.id, []).append(entry)
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        self.drafter.observe(sample, num_new)

    def forget(self, sample_id: str) -> None:
        self.drafter.forget(sample_id)


class ModelRecorder(Recorder):
    """Of a drafter that runs a model of the native engine (`engines/native/target.py`)."""

    @property
    def wants_hidden(self) -> bool:
        return bool(getattr(self.drafter, "wants_hidden", False))

    def bind(self, target: Target) -> None:
        cast(Any, self.drafter).bind(target)

    def take_hidden(self, sample: Sample, start: int, hidden: torch.Tensor) -> None:
        cast(Any, self.drafter).take_hidden(sample, start, hidden)


def recorded(drafter: Drafter, notes: dict[str, list[tuple[int, list[int]]]]) -> Drafter:
    """The same drafter, with notes of what it proposes. Of a composition each part is noted: one is asked where those
    before it are silent, so what is noted is what the composition proposes."""
    if isinstance(drafter, FirstOf):
        return FirstOf([recorded(part, notes) for part in drafter.drafters])
    return (ModelRecorder if hasattr(drafter, "bind") else Recorder)(drafter, notes)


class EngineUnderAudit:
    """An `Engine` of this project. use_drafter: makes it draft with this drafter, up to so many tokens a step; make:
    the drafter of a name, by default `make_drafter`."""

    def __init__(
        self,
        engine: Engine,
        use_drafter: Callable[[Drafter | None, int], None],
        *,
        vocab_size: int,
        eos: Tokens,
        exact: bool,
        verification: Verification = "match",
        decode: Callable[[Sequence[int]], str] | None = None,
        make: Callable[[str], Drafter] = make_drafter,
    ) -> None:
        self.engine, self.use_drafter, self.make = engine, use_drafter, make
        self.name = engine.name
        self.vocab_size, self.eos, self.exact, self.verification = vocab_size, eos, exact, verification
        self.decode = decode
        self.takes_drafters = True
        self.refuses: tuple[str, ...] = ()
        self._notes: dict[str, list[tuple[int, list[int]]]] | None = None
        self._ids = itertools.count()

    def use(self, drafter: DraftChoice | None, length: int = 0) -> None:
        self._notes = None
        if drafter is None:
            self.use_drafter(None, 0)
            return
        self._notes = {}
        made = self.make(drafter) if isinstance(drafter, str) else drafter
        self.use_drafter(recorded(made, self._notes), length)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Completion]:
        call = next(self._ids)
        samples = [
            Sample(id=f"audit-{call}/{i}", group_id=f"audit-{call}", index=i, prompt_ids=tuple(p), params=q, seed=s)
            for i, (p, q, s) in enumerate(zip(prompts, params, seeds, strict=True))
        ]
        self.engine.add(samples)
        while self.engine.has_work:
            self.engine.step()
        for sample in samples:
            if sample.status != "finished" or sample.finish_reason not in ("stop", "length"):
                why = sample.failure or sample.finish_reason
                raise RuntimeError(f"engine {self.name}: sample {sample.id} is {sample.status} ({why})")
        return [
            Completion(
                s.output_ids,
                s.logprobs,
                str(s.finish_reason),
                s.stop_reason,
                None if self._notes is None else self._notes.pop(s.id, []),
            )
            for s in samples
        ]


def native_engine(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    numerics: Literal["exact", "fast"] = "exact",
    slots: int = 128,
    max_model_len: int = 512,
    threads: int | None = None,
) -> EngineUnderAudit:
    """The native engine on a model; settings as in `NativeConfig`. ValueError if the model cannot draft."""
    from longtail import NativeEngine
    from longtail.partial_rollout.engines.native.drafters import native_drafter
    from longtail.spec_decode.controller import FixedLength

    engine = NativeEngine(
        model,
        tokenizer=tokenizer,
        numerics=numerics,
        max_num_seqs=slots,
        max_num_batched_tokens=max(8 * slots, 512),
        max_model_len=max_model_len,
        block_size=16,
        threads=threads,
    )
    engine.use_drafter("ngram")  # a model that cannot is refused before anything is measured
    engine.use_drafter(None)

    def use(drafter: Drafter | None, length: int) -> None:
        engine.use_drafter(drafter, FixedLength(length) if drafter is not None else None)

    return EngineUnderAudit(
        engine,
        use,
        vocab_size=engine.spec.vocab_size,
        eos=tuple(engine.spec.eos_token_ids),
        exact=numerics == "exact",
        decode=None if tokenizer is None else tokenizer.decode,
        make=lambda name: native_drafter(name, numerics),
    )


TINY_VOCAB = 96


def tiny_model(head_dim: int = 16, vocab_size: int = TINY_VOCAB) -> tuple[Any, Any]:
    """A random Llama of one layer whose logits depend on the whole context, and a tokenizer with one character a token:
    an audit of it takes seconds."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(0x4E00 + i): 3 + i for i in range(vocab_size - 3)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer)
