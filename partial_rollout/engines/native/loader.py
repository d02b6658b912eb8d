"""From a directory, hub id or model object to a `Decoder` that is known to compute what the model computes."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail.errors import ExactNumericsUnavailable, UnsupportedModel
from longtail.kernels.linear import RowRule
from longtail.partial_rollout.engines.native import latent, moe
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache, make_kv
from longtail.partial_rollout.engines.native.decoder import Decoder, FusedDecoder, linear_shapes
from longtail.partial_rollout.engines.native.interface import InterfaceDecoder
from longtail.partial_rollout.engines.native.numerics import Numerics, row_rule
from longtail.partial_rollout.engines.native.scheduler import Scheduled
from longtail.partial_rollout.engines.native.spec import DecoderSpec, LayerSpec
from longtail.partial_rollout.engines.native.state_layers import state_shapes
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary variants whose angles depend on the position alone."""

ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})
STATE_TYPES = frozenset({"linear_attention", "conv"})
"""Layers that keep a state; whose modules run here stands in state_layers.py."""
STATELESS_TYPES = frozenset({"mlp", "moe"})
"""Layers that keep nothing (Nemotron-H)."""

PROBED_WINDOW = 256
"""Longest sliding window that the check at load goes beyond. Of a longer one only the length is compared, with the
config's."""


def load_model(model: str | Path | PreTrainedModel) -> tuple[PreTrainedModel, str | None]:
    """-> the model in float32 (ours to change), and where its tokenizer lies if it came from a directory or the hub.

    ValueError if there is no such model.
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel

    if isinstance(model, PreTrainedModel):
        check_supported(model.config)
        return copy.deepcopy(model).float().eval(), None
    source = str(model)
    if ("/" in source and source.startswith((".", "/", "~"))) or Path(source).exists():
        source = str(Path(source).expanduser())
        if not (Path(source) / "config.json").is_file():
            raise ValueError(
                f"model: {source} is not a model directory (no config.json); make one with "
                "`longtail model smollm2-135m` or give a Hugging Face directory or hub id"
            )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: cannot load {source!r}: {error}. Give a local model directory, or a hub id if this machine "
            "reaches the hub; `longtail model smollm2-135m` makes a small one"
        ) from error
    check_supported(config)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return loaded.eval(), source


def check_supported(config: Any) -> None:
    """UnsupportedModel for what would run wrong: the engine refuses rather than approximates."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model: {kind} is an encoder-decoder; the native engine runs decoder-only models")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layer_types = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in layer_types and not getattr(config, "sliding_window", None):
        raise UnsupportedModel(f"model: {kind} has sliding-window layers, and its config states no sliding_window")
    if unknown := layer_types - ATTENTION_TYPES - STATE_TYPES - STATELESS_TYPES:
        raise UnsupportedModel(f"model: {kind} has layers of type {', '.join(sorted(unknown))}; not supported yet")
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    moving = {str(v["rope_type"]) for v in variants if "rope_type" in v} - STATIC_ROPE
    if moving:
        # Their angles depend on the longest position in the batch: a sample would depend on its neighbours.
        raise UnsupportedModel(
            f"model: {kind} has rotary embeddings of type {', '.join(sorted(moving))}; not supported"
        )
    if getattr(config, "index_topk", None):  # a context as short as that of the check at load would not show it
        raise UnsupportedModel(f"model: {kind} attends to index_topk chosen tokens (sparse attention); not supported")


