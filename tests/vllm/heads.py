"""Tiny models with random heads that draft: EAGLE, EAGLE-3, and MTP in MiMo's form, as vLLM reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 16,  # a random head is often right
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HIDDEN, KV_WIDTH = SIZES["hidden_size"], 32
LAYERS = 8
"""EAGLE-3 reads the hidden states of three, which are different ones from here on."""


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def _block(prefix: str, attention_input: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, attention_input),
        f"{prefix}.self_attn.k_proj.weight": (KV_WIDTH, attention_input),
        f"{prefix}.self_attn.v_proj.weight": (KV_WIDTH, attention_input),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def save_target(directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=LAYERS, head_dim=32)).save_pretrained(directory)
    return directory


def save_eagle(directory: Path) -> Path:
    _save_head(directory, "LlamaForCausalLM", {"fc.weight": (HIDDEN, 2 * HIDDEN)} | _block("layers.0"))
    return directory


def save_eagle3(directory: Path) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (SIZES["vocab_size"], HIDDEN),
    } | _block("midlayer", 2 * HIDDEN)
    _save_head(directory, "LlamaForCausalLMEagle3", shapes, draft_vocab_size=SIZES["vocab_size"])
    return directory


def _save_head(directory: Path, architecture: str, shapes: dict[str, tuple[int, ...]], **fields: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**SIZES, num_hidden_layers=1, head_dim=32, architectures=[architecture]).to_dict() | fields
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(shapes, seed=1), directory / "model.safetensors")


def save_mimo(directory: Path) -> Path:
    """A target that has its head with it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(**SIZES, num_hidden_layers=2)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    written |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(written))
    head = "model.mtp_layers.0"
    shapes = _block(head) | {
        f"{head}.input_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{head}.token_layernorm.weight": (HIDDEN,),
        f"{head}.hidden_layernorm.weight": (HIDDEN,),
        f"{head}.input_layernorm.weight": (HIDDEN,),
        f"{head}.final_layernorm.weight": (HIDDEN,),
        f"{head}.self_attn.q_proj.bias": (HIDDEN,),
        f"{head}.self_attn.k_proj.bias": (KV_WIDTH,),
        f"{head}.self_attn.v_proj.bias": (KV_WIDTH,),
    }
    path = directory / "model.safetensors"
    save_file({**load_file(path), **_weights(shapes, seed=1)}, path, metadata={"format": "pt"})
    return directory
