"""Shapes against published parameter counts, KV sizes and weights on disk; rooflines against sums by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.bench.accelerators import ACCELERATORS, Accelerator, Roofline, accelerator, analytic, kv_capacity
from longtail.bench.cost_model import read_cost
from longtail.bench.model_shape import read_shape

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = LLAMA_3_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [
        pytest.param(LLAMA_3_8B, 8.030261248, 8.030261248, 131_072, id="Llama-3-8B"),  # its checkpoint's count
        pytest.param(MIXTRAL_8X7B, 46.7, 12.9, 131_072, id="Mixtral-8x7B"),  # Jiang et al. 2024
        pytest.param(QWEN3_30B_A3B, 30.5, 3.3, 98_304, id="Qwen3-30B-A3B"),  # its model card
        pytest.param(DEEPSEEK_V3, 671.0, 37.0, 70_272, id="DeepSeek-V3"),  # its report; Insights into DeepSeek-V3
    ],
)
def test_published_models(config: dict[str, Any], billions: float, active: float, kv_bytes: int) -> None:
    shape = read_shape(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=2e-2)
    assert shape.kv_bytes_per_token("bfloat16") == kv_bytes


def test_llama_3_8b_to_the_last_weight() -> None:
    assert read_shape(LLAMA_3_8B).parameters == 8_030_261_248


def tiny(**change: Any) -> dict[str, Any]:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    return {key: value for key, value in (config | change).items() if value is not None}


def test_dense_by_hand() -> None:
    """A layer: Q and O 8 x 8 each, K and V 8 x 4 each, three matrices of 8 x 16, two norms of 8; and a last norm."""
    shape = read_shape(tiny())
    layer = 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8
    assert shape.parameters == 2 * 800 + 2 * layer + 8
    assert read_shape(tiny(tie_word_embeddings=True)).parameters == 800 + 2 * layer + 8
    assert shape.kv_values == 2 * 2 * 2  # K and V of two heads of two values
    assert shape.attention_flops == 2 * 4 * 4 * 2  # layers x 2 products of 2 FLOPs x heads x values
    assert shape.row_parameters == 2 * layer + 8
    assert shape.fixed_parameters == 2 * layer + 8 + 800


def test_sparse_by_hand() -> None:
    """Five layers, the first dense; 4 experts of 8 x 6, two chosen; one shared."""
    config = tiny(
        num_hidden_layers=5,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        n_shared_experts=1,
    )
    shape = read_shape(config)
    assert shape.expert_parameters == 4 * 4 * 3 * 48
    assert shape.mlp_parameters == 3 * 128 + 4 * (3 * 48 + 8 * 4)
    assert shape.parameters - shape.active_parameters == 4 * 2 * 3 * 48
    qwen = tiny(num_hidden_layers=6, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=6)
    assert read_shape(qwen | {"decoder_sparse_step": 2}).expert_parameters == 3 * 4 * 3 * 48  # layers 1, 3, 5
    assert read_shape(qwen | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).expert_parameters == 2 * 4 * 3 * 48


def test_weights_on_disk(tiny_task_model: Path) -> None:
    """transformers makes as many weights as we count."""
    from safetensors import safe_open

    with safe_open(tiny_task_model / "model.safetensors", "np") as file:
        count = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118  (no mapping)
    shape = read_shape(tiny_task_model)
    assert shape.parameters == count
    assert shape.name == tiny_task_model.name and shape.dtype == "float32"


def test_nested_config_of_a_vision_model() -> None:
    assert read_shape({"model_type": "vlm", "text_config": tiny()}).parameters == read_shape(tiny()).parameters


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (tiny(hidden_size=None), "hidden_size is missing"),
        (tiny(num_hidden_layers="two"), "num_hidden_layers is 'two'"),
        (tiny(intermediate_size=None), "intermediate_size is missing"),
        (tiny(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (tiny(is_encoder_decoder=True), "only decoders"),
        (tiny(quantization_config={"quant_method": "awq"}), "awq"),
        (tiny(torch_dtype="int3"), "int3"),
        (tiny(num_experts=4), "num_experts_per_tok is missing"),
        (tiny(num_experts=4, num_experts_per_tok=5), "num_experts_per_tok is 5"),
    ],
)
def test_configs_that_are_not_modelled(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says) as caught:
        read_shape(tmp_path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="table of keys"):
        read_shape(tmp_path)


def test_windows_are_noted() -> None:
    config = tiny(layer_types=["full_attention", "sliding_attention"], sliding_window=128)
    assert "window of 128" in read_shape(config).notes[0]
    assert read_shape(tiny(sliding_window=128, use_sliding_window=False)).notes == ()


# --- rooflines


def test_llama_3_8b_on_an_h100_by_hand() -> None:
    """One sequence of 1,000 tokens: every weight but the embedding once, its KV once."""
    step = analytic("H100", LLAMA_3_8B).step
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert step.seconds(1, 1, 1000) == pytest.approx((weights + 131_072 * 1000) / 3.35e12, rel=1e-12)
    # 4,096 rows of one prompt: bound by arithmetic; the output layer sees one of them, a row half of the context.
    row = 8_030_261_248 - 2 * 128256 * 4096
    linear = (2 * row * 4096 + 2 * 128256 * 4096) / 989.4e12
    attention = 32 * 4 * 32 * 128 * (4096 * 4097 / 2) / 989.4e12
    assert step.seconds(1, 4096, 4096) == pytest.approx(linear + attention, rel=1e-12)


def chip(**change: Any) -> Accelerator:
    values: dict[str, Any] = {"memory": 1e6, "bandwidth": 1e6, "flops": {"bfloat16": 1e9}, "link": 1e6, "host": 1e5}
    return Accelerator(name="toy", source="made up", **(values | change))


def test_tensor_parallel_by_hand() -> None:
    shape = read_shape(tiny())
    one, two, four = (analytic(chip(), shape, tensor_parallel=t).step for t in (1, 2, 4))
    reads = [s.seconds(1, 1, 10) - s.row_link_bytes / s.link for s in (one, two, four)]
    weights, kv = 2 * shape.fixed_parameters, 10 * shape.kv_bytes_per_token()
    # Two KV heads: four ranks hold two halves twice.
    expected = [(weights / t + kv / min(t, 2)) / 1e6 for t in (1, 2, 4)]
    assert reads == pytest.approx(expected, rel=1e-12)
    # 2 layers x 2 all-reduces of 8 values of 2 bytes, of which a ring of 4 moves 2 x 3 / 4.
    assert (one.row_link_bytes, four.row_link_bytes) == (0.0, pytest.approx(2 * 2 * 8 * 2 * 1.5))


def test_experts_touched_by_hand() -> None:
    """4 experts, one a row: one row touches 1, two rows 1 + 3/4 of them on average."""
    step = Roofline(
        fixed_weights=0.0,
        expert_weights=400.0,
        experts=4,
        experts_per_token=1,
        row_flops=0.0,
        context_bytes=0.0,
        context_flops=0.0,
        bandwidth=100.0,
        flops=1.0,
        link=1.0,
    )
    assert [step.seconds(n, n, 0) for n in (1, 2)] == pytest.approx([1.0, 1.75])
    assert step.seconds(1000, 1000, 0) == pytest.approx(4.0)


def test_a_latent_is_on_every_rank() -> None:
    one, eight = (analytic("H800", DEEPSEEK_V3, tensor_parallel=t).step for t in (1, 8))
    assert one.context_bytes == eight.context_bytes == 70_272
    assert analytic("H800", DEEPSEEK_V3).report["kv_dtype"] == "bfloat16"  # weights are float8


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(ACCELERATORS)),
    config=st.sampled_from([LLAMA_3_8B, MIXTRAL_8X7B, QWEN3_30B_A3B]),
    t=st.sampled_from([1, 2, 4, 8]),
    seqs=st.integers(1, 600),
    context=st.integers(0, 10**7),
    passes=st.integers(0, 50),
)
def test_a_run_is_the_sum_of_its_passes(
    name: str, config: dict[str, Any], t: int, seqs: int, context: int, passes: int
) -> None:
    step = analytic(name, config, tensor_parallel=t, overhead=1e-4).step
    each = [step.seconds(seqs, seqs, context + i * seqs) for i in range(passes)]
    assert step.decode_seconds(seqs, context, passes) == pytest.approx(math.fsum(each), rel=1e-9)
    assert step.seconds(seqs + 1, seqs + 1, context) >= step.seconds(seqs, seqs, context)
    assert step.seconds(seqs, seqs + 64, context) >= step.seconds(seqs, seqs, context)


def test_efficiency_divides_the_speeds() -> None:
    full, half = (
        analytic("H200", LLAMA_3_8B, bandwidth_efficiency=e, compute_efficiency=e, overhead=0.001 * (e < 1))
        for e in (1.0, 0.5)
    )
    for shape in ((1, 1, 5000), (1, 8192, 8192)):
        assert half.step.seconds(*shape) - 0.001 == pytest.approx(2 * full.step.seconds(*shape))


def test_it_says_that_it_is_analytic(tmp_path: Path) -> None:
    costs = analytic("h100", LLAMA_3_8B, tensor_parallel=16)
    assert costs.source == "analytic" and "not measured" in costs.label
    assert any("within a node" in line for line in costs.report["findings"])
    assert costs.save is not None and costs.save.per_token == pytest.approx(131_072 / 8 / 64e9)
    for ending in (".toml", ".json"):
        costs.write(tmp_path / f"cost{ending}")
        assert read_cost(tmp_path / f"cost{ending}") == costs


def test_kv_capacity_by_hand() -> None:
    tokens = kv_capacity("H100", LLAMA_3_8B)
    assert tokens == int((0.9 * 80e9 - 2 * 8_030_261_248) / 131_072)
    with pytest.raises(ValueError, match=r"weights do not fit.*take more accelerators"):
        kv_capacity("H100", DEEPSEEK_V3, tensor_parallel=8)
    assert kv_capacity("H200", DEEPSEEK_V3, tensor_parallel=8) > 0


def test_the_table() -> None:
    """Compute-bound from as many rows as FLOPs go to a byte: 295 on an H100, as its papers say."""
    h100 = accelerator("H100")
    assert h100.flops["bfloat16"] / h100.bandwidth == pytest.approx(295, abs=1)
    assert accelerator("a100") is ACCELERATORS["A100-80GB"]
    for chip in ACCELERATORS.values():
        assert chip.source
        assert chip.flops.get("float8", 2 * chip.flops["bfloat16"]) == pytest.approx(
            2 * chip.flops["bfloat16"], rel=1e-3
        )
    h800 = accelerator("H800")
    assert (h800.link, h100.link) == (200e9, 450e9) and h800.bandwidth == h100.bandwidth


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "H1000"}, "choose from A100-40GB"),
        ({"tensor_parallel": 0}, "tensor_parallel must be"),
        ({"tensor_parallel": 3}, "does not divide"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"dtype": "float8", "device": "A100"}, "no float8 arithmetic"),
        ({"bandwidth_efficiency": 1.5}, "bandwidth_efficiency"),
        ({"compute_efficiency": 0.0}, "compute_efficiency"),
        ({"overhead": -1.0}, "step.overhead"),
    ],
)
def test_arguments_that_are_wrong(change: dict[str, Any], says: str) -> None:
    arguments = {"device": "H100", "model": LLAMA_3_8B} | change
    with pytest.raises(ValueError, match=says):
        analytic(**arguments)
