"""KVManager under random use, against a plain model of what every position must hold.

The model knows nothing of blocks. The KV of a position is a function of the weights that computed it, of the KV before
it, and of its token, as in a causal model; `Model.content` gives each such triple a number of its own. Whatever the
manager does (sharing, copying, evicting, saving, restoring, changing weights), two things hold after every operation:

- every running sequence reads its own numbers at all of its computed positions that its layers still see, in every
  group of layers, and the number of its last position where a state is kept;
- every key in a prefix index leads to the numbers that the present weights give its tokens.

Models with full attention, windows, latents and states, alone and mixed. Blocks of 4 tokens, pools of 10, tokens 0 and
1, and prompts of one family: collisions and shortages all the time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longtail.kv_manager.block_pool import BlockHash, chain_hash, root_hash
from longtail.kv_manager.group import PagedGroup
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.manager import KVManager, _tail_hash
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.states import StateSlots
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint

LAYERS, HEADS, SIZE, DIM = 2, 2, 4, 4
NUM_BLOCKS, MOST_TOKENS, MOST_RUNNING = 10, 16, 5
FINGERPRINTS = [Fingerprint(name) for name in "AB"]
FULL = Layout("kv", LAYERS, HEADS, SIZE, DIM)
NARROW, WIDE = FULL._replace(window=3), FULL._replace(window=6)
LATENT = Layout("latent", LAYERS, 1, SIZE, DIM)
SHAPES = (((3,), (2, 2)), ((5,),))
MODELS = [
    ([FULL], False),
    ([FULL], False),
    ([NARROW], False),
    ([FULL, WIDE], False),
    ([LATENT], False),
    ([FULL], True),
    ([NARROW, LATENT], True),
]
"""Groups of layers, and whether some keep a state."""
SCALE = np.float32(32)

SAMPLED = st.lists(st.integers(0, 1), min_size=1, max_size=4)
CHUNK = st.sampled_from([1, 3, MOST_TOKENS, MOST_TOKENS])
DRAFTS = st.sampled_from([0, 0, 0, 1, 3])

Content = tuple[int, ...]
"""The numbers of a sequence's computed positions."""


class Model:
    def __init__(self) -> None:
        self.numbers: dict[tuple[str, Content, int], int] = {}

    def extend(self, content: Content, fingerprint: str, token_ids: list[int]) -> Content:
        for token in token_ids:
            # The last number stands for everything before it: it was given to that history alone.
            triple = (fingerprint, content[-1:], token)
            content = (*content, self.numbers.setdefault(triple, len(self.numbers) + 1))
        return content


@dataclasses.dataclass(eq=False)
class Record:
    """A sequence, the model's content of its computed positions, and what it has saved."""

    seq: Sequence
    content: Content = ()
    snapshot: Snapshot | None = None
    saved: Content = ()


class Cache:
    """Reads and writes positions of a group's cache: number n is n * 32 + channel, different in each channel."""

    def __init__(self, group: PagedGroup) -> None:
        data = group.cache.numpy()
        blocks = len(data)
        if group.layout.kind == "latent":
            self.parts = [data.transpose(0, 2, 1, 3)]  # [blocks, size, layers, dim]
        else:  # [blocks, size, layers, heads, dim] of keys and values
            k = data[:, :, 0].reshape(blocks, LAYERS, HEADS, DIM, SIZE).transpose(0, 4, 1, 2, 3)
            v = data[:, :, 1].reshape(blocks, LAYERS, HEADS, SIZE, DIM).transpose(0, 3, 1, 2, 4)
            self.parts = [k, v]
        assert all(np.shares_memory(part, data) for part in self.parts)
        start = 0
        self.channels = []
        for part in self.parts:
            shape = part.shape[2:]
            self.channels.append(np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape))
            start += int(np.prod(shape))

    def write(self, slots: list[int], numbers: Content) -> None:
        for slot, number in zip(slots, numbers, strict=True):
            for part, channels in zip(self.parts, self.channels, strict=True):
                part[divmod(slot, SIZE)] = number * SCALE + channels

    def read(self, slots: list[int]) -> Content:
        """0 where the channels do not agree."""
        return tuple(
            _number(
                [part[divmod(slot, SIZE)] - channels for part, channels in zip(self.parts, self.channels, strict=True)]
            )
            for slot in slots
        )


def _number(values: list[np.ndarray]) -> int:
    flat = np.concatenate([v.ravel() for v in values])
    return int(flat[0] / SCALE) if flat.min() == flat.max() and flat[0] % SCALE == 0 else 0


