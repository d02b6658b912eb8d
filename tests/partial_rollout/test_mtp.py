"""Multi-token-prediction heads: the drafter computes what the head was trained as, changes no token, and reads what
checkpoints ship."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from longtail import Group
from longtail.partial_rollout.engines.native.mtp import MTPDrafter
from longtail.partial_rollout.engines.native.mtp_head import MTPHead
from longtail.partial_rollout.engines.native.mtp_layouts import load_shipped
from longtail.sample import Sample
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.drafter import Draft, DraftRequest

LENGTH = 40


def make_head(model: Any, seed: int = 0, vocabulary: torch.Tensor | None = None) -> MTPHead:
    """Random, with weights large enough that every part shows in the output."""
    torch.manual_seed(seed)
    head = MTPHead(model.config, vocabulary)
    with torch.no_grad():
        head.eh_proj.weight.normal_(std=0.2)
        norms: list[Any] = [head.enorm, head.hnorm, head.base.norm]
        for norm in norms:
            norm.weight.uniform_(0.5, 1.5)
    return head


def groups() -> list[Group]:
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 3},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"ignore_eos": False, "stop_token_ids": tuple(range(3, 60)), "min_tokens": 12},
    ]
    return [
        group(f"g{i}", prompt(5 + 13 * i % 37, i), n=2, **({"max_tokens": LENGTH} | p)) for i, p in enumerate(params)
    ]


def reference_drafts(head: MTPHead, model: Any, sample: Sample, length: int, first: int = 0) -> list[list[float]]:
    """Logits of each draft by the head's own forward: rows of committed tokens on the target's hidden states, those of
    drafts (sampled greedily) on the head's own output; all through one causal pass over all rows. Rows whose hidden
    state is at a position before `first` read zeros."""
    ids = [*sample.prompt_ids, *sample.output_ids]
    states = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    states[:first] = 0.0
    rows = torch.cat([torch.zeros(1, states.shape[1]), states[:-1]])
    logits = []
    for _ in range(length):
        out = head(rows[None], model.get_input_embeddings()(torch.tensor([ids])))[0]
        logits.append(model.lm_head(out[-1]))
        ids = [*ids, int(logits[-1].argmax())]
        rows = torch.cat([rows, out[-1:]])
    return [row.tolist() for row in logits]


class _Watched(MTPDrafter):
    """Keeps the logits that it drafts from. stream: if given, drafts this output of its only sample, so that its rows
    are accepted."""

    def __init__(self, head: MTPHead, stream: list[int] | None = None, **fields: Any) -> None:
        super().__init__(head, **fields)
        self.seen: list[torch.Tensor] = []
        self.stream, self.at = stream or [], 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.at = len(requests[0].sample.output_ids)
        return super().propose(requests)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(super()._logits(hidden).clone())
        logits = self.seen[-1].clone()
        if self.at < len(self.stream):
            logits[:, self.stream[self.at]] += 1e4
        self.at += 1
        return logits


@pytest.mark.parametrize("right", [False, True], ids=["rejected", "accepted"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-interface"])
@torch.no_grad()
def test_the_drafter_computes_the_heads_forward(make_engine: EngineMaker, kind: str, right: bool) -> None:
    """After every step of a greedy sample, through paged KV in pieces, within 2e-3 of the largest logit; whatever was
    drafted before, and whether it was accepted."""
    kind, _, interface = kind.partition("-")
    model = make_model(kind)
    plain = generate(make_engine(model), group("a", prompt(21), max_tokens=24, temperature=0.0))[0].output_ids
    drafter = _Watched(make_head(model), plain if right else None)
    engine = make_engine(model, fused=False if interface else None, drafter=drafter, controller=FixedLength(3))
    (sample,) = group("a", prompt(21), max_tokens=24, temperature=0.0).samples
    engine.add([sample])
    compared = 0
    while engine.has_work:
        engine.step()
        drafter.check_integrity()
        if sample.is_done:
            break
        drafter.seen.clear()
        drafter.stream = []
        (draft,) = drafter.propose([DraftRequest(sample, 3)])
        drafter.stream = plain if right else []
        want = torch.tensor(reference_drafts(drafter.head, model, sample, 3))
        got = torch.cat(drafter.seen)
        assert torch.allclose(got, want, rtol=0, atol=2e-3 * want.abs().max().item())
        assert draft.tokens == want.argmax(-1).tolist()
        compared += 1
    assert compared > 3
    assert (engine.stats().num_accepted_tokens > 10) == right
    assert not drafter._known
    assert not drafter._held
    assert not drafter._true
    assert not drafter._last


@torch.no_grad()
def test_siblings_share_the_heads_kv_of_their_prompt(make_engine: EngineMaker) -> None:
    """The second sample's prompt is not computed by the target, so nobody has its hidden states; the head has the
    rows of the first one. Its drafts are those of a full context all the same."""
    model = make_model("llama")
    drafter = _Watched(make_head(model))
    engine = make_engine(model, drafter=drafter, controller=FixedLength(2))
    first, second = group("a", prompt(37), n=2, max_tokens=24, temperature=0.0).samples
    engine.add([first, second])
    while not (engine.stats().num_cached_tokens and len(second.output_ids) > 3):
        engine.step()
    assert drafter._held[second.id].seq.num_computed_tokens >= 37
    drafter.seen.clear()
    drafter.propose([DraftRequest(second, 2)])
    want = torch.tensor(reference_drafts(drafter.head, model, second, 2))
    assert torch.allclose(torch.cat(drafter.seen), want, rtol=0, atol=2e-3 * want.abs().max().item())


@torch.no_grad()
def test_hidden_states_that_nobody_has_read_as_zeros(make_engine: EngineMaker) -> None:
    """A sample resumed from a snapshot in an engine whose drafter has not seen it."""
    model = make_model("llama")
    one = make_engine(model)
    (sample,) = group("a", prompt(19), max_tokens=24, temperature=0.0).samples
    run(one, [sample], until=6)
    one.pause([sample.id])
    drafter = _Watched(make_head(model))
    two = make_engine(model, drafter=drafter, controller=FixedLength(2))
    two.add([sample])
    two.step()
    start = sample.num_tokens - 2  # the position that the second engine computed
    assert two.stats().num_restored_tokens == start
    drafter.propose([DraftRequest(sample, 2)])
    want = torch.tensor(reference_drafts(drafter.head, model, sample, 2, first=start))
    assert torch.allclose(torch.cat(drafter.seen), want, rtol=0, atol=2e-3 * want.abs().max().item())


@functools.cache
def expected(make_engine: EngineMaker, kind: str) -> list[Sample]:
    return generate(make_engine(make_model(kind)), *groups())


@pytest.mark.parametrize("vocabulary", [None, tuple(range(0, 512, 3))], ids=["all", "third"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_same_samples_with_a_head(make_engine: EngineMaker, kind: str, vocabulary: tuple[int, ...] | None) -> None:
    model = make_model(kind)
    head = make_head(model, vocabulary=None if vocabulary is None else torch.tensor(vocabulary))
    drafter = MTPDrafter(head)
    engine = make_engine(model, drafter=drafter, controller=FixedLength(3))
    for got, want in zip(generate(engine, *groups()), expected(make_engine, kind), strict=True):
        assert_same(got, want)
    assert engine.stats().num_draft_tokens > 0
    drafter.check_integrity()
    assert drafter.kv is not None
    assert drafter.kv.num_free == drafter.kv.num_blocks


@pytest.mark.parametrize("preemption", ["snapshot", "recompute"])
def test_the_same_samples_when_blocks_run_out(make_engine: EngineMaker, preemption: str) -> None:
    model = make_model("llama")
    one = make_engine(model).kv.bytes_per_block
    many = [group(f"g{i}", prompt(30, i), max_tokens=60) for i in range(6)]
    want = generate(make_engine(model), *copy.deepcopy(many))
    drafter = MTPDrafter(make_head(model), kv_cache_bytes=20 * one // 2)  # too little for all of them as well
    tight = make_engine(
        model, kv_cache_bytes=16 * one, max_model_len=160, preemption=preemption, drafter=drafter,
        controller=FixedLength(3),
    )  # fmt: skip
    for got, expected_one in zip(generate(tight, *many), want, strict=True):
        assert_same(got, expected_one)
        drafter.check_integrity()
    assert tight.stats().num_preemptions > 0
    assert tight.stats().num_draft_tokens > 0


def test_pauses_with_and_without_kv_change_nothing(make_engine: EngineMaker) -> None:
    model = make_model("llama")
    drafter = MTPDrafter(make_head(model))
    engine = make_engine(model, drafter=drafter, controller=FixedLength(3))
    samples = [s for g in groups() for s in g.samples]
    turn = 0
    while any(not s.is_done for s in samples):
        engine.add([s for s in samples if not s.is_done and s.id not in engine._sequences])
        for _ in range(3):
            engine.step()
            drafter.check_integrity()
        live = [s.id for s in samples if s.id in engine._sequences]
        engine.pause(live[turn % 2 :: 2], snapshot=turn % 3 > 0)
        if turn % 4 == 0:
            engine.reset_prefix_cache()
        turn += 1
    for got, want in zip(samples, expected(make_engine, "llama"), strict=True):
        assert_same(got, want)
    assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_updates_of_the_weights(make_engine: EngineMaker, kv_on_update: str) -> None:
    """With drafts an update lands at another token; where it lands, the stream is that of a run without drafts."""
    model, state = make_model("llama"), make_model("llama", seed=1).state_dict()
    drafter = _Watched(make_head(model, vocabulary=torch.arange(0, 512, 2)))
    engine = make_engine(model, kv_on_update=kv_on_update, drafter=drafter, controller=FixedLength(3))
    (sample,) = group("a", prompt(9), max_tokens=LENGTH, temperature=0.0).samples
    run(engine, [sample], until=12)
    cut = len(sample.output_ids)
    engine.update_weights(state, 1)
    engine.step()
    drafter.seen.clear()
    drafter.propose([DraftRequest(sample, 1)])
    if kv_on_update == "recompute":  # all rows are on the new weights' hidden states, and the LM head is the new one
        updated = make_model("llama", seed=1)
        with torch.no_grad():
            want = torch.tensor(reference_drafts(drafter.head, updated, sample, 1))[:, ::2]
        assert torch.allclose(drafter.seen[0][:, ::2], want, rtol=0, atol=2e-3 * want.abs().max().item())
    run(engine)
    plain = make_engine(model, kv_on_update=kv_on_update)
    (other,) = group("a", prompt(9), max_tokens=LENGTH, temperature=0.0).samples
    run(plain, [other], until=cut)
    plain.update_weights(state, 1)
    run(plain)
    assert_same(sample, other)


def test_by_rejection(make_engine: EngineMaker) -> None:
    """Greedy samples are the same under either verification; drafts carry what they were drawn from."""
    model = make_model("llama")
    want = generate(make_engine(model), group("a", prompt(9), max_tokens=LENGTH, temperature=0.0))[0]
    engine = make_engine(
        model, verification="rejection", drafter=MTPDrafter(make_head(model)), controller=FixedLength(3)
    )
    got = generate(engine, group("a", prompt(9), max_tokens=LENGTH, temperature=0.0))[0]
    assert got.output_ids == want.output_ids
    generate(engine, group("b", prompt(12), max_tokens=LENGTH))
    assert engine.stats().num_draft_tokens > 0


# -- on disk ----------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    model = make_model("qwen3")
    head = make_head(model, vocabulary=torch.arange(5, 300))
    head.version, head.record = 3, {"steps": 7}
    head.save(tmp_path)
    back = MTPHead.load(tmp_path)
    assert (back.version, back.record, back.target) == (3, {"steps": 7}, head.target)
    ours, theirs = head.tensors(), back.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        assert torch.equal(head(x, x.flip(1)), back(x, x.flip(1)))
    assert json.loads((tmp_path / "mtp.json").read_text())["version"] == 3
    assert not list(tmp_path.glob("*.part"))


def test_a_head_of_another_target_is_refused(make_engine: EngineMaker, tmp_path: Path) -> None:
    make_head(make_model("llama", vocab_size=300)).save(tmp_path)
    with pytest.raises(ValueError, match="target with vocab_size 300, this one has 512"):
        make_engine(drafter=f"mtp:{tmp_path}")
    wide = make_head(make_model("llama", hidden_size=32))
    with pytest.raises(ValueError, match="target with hidden_size 32, this one has 64"):
        make_engine(drafter=MTPDrafter(wide))
    with pytest.raises(ValueError, match="target with model_type qwen3, this one has llama"):
        make_head(make_model("qwen3")).check_target(make_model("llama").config)


def test_files_that_are_no_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no head"):
        MTPHead.load(tmp_path)
    (tmp_path / "mtp.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        MTPHead.load(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "mtp.safetensors")
    with pytest.raises(ValueError, match="is not a head of format"):
        MTPHead.load(tmp_path)
    for bad in ([], [3, 3], [2, 1], [-1, 4], [511, 512]):
        with pytest.raises(ValueError, match="vocabulary: must be ascending"):
            MTPHead(make_model("llama").config, torch.tensor(bad))


# -- what checkpoints ship --------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip
GLM = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "use_qk_norm": True, "n_shared_experts": 1,
}  # fmt: skip
NEXT = {
    "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def shipped(kind: str) -> tuple[Any, dict[str, str], bool]:
    """-> a target of three layers, whose last one is to be the shipped head's block (so the library's own saving gives
    its tensors their checkpoint names); the names of the head's own tensors; whether the hidden state comes first."""
    torch.manual_seed(3)
    three = {"num_hidden_layers": 3}
    if kind == "deepseek":
        model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL | DEEPSEEK | three))
    elif kind == "glm":
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL | GLM | three))
    elif kind == "mimo":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL | three))
    else:
        types = [*NEXT["layer_types"], "full_attention"]  # type: ignore[misc]
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL | NEXT | three | {"layer_types": types}))
    names = {
        "deepseek": ("model.layers.2.", "enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
        "glm": ("model.layers.2.", "enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
        "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
        "next": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    }[kind]
    keys = ("prefix", "enorm", "hnorm", "proj", "norm", "block")
    return model.eval(), dict(zip(keys, names, strict=True)), kind == "mimo"


@pytest.mark.parametrize("kind", ["deepseek", "glm", "mimo", "next"])
@torch.no_grad()
def test_shipped_layers(kind: str, tmp_path: Path) -> None:
    """Against the model's own layer and norms, called one by one."""
    model, name, hidden_first = shipped(kind)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix, size = name["prefix"], 32
    renamed = {}
    for key, tensor in tensors.items():
        block = key.removeprefix("model.layers.2.")
        renamed[key if block == key else f"{prefix}{name['block']}{block}"] = tensor
    enorm, hnorm, final = (copy.deepcopy(model.model.norm) for _ in range(3))
    for module, key in ((enorm, "enorm"), (hnorm, "hnorm"), (final, "norm")):
        module.weight.uniform_(0.5, 1.5)
        renamed[f"{prefix}{name[key]}.weight"] = module.weight.clone()
    proj = torch.randn(size, 2 * size) * 0.2
    renamed[f"{prefix}{name['proj']}.weight"] = proj
    if kind in ("deepseek", "glm"):
        renamed[f"{prefix}embed_tokens.weight"] = torch.zeros(64, 32)
        renamed[f"{prefix}shared_head.head.weight"] = torch.zeros(64, 32)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 2
    for field in ("layer_types", "mlp_layer_types"):
        if config.get(field):
            config[field] = config[field][:2]
    (tmp_path / "config.json").write_text(json.dumps(config))

    head = load_shipped(tmp_path)
    hidden, embeds = torch.randn(1, 6, size), torch.randn(1, 6, size)
    got = head(hidden, embeds)
    parts = (hnorm(hidden), enorm(embeds)) if hidden_first else (enorm(embeds), hnorm(hidden))
    x = nn.functional.linear(torch.cat(parts, dim=-1), proj)
    # The model's own last layer, with everything else taken away.
    alone = copy.deepcopy(model)
    alone.model.layers = alone.model.layers[2:]
    alone.model.norm = final
    alone.config.num_hidden_layers = alone.model.config.num_hidden_layers = 1
    if getattr(alone.config, "layer_types", None):
        alone.model.config.layer_types = ["full_attention"]
    want = alone.model(inputs_embeds=x, use_cache=False).last_hidden_state
    assert torch.allclose(got, want, rtol=0, atol=1e-5 * want.abs().max().item())
    assert not torch.allclose(got, head(embeds, hidden), atol=1e-2)  # the order of the two matters


def test_a_checkpoint_without_such_layers_says_so(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ships no multi-token-prediction layer in a known layout"):
        load_shipped(tmp_path)


def test_a_layer_that_does_not_fit_says_what(tmp_path: Path) -> None:
    model: LlamaForCausalLM = make_model("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.2."
    size = {"enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,), "eh_proj": (64, 128)}
    extra = {f"{prefix}{name}.weight": torch.ones(shape) for name, shape in size.items()}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not fit the model's own layers: model\.layers\.0"):
        load_shipped(tmp_path)
    extra[f"{prefix}eh_proj.weight"] = torch.ones(64, 64)
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"eh_proj.weight has shape \(64, 64\), the model needs \(64, 128\)"):
        load_shipped(tmp_path)
