"""A small stand-in for the bench: synthetic but plausible events of a sync and of a token-budget run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from longtail.bench.trace import TraceWriter
from longtail.events import Event, Listener

CAP = 512


class SyntheticRun:
    """Same prompts, lengths and step costs for every strategy; only the moment at which an iteration ends differs."""

    def __init__(self, emit: Listener, strategy: str, budget: int | None, slots: int = 16, seed: int = 0) -> None:
        self.emit, self.strategy, self.budget, self.slots = emit, strategy, budget, slots
        self.lengths = random.Random(seed)
        self.now = 1000.0
        self.waiting: list[dict] = []
        self.running: list[dict] = []
        self.open_groups: dict[str, list[dict]] = {}

    def run(self, iterations: int = 4, prompts: int = 4, group_size: int = 8) -> None:
        settings = {"strategy": self.strategy, "model": "synthetic", "slots": self.slots, "group_size": group_size}
        self.event("run_start", detail=json.dumps(settings | {"iterations": iterations, "max_tokens": CAP}))
        for version in range(iterations):
            self.event("iteration_start", iteration=version, value=version)
            self.submit(version, prompts, group_size)
            self.generate()
            self.train()
            self.event("iteration_end", iteration=version)
            self.event("update", 0.3, value=version + 1)
        self.event("run_end")

    def event(self, kind, duration: float = 0.0, **fields) -> None:
        self.emit(Event(kind, self.now, duration, **fields))
        self.now += duration

    def submit(self, version: int, prompts: int, group_size: int) -> None:
        for prompt in range(prompts):
            group = f"g{version}.{prompt}"
            median = self.lengths.choice([40, 120, 200, 300])
            for index in range(group_size):
                length = min(CAP, max(5, round(self.lengths.lognormvariate(0, 0.7) * median)))
                sample = {"id": f"{group}/{index}", "group": group, "length": length, "done": 0, "kv": 0, "known": 60}
                self.open_groups.setdefault(group, []).append(sample)
                self.waiting.append(sample)
                self.event("submit", sample=sample["id"], group=group, num_tokens=60)

    def generate(self) -> None:
        made = 0
        while (self.running or self.waiting) and (self.budget is None or made < self.budget):
            prefill = self.admit()
            made += len(self.running)
            rows = prefill + len(self.running)
            model, draw = 0.02 + 0.0015 * len(self.running) + 0.0004 * prefill, 0.0006 * len(self.running)
            counts = {"num_seqs": len(self.running), "num_tokens": rows, "num_prefill_tokens": prefill}
            counts["num_output_tokens"] = len(self.running)
            self.event("step", model + draw + 0.002, model_seconds=model, sample_seconds=draw, **counts)
            self.advance()
        for sample in self.running:
            self.event("pause", sample=sample["id"], group=sample["group"], num_tokens=sample["done"], value=0)
        self.waiting = self.running + self.waiting
        self.running = []

    def admit(self) -> int:
        prefill = 0
        while self.waiting and len(self.running) < self.slots:
            sample = self.waiting.pop(0)
            known = 60 + sample["done"]
            self.event("admit", sample=sample["id"], group=sample["group"], num_tokens=0, value=known)
            self.running.append(sample)
            prefill += known
        return prefill

    def advance(self) -> None:
        for sample in list(self.running):
            sample["done"] += 1
            if sample["done"] == sample["length"]:
                self.running.remove(sample)
                reason = "length" if sample["length"] == CAP else "stop"
                ids = {"sample": sample["id"], "group": sample["group"]}
                self.event("finish", num_tokens=sample["done"], detail=reason, **ids)

    def train(self) -> None:
        for group, samples in list(self.open_groups.items()):
            if all(sample["done"] == sample["length"] for sample in samples):
                for sample in samples:
                    self.event("grade", 0.004, sample=sample["id"], group=group, value=float(sample["length"] < 100))
                total = sum(sample["length"] for sample in samples)
                self.event("hand_over", group=group, num_seqs=len(samples), num_tokens=total)
                del self.open_groups[group]
        self.event("train", 2.0)


@pytest.fixture(scope="session")
def synthetic_writer() -> TraceWriter:
    return make_writer()


@pytest.fixture
def synthetic(synthetic_writer: TraceWriter) -> pd.DataFrame:
    return synthetic_writer.frame()


def make_writer() -> TraceWriter:
    writer = TraceWriter()
    SyntheticRun(writer.listener("sync"), "sync", budget=None).run()
    SyntheticRun(writer.listener("token-budget"), "token-budget", budget=5500).run()
    return writer


@pytest.fixture(scope="session")
def tiny_task_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer (a token a byte), so that it can be given real tasks."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("task-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """An engine sets the threads of torch and numba, which are process-wide."""
    import numba
    import torch

    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])