def build_decoder(
    model: PreTrainedModel,
    numerics: Numerics,
    *,
    fused: bool | None = None,
    block_size: int = 32,
    record_routing: bool = False,
) -> tuple[Decoder, RowRule]:
    """Takes `model` over. fused: None chooses; False forces the attention interface. record_routing: keep the experts
    of each token in the cache; ValueError for a model without experts.

    UnsupportedModel if the result differs from the model's own forward pass; ExactNumericsUnavailable if exact was
    asked for and this machine's arithmetic is not independent of the batch.
    """
    spec = _spec(model)
    model.set_experts_implementation("eager")  # the library's others take some sizes only
    ids = probe_ids(spec)
    n = len(ids)
    with torch.no_grad(), moe.watched(model) as top_k:
        expected = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if record_routing:
        spec = dataclasses.replace(spec, routing=_routing(model, top_k))
    exact = numerics == "exact"
    rule = row_rule(numerics, linear_shapes(model) | moe.matmul_shapes(model) | latent.matmul_shapes(model))
    use_fused = FusedDecoder.supports(model) if fused is None else fused
    decoder: Decoder
    decoder = FusedDecoder(model, spec, rule.backend) if use_fused else InterfaceDecoder(model, spec, rule, exact)
    probe = Probe(decoder, rule, block_size)
    try:
        got = probe.run([(ids.tolist(), [n - 4, 1, 3])])[0]
    except (AttributeError, TypeError, RuntimeError, IndexError) as cause:
        raise UnsupportedModel(
            f"model: {type(model).__name__} does not run through transformers' attention interface ({cause!r})"
        ) from cause
    error = (got - expected).abs().max().item()
    if not error <= 1e-3 * max(1.0, expected.abs().max().item()):
        raise UnsupportedModel(
            f"model: the native engine computes other logits than {type(model).__name__} itself "
            f"(difference {error:.3g}); this architecture is not supported"
        )
    if exact:
        whole = probe.run([(ids.tolist(), [n])])[0]
        mixed = probe.run([(ids.flip(0).tolist(), [4, n - 4]), (ids.tolist(), [n - 1, 1]), (ids[:5].tolist(), [5])])[1]
        if not (torch.equal(whole, got) and torch.equal(whole, mixed)):
            raise ExactNumericsUnavailable(
                f"model: {type(model).__name__} gives other bits in other batches on this machine; "
                'use numerics="fast" (log-probabilities then differ by floating-point noise)'
            )
    return decoder, rule


def probe_ids(spec: DecoderSpec, at_least: int = 11) -> torch.Tensor:
    """int64 [n], random, on which a way of computing is compared with another: beyond the smallest window, or a wrong
    one would not be seen."""
    smallest = min((window for window in spec.windows if 0 < window <= PROBED_WINDOW), default=0)
    n = min(max(at_least, 11 + smallest), max(spec.max_positions, 11))
    return torch.randint(0, spec.vocab_size, (n,), generator=torch.Generator().manual_seed(0))


