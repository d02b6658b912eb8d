"""KV memory by counting: one number for what all sequences hold, and the prompts that groups share.

The KV of a group's prompt (all but its last token, which each sample computes itself) is held once, while a sample of
the group that has computed it runs.
"""

from __future__ import annotations

import dataclasses

from longtail.partial_rollout.engines.simulated.sequence import SimulatedSequence


@dataclasses.dataclass(slots=True)
class SharedPrompt:
    ids: tuple[int, ...]
    holders: int = 1

    def __len__(self) -> int:
        return len(self.ids) - 1


class Memory:
    """capacity: KV tokens that fit; None: any number. sharing: whether groups share their prompts."""

    def __init__(self, capacity: int | None, sharing: bool) -> None:
        self.capacity = capacity
        self.sharing = sharing
        self.saved = 0
        """Tokens not held twice because they are shared."""
        self.prompts: dict[str, SharedPrompt] = {}
        """By group."""
        self.leaders: dict[str, int] = {}
        """Sequences by group that compute its prompt."""

    def shared(self, seq: SimulatedSequence) -> SharedPrompt | None:
        """The prompt that a sequence finds computed."""
        prompt = self.prompts.get(seq.sample.group_id)
        if prompt is None or (prompt.ids is not seq.sample.prompt_ids and prompt.ids != seq.sample.prompt_ids):
            return None
        return prompt

    def is_awaited(self, seq: SimulatedSequence) -> bool:
        """Whether a sibling is computing the prompt that this one needs."""
        return seq.sample.group_id in self.leaders and seq.sample.snapshot is None

    def enter(self, seq: SimulatedSequence) -> None:
        """It has its slot, with `num_cached_tokens` of a shared prompt."""
        if not self.sharing:
            return
        if seq.num_cached_tokens:
            prompt = self.prompts[seq.sample.group_id]
            prompt.holders += 1
            self.saved += len(prompt)
            seq.shares = True
        else:
            seq.leads = True
            self.leaders[seq.sample.group_id] = self.leaders.get(seq.sample.group_id, 0) + 1
            self.computed(seq)

    def computed(self, seq: SimulatedSequence) -> None:
        """More of it is computed: perhaps the whole prompt, which is its group's from then on."""
        size = len(seq.sample.prompt_ids) - 1
        if not seq.leads or seq.computed < size:
            return
        self._no_leader(seq)
        if size and seq.sample.group_id not in self.prompts:
            self.prompts[seq.sample.group_id] = SharedPrompt(seq.sample.prompt_ids)
            seq.shares = True

    def leave(self, seq: SimulatedSequence) -> None:
        """It gives back what it holds."""
        if seq.leads:
            self._no_leader(seq)
        if seq.shares:
            seq.shares = False
            prompt = self.prompts[seq.sample.group_id]
            prompt.holders -= 1
            if prompt.holders:
                self.saved -= len(prompt)
            else:
                del self.prompts[seq.sample.group_id]

    def _no_leader(self, seq: SimulatedSequence) -> None:
        seq.leads = False
        self.leaders[seq.sample.group_id] -= 1
        if not self.leaders[seq.sample.group_id]:
            del self.leaders[seq.sample.group_id]

    def check_integrity(self, running: list[SimulatedSequence]) -> None:
        """AssertionError unless prompts and leaders are those of the running sequences."""
        holders: dict[str, int] = {}
        leaders: dict[str, int] = {}
        for seq in running:
            group = seq.sample.group_id
            if seq.shares:
                holders[group] = holders.get(group, 0) + 1
                assert self.shared(seq) is not None and seq.num_computed_tokens >= len(self.prompts[group])
            if seq.leads:
                leaders[group] = leaders.get(group, 0) + 1
                assert seq.num_computed_tokens < len(seq.sample.prompt_ids) - 1, seq.sample.id
        assert holders == {group: prompt.holders for group, prompt in self.prompts.items()}
        assert leaders == self.leaders
        assert self.saved == sum(len(prompt) * (prompt.holders - 1) for prompt in self.prompts.values())
