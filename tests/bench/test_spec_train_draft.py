"""Training a draft model: layers of the target are the target's, what was disturbed is learnt back in seconds, and the
model does in the engine what the estimate promised."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.test_spec_train import VOCAB, cyclic, rollouts
from tests.partial_rollout.conftest import assert_same, make_model
from typer.testing import CliRunner

from longtail import Group, NativeEngine, SamplingParams
from longtail.bench import spec_train_draft
from longtail.bench.spec_rollouts import Rollout
from longtail.bench.spec_train import Batch, Example
from longtail.bench.spec_train_cli import table
from longtail.bench.spec_train_draft import (
    ABOUT,
    DraftConfig,
    TrainedDraft,
    loss_of,
    some_layers,
    spread,
    train_draft,
    version_of,
)
from longtail.spec_decode.controller import FixedLength

pytestmark = pytest.mark.usefixtures("threads_as_before")


def disturbed() -> Any:
    """The certain target, but for layers that talk into it."""
    model = cyclic()
    torch.manual_seed(2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.normal_(std=0.3)
    return model


def quick(**fields: Any) -> DraftConfig:
    return DraftConfig(**{"minutes": 0.15, "batch_tokens": 256, "learning_rate": 3e-3, "rows": 64} | fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TrainedDraft, Path]:
    model, out = cyclic(), tmp_path_factory.mktemp("draft") / "model"
    return model, train_draft(model, rollouts(), out, quick(), start=disturbed()), out


def first(record: dict[str, Any], name: str) -> float:
    return float(record["held_out"]["temperatures"]["1.0"][name]["by_position"][0])


def test_what_was_disturbed_is_learnt_back(trained: tuple[Any, TrainedDraft, Path]) -> None:
    _, draft, _ = trained
    before = {"held_out": draft.record["held_out_before"]}
    for name in ("greedy", "rejection", "match"):
        assert first(before, name) < 0.6 and first(draft.record, name) > 0.85, (name, draft.record)
    entry = draft.record["held_out"]["temperatures"]["1.0"]["match"]
    assert entry["by_position"] == [entry["by_position"][0]] * 4  # a draft is read as a token is
    a = entry["by_position"][0]
    assert entry["acceptance_length"] == pytest.approx(1 + a + a**2 + a**3 + a**4)
    assert draft.version == 1 and draft.record["trained_on"]["samples"] == 22
    counts = draft.record["parameters"]
    assert counts["all"] - counts["trained"] == 2 * VOCAB * 64  # embedding and LM head stay as they are


def test_embedding_head_and_target_stay_as_they_were(trained: tuple[Any, TrainedDraft, Path]) -> None:
    model, draft, _ = trained
    for name, p in cyclic().state_dict().items():
        assert torch.equal(p, model.state_dict()[name]), name
        if "embed" in name or "lm_head" in name:
            assert torch.equal(p, draft.model.state_dict()[name]), name


def test_the_engine_accepts_its_drafts_and_samples_stay(trained: tuple[Any, TrainedDraft, Path]) -> None:
    model, _, out = trained
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=3, n=4, ignore_eos=True)
    settings: dict[str, Any] = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "block_size": 16}

    def samples(drafter: str | None) -> tuple[list[Any], NativeEngine]:
        engine = NativeEngine(model, drafter=drafter, controller=FixedLength(3), **settings)
        group = Group.from_prompt("a", [9, 4, 27], params)
        engine.add(group.samples)
        while engine.has_work:
            engine.step()
        return group.samples, engine

    plain, _ = samples(None)
    drafted, engine = samples(f"model:{out}")
    for got, want in zip(drafted, plain, strict=True):
        assert_same(got, want)
    assert engine.stats().num_accepted_tokens > 0.7 * engine.stats().num_draft_tokens > 0


def test_training_goes_on_and_takes_the_place(trained: tuple[Any, TrainedDraft, Path], tmp_path: Path) -> None:
    model, _, out = trained
    mine = tmp_path / "mine"
    first_one = train_draft(model, rollouts(), mine, quick(minutes=0.02), start=out)
    assert first_one.version == version_of(mine) == 2 and first(first_one.record, "greedy") > 0.9
    (mine / "leftover").touch()
    assert train_draft(model, rollouts(), mine, quick(minutes=0.02), start=mine).version == version_of(mine) == 3
    assert not (mine / "leftover").exists() and [p.name for p in tmp_path.iterdir()] == ["mine"]
    about = json.loads((mine / ABOUT).read_text())
    assert about["kind"] == "draft" and about["record"]["started_from"] == str(mine)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="other holds something that is no draft model of ours"):
        first_one.save(tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.tex"]
    (mine / ABOUT).write_text("{}")
    with pytest.raises(ValueError, match=r"start: .*draft.json cannot be read"):
        train_draft(model, rollouts(), None, quick(), start=mine)


@torch.no_grad()
def test_layers_of_the_target_are_the_targets() -> None:
    model = make_model("qwen3", num_hidden_layers=5)
    ids = torch.arange(3, 20)[None]
    assert spread(5, 3) == [0, 1, 4] and spread(5, 1) == [4] and spread(5, 5) == list(range(5))
    whole = some_layers(model, range(5))
    assert torch.equal(whole(ids).logits, model(ids).logits)
    other = copy.deepcopy(model)
    other.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in (0, 1, 4))
    other.config.num_hidden_layers = other.model.config.num_hidden_layers = 3
    some = some_layers(model, [0, 1, 4])
    assert torch.equal(some(ids, use_cache=False).logits, other(ids, use_cache=False).logits)
    assert some.config.num_hidden_layers == len(some.config.layer_types) == 3
    some.model.layers[0].mlp.down_proj.weight.zero_()
    assert model.model.layers[0].mlp.down_proj.weight.any()  # a copy
    with pytest.raises(ValueError, match="the target has 5 layers, not 6"):
        spread(5, 6)


@torch.no_grad()
def test_the_loss_by_hand() -> None:
    """At every output position after the first: cross-entropy against the target's distribution, and against the token
    that came, where one did."""
    model, draft = make_model("llama", num_hidden_layers=3), make_model("llama", seed=1)
    examples = []
    for ids, prompt in ((torch.arange(5, 12), 3), (torch.arange(20, 24), 2)):
        examples.append(Example(ids, prompt, model.model(ids[None]).last_hidden_state[0]))
    config = DraftConfig(token_weight=0.5, rows=100, precision="float32")
    soft, hard = [], []
    for e in examples:
        wanted, logits = model(e.ids[None]).logits[0].softmax(-1), draft(e.ids[None]).logits[0].log_softmax(-1)
        soft += [-(wanted[p] * logits[p]).sum() for p in range(e.prompt_len, len(e.ids))]
        hard += [-logits[p, e.ids[p + 1]] for p in range(e.prompt_len, len(e.ids) - 1)]
    want = torch.stack(soft).mean() + 0.5 * torch.stack(hard).mean()
    got = loss_of(draft, model, Batch.of(examples), config, torch.Generator())
    assert torch.allclose(got, want, rtol=1e-4)
    few = [
        float(loss_of(draft, model, Batch.of(examples), DraftConfig(rows=1), torch.Generator().manual_seed(s)))
        for s in range(40)
    ]
    close = [any(abs(loss - float(one)) < 1e-3 for one in soft) for loss in few]
    assert all(close) and len({round(loss, 3) for loss in few}) == len(soft) == 6


def test_an_interrupt_keeps_what_was_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def interrupted(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return loss_of(*args)

    monkeypatch.setattr(spec_train_draft, "loss_of", interrupted)
    made = train_draft(cyclic(), rollouts(), tmp_path / "out", quick(minutes=5.0), start=disturbed())
    assert made.record["steps"] == 3 and version_of(tmp_path / "out") == 1


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="vocabulary of 512 tokens, the target one of 48"):
        train_draft(cyclic(), rollouts(), None, quick(), start=make_model("llama"))
    with pytest.raises(ValueError, match="the target has 2 layers, not 4"):
        train_draft(cyclic(), rollouts(), None, quick())
    with pytest.raises(ValueError, match="at least two groups"):
        train_draft(cyclic(), rollouts(1), None, quick(layers=1))
    with pytest.raises(ValueError, match="token 99, the target's vocabulary 48"):
        train_draft(cyclic(), [Rollout("a", [1], [99])], None, quick(layers=1))
    for field, value in (("layers", 0), ("rows", 0), ("minutes", 0.0), ("learning_rate", float("inf"))):
        with pytest.raises(ValueError, match=field):
            DraftConfig(**{field: value})  # type: ignore[arg-type]


def test_the_command(trained: tuple[Any, TrainedDraft, Path], tmp_path: Path) -> None:
    import typer

    from longtail.bench import spec_train_cli

    model, draft, _ = trained
    model.save_pretrained(tmp_path / "target")
    lines = [json.dumps({"group": r.group, "prompt_ids": r.prompt_ids, "output_ids": r.output_ids}) for r in rollouts()]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    app = typer.Typer()
    app.command("train")(spec_train_cli.train)
    given = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "out"), "--minutes", "0.03", "--json"]
    given += ["--kind", "draft", "--samples", str(tmp_path / "rollouts.jsonl")]
    done = CliRunner().invoke(app, [*given, "--layers", "1"])
    assert done.exit_code == 0, (done.output, done.exception)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["version"] == version_of(tmp_path / "out") == 1
    assert record["started_from"] == "1 layers of the target" and record["settings"]["layers"] == 1
    for wrong, message in (
        (["--depth", "2"], "--depth: of --kind mtp, not of draft"),
        (["--layers", "1", "--start", "x"], "has the layers of that one"),
    ):
        with pytest.raises(ValueError, match=message):
            CliRunner().invoke(app, [*given, *wrong], catch_exceptions=False)
    shown = [str(cell) for cell in table(draft.record).columns[1].cells]
    assert shown[:2] == ["greedy, before", "greedy"]