class ManagerMachine(RuleBasedStateMachine):
    @initialize(model=st.sampled_from(MODELS), prefix_caching=st.sampled_from([True] * 7 + [False]))
    def start(self, model: tuple[list[Layout], bool], prefix_caching: bool) -> None:
        layouts, states = model
        self.kv = KVManager(
            layouts,
            [NUM_BLOCKS] * len(layouts),
            fingerprint=FINGERPRINTS[0],
            states=StateSlots(SHAPES, MOST_RUNNING) if states else None,
            prefix_caching=prefix_caching,
        )
        self.model, self.caches = Model(), [Cache(group) for group in self.kv.groups]
        self.running: list[Record] = []
        self.waiting: list[Record] = []
        self.seen: set[tuple[int, ...]] = set()
        self.count = 0
        self.work = 0

    # ---- what must hold

    def pure(self, token_ids: list[int]) -> Content:
        return self.model.extend((), self.kv.fingerprint, token_ids)

    def state(self) -> Any:
        """Everything that an operation without effect must leave alone."""
        tables = [([list(t) for t in r.seq.block_tables], r.seq.num_computed_tokens) for r in self.running]
        groups = []
        for group in self.kv.groups:
            pool = group.pool
            free = (list(pool._free_plain), list(pool._free_cached))
            keys = {block: dict(covered) for block, covered in pool._keys_of.items()}
            groups.append((list(pool.ref_counts), free, keys, dict(pool._block_of), group.cache.numpy().tobytes()))
        return groups, tables, [self.read_state(r) for r in self.running]

    def read_state(self, r: Record) -> int | None:
        """The number that a sequence's state stands for: 0 before any token."""
        if self.kv.states is None:
            return None
        return self.read_slot(self.kv.states.slots(r.seq)[0])

    def read_slot(self, slot: int) -> int:
        assert self.kv.states is not None
        return _number([t[slot].numpy() for layer in self.kv.states.tensors for t in layer])

    @invariant()
    def every_sequence_reads_its_own_content(self) -> None:
        self.kv.check_integrity([r.seq for r in self.running])
        for r in self.running:
            n = len(r.content)
            assert n == r.seq.num_computed_tokens
            for i, group in enumerate(self.kv.groups):
                first = group.layout.first_kept(n) * SIZE
                assert self.caches[i].read(self.kv.slots(r.seq, first, n, i)) == r.content[first:], r.seq.sample.id
            assert self.read_state(r) in (None, r.content[-1] if r.content else 0), r.seq.sample.id

    @invariant()
    def every_key_keeps_its_promise(self) -> None:
        """All keys that any token list ever seen can have, under the present weights; there are no others."""
        promised: dict[BlockHash, tuple[int, ...]] = {}
        for tokens in self.seen:
            parent = root_hash(self.kv.fingerprint)
            for first in range(0, len(tokens), SIZE):
                block = list(tokens[first : first + SIZE])
                for covered in range(1, min(len(block), SIZE - 1) + 1):
                    promised[_tail_hash(parent, block[:covered])] = tokens[: first + covered]
                if len(block) == SIZE:
                    parent = chain_hash(parent, block)
                    promised[parent] = tokens[: first + SIZE]
        for group, cache in zip(self.kv.groups, self.caches, strict=True):
            for key, block_id in group.pool._block_of.items():
                prefix = promised[key]  # KeyError: a key of other weights, or of tokens that nobody has
                covered = (len(prefix) - 1) % SIZE + 1
                expected = self.pure(list(prefix))[-covered:]
                slots = [block_id * SIZE + offset for offset in range(covered)]
                assert cache.read(slots) == expected, f"block {block_id} promises {prefix}"
                assert group.pool._keys_of[block_id][key] == covered
        for key, slot in self.kv.states._kept.items() if self.kv.states is not None else ():
            assert self.read_slot(slot) == self.pure(list(promised[key]))[-1]

    # ---- operations

    def note(self, r: Record) -> None:
        self.seen.add(tuple(r.seq.token_ids))

    def pick(self, data: st.DataObject, records: list[Record]) -> Record:
        return records[data.draw(st.integers(0, len(records) - 1))]

    @precondition(lambda self: len(self.waiting) + len(self.running) < 8)
    @rule(length=st.integers(4, 11), flip=st.sampled_from([None, None, 5]), last=st.integers(0, 1), same=st.booleans())
    def arrive(self, length: int, flip: int | None, last: int, same: bool) -> None:
        """A prompt of the family (zeros, perhaps a one, any last token), or the prompt of the one that came before."""
        if not same or not self.count:
            self.prompt = (*(int(i == flip) for i in range(length - 1)), last)
        self.count += 1
        sample = Sample(
            id=f"s{self.count}", group_id="g", index=0, prompt_ids=self.prompt, params=SamplingParams(), seed=self.count
        )
        self.waiting.append(Record(Sequence(sample)))
        self.note(self.waiting[-1])

    @precondition(lambda self: self.waiting and len(self.running) < MOST_RUNNING)
    @rule(data=st.data(), keep=st.booleans())
    def admit(self, data: st.DataObject, keep: bool) -> None:
        """attach, and restore where there is a snapshot of the present weights, or of others and the user keeps it."""
        r = self.pick(data, self.waiting)
        free = self.kv.num_free
        self.kv.attach(r.seq)
        found = r.seq.num_computed_tokens
        assert found < r.seq.num_tokens
        assert self.kv.prefix_caching or not found
        assert all(len(table) == -(-found // SIZE) for table in r.seq.block_tables)
        assert self.kv.num_free <= free
        r.content = self.pure(r.seq.token_ids[:found])
        self.waiting.remove(r)
        self.running.append(r)
        self.every_sequence_reads_its_own_content()
        if r.snapshot is None or not (keep or r.snapshot.fingerprint == self.kv.fingerprint):
            return
        before = self.state()
        if not self.kv.restore(r.seq, r.snapshot):
            assert self.state() == before
            return
        if r.seq.num_computed_tokens > found:
            assert r.seq.num_computed_tokens == r.snapshot.num_tokens
            r.content = r.content + r.saved[found:]
            if r.snapshot.fingerprint == self.kv.fingerprint:
                assert r.content == self.pure(r.seq.token_ids[: len(r.content)])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seqs=st.integers(1, 4))
    def step(self, data: st.DataObject, seqs: int) -> None:
        """Some of the running sequences get one forward pass each."""
        self.work += 1
        for _ in range(seqs):
            r = self.pick(data, self.running)
            if not r.seq.num_uncomputed_tokens:  # tokens were sampled (several: accepted drafts)
                r.seq.token_ids += data.draw(SAMPLED)[: MOST_TOKENS - r.seq.num_tokens]
                self.note(r)
            stop = min(r.seq.num_computed_tokens + data.draw(CHUNK), r.seq.num_tokens)
            if data.draw(st.booleans()):
                stop = r.seq.num_computed_tokens + self.kv.chunk(r.seq, stop - r.seq.num_computed_tokens)
            drafts = data.draw(DRAFTS) if stop == r.seq.num_tokens and self.kv.states is None else 0
            self.forward(r, stop, drafts)

    def forward(self, r: Record, stop: int, drafts: int) -> None:
        """Computes up to `stop`, and writes drafts behind it, which are rejected."""
        seq = r.seq
        before = self.state()
        if not self.kv.reserve(seq, stop + drafts):
            assert self.state() == before
            return
        first = seq.num_computed_tokens // SIZE
        for group, table in zip(self.kv.groups, seq.block_tables, strict=True):
            assert all(group.pool.ref_counts[b] == 1 for b in table[first:])
        content = self.model.extend(r.content, self.kv.fingerprint, seq.token_ids[len(r.content) : stop])
        rejected = self.model.extend(content, "draft", [1] * drafts)
        for i, cache in enumerate(self.caches):
            cache.write(self.kv.slots(seq, len(r.content), stop + drafts, i), rejected[len(r.content) :])
        if self.kv.states is not None:
            for layer in self.kv.states.tensors:
                for t in layer:
                    t[self.kv.states.slots(seq)[1]] = content[-1] * float(SCALE)
        self.kv.advance(seq, stop - len(r.content))
        r.content = content
        self.every_sequence_reads_its_own_content()

    # What destroys has to wait for some work to destroy, or random schedules would do little else.

    @precondition(lambda self: self.running and self.work >= 1)
    @rule(data=st.data(), save=st.booleans())
    def preempt(self, data: st.DataObject, save: bool) -> None:
        r = self.pick(data, self.running)
        if save:
            before = self.state()
            r.snapshot, r.saved = self.kv.save(r.seq), r.content
            assert self.state() == before
            assert (r.snapshot is None) == (not r.content)
        self.release(r)
        self.waiting.append(r)

    @precondition(lambda self: self.running and self.work >= 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.release(self.pick(data, self.running))

    def release(self, r: Record) -> None:
        self.kv.release(r.seq)
        assert r.seq.block_tables == []
        assert r.seq.num_computed_tokens == 0
        r.content = ()
        self.running.remove(r)
        self.work -= 1

    @precondition(lambda self: self.work >= 2)
    @rule(fingerprint=st.sampled_from(FINGERPRINTS), keep=st.booleans())
    def update_weights(self, fingerprint: Fingerprint, keep: bool) -> None:
        self.work = 0
        self.kv.set_fingerprint(fingerprint)
        assert not any(group.pool._block_of for group in self.kv.groups)
        if not keep:
            for r in list(self.running):
                self.release(r)
                self.waiting.append(r)

    @precondition(lambda self: self.work >= 2)
    @rule()
    def forget(self) -> None:
        self.work = 0
        self.kv.forget_all()

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for r in list(self.running):
            self.release(r)
        assert self.kv.num_free == self.kv.num_blocks
        self.kv.check_integrity([])


TestManagerAgainstAModel = ManagerMachine.TestCase
TestManagerAgainstAModel.settings = settings(
    max_examples=600, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
