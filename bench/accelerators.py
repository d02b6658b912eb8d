"""Analytic pass times: a roofline of a named accelerator and a model's shape. Nobody measured them; they are bounds.

    seconds = max(weight bytes / bandwidth, 2 x active weights x rows / FLOP/s)       linear layers
            + max(KV bytes / bandwidth, attention FLOPs / FLOP/s)                     attention
            + all-reduces + overhead

on each of the `tensor_parallel` accelerators, which share weights, FLOPs and KV (Williams et al. 2009 for the roofline;
Pope et al. 2022, "Efficiently scaling transformer inference", for its use on decoding). With efficiency 1 and overhead
0 no real engine is quicker; kernels reach 60 to 90 % of it, and at small batches launching them takes longer than
running them. Give `bandwidth_efficiency`, `compute_efficiency` and `overhead` where they are known.

Sparse experts: n rows that each choose k of E experts at random touch E (1 - (1 - k/E)^n) of them, whose weights are
read; each expert is split like the rest (tensor parallel; expert parallelism and its all-to-all are not modelled).
Tensor parallelism: two all-reduces a layer of rows x hidden values; a ring moves 2 (t - 1) / t of them over each link
(Patarasuk and Yuan 2009). KV heads are split as far as they go; a latent (MLA) is on every accelerator.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtail.bench.cost_model import CostModel, Transfer
from longtail.bench.model_shape import BYTES, ModelShape, read_shape
from longtail.partial_rollout.engines.simulated.cost import total_context

NODE = 8
"""Accelerators that the links of a DGX or HGX node join."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Of one accelerator. Dense FLOP/s, without structured sparsity, which datasheets print doubled."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second from its memory."""
    flops: Mapping[str, float]
    """FLOP/s by dtype."""
    link: float
    """Bytes a second to its peers, one way: half of what datasheets give for NVLink."""
    host: float
    """Bytes a second to the host, one way: half of what they give for PCIe."""
    source: str


def _hopper(name: str, memory: float, bandwidth: float, link: float, source: str) -> Accelerator:
    flops = {"bfloat16": 989.4e12, "float16": 989.4e12, "float8": 1978.9e12, "float32": 67e12}
    return Accelerator(name=name, memory=memory, bandwidth=bandwidth, flops=flops, link=link, host=64e9, source=source)


def _ampere(name: str, memory: float, bandwidth: float) -> Accelerator:
    flops = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}
    source = "NVIDIA A100 Tensor Core GPU datasheet (nvidia-a100-datasheet-us-nvidia-1758950), SXM column"
    return Accelerator(name=name, memory=memory, bandwidth=bandwidth, flops=flops, link=300e9, host=32e9, source=source)


ACCELERATORS: dict[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        _ampere("A100-40GB", 40e9, 1.555e12),
        _ampere("A100-80GB", 80e9, 2.039e12),
        _hopper("H100", 80e9, 3.35e12, 450e9, "NVIDIA H100 Tensor Core GPU datasheet, SXM column"),
        _hopper(
            "H800",
            80e9,
            3.35e12,
            200e9,
            "as the H100 but for NVLink at 400 GB/s: DeepSeek-AI, Insights into DeepSeek-V3 (2025), section 4.1; "
            "NVIDIA's own datasheet of it is not public",
        ),
        _hopper("H200", 141e9, 4.8e12, 450e9, "NVIDIA H200 Tensor Core GPU datasheet, SXM column"),
        Accelerator(
            name="B200",
            memory=180e9,
            bandwidth=8.0e12,
            flops={"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "float32": 80e12},
            link=900e9,
            host=64e9,
            source="NVIDIA DGX B200 datasheet (1,440 GB and 64 TB/s over 8 GPUs); Blackwell architecture brief, HGX",
        ),
    )
}


def accelerator(name: str) -> Accelerator:
    """By name, in any case; A100 is the one of 80 GB. ValueError lists those there are."""
    found = {known.lower(): value for known, value in ACCELERATORS.items()} | {"a100": ACCELERATORS["A100-80GB"]}
    if name.lower() not in found:
        raise ValueError(
            f"accelerator {name!r} is not known; choose from {', '.join(ACCELERATORS)}, or give an Accelerator"
        )
    return found[name.lower()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Analytic `StepSeconds`; all of one accelerator, its share of the model's. See the module's docstring."""

    fixed_weights: float
    """Bytes of weights that every pass reads,"""
    expert_weights: float = 0.0
    """and those of all routed experts, of which it reads those touched."""
    experts: int = 1
    experts_per_token: int = 1
    row_flops: float
    """FLOPs of the linear layers for a row,"""
    seq_flops: float = 0.0
    """and of the output layer, for a sequence."""
    context_bytes: float
    """KV bytes of a token, and"""
    context_flops: float
    """attention FLOPs of a query with a token."""
    row_link_bytes: float = 0.0
    """Bytes over a link for a row."""
    bandwidth: float
    flops: float
    link: float
    """A second, as reached."""
    overhead: float = 0.0
    """Seconds of a pass."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            positive = field.name in ("bandwidth", "flops", "link", "experts", "experts_per_token")
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"step.{field.name} must be a finite number of at least 0, not {value!r}")
            if positive and value == 0:
                raise ValueError(f"step.{field.name} must be above 0")

    def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
        return self._linear(num_seqs, query_tokens) + self._attention(num_seqs, query_tokens, context_tokens)

    def decode_seconds(self, num_seqs: int, context_tokens: int, num_passes: int) -> float:
        context = total_context(num_seqs, context_tokens, num_passes)
        each = self._decode_rows.get(num_seqs)
        if each is None:
            each = self._decode_rows[num_seqs] = self._linear(num_seqs, num_seqs)
        return num_passes * each + self._attention(num_seqs, num_seqs, context)

    @functools.cached_property
    def _decode_rows(self) -> dict[int, float]:
        """`_linear` of decode passes, by their number of sequences, as far as it was asked for."""
        return {}

    def _linear(self, num_seqs: int, rows: int) -> float:
        touched = 1.0 - (1.0 - self.experts_per_token / self.experts) ** rows
        read = self.fixed_weights + self.expert_weights * touched
        work = self.row_flops * rows + self.seq_flops * num_seqs
        return max(read / self.bandwidth, work / self.flops) + self.row_link_bytes * rows / self.link + self.overhead

    def _attention(self, num_seqs: int, rows: int, context: int) -> float:
        """A sequence's rows see its context less the rows after them; sequences are taken as equally long."""
        each = rows / num_seqs if num_seqs else 0.0
        pairs = max(each * context - rows * (each - 1.0) / 2.0, 0.0)
        return max(self.context_bytes * context / self.bandwidth, self.context_flops * pairs / self.flops)


