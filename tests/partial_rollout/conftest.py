"""Tiny random models, engines on them, and the one comparison that matters: tokens and logprobs, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from longtail import Group, NativeEngine, Sample, SamplingParams
from longtail.kv_manager import snapshot_file
from longtail.kv_manager import tiers as tiers_module

VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Large enough that logits depend on the whole context: with 0.02 a wrong KV would go unnoticed.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(kind: str, seed: int = 0, **fields: object) -> LlamaForCausalLM | Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes: dict = SIZES | fields
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return make_model("llama")


@pytest.fixture(scope="session")
def qwen3() -> Qwen3ForCausalLM:
    return make_model("qwen3")


@pytest.fixture(scope="session")
def letters() -> PreTrainedTokenizerFast:
    """A real tokenizer in which every token is one character, so that texts are easy to plan."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab |= {chr(0x4E00 + i): 3 + i for i in range(VOCAB - 3)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


EngineMaker = Callable[..., NativeEngine]


@pytest.fixture(scope="session")
def make_engine(llama: LlamaForCausalLM) -> EngineMaker:
    def make(model: object = None, **settings: object) -> NativeEngine:
        settings = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "block_size": 16} | settings
        return NativeEngine(llama if model is None else model, **settings)  # type: ignore[arg-type]

    return make


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(1000 + seed)).tolist()


def group(name: str, ids: Sequence[int], **params: object) -> Group:
    params = {"temperature": 1.0, "max_tokens": 32, "seed": 7, "ignore_eos": True} | params
    return Group.from_prompt(name, ids, SamplingParams(**params))  # type: ignore[arg-type]


def run(engine: NativeEngine, samples: Sequence[Sample] = (), until: int | None = None) -> None:
    """Adds samples and steps until all are done, or until the first one has `until` output tokens."""
    engine.add(samples)
    while engine.has_work:
        if until is not None and len(samples[0].output_ids) >= until:
            break
        engine.step()
        engine.check_integrity()


def generate(engine: NativeEngine, *groups: Group) -> list[Sample]:
    samples = [sample for g in groups for sample in g.samples]
    run(engine, samples)
    return samples


def assert_same(got: Sample, expected: Sample) -> None:
    """Bit-equal tokens and log-probabilities."""
    assert got.output_ids == expected.output_ids
    assert torch.equal(torch.tensor(got.logprobs), torch.tensor(expected.logprobs))
    assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    got.check_integrity()


# ---- of the tests of pools


@pytest.fixture(scope="session")
def alone(make_engine: EngineMaker) -> dict[str, Sample]:
    """The samples of `pool_helpers.batch`, by id, as a single engine makes them."""
    from tests.partial_rollout.pool_helpers import batch

    return {s.id: s for s in generate(make_engine(), *batch())}


# ---- of the tests of saved KV


@pytest.fixture(scope="session")
def plain(make_engine: EngineMaker) -> dict[str, Sample]:
    """The samples of `saved_kv_helpers.batch`, alone."""
    from tests.partial_rollout.saved_kv_helpers import batch

    return {s.id: s for s in generate(make_engine(), *batch())}


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write of a file until it is set."""
    write, event = snapshot_file.write_part, threading.Event()

    def held(*arguments: Any) -> Path:
        assert event.wait(30)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tiers_module, "write_part", held)
        yield event
        event.set()
