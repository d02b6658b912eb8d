"""KV memory by counting: one number for what all sequences hold, and the prompts that groups share.

The KV of a group's prompt is held once, while a sample of the group that has computed it runs.
"""

from __future__ import annotations

from longtail.partial_rollout.engines.simulated.sequence import SharedPrompt, SimulatedSequence
from longtail.version import PolicyVersion


class Memory:
    """capacity: KV tokens that fit; None: any number. sharing: whether groups share their prompts."""

    def __init__(self, capacity: int | None, sharing: bool) -> None:
        self.capacity = capacity
        self.sharing = sharing
        self.saved = 0
        """Tokens not held twice because they are shared."""
        self.prompts: dict[tuple[str, PolicyVersion], SharedPrompt] = {}
        self.leaders: dict[str, int] = {}
        """Sequences by group that compute its prompt."""

    def shared(self, seq: SimulatedSequence, version: PolicyVersion) -> SharedPrompt | None:
        """The prompt that a sequence finds computed by these weights."""
        prompt = self.prompts.get((seq.sample.group_id, version))
        if prompt is None or (prompt.ids is not seq.sample.prompt_ids and prompt.ids != seq.sample.prompt_ids):
            return None
        return prompt

    def is_awaited(self, seq: SimulatedSequence) -> bool:
        """Whether a sibling is computing the prompt that this one needs."""
        return seq.sample.group_id in self.leaders and seq.sample.snapshot is None

    def enter(self, seq: SimulatedSequence, version: PolicyVersion) -> None:
        """It has its slot, with `num_cached_tokens` of the prompt that it found computed by these weights."""
        if not self.sharing:
            return
        if seq.num_cached_tokens:
            seq.prompt = self.prompts[seq.sample.group_id, version]
            seq.prompt.holders += 1
            self.saved += len(seq.prompt)
        elif len(seq.sample.prompt_ids) > 1:  # a single token is each sample's own
            seq.leads = True
            self.leaders[seq.sample.group_id] = self.leaders.get(seq.sample.group_id, 0) + 1
            self.computed(seq)

    def computed(self, seq: SimulatedSequence) -> None:
        """More of it is computed: perhaps the whole prompt, which is its group's from then on."""
        size = len(seq.sample.prompt_ids) - 1
        if not seq.leads or seq.computed < size:
            return
        self._no_leader(seq)
        key = seq.sample.group_id, seq.kv_version
        if size and key not in self.prompts:
            seq.prompt = self.prompts[key] = SharedPrompt(key, seq.sample.prompt_ids)

    def leave(self, seq: SimulatedSequence) -> None:
        """It gives back what it holds."""
        if seq.leads:
            self._no_leader(seq)
        prompt, seq.prompt = seq.prompt, None
        if prompt is not None:
            prompt.holders -= 1
            if prompt.holders:
                self.saved -= len(prompt)
            else:
                del self.prompts[prompt.key]

    def _no_leader(self, seq: SimulatedSequence) -> None:
        seq.leads = False
        self.leaders[seq.sample.group_id] -= 1
        if not self.leaders[seq.sample.group_id]:
            del self.leaders[seq.sample.group_id]

    def check_integrity(self, running: list[SimulatedSequence]) -> None:
        """AssertionError unless prompts and leaders are those of the running sequences."""
        holders: dict[tuple[str, PolicyVersion], int] = {}
        leaders: dict[str, int] = {}
        for seq in running:
            group = seq.sample.group_id
            if seq.prompt is not None:
                assert self.prompts[seq.prompt.key] is seq.prompt and seq.prompt.key[0] == group, seq.sample.id
                assert seq.prompt.ids == seq.sample.prompt_ids and seq.num_computed_tokens >= len(seq.prompt)
                holders[seq.prompt.key] = holders.get(seq.prompt.key, 0) + 1
            if seq.leads:
                leaders[group] = leaders.get(group, 0) + 1
                assert seq.num_computed_tokens < len(seq.sample.prompt_ids) - 1, seq.sample.id
        assert holders == {key: prompt.holders for key, prompt in self.prompts.items()}
        assert leaders == self.leaders
        assert self.saved == sum(len(prompt) * (prompt.holders - 1) for prompt in self.prompts.values())
