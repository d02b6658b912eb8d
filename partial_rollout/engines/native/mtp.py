"""The drafter that runs a multi-token-prediction head (`mtp_head.py`) behind the target.

    pass of the target -> hidden states of what was committed -> take_hidden
    propose: rows of the committed tokens, on these -> first draft -> rows of drafts, on the head's own output -> more

A row is (token p, hidden state p - 1). The head keeps KV of its own rows, found by prefix as the target's is. Rows of
drafts are always written again: by then the target's hidden state is there.

Where the target did not compute (a prefix that it found in its cache, a snapshot) nobody has hidden states. If the head
has KV of these rows, from a sibling or from before a pause, it goes on; else it reads zeros for them, row by row, and
drafts a little worse. It can only be slower: what is drafted is verified.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longtail.kernels.linear import Backend, PackedLinear
from longtail.partial_rollout.engines.native import loader
from longtail.partial_rollout.engines.native.interface import row_invariant_norm
from longtail.partial_rollout.engines.native.model_drafter import DecoderDrafter, Held
from longtail.partial_rollout.engines.native.mtp_head import MTPHead
from longtail.partial_rollout.engines.native.target import Target
from longtail.sample import Sample
from longtail.spec_decode.drafter import Draft, DraftRequest
from longtail.version import Fingerprint

MOST_TAILS = 256
"""Prompts whose last block's hidden states are kept for siblings."""


@dataclasses.dataclass(slots=True)
class _Known:
    """Hidden states of positions start to end - 1; those before were used, or are not known."""

    start: int
    end: int
    chunks: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def add(self, hidden: torch.Tensor) -> None:
        self.chunks.append(hidden)
        self.end += len(hidden)

    def cut(self, start: int, end: int) -> None:
        """To these positions, within what is known."""
        start, end = max(start, self.start), max(min(end, self.end), self.start)
        if (start, end) != (self.start, self.end):
            whole = torch.cat(self.chunks)[start - self.start : end - self.start] if start < end else None
            self.chunks = [] if whole is None else [whole.clone()]
            self.start, self.end = min(start, end), end

    def rows(self, start: int, stop: int, size: int) -> torch.Tensor:
        """float32 [stop - start, size], zeros where nothing is known."""
        out = torch.zeros(stop - start, size)
        low, high = max(start, self.start), min(stop, self.end)
        if low < high:
            out[low - start : high - start] = torch.cat(self.chunks)[low - self.start : high - self.start]
        return out