def analytic(
    device: str | Accelerator,
    model: ModelShape | str | Path | Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    bandwidth_efficiency: float = 1.0,
    compute_efficiency: float = 1.0,
    overhead: float = 0.0,
) -> CostModel:
    """Costs of one instance: `tensor_parallel` accelerators that hold the model together.

    model: a shape, or what `read_shape` takes (a config.json, its folder, its content). dtype: of the weights; None:
    the config's; kv_dtype: None: bfloat16 where the weights have 8 bits, else theirs. save and restore move the KV to
    the host and back, update brings all weights from there; grade and train are not the accelerator's to say.

    ValueError names the field and the fix."""
    chip = accelerator(device) if isinstance(device, str) else device
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    weights_dtype = shape.dtype if dtype is None else dtype
    kv = kv_dtype or ("bfloat16" if weights_dtype == "float8" else weights_dtype)
    for field, name in (("dtype", weights_dtype), ("kv_dtype", kv)):
        if name not in BYTES:
            raise ValueError(f"{field} {name!r} is not known; choose from {', '.join(BYTES)}")
    if weights_dtype not in chip.flops:
        raise ValueError(f"{chip.name} has no {weights_dtype} arithmetic; choose dtype from {', '.join(chip.flops)}")
    for field, share in (("bandwidth_efficiency", bandwidth_efficiency), ("compute_efficiency", compute_efficiency)):
        if not 0.0 < share <= 1.0:
            raise ValueError(f"{field} must be above 0 and at most 1, not {share}")
    _check_parallel(shape, tensor_parallel)
    size, t = BYTES[weights_dtype], tensor_parallel
    context_bytes = shape.kv_bytes_per_token(kv) / shape.kv_shards(t)
    step = Roofline(
        fixed_weights=shape.fixed_parameters * size / t,
        expert_weights=shape.expert_parameters * size / t,
        experts=max(shape.experts, 1),
        experts_per_token=max(shape.experts_per_token, 1),
        row_flops=2.0 * shape.row_parameters / t,
        seq_flops=2.0 * shape.output_parameters / t,
        context_bytes=context_bytes,
        context_flops=shape.attention_flops / t,
        row_link_bytes=2 * shape.layers * shape.hidden * BYTES["bfloat16"] * 2.0 * (t - 1) / t,
        bandwidth=chip.bandwidth * bandwidth_efficiency,
        flops=chip.flops[weights_dtype] * compute_efficiency,
        link=chip.link,
        overhead=overhead,
    )
    to_host = Transfer(per_token=context_bytes / chip.host)
    return CostModel(
        step=step,
        source="analytic",
        label=f"{t} x {chip.name}, {shape.name}, {weights_dtype}: analytic bound, not measured",
        save=to_host,
        restore=to_host,
        update=shape.parameters * size / t / chip.host,
        report={
            "accelerator": chip.name,
            "accelerator_source": chip.source,
            "model": shape.name,
            "tensor_parallel": t,
            "dtype": weights_dtype,
            "kv_dtype": kv,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "kv_bytes_per_token": shape.kv_bytes_per_token(kv),
            "findings": [*shape.notes, *_beyond_node(t)],
        },
    )


def _beyond_node(tensor_parallel: int) -> list[str]:
    if tensor_parallel <= NODE:
        return []
    return [f"All-reduces of more than {NODE} accelerators are counted at the speed of links within a node."]


def kv_capacity(
    device: str | Accelerator,
    model: ModelShape | str | Path | Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    memory_share: float = 0.9,
) -> int:
    """KV tokens that an instance holds beside the weights in this share of its memory (activations not counted).
    ValueError if the weights do not fit."""
    chip = accelerator(device) if isinstance(device, str) else device
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    costs = analytic(chip, shape, tensor_parallel=tensor_parallel, dtype=dtype, kv_dtype=kv_dtype)
    weights = shape.parameters * BYTES[costs.report["dtype"]] / tensor_parallel
    free = memory_share * chip.memory - weights
    if free <= 0.0:
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: {weights / 1e9:.0f} GB of weights do not fit into {memory_share:.0%} "
            f"of the {chip.memory / 1e9:.0f} GB of a {chip.name}; take more accelerators or a smaller dtype"
        )
    return int(free / costs.step.context_bytes)


def _check_parallel(shape: ModelShape, tensor_parallel: int) -> None:
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise ValueError(f"tensor_parallel must be an integer of at least 1, not {tensor_parallel!r}")
    if shape.heads % tensor_parallel:
        raise ValueError(f"tensor_parallel={tensor_parallel} does not divide the model's {shape.heads} attention heads")