class Probe:
    """Runs a few tokens through a decoder in given chunks, all logits out."""

    def __init__(self, decoder: Decoder, rule: RowRule, block_size: int) -> None:
        self.decoder, self.rule, self.block_size = decoder, rule, block_size

    @torch.no_grad()
    def run(self, sequences: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
        """sequences: (token ids, chunk lengths); step i runs the i-th chunk of each in one batch -> [tokens, vocab]."""
        spec, longest = self.decoder.spec, max(len(ids) for ids, _ in sequences)
        kv = make_kv(
            spec,
            budget=1 << 40,  # pages that are never touched
            block_size=self.block_size,
            longest=longest,
            max_num_seqs=len(sequences),
            max_rows=sum(len(ids) for ids, _ in sequences),
            most_blocks=len(sequences) * -(-longest // self.block_size),
            fingerprint=Fingerprint("probe"),
            prefix_caching=False,
        )
        cache = Cache.of(kv)
        seqs = []
        for i, (ids, _) in enumerate(sequences):
            sample = Sample(id=str(i), group_id="", index=i, prompt_ids=tuple(ids), params=SamplingParams(), seed=0)
            seqs.append(Sequence(sample))
            kv.attach(seqs[-1])
        parts: list[list[torch.Tensor]] = [[] for _ in sequences]
        for step in range(max(len(chunks) for _, chunks in sequences)):
            live = [(i, chunks[step]) for i, (_, chunks) in enumerate(sequences) if step < len(chunks)]
            scheduled = [Scheduled(seqs[i], count) for i, count in live]
            for item in scheduled:
                assert kv.reserve(item.seq, item.seq.num_computed_tokens + item.num_tokens)
            rows = sum(count for _, count in live)
            batch = ForwardBatch.build(scheduled, kv, spec, self.rule, list(range(rows)))
            logits = self.decoder.forward(batch, cache)[:rows]
            for (i, count), part in zip(live, logits.split([count for _, count in live]), strict=True):
                parts[i].append(part)
                kv.advance(seqs[i], count)
        return [torch.cat(p) for p in parts]


def _spec(model: PreTrainedModel) -> DecoderSpec:
    config = model.config.get_text_config()
    eos = getattr(model.generation_config, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    ids = eos if isinstance(eos, list | tuple) else (eos,)
    if not getattr(config, "max_position_embeddings", None):
        raise UnsupportedModel(f"model: {config.model_type} states no max_position_embeddings; not supported")
    return DecoderSpec(
        layers=_layers(model, config),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        # Some configs name an EOS that their vocabulary does not have; it can never come.
        eos_token_ids=tuple(i for i in ids if i is not None and 0 <= i < config.vocab_size),
    )


def _routing(model: PreTrainedModel, top_k: list[int]) -> tuple[int, int]:
    """top_k: of each layer of experts that was run."""
    kind = type(model).__name__
    if unknown := moe.unknown_experts(model):
        raise UnsupportedModel(f"record_routing: the experts of {kind} ({', '.join(unknown)}) are not understood")
    if not top_k:
        raise ValueError(f"record_routing: {kind} has no experts; leave it False")
    if len(set(top_k)) > 1:
        raise UnsupportedModel(f"record_routing: the layers of {kind} give a token {sorted(set(top_k))} experts")
    return len(top_k), top_k[0]


def _layers(model: PreTrainedModel, config: Any) -> tuple[LayerSpec, ...]:
    types = getattr(config, "layer_types", None) or ("full_attention",) * config.num_hidden_layers
    found = {module.layer_idx: shapes for module in model.modules() if (shapes := state_shapes(module)) is not None}
    declared = {i for i, kind in enumerate(types) if kind in STATE_TYPES}
    if found.keys() != declared:
        wrong = min(found.keys() ^ declared)
        raise UnsupportedModel(
            f"model: {config.model_type}: layer {wrong} is of type {types[wrong]}, of which the native engine knows "
            "other modules; not supported yet"
        )
    if not ATTENTION_TYPES.intersection(types):
        raise UnsupportedModel(f"model: {config.model_type} has no attention layer; not supported")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rank = getattr(config, "kv_lora_rank", None)
    layers = []
    for i, (kind, window) in enumerate(zip(types, _windows(config), strict=True)):
        if kind in ATTENTION_TYPES and rank:
            layers.append(LayerSpec("latent", 1, rank + config.qk_rope_head_dim, heads))
        elif kind in ATTENTION_TYPES:
            layers.append(LayerSpec("kv", kv_heads, dim, heads // kv_heads, window))
        else:
            layers.append(LayerSpec("state", shapes=found.get(i, ())))
    return tuple(layers)


def _windows(config: Any) -> tuple[int, ...]:
    """Of each layer, as `LayerSpec.window`; transformers counts the same way (a row sees sliding_window tokens)."""
    window = getattr(config, "sliding_window", None) or 0
    if types := getattr(config, "layer_types", None):
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return (window if getattr(config, "use_sliding_window", True) else 0,) * config.num_hidden_layers


def fingerprint(weights: Mapping[str, torch.Tensor], arithmetic: str) -> Fingerprint:
    """Identity of the KV that these weights make: names, shapes and all bytes (CRC-32 per tensor, about 2 GB/s), and
    `arithmetic`, whatever else the KV depends on (see `arithmetic_of`)."""
    digest = hashlib.blake2b(arithmetic.encode(), digest_size=12)
    for name in sorted(weights):
        tensor = weights[name].detach().float().contiguous().cpu()
        checksum = zlib.crc32(tensor.view(torch.uint8).numpy().reshape(-1).data)
        digest.update(f"{name}{tuple(tensor.shape)}{checksum:08x}".encode())
    return Fingerprint(digest.hexdigest())


def arithmetic_of(config: Any, decoder: Decoder, rule: RowRule, numerics: Numerics) -> str:
    """What besides the weights decides the bits of the KV: the architecture's settings and the way it is computed."""
    settings = {
        k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")
    }
    return f"{sorted(settings.items(), key=str)} {type(decoder).__name__} {rule} {numerics}"


def check_weights(shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that `shapes` names, or a ValueError that names the first few that are missing or misshapen. A tied
    LM head in `weights` is ignored (the embedding is what counts)."""
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ValueError(f"weights: {len(missing)} parameters are missing, for example {', '.join(missing[:3])}")
    unknown = [name for name in weights if name not in shapes and name != "lm_head.weight" and "inv_freq" not in name]
    if unknown:
        raise ValueError(f"weights: the model has no parameter {', '.join(unknown[:3])}")
    for name, shape in shapes.items():
        if not isinstance(weights[name], torch.Tensor) or not weights[name].is_floating_point():
            raise ValueError(
                f"weights: {name} must be a floating-point torch.Tensor, not {type(weights[name]).__name__}"
            )
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"weights: {name} has shape {tuple(weights[name].shape)}, the model needs {shape}")
    return {name: weights[name].detach().cpu() for name in shapes}