class MTPDrafter(DecoderDrafter):
    """head: or the directory of one. length: most tokens that it drafts at once. kv_cache_bytes: of the head's own KV;
    None: what it needs to hold as many tokens as the engine."""

    wants_hidden = True

    def __init__(
        self,
        head: MTPHead | str | Path,
        *,
        name: str = "mtp",
        length: int = 4,
        kv_cache_bytes: int | None = None,
    ) -> None:
        super().__init__(name, kv_cache_bytes)
        if length < 1:
            raise ValueError(f"length must be at least 1, not {length}")
        self.head = head if isinstance(head, MTPHead) else MTPHead.load(head)
        self.length = length
        self._bytes = kv_cache_bytes
        self._known: OrderedDict[str, _Known] = OrderedDict()  # the one heard of last is last
        self._tails: OrderedDict[tuple[int, ...], _Known] = OrderedDict()  # by prompt
        self._true: dict[str, int] = {}  # of a held sequence's rows ahead, those on the target's hidden states
        self._last: dict[str, torch.Tensor] = {}  # [hidden], the head's output on the last row

    @torch.no_grad()
    def bind(self, target: Target) -> None:
        self.head.check_target_of(target.decoder)
        # The target's numerics are not needed here: a draft's bits change no token.
        block, config = copy.deepcopy(self.head.block), target.config
        decoder, rule = loader.build_decoder(block, "fast", block_size=config.block_size)
        enough = max(2 * config.kv_cache_bytes // len(target.decoder.spec.layers), 1 << 20)
        self.kv_cache_bytes = enough if self._bytes is None else self._bytes
        self._known.clear()
        self._tails.clear()
        self._true.clear()
        self._last.clear()
        self._target = target
        self._start(target, decoder, rule, target.kv.fingerprint)
        self._join = _Join(self.head, rule.backend)
        self._rows: PackedLinear | None = None
        self._refresh()

    # -- what the target tells ----------------------------------------------------------------------------------------

    def take_hidden(self, sample: Sample, start: int, hidden: torch.Tensor) -> None:
        """hidden: float32 [n, hidden], what the target's LM head reads at positions start to start + n - 1. All of
        these are committed tokens. It is copied. Positions that were there already are computed again (other weights,
        a failed step): what was made of them is dropped."""
        self._follow()
        known = self._known.get(sample.id)
        if known is None or not known.start <= start <= known.end:
            self._drop(sample.id)
            known = self._known[sample.id] = self._begin(sample, start)
        elif start < known.end:
            held = self._held.get(sample.id)
            if held is not None and held.seq.num_computed_tokens + self._true.get(sample.id, 0) > start + 1:
                self._release(sample.id)
            known.cut(known.start, start)
        known.add(hidden.clone())
        self._known.move_to_end(sample.id)
        self._keep_tail(sample, known)
        self._bound()

    def _begin(self, sample: Sample, start: int) -> _Known:
        tail = self._tails.get(sample.prompt_ids)
        if tail is None or not tail.start < start <= tail.end:
            return _Known(start, start)
        return _Known(tail.start, start, [tail.rows(tail.start, start, self._join.size)])

    def _keep_tail(self, sample: Sample, known: _Known) -> None:
        """Hidden states of a prompt's last, partly filled block, for siblings: the target finds such a block and does
        not compute it; the head finds whole blocks only."""
        assert self.kv is not None
        end = len(sample.prompt_ids) - 1
        start = max(end // self.kv.block_size * self.kv.block_size - 1, 0)
        if known.start <= start < end <= known.end and sample.prompt_ids not in self._tails:
            self._tails[sample.prompt_ids] = _Known(start, end, [known.rows(start, end, self._join.size)])
            if len(self._tails) > MOST_TAILS:
                self._tails.popitem(last=False)

    def _bound(self) -> None:
        """Samples that left without a word (paused, gone on elsewhere) do not pile up."""
        assert self.kv is not None
        most = self.kv.num_blocks * self.kv.block_size
        while len(self._known) > 1 and sum(k.end - k.start for k in self._known.values()) > most:
            self._drop(next(iter(self._known)))

    def _drop(self, sample_id: str) -> None:
        self._known.pop(sample_id, None)
        if sample_id in self._held:
            self._release(sample_id)

    def forget(self, sample_id: str) -> None:
        self._drop(sample_id)

    def _follow(self) -> None:
        if self.kv is not None and self.kv.fingerprint != self._target.kv.fingerprint:
            # Held rows stay until the target computes theirs again, which it does unless it keeps its KV, too.
            self.kv.set_fingerprint(Fingerprint(self._target.kv.fingerprint))
            self._tails.clear()
            self._refresh()

    def _refresh(self) -> None:
        """The LM head's rows of the tokens that may be drafted."""
        if self.head.vocabulary is not None:
            rows = self._target.decoder.head_rows(self.head.vocabulary)
            self._rows = None if rows is None else PackedLinear([rows], None, self._target.rule.backend)

    # -- drafts -------------------------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        wanted = [min(r.max_tokens, self.length) if self._is_ready(r.sample) else 0 for r in requests]
        return super().propose([DraftRequest(r.sample, n) for r, n in zip(requests, wanted, strict=True)])

    def _is_ready(self, sample: Sample) -> bool:
        known = self._known.get(sample.id)
        return known is not None and known.end == sample.num_tokens - 1

    def _sync(self, held: Held) -> None:
        assert self.kv is not None
        seq = held.seq
        # The last known token's row is left to compute.
        self.kv.advance(seq, min(self._true.pop(seq.sample.id, 0), seq.num_tokens - 1 - seq.num_computed_tokens))
        held.ahead = []
        if (known := self._known.get(seq.sample.id)) is not None:
            known.cut(seq.num_computed_tokens - 1, known.end)

    def _release(self, sample_id: str) -> None:
        self._true.pop(sample_id, None)
        self._last.pop(sample_id, None)
        super()._release(sample_id)

    def _forward(self, parts: list[tuple[Held, list[int]]], rows: list[int]) -> torch.Tensor:
        assert self.decoder is not None
        batch = self._batch(parts, rows)
        size = self._join.size
        states = torch.zeros(len(batch.input_ids), size)
        first = 0
        for held, tokens in parts:
            sample_id = held.seq.sample.id
            start = held.seq.num_computed_tokens + len(held.ahead)
            if start < held.seq.num_tokens:
                stop = start + len(tokens)
                states[first : first + len(tokens)] = self._known[sample_id].rows(start - 1, stop - 1, size)
                self._true[sample_id] = len(held.ahead) + len(tokens)
            else:
                states[first] = self._last[sample_id]
            first += len(tokens)
        joined = self._join(states, self._target.decoder.embed(batch.input_ids))
        hidden = self.decoder.hidden(batch, self._cache, joined)
        first = 0
        for held, tokens in parts:
            first += len(tokens)
            held.ahead += tokens
            self._last[held.seq.sample.id] = hidden[first - 1]
        return self._logits(hidden[rows])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden] -> float32 [R, the target's vocabulary], -inf where the head does not draft."""
        allowed = self.head.vocabulary
        if allowed is None:
            return self._target.decoder.logits(hidden)
        logits = torch.full((len(hidden), self._target.decoder.spec.vocab_size), -torch.inf)
        if self._rows is not None:
            logits[:, allowed] = self._rows(hidden)
        else:
            logits[:, allowed] = self._target.decoder.logits(hidden)[:, allowed]
        return logits


class _Join:
    """`MTPHead.join` on packed weights."""

    def __init__(self, head: MTPHead, backend: Backend) -> None:
        self.size = head.eh_proj.out_features
        self._enorm: Any = row_invariant_norm(head.enorm) or copy.deepcopy(head.enorm)
        self._hnorm: Any = row_invariant_norm(head.hnorm) or copy.deepcopy(head.hnorm)
        self._proj = PackedLinear([head.eh_proj.weight.detach().float()], None, backend)

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        return self._proj(torch.cat([self._enorm(embeds), self._hnorm(hidden)], dim=-1))
