"""Our backend of vLLM's weight transfer: under `VllmEngine`, and in a vLLM of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import group, prompt
from tests.vllm.conftest import EngineMaker, assert_same, generate
from transformers import LlamaForCausalLM

Weights = dict[str, torch.Tensor]
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def other(tiny: LlamaForCausalLM) -> Weights:
    """Of another model. Its head is tied, and left out."""
    torch.manual_seed(6)
    return {n: t + 0.05 * torch.randn_like(t) for n, t in tiny.state_dict().items() if n != HEAD}


@pytest.mark.parametrize("after", ["q_proj.weight", "mlp.gate_proj.weight", "embed_tokens.weight"])
def test_an_update_that_breaks_in_the_middle_can_be_repeated(
    after: str, make_vllm: EngineMaker, other: Weights, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a fused matrix is loaded, or a layer. vLLM's own `reload_weights` can never load again."""
    engine = make_vllm()
    engine.update_weights(other, engine.version + 1)
    expected = generate(engine, group("a", prompt(21)))[0]
    engine.update_weights(tiny.state_dict(), engine.version + 1)

    model = type(engine.core.runner.model)
    load = model.load_weights

    def torn(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name, tensor
            if name.endswith(after):
                raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(model, "load_weights", lambda self, weights: load(self, torn(weights)))
        with pytest.raises(OSError, match="planted"):
            engine.update_weights(other, engine.version + 1)
    sample = group("a", prompt(21)).samples[0]
    engine.add([sample])
    with pytest.raises(RuntimeError, match="repeat update_weights"):
        engine.step()
    engine.update_weights(other, engine.version + 1)
    while engine.has_work:
        engine.step()
    assert_same(sample, expected)


def test_plain_vllm(directories: dict[str, Path], make_vllm: EngineMaker, other: Weights, tmp_path: Path) -> None:
    """By its own calls: the head follows the embedding, spans of versions are told, and no KV of the old weights is
    found once its cache is reset. From memory and from a directory."""
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    from longtail.partial_rollout.engines.vllm_plugin import WEIGHT_TRANSFER, register_weight_transfer

    ours = make_vllm()
    ours.update_weights(other, ours.version + 1)
    expected = generate(ours, group("a", prompt(70), max_tokens=20, temperature=0.0))[0]
    register_weight_transfer()  # by the entry point, where longtail is installed
    llm = LLM(
        str(directories["llama"]),
        weight_transfer_config={"backend": WEIGHT_TRANSFER},
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
    )
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    given: Any = {"prompt_token_ids": prompt(70)}

    def update(version: str, **update_info: Any) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": update_info})
        llm.finish_weight_update(weight_version=version)
        assert llm.reset_prefix_cache(reset_running_requests=True)

    def made(times: int) -> Any:
        out = None
        for _ in range(times):
            for out in engine.step():
                if out.finished:
                    return out
        return out

    try:
        own = llm.generate(given, params, use_tqdm=False)[0].outputs[0].token_ids
        save_file({name: t.contiguous() for name, t in other.items()}, tmp_path / "model.safetensors")
        for kind, info in {"tensors": other, "directory": str(tmp_path)}.items():
            engine.set_weight_version("v1")
            engine.add_request(kind, given, params)
            made(8)
            update(f"v2 {kind}", **{kind: info})
            out = made(40)
            assert out.outputs[0].token_ids[:8] == own[:8]
            spans = [(s.version, s.start, s.end) for s in out.outputs[0].weight_versions]
            assert spans == [("v1", 0, 8), (f"v2 {kind}", 8, 20)]
            fresh = llm.generate(given, params, use_tqdm=False)[0]
            assert list(fresh.outputs[0].token_ids) == expected.output_ids
            update("v1", tensors=LlamaForCausalLM.from_pretrained(directories["llama"]).state_dict())
            assert llm.generate(given, params, use_tqdm=False)[0].outputs[0].token_ids == own
        for info in ({}, {"tensors": other, "directory": str(tmp_path)}):
            with pytest.raises(ValueError, match="one of the two"):
                llm.start_weight_update()
                llm.update_weights({"update_info": info})
    finally:
        engine.engine_core.shutdown()
