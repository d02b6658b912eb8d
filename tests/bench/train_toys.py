"""A task for a tiny random model: write tokens of the lower half of the vocabulary. Light, for it is what a grader's
worker imports."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

VOCAB, END = 32, 2


def low(request: Any) -> float:
    """Share of the output tokens below 16 (the end token aside)."""
    own = [token for token in request.output_ids if token != END]
    return sum(token < VOCAB // 2 for token in own) / len(own) if own else 0.0


def slow_low(request: Any) -> float:
    """The same, after a time that differs from run to run."""
    time.sleep(random.SystemRandom().uniform(0, 0.03))
    return low(request)


@dataclasses.dataclass
class Toy:
    token_ids: list[int]
    task: Any = None


@dataclasses.dataclass
class ToyPrompts:
    grader: Any = low
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 12

    def train(self, index: int) -> Toy:
        numbers = random.Random(index)
        return Toy([numbers.randrange(3, VOCAB) for _ in range(numbers.randrange(2, 6))])

    def held_out(self) -> list[Toy]:
        return [self.train(-1 - i) for i in range(16)]


def save_model(directory: Any, seed: int = 0, **shape: int) -> None:
    """shape: of the heads, for engines that do not take these."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} | shape
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=True,
        **heads,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
