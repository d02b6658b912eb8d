"""TRL 1.16's `AsyncGRPOTrainer` on a rollout of ours, through its two protocols: rollout worker and weight transfer.

    rollout = Rollout(NativeEngine(path), strategy="bounded-staleness:groups=8", background=True)
    worker = RolloutWorker(rollout, args, dataset, tokenizer, reward_funcs=[reward])
    trainer = AsyncGRPOTrainer(path, args=args, train_dataset=dataset, processing_class=tokenizer,
                               rollout_worker=worker, weight_transfer=WeightTransfer(rollout))

                     worker's thread                                      trainer's thread
    dataset --> rollout (prompts asked ahead) --> rewards, advantages --> rollout_buffer --> step
                   ^ new weights between two steps of the engine <------- send_weights <------+

A sample carries one version in TRL: here it is that of its oldest token that counts in the loss, so that TRL's
staleness bound holds for every token. What is older is dropped sample by sample, as TRL does it, but by the queue,
which tells the store: the ledger says stale. TRL looks at the age when it takes a sample, one batch ahead: the batch
that it trains on may be one version older than `max_staleness`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import math
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental is known
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trl.data_utils import is_conversational

from longtail.sample import Group, Sample
from longtail.trainer_adapter.plugins.trl_prompts import Line, Prompts, Rollout, collect_some, sampling_params

RewardFunc = Callable[..., Any]
POLL_SECONDS = 0.1
METRICS_KEPT = 4096


@dataclasses.dataclass(slots=True)
class TrackedSample(RolloutSample):
    """TRL's record, and which of ours it was made of."""

    sample_id: str = ""


