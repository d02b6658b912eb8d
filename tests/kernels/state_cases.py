"""Shared by the tests of ops that carry a state: sequences of rows, whole or in steps, from slot to slot."""

from __future__ import annotations

from collections.abc import Callable

import torch

LENS = [13, 1, 23, 2]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)


class Sequences:
    """op(parts, state, cu_seqlens, read, write) -> out; parts: per sequence, the tensors [rows, ...] that the op takes;
    shape: of a state. Slot 0 of the state stays zero."""

    def __init__(
        self, op: Callable[..., torch.Tensor], parts: list[list[torch.Tensor]], shape: tuple[int, ...]
    ) -> None:
        self.op, self.parts, self.shape = op, parts, shape
        self.lens = [len(p[0]) for p in parts]

    def empty(self, slots: int) -> torch.Tensor:
        """States that hold nothing yet: what is read of them would show."""
        state = torch.full((slots, *self.shape), torch.nan)
        state[0] = 0
        return state

    def whole(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each sequence alone, in one go -> (rows, last state), of each."""
        outs, states = [], []
        for parts in self.parts:
            state = self.empty(2)
            outs.append(self.op(parts, state, int64(0, len(parts[0])), int64(0), int64(1)))
            states.append(state[1])
        return outs, states

    def steps(self, cuts: list[list[int]], padding: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """cuts: rows of each sequence in each step, packed, with rows of NaN behind them; states go back and forth
        between two slots of each. Checks that nothing but the write slots changes, and that padding comes back as 0."""
        count = len(self.lens)
        state, done, write = self.empty(2 * count + 1), [0] * count, [0] * count
        outs: list[list[torch.Tensor]] = [[] for _ in self.lens]
        for step, lens in enumerate(cuts):
            read, write = write, [1 + 2 * i + step % 2 for i in range(count)]
            before = state.clone()
            packed = []
            for part in range(len(self.parts[0])):
                live = [self.parts[i][part][done[i] : done[i] + n] for i, n in enumerate(lens)]
                packed.append(torch.cat([*live, torch.full((padding, *live[0].shape[1:]), torch.nan)]))
            out = self.op(packed, state, torch.tensor([0, *lens]).cumsum(0), int64(*read), int64(*write))
            untouched = [s for s in range(len(state)) if s not in write]
            torch.testing.assert_close(state[untouched], before[untouched], rtol=0, atol=0, equal_nan=True)
            assert not out[sum(lens) :].any()
            for i, rows in enumerate(out[: sum(lens)].split(lens)):
                outs[i].append(rows)
                done[i] += lens[i]
        assert done == self.lens
        return [torch.cat(p) for p in outs], [state[w] for w in write]

    def check_cuts(self, expected: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        """Bits of rows and states (of LENS), all at once, with padding, in chunks with idle sequences, row by row."""
        chunks = [[5, 1, 3, 0], [0, 0, 13, 1], [1, 0, 6, 0], [7, 0, 1, 1]]
        ones = [[int(t < n) for n in self.lens] for t in range(max(self.lens))]
        for cuts, padding in (([self.lens], 0), ([self.lens], 3), (chunks, 2), (ones, 1)):
            got, last = self.steps(cuts, padding)
            assert_equal(got, expected[0])
            assert_equal(last, expected[1])

    def check_view(self, expected: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        """A state may be a view of a larger memory, of which nothing else is touched."""
        memory = torch.full((3, 5, *self.shape), torch.nan)
        memory[0] = 0
        out = self.op(self.parts[0], memory[:, 2], int64(0, self.lens[0]), int64(0), int64(2))
        assert torch.equal(out, expected[0][0]) and torch.equal(memory[2, 2], expected[1][0])
        assert memory[1].isnan().all() and memory[2, [0, 1, 3, 4]].isnan().all() and not memory[0].any()


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
