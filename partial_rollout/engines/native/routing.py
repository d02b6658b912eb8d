"""The routing of a mixture-of-experts model, from the cache to the samples.

The experts of each position lie in the cache beside its KV, as a group of its own (kv_manager/layout.py): whatever
brings a position's KV to a sequence (the prefix cache, a sibling's prompt, a snapshot from host memory or disk) brings
its routing too, and it is the routing by which that KV was made.

A sample's record says by which experts its log-probabilities were made: positions that are in it stay as they are when
they are computed again. Only a sample without output starts anew: nothing was drawn yet.
"""

from __future__ import annotations

import torch

from longtail.kv_manager.manager import KVManager
from longtail.routing import RoutedExperts
from longtail.sample import Sample
from longtail.sequence import Sequence


def store_routing(experts: list[torch.Tensor], cache: torch.Tensor, slots: torch.Tensor, block_size: int) -> None:
    """experts: of each mixture layer, int64 [rows, top_k]; cache: float32 [blocks, layers, block_size, top_k], which
    holds numbers up to 2**24 exactly; slots: int64 [T], T >= rows. Writes in place."""
    routed = torch.stack(experts, dim=1)
    live = slots[: len(routed)]
    cache[live // block_size, :, live % block_size] = routed.to(cache.dtype)


class RoutingRecorder:
    """Keeps `routed_experts` of running samples up with what is computed. group: of the cache, that holds routing;
    None: nothing is recorded."""

    def __init__(self, kv: KVManager, group: int | None) -> None:
        self.kv, self.group = kv, group

    def check(self, sample: Sample) -> None:
        """ValueError for a sample that was routed in another model."""
        routed = sample.routed_experts
        if self.group is None or routed is None:
            return
        layout = self.kv.groups[self.group].layout
        if (routed.layers, routed.top_k) != (layout.layers, layout.dim):
            raise ValueError(
                f"sample {sample.id}: routed_experts are of {routed.layers} layers and {routed.top_k} experts a token, "
                f"the model has {layout.layers} and {layout.dim}; set routed_experts to None"
            )

    def admit(self, sample: Sample) -> None:
        """It is about to run."""
        if self.group is not None and (sample.routed_experts is None or not sample.output_ids):
            layout = self.kv.groups[self.group].layout
            sample.routed_experts = RoutedExperts(layout.layers, layout.dim)

    def record(self, seq: Sequence, num_tokens: int) -> None:
        """What is in the cache, of the first num_tokens tokens, and not yet in the sample. The last token's routing is
        of no pass that counts."""
        if self.group is None:
            return
        routed = seq.sample.routed_experts
        assert routed is not None, seq.sample.id
        start, stop = len(routed), min(num_tokens, seq.num_tokens - 1)
        if start < stop:
            size = self.kv.block_size
            slots = torch.tensor(self.kv.slots(seq, start, stop, self.group))
            rows = self.kv.groups[self.group].cache[slots // size, :, slots % size]
            routed.extend(rows.to(torch.int16).numpy().tobytes())