class WeightTransfer:
    """TRL's `weight_transfer`: each sync is one version more. The rollout takes new weights between two steps of its
    engine, so that nothing is to be paused. All parameters must be trained (TRL sends no frozen ones)."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.rollout.update_weights(dict(iterator), self.rollout.engine.version + 1)

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class RolloutWorker:
    """TRL's `rollout_worker`: asks the rollout for prompts, scores groups that are complete, and queues their samples.

    rollout: open, and the caller's. Best with a strategy that keeps samples running, and `background=True`: new weights
    then take their place under running samples; with others a sync waits for the end of an iteration. With a store on
    disk, a later run goes on with what is unfinished (give its engine the newest version that is in the store).
    args: the trainer's, with token_budget=-1. train_dataset: map-style, with a column "prompt", text or messages.
    reward_funcs: as TRL calls them (prompts, completions, completion_ids, the row's columns), with the `Sample`s as
    `sample`; async ones too; their sum counts. None: the rewards of the rollout's own grader.
    lookahead: groups that are kept in the rollout, complete or not (None: two steps' worth).

    The advantage of a sample is (reward - mean) / (std + 1e-8) over the finished samples of its group that have a
    reward, as in TRL; without a reward it is 0. Failed samples are left out.
    """

    def __init__(
        self,
        rollout: Rollout,
        args: AsyncGRPOConfig,
        train_dataset: Any,
        processing_class: Any,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        *,
        lookahead: int | None = None,
        shuffle: bool = False,
    ) -> None:
        check_config(args)
        self.rollout = rollout
        self.max_staleness = args.max_staleness
        self.reward_funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or ())
        self._tokenizer = processing_class
        self._chat = dict(args.chat_template_kwargs or {})
        eos = processing_class.eos_token_id
        self.prompts = Prompts(
            train_dataset,
            self._tokenize,
            sampling_params(args, () if eos is None else (eos,)),
            seed=args.seed,
            shuffle=shuffle,
        )
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.lookahead = -(-2 * per_step // args.num_generations) if lookahead is None else lookahead
        if isinstance(self.lookahead, bool) or not isinstance(self.lookahead, int) or self.lookahead < 1:
            raise ValueError(f"lookahead must be an integer of at least 1, not {lookahead!r}")
        self.model_version = 0
        """The trainer's number for the newest weights."""
        self._ahead = 0
        """So much the engine's number is above it."""
        self.rollout_buffer = _Buffer(min(args.queue_maxsize or per_step, per_step), self._is_fresh, self._drop)
        """Holds at most the samples of one step: what waits here only gets older."""
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue(METRICS_KEPT)
        self._unsettled: deque[tuple[str, Line]] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._seen: tuple[int, int] = (-1, -1)
        self._seen_at = time.monotonic()
        self._queued = 0

    # -- the protocol --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """After the first weights have come."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping.clear()
        self._error, self._seen_at = None, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="longtail-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in hand. Samples that nobody has taken are surplus on the ledger, unfinished
        ones stay pending in the rollout's store. May be called again."""
        self._stopping.set()
        while self._thread is not None and self._thread.is_alive():
            self.rollout.interrupt()
            self._thread.join(POLL_SECONDS)
        self._thread = None
        for sample in self.rollout_buffer.drain():
            self._unsettled.append((sample.sample_id, "surplus"))
        self._settle()
        with self.rollout.turn:
            self.rollout.store.flush()

    def update_model_version(self, model_version: int) -> None:
        self.model_version, self._ahead = model_version, self.rollout.engine.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """RuntimeError if the thread has failed or ended, or if for `stale_after_s` seconds the engine made no step and
        no sample came."""
        if self._error is not None:
            raise RuntimeError(f"the rollout worker has failed: {self._error!r}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the rollout worker is not running; it was stopped, or never started")
        seen, now = (self.rollout.engine.stats().num_steps, self._queued), time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        elif now - self._seen_at > stale_after_s:
            raise RuntimeError(
                f"the rollout worker has done nothing for {now - self._seen_at:.0f} s (heartbeat_stale_after_s "
                f"{stale_after_s:g}): {self._queued} samples so far, {len(self.rollout.store)} groups unfinished"
            )

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._settle()
                self.prompts.keep_open(self.rollout, self.lookahead)
                groups = self._collect()
                records = [record for group in groups for record in self._score(group)]
                if groups:
                    self._measure(groups)
                for record in records:
                    if not self._put(record):
                        self._unsettled.append((record.sample_id, "surplus"))
        except BaseException as error:  # told to the trainer, by check_health
            self._error = error

    def _collect(self) -> list[Group]:
        try:
            return collect_some(self.rollout)
        except RuntimeError:
            if self._stopping.is_set():  # interrupted before it began
                return []
            raise

    def _put(self, record: TrackedSample) -> bool:
        """-> False if the worker stops before there is room."""
        while not self._stopping.is_set():
            record.enqueued_at = time.time()
            with contextlib.suppress(queue.Full):
                self.rollout_buffer.put(record, timeout=POLL_SECONDS)
                self._queued += 1
                return True
        return False

    def _settle(self) -> None:
        lines: dict[Line, list[str]] = {}
        while self._unsettled:
            sample_id, line = self._unsettled.popleft()
            lines.setdefault(line, []).append(sample_id)
        with self.rollout.turn:
            for line, ids in lines.items():
                self.rollout.store.settle(ids, line)

    def _is_fresh(self, record: TrackedSample) -> bool:
        return self.model_version - record.model_version <= self.max_staleness

    def _drop(self, record: TrackedSample) -> None:
        """In the trainer's thread: the store hears of it from the worker's."""
        self._unsettled.append((record.sample_id, "stale"))
        self._tell({"sample/dropped_stale_total": 1.0})

    def _tell(self, metrics: dict[str, float | tuple[float, float]]) -> None:
        with contextlib.suppress(queue.Full):  # a trainer that does not listen stops nobody
            self.metrics_queue.put_nowait(metrics)

    def _measure(self, groups: list[Group]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        resumed = sum(len({v for v in s.versions if v >= 0}) > 1 for s in samples)
        self._tell({"rollout/resumed_samples": (resumed, len(samples)), "rollout/in_flight": len(self.rollout.store)})

    # -- samples -------------------------------------------------------------------------------------------------------

    def _tokenize(self, prompt: Any) -> list[int]:
        if not is_conversational({"prompt": prompt}):
            return list(self._tokenizer(text=prompt)["input_ids"])
        encoded = self._tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **self._chat
        )
        return list(encoded["input_ids"])

    def _score(self, group: Group) -> list[TrackedSample]:
        samples = [sample for sample in group.samples if sample.status == "finished" and sample.output_ids]
        if not samples:
            return []
        row = group.task
        texts = self._tokenizer.batch_decode([s.output_ids for s in samples], skip_special_tokens=True)
        is_chat = is_conversational({"prompt": row["prompt"]})
        completions: list[Any] = [[{"role": "assistant", "content": t}] for t in texts] if is_chat else texts
        columns = self._rewards(row, completions, samples)
        rewards = [_sum(scores) for scores in zip(*columns.values(), strict=True)]
        advantages, std = _advantages(rewards)
        prompt = row["prompt"] if is_chat else [{"role": "user", "content": row["prompt"]}]
        records = []
        for i, (sample, text) in enumerate(zip(samples, texts, strict=True)):
            metrics = {f"rewards/{name}": scores[i] for name, scores in columns.items()}
            records.append(
                TrackedSample(
                    prompt=prompt,
                    completion=[{"role": "assistant", "content": text}],
                    advantage=advantages[i],
                    group_id=self.prompts.position(group.id),
                    metrics={"reward": rewards[i], "reward_std": std, **metrics},
                    model_version=_oldest(sample) - self._ahead,
                    sample_id=sample.id,
                    **_arrays(sample),
                )
            )
        return records

    def _rewards(self, row: dict[str, Any], completions: list[Any], samples: list[Sample]) -> dict[str, list[float]]:
        """By function; NaN where it gave None."""
        if not self.reward_funcs:
            return {"rollout": [math.nan if s.reward is None else s.reward for s in samples]}
        count = len(samples)
        kwargs = {name: [value] * count for name, value in row.items() if name not in ("prompt", "completion")}
        kwargs |= {"completion_ids": [list(s.output_ids) for s in samples], "sample": samples}
        columns = {}
        for i, function in enumerate(self.reward_funcs):
            scores = function(prompts=[row["prompt"]] * count, completions=completions, **kwargs)
            if inspect.isawaitable(scores):
                scores = asyncio.run(_wait_for(scores))
            name = getattr(function, "__name__", type(function).__name__)
            if len(scores) != count:
                raise ValueError(f"reward_funcs: {name} returned {len(scores)} rewards for {count} completions")
            column = [math.nan if score is None else float(score) for score in scores]
            columns[name if name not in columns else f"{name}_{i}"] = column
        return columns


class _Buffer(queue.Queue[TrackedSample]):
    """Hands out no sample that is too old: the trainer would drop it, and nobody would know which."""

    def __init__(
        self, maxsize: int, is_fresh: Callable[[TrackedSample], bool], drop: Callable[[TrackedSample], None]
    ) -> None:
        super().__init__(maxsize)
        self._is_fresh, self._drop = is_fresh, drop

    def get(self, block: bool = True, timeout: float | None = None) -> TrackedSample:
        while True:
            record = super().get(block, timeout)
            if self._is_fresh(record):
                return record
            self._drop(record)

    def drain(self) -> list[TrackedSample]:
        """All that is left, whatever its age."""
        records = []
        with contextlib.suppress(queue.Empty):
            while True:
                records.append(super().get(block=False))
        return records


def check_config(args: AsyncGRPOConfig) -> None:
    """ValueError for settings that need a vLLM server, or train on something else than they say."""
    if args.token_budget is None or args.token_budget > 0:
        raise ValueError(
            f"token_budget is {args.token_budget}: TRL would ask a vLLM server for its longest sample, and drop longer "
            "ones unseen by the ledger; set token_budget=-1"
        )
    if args.max_staleness < 0:
        raise ValueError(f"max_staleness must be at least 0, not {args.max_staleness}")


def _oldest(sample: Sample) -> int:
    """Version of the oldest token that counts in the loss; where none does, of the newest."""
    counted = [v for v, trained in zip(sample.versions, sample.loss_mask, strict=True) if trained]
    return min(counted) if counted else max(sample.versions)


def _arrays(sample: Sample) -> dict[str, np.ndarray]:
    """Prompt and output: int64 input_ids and completion_mask, float32 old_log_probs, all of shape [num_tokens]."""
    before = [0] * len(sample.prompt_ids)
    return {
        "input_ids": np.array([*sample.prompt_ids, *sample.output_ids], dtype=np.int64),
        "completion_mask": np.array([*before, *sample.loss_mask], dtype=np.int64),
        "old_log_probs": np.array([*before, *sample.logprobs], dtype=np.float32),
    }


def _sum(scores: Sequence[float]) -> float:
    """Of the functions that have scored; NaN if none has."""
    known = [score for score in scores if not math.isnan(score)]
    return math.fsum(known) if known else math.nan


def _advantages(rewards: Sequence[float]) -> tuple[list[float], float]:
    """-> advantages (0.0 without a reward), and the standard deviation (NaN without any)."""
    known = np.array([reward for reward in rewards if not math.isnan(reward)])
    if not len(known):
        return [0.0] * len(rewards), math.nan
    mean, std = float(known.mean()), float(known.std())
    return [0.0 if math.isnan(reward) else (reward - mean) / (std + 1e-8) for reward in rewards], std


async def _wait_for(scores: Any) -> Any:
    return await scores
