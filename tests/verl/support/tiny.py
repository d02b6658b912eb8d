"""A model and a data set that take no time: a random Qwen2 of two layers with a byte-level tokenizer, and sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def tokenizer() -> Any:
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )


def model(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen2ForCausalLM(Qwen2Config(**{**defaults, **settings}))


def save(path: Path, seed: int = 0) -> Path:
    model(seed).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def question(i: int) -> str:
    return f"{i}+{i}="


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question(i)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(count)
    ]


def save_rows(path: Path, count: int) -> Path:
    pd.DataFrame(rows(count)).to_parquet(path)
    return path
