"""What the two TRL plugins share: a dataset's rows as groups for a rollout, and what they need of a rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from longtail.sample import Group
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

Line = Literal["trained", "stale", "aborted", "surplus", "failed"]
"""Of the store's ledger, those that a trainer settles."""


class EngineStats(Protocol):
    @property
    def num_steps(self) -> int: ...


class Engine(Protocol):
    @property
    def version(self) -> PolicyVersion: ...

    def stats(self) -> EngineStats: ...


class Ledger(Protocol):
    @property
    def generated(self) -> int: ...


class Store(Protocol):
    """`longtail.SampleStore`."""

    @property
    def directory(self) -> Path | None: ...

    @property
    def last_delivery(self) -> int: ...

    @property
    def ledger(self) -> Ledger: ...

    def __contains__(self, group_id: str) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Group]: ...
    def deliveries(self, *, after: int | None = None) -> Iterator[Any]: ...
    def settle(self, sample_ids: Iterable[str], line: Line) -> None: ...
    def flush(self) -> None: ...


class Rollout(Protocol):
    """`longtail.Rollout`."""

    @property
    def engine(self) -> Engine: ...

    @property
    def store(self) -> Store: ...

    @property
    def turn(self) -> contextlib.AbstractContextManager[None]: ...

    def submit(self, prompts: Iterable[Group]) -> list[Group]: ...
    def collect(self) -> list[Group]: ...
    def update_weights(self, weights: Mapping[str, Any], version: int) -> None: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


class Prompts:
    """The rows of a dataset as groups, without end: position 0, 1, 2, ... of this process, epoch after epoch.

    A group is a pure function of its position: its row is its `task`, its id comes from the seed, the rank and the
    position, and its samples' seeds from its id. So a run that is resumed asks for the same, and for nothing twice.

    dataset: a map-style dataset with a column "prompt". tokenize: a prompt (text or messages) -> its token ids. seed:
    of the order (with shuffle; in the first epoch TRL's own) and of the samples. rank, world_size: this process takes
    every world_size-th row.
    """

    def __init__(
        self,
        dataset: Any,
        tokenize: Callable[[Any], Sequence[int]],
        params: SamplingParams,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"train_dataset must be a map-style dataset, not {type(dataset).__name__}: prompts are asked for "
                "ahead, and again when a run is resumed; make a datasets.Dataset of the stream"
            )
        if len(dataset) == 0:
            raise ValueError("train_dataset is empty; it needs at least one row")
        if "prompt" not in dataset[0]:
            raise ValueError(f"train_dataset has no column prompt; it has {', '.join(dataset[0])}")
        if "sample" in dataset[0]:
            raise ValueError(
                "train_dataset has a column sample, under which reward functions get the Sample; rename the column"
            )
        self.dataset, self.params = dataset, params
        self.asked = 0
        """The next position to ask for."""
        self._tokenize = tokenize
        self._seed, self._shuffle = seed, shuffle
        self._rank, self._world_size = rank, world_size
        self._permutation: tuple[int, list[int]] = (-1, [])

    def name(self, position: int) -> str:
        """The group id."""
        return f"trl-{self._seed}-{self._rank}-{position}"

    def position(self, name: str) -> int:
        """Of a group id; -1 for one that is not of these prompts."""
        head, _, number = name.rpartition("-")
        return int(number) if number.isdigit() and self.name(int(number)) == name and head else -1

    def group(self, position: int) -> Group:
        epoch, place = divmod(position * self._world_size + self._rank, len(self.dataset))
        row = dict(self.dataset[self._order(epoch)[place]])
        return Group.from_prompt(self.name(position), self._tokenize(row["prompt"]), self.params, task=row)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self.dataset))
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._permutation = epoch, torch.randperm(len(self.dataset), generator=generator).tolist()
        return self._permutation[1]

    def keep_open(self, rollout: Rollout, count: int) -> None:
        """Asks for the next prompts until the rollout has `count` groups that are not handed over."""
        with rollout.turn:
            groups: list[Group] = []
            while len(rollout.store) + len(groups) < count:
                if self.name(self.asked) not in rollout.store:  # a store that outlived its process has seen some
                    groups.append(self.group(self.asked))
                self.asked += 1
            rollout.submit(groups)


def sampling_params(args: Any, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Of a TRL config: one group of `num_generations` samples. stop_token_ids: every token that TRL takes for an end.

    ValueError for a generation_kwargs that `SamplingParams` does not know, or that the config has a field for."""
    fields = {
        "n": args.num_generations,
        "max_tokens": args.max_completion_length,
        "temperature": float(args.temperature),
        "top_p": float(args.top_p),
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": float(args.repetition_penalty),
        "stop_token_ids": tuple(stop_token_ids),
    }
    more = dict(getattr(args, "generation_kwargs", None) or {})
    if twice := sorted(fields.keys() & more.keys()):
        raise ValueError(f"generation_kwargs: {', '.join(twice)} is set by the config's own fields; leave it out here")
    return SamplingParams.from_dict(fields | more)


def collect_some(rollout: Rollout) -> list[Group]:
    """One iteration of the rollout; [] where none of its groups is complete yet.

    RuntimeError if it neither made a token nor handed anything over, for the next one would not either."""
    before = rollout.store.ledger.generated
    groups = rollout.collect()
    if not groups:
        with rollout.turn:
            if rollout.store.ledger.generated == before:
                raise RuntimeError(
                    f"the rollout makes no token and hands over no group of the {len(rollout.store)} it has; its "
                    "strategy may want more groups than are asked for (lookahead=), or all of them were dropped"
                )
    return groups
