"""Given tokens computed piece by piece under changing weights: the KV that an engine with `kv_on_update="keep"` has.

    tokens    | prompt and first outputs |       continuation      |
    KV of     |  v0  |  v1  | ... | v-1 |            v             |   keep: each piece on the KV that is there
              |                      v                             |   recompute

At an update an engine has computed all known tokens but the last, so of a sample of n known tokens n - 1 positions are
stale, and the first row that the new weights compute is the one that chooses token n.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache, make_kv
from longtail.partial_rollout.engines.native.scheduler import Scheduled
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence as Running
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from longtail.kv_manager.snapshot import Snapshot
    from longtail.partial_rollout.engines.native.engine import NativeEngine


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """A sample that was cut by an update."""

    ids: tuple[int, ...]
    """Prompt, stale output tokens, continuation."""
    prompt: int
    """Prompt tokens."""
    known: int
    """Tokens known at the update."""

    @property
    def stale(self) -> int:
        """Positions whose KV the update makes stale."""
        return self.known - 1

    @property
    def targets(self) -> torch.Tensor:
        """int64 [len(ids) - known]: the continuation."""
        return torch.tensor(self.ids[self.known :])


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """Which version computed which positions before the newest one takes over."""

    pieces: tuple[tuple[int, float], ...]
    """(version, share of the stale output tokens by its end), in order; the first one computes the prompt as well, the
    last share is 1."""

    @property
    def mixed(self) -> bool:
        return len(self.pieces) > 1

    @property
    def made_by(self) -> int:
        """The oldest version in it, which computed the prompt."""
        return self.pieces[0][0]

    def mean_age(self, newest: int) -> float:
        """Of the stale output tokens."""
        shares = [0.0, *(share for _, share in self.pieces)]
        widths = [b - a for a, b in itertools.pairwise(shares)]
        return sum((newest - v) * width for (v, _), width in zip(self.pieces, widths, strict=True))

    def stop(self, context: Context, share: float) -> int:
        """First position after a piece."""
        return context.prompt + round(share * (context.stale - context.prompt))


class Replay:
    """Runs an engine's decoder, with the weights that the engine has at the moment, on a KV cache of its own. Between
    pieces the KV lies in host memory, in snapshots, as that of a paused sample does."""

    def __init__(self, engine: NativeEngine, longest: int) -> None:
        """longest: tokens of a context."""
        self.decoder, self.rule, config = engine.decoder, engine.row_rule, engine.config
        self.max_rows = config.max_num_batched_tokens
        self.kv = make_kv(
            self.decoder.spec,
            budget=1 << 40,  # pages that are never touched
            block_size=config.block_size,
            longest=longest,
            max_num_seqs=1,
            max_rows=self.max_rows,
            most_blocks=-(-longest // config.block_size),
            fingerprint=Fingerprint("replay"),
            prefix_caching=False,
        )
        self.cache = Cache.of(self.kv)

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], saved: Snapshot | None, stop: int) -> Snapshot:
        """Computes the positions from the end of `saved` to before `stop`. -> the KV of all of them."""
        seq = self._start(ids, saved)
        self._compute(seq, stop, logits=False)
        snapshot = self.kv.save(seq)
        self.kv.release(seq)
        assert snapshot is not None
        return snapshot

    @torch.inference_mode()
    def logits(self, context: Context, saved: Snapshot | None) -> torch.Tensor:
        """Computes what `saved` lacks. -> float32 [len(context.targets), vocab]: those that choose the continuation."""
        seq = self._start(context.ids, saved)
        self._compute(seq, context.stale, logits=False)
        found = self._compute(seq, len(context.ids) - 1, logits=True)
        self.kv.release(seq)
        return torch.cat(found)

    def _start(self, ids: Sequence[int], saved: Snapshot | None) -> Running:
        sample = Sample(id="s", group_id="g", index=0, prompt_ids=tuple(ids), params=SamplingParams(), seed=0)
        seq = Running(sample)
        self.kv.attach(seq)
        if saved is not None:
            restored = self.kv.restore(seq, saved)
            assert restored and seq.num_computed_tokens == saved.num_tokens
        return seq

    def _compute(self, seq: Running, stop: int, *, logits: bool) -> list[torch.Tensor]:
        found = []
        while seq.num_computed_tokens < stop:
            count = min(stop - seq.num_computed_tokens, self.max_rows)
            reserved = self.kv.reserve(seq, seq.num_computed_tokens + count)
            assert reserved
            rows = list(range(count)) if logits else []
            batch = ForwardBatch.build([Scheduled(seq, count)], self.kv, self.decoder.spec, self.rule, rows)
            out = self.decoder.forward(batch, self.cache)
            if logits:
                found.append(out[:count])
            self.kv.advance(seq, count)
        return found
