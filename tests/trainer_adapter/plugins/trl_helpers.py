"""A tiny model with a byte-level tokenizer and many ends of text, so that lengths differ; a dataset with its reward."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longtail import NativeEngine, Rollout, Sample, SampleStore

NUM_ENDS = 12
"""Of 271 tokens: an end comes after about 20 tokens."""
GROUP = 4


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocab |= {letter: 3 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<end{i}>": len(vocab) + i for i in range(NUM_ENDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_model(seed: int = 0, **shape: int) -> LlamaForCausalLM:
    """shape: of the heads, for engines that do not take these."""
    torch.manual_seed(seed)
    size = len(tiny_tokenizer())
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} | shape
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=[1, *range(size - NUM_ENDS, size)],
        tie_word_embeddings=True,
        **heads,
    )
    return LlamaForCausalLM(config)


def save_tiny(directory: Path, **shape: int) -> str:
    tiny_model(**shape).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


def additions(count: int = 24) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{i}+{i}=" for i in range(count)], "answer": [str(2 * i) for i in range(count)]}
    )


def reward(
    prompts: list[str],
    completions: list[str],
    completion_ids: list[list[int]],
    answer: list[str],
    sample: list[Sample],
    **_: Any,
) -> list[float]:
    """The share of low tokens; and the columns are those of the row that the completion answers."""
    decode = tiny_tokenizer().decode
    for prompt, text, ids, right, one in zip(prompts, completions, completion_ids, answer, sample, strict=True):
        assert right == str(2 * int(prompt.split("+")[0]))
        assert decode(one.prompt_ids) == prompt
        assert ids == one.output_ids
        assert text == decode(ids, skip_special_tokens=True)
    return [low_share(ids) for ids in completion_ids]


def low_share(ids: list[int]) -> float:
    return sum(token < 130 for token in ids) / len(ids)


def make_rollout(model: Any, version: int, store: SampleStore | None = None, **settings: Any) -> Rollout:
    engine = NativeEngine(model, version=version, max_num_seqs=24, kv_cache_bytes=8 << 20, block_size=16)
    return Rollout(engine, store=store, **{"strategy": "over-issue:groups=2,extra=2"} | settings)


def spans_versions(sample: Sample) -> bool:
    return len({v for v in sample.versions if v >= 0}) > 1


def check_segments(sample: Sample) -> None:
    """Versions never fall, and each token has a log-probability."""
    sample.check_integrity()
    assert all(a <= b for a, b in itertools.pairwise(sample.versions))
    assert all(logprob <= 0.0 for logprob in sample.logprobs)
