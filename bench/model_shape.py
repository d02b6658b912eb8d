"""A decoder's shape from its `config.json`: how many weights, how many bytes of KV a token, how many FLOPs.

Counted: embeddings, attention (grouped heads; or a latent, MLA), gated MLPs (three matrices), routed and shared
experts, norms, the output layer. Not counted: biases and the norms of queries and keys (under 0.01 %), vision towers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Parameters are counts of weights, of the whole model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """0: a latent, which every tensor-parallel rank holds whole."""
    kv_values: int
    """Values that a token leaves in the KV cache of one layer."""
    attention_flops: float
    """Of one query with one token of context, all layers and heads."""
    embedding_parameters: int
    output_parameters: int
    """Of the output layer, also where it is the embedding."""
    tied: bool
    attention_parameters: int
    """And of the norms, all layers,"""
    mlp_parameters: int
    """of dense MLPs, shared experts and routers, all layers,"""
    expert_parameters: int = 0
    """and of all routed experts, all layers."""
    experts: int = 0
    experts_per_token: int = 0
    dtype: str = "bfloat16"
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        output = 0 if self.tied else self.output_parameters
        return (
            self.embedding_parameters
            + output
            + self.attention_parameters
            + self.mlp_parameters
            + self.expert_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Of one token: all but the experts that it does not choose."""
        return self.parameters - self.expert_parameters + self._active_experts

    @property
    def fixed_parameters(self) -> int:
        """What every pass reads: all but routed experts and the embedding, of which it reads a row a token."""
        return self.attention_parameters + self.mlp_parameters + self.output_parameters

    @property
    def row_parameters(self) -> int:
        """Weights that multiply each row: not those of the output layer, which sees one row a sequence."""
        return self.attention_parameters + self.mlp_parameters + self._active_experts

    @property
    def _active_experts(self) -> int:
        return self.expert_parameters * self.experts_per_token // self.experts if self.experts else 0

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        return self.layers * self.kv_values * BYTES[dtype]

    def kv_shards(self, tensor_parallel: int) -> int:
        """Parts that the KV of a token falls into: no more than there are KV heads."""
        return max(1, min(tensor_parallel, self.kv_heads))


def read_shape(source: str | Path | Mapping[str, Any]) -> ModelShape:
    """source: a config.json, a folder with one, or its content. ValueError names the file, the key and the fix."""
    if isinstance(source, Mapping):
        return _shape(source, str(source.get("model_type", "model")))
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; give a model's config.json or its folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a model's config.json, which is a table of keys")
    try:
        return _shape(config, path.parent.name if path.name == "config.json" else path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    _refuse(config)
    layers, hidden = _number(config, "num_hidden_layers"), _number(config, "hidden_size")
    heads, vocab = _number(config, "num_attention_heads"), _number(config, "vocab_size")
    attention, kv_values, flops, kv_heads = _attention(config, hidden, heads)
    sparse = _sparse_layers(config, layers)
    mlp, routed, experts, chosen = _mlp(config, hidden)
    dense = 3 * hidden * _number(config, "intermediate_size") if sparse < layers else 0
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        kv_values=kv_values,
        attention_flops=float(layers * flops),
        embedding_parameters=vocab * hidden,
        output_parameters=vocab * hidden,
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_parameters=layers * (attention + 2 * hidden) + hidden,
        mlp_parameters=(layers - sparse) * dense + sparse * mlp,
        expert_parameters=sparse * routed,
        experts=experts,
        experts_per_token=chosen,
        dtype=_dtype(config),
        notes=_notes(config),
    )


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int, int]:
    """Of a layer: weights, KV values of a token, FLOPs of a query with a token, KV heads."""
    if config.get("kv_lora_rank"):
        # DeepSeek-V2 (2024), section 2.1; FLOPs in the absorbed form, in which queries meet the latent itself.
        latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        nope, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
        q_rank = config.get("q_lora_rank")
        queries = q_rank * (hidden + heads * (nope + rope)) + q_rank if q_rank else hidden * heads * (nope + rope)
        weights = queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden + latent
        return weights, latent + rope, 2 * heads * (latent + rope) + 2 * heads * latent, 0
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * hidden * head * (heads + kv_heads), 2 * kv_heads * head, 4 * heads * head, kv_heads


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _mlp(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int, int]:
    """Of a sparse layer: weights of its shared experts and router, weights of its routed experts; their number, and how
    many a token chooses."""
    key = next((key for key in _EXPERTS if config.get(key)), None)
    if key is None:
        return 0, 0, 0, 0
    experts, chosen = _number(config, key), _number(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok is {chosen}, and {key} only {experts}")
    width = config.get("moe_intermediate_size") or _number(config, "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return 3 * hidden * shared + hidden * experts, 3 * hidden * width * experts, experts, chosen


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """Those that have routed experts."""
    if not any(config.get(key) for key in _EXPERTS):
        return 0
    first = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    dense = set(config.get("mlp_only_layers") or ())
    if not isinstance(step, int):
        raise ValueError(f"moe_layer_freq must be a whole number, not {step!r}")
    if "decoder_sparse_step" in config:  # Qwen: counted from 1
        return sum(1 for i in range(layers) if (i + 1) % step == 0 and i not in dense)
    return sum(1 for i in range(first, layers) if i % step == 0)


def _dtype(config: Mapping[str, Any]) -> str:
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping):
        if quantised.get("quant_method") != "fp8":
            raise ValueError(
                f"quantization_config: quant_method {quantised.get('quant_method')!r} is not modelled (fp8 is); take "
                "the config of the unquantised model and give dtype="
            )
        return "float8"
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in BYTES:
        raise ValueError(f"dtype {dtype!r} is not known; choose from {', '.join(BYTES)}")
    return dtype


def _refuse(config: Mapping[str, Any]) -> None:
    """ValueError where the sums above would be wrong."""
    kinds = set(config.get("layer_types") or ())
    strange = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if strange or any(key in config for key in ("ssm_cfg", "mamba_d_state", "linear_num_key_heads")):
        what = ", ".join(strange) or "state-space layers"
        raise ValueError(f"{what}: only attention layers are modelled; give a cost model fitted from a trace instead")
    if config.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder: only decoders are modelled")


def _notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    window = config.get("sliding_window")
    sliding = "sliding_attention" in (config.get("layer_types") or ()) or config.get("use_sliding_window") is True
    if window and sliding:
        return (f"Layers with a window of {window} tokens are counted as if they read the whole context.",)
    return ()


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise ValueError(
            f"{key} {found}; a decoder's config.json of transformers has it as a whole number of at least 1"
        )
    return value
