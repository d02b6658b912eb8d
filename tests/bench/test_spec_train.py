"""Training a multi-token-prediction head: a target whose next token is certain is learnt in seconds, and the head does
in the engine what the estimate promised."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import assert_same, make_model
from typer.testing import CliRunner

from longtail import Group, NativeEngine, SampleStore, SamplingParams
from longtail.bench import spec_train
from longtail.bench.spec_acceptance import coupled_match
from longtail.bench.spec_rollouts import Rollout, hold_out, load_rollouts
from longtail.bench.spec_train import Batch, Example, TrainConfig, train_mtp, unroll
from longtail.bench.spec_train_cli import table
from longtail.partial_rollout.engines.native.mtp import MTPDrafter
from longtail.partial_rollout.engines.native.mtp_head import MTPHead
from longtail.spec_decode.controller import FixedLength

VOCAB, SIZE = 48, 64


def cyclic() -> Any:
    """A target that always goes from token t to token (5 t + 7) mod VOCAB: its layers add nothing, its LM head reads
    the embedding."""
    model = make_model("qwen3", vocab_size=VOCAB)  # its LM head is not tied to the embedding
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(torch.randn(VOCAB, SIZE), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        for token in range(VOCAB):
            model.lm_head.weight[(5 * token + 7) % VOCAB] = 2.0 * embedding[token]  # the norm makes it 8 times as long
    return model


def rollouts(groups: int = 12, length: int = 24) -> list[Rollout]:
    made = []
    for g in range(groups):
        ids = [random.Random(g).randrange(3, VOCAB)]
        while len(ids) < 4 + length:
            ids.append((5 * ids[-1] + 7) % VOCAB)
        made += [Rollout(f"g{g}", ids[:4], ids[4:], version=g)] * 2
    return made


def quick(**fields: Any) -> TrainConfig:
    return TrainConfig(**{"minutes": 0.15, "vocabulary": 0, "batch_tokens": 256, "learning_rate": 3e-3} | fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, MTPHead, Path]:
    model, out = cyclic(), tmp_path_factory.mktemp("head")
    return model, train_mtp(model, rollouts(), out, quick()), out


def test_a_certain_target_is_learnt(trained: tuple[Any, MTPHead, Path]) -> None:
    _, head, _ = trained
    entries = head.record["held_out"]["temperatures"]["1.0"]
    for name in ("greedy", "rejection", "match"):
        assert entries[name]["by_position"][0] > 0.9, (name, entries)
        assert entries[name]["by_position"][1] > 0.8, (name, entries)
    assert head.version == 1
    assert head.record["trained_on"] == {
        "groups": 11, "samples": 22, "tokens": 22 * 28, "newest_version": head.record["trained_on"]["newest_version"],
    }  # fmt: skip


def test_the_engine_accepts_its_drafts_and_samples_stay(trained: tuple[Any, MTPHead, Path]) -> None:
    model, _, out = trained
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=3, n=4, ignore_eos=True)
    settings: dict[str, Any] = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "block_size": 16}

    def samples(drafter: Any) -> tuple[list[Any], NativeEngine]:
        engine = NativeEngine(model, drafter=drafter, controller=FixedLength(2), **settings)
        group = Group.from_prompt("a", [9, 4, 27], params)
        engine.add(group.samples)
        while engine.has_work:
            engine.step()
        return group.samples, engine

    plain, _ = samples(None)
    drafted, engine = samples(f"mtp:{out}")
    for got, want in zip(drafted, plain, strict=True):
        assert_same(got, want)
    assert engine.stats().num_accepted_tokens > 0.7 * engine.stats().num_draft_tokens > 0


def test_training_goes_on_from_a_head(trained: tuple[Any, MTPHead, Path], tmp_path: Path) -> None:
    model, _, out = trained
    more = train_mtp(model, rollouts(), tmp_path, quick(minutes=0.02), start=MTPHead.load(out))
    assert more.version == MTPHead.load(tmp_path).version == 2
    assert more.record["held_out"]["temperatures"]["1.0"]["greedy"]["by_position"][0] > 0.9
    with pytest.raises(ValueError, match="target with vocab_size 48, this one has 512"):
        train_mtp(make_model("qwen3"), rollouts(), None, quick(), start=more)


def test_the_target_stays_as_it_was(trained: tuple[Any, MTPHead, Path]) -> None:
    model, _, _ = trained
    for name, p in cyclic().state_dict().items():
        assert torch.equal(p, model.state_dict()[name]), name
        assert model.get_parameter(name).grad is None


def test_an_interrupt_keeps_what_was_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def interrupted(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return loss_of(*args)

    loss_of = spec_train.loss_of
    monkeypatch.setattr(spec_train, "loss_of", interrupted)
    head = train_mtp(cyclic(), rollouts(), tmp_path, quick(minutes=5.0))
    assert head.record["steps"] == 3
    assert MTPHead.load(tmp_path).record["steps"] == 3


@torch.no_grad()
def test_unrolled_rows_by_hand() -> None:
    """At draft position j a row reads the output of the row before it at position j - 1."""
    model = make_model("llama")
    torch.manual_seed(0)
    head = MTPHead(model.config)
    example = Example(torch.arange(5, 12), 3, torch.randn(7, 64))
    batch = Batch.of([example, Example(torch.arange(4), 2, torch.randn(4, 64))])
    assert batch.learn.tolist() == [[False] * 3 + [True] * 4, [False] * 2 + [True] * 2 + [False] * 3]
    embeds = model.get_input_embeddings()(batch.ids)
    one, two = unroll(head, batch, embeds, 2)
    zero = torch.zeros(1, 64)
    want = head(torch.cat([zero, example.hidden[:-1]])[None], embeds[:1])
    assert torch.allclose(one[:1], want, atol=1e-5)
    assert torch.allclose(two[:1], head(torch.cat([zero, want[0, :-1]])[None], embeds[:1]), atol=1e-5)


def test_coupled_match_is_the_share_of_equal_winners() -> None:
    """Against 100,000 races with shared noise: within 5 standard errors (0.008), false alarms below 1e-6 a pair."""
    generator = torch.Generator().manual_seed(5)
    for spread in (0.5, 2.0, 5.0):
        p, q = (torch.softmax(spread * torch.randn(1, 7, generator=generator), -1) for _ in range(2))
        noise = torch.empty(100_000, 7).exponential_(generator=generator)
        same = ((noise / p).argmin(1) == (noise / q).argmin(1)).double().mean()
        assert abs(float(coupled_match(p, q)) - float(same)) < 0.008
    assert float(coupled_match(p, p)) == pytest.approx(1.0, abs=2e-3)


def test_rollouts_of_a_store_and_of_a_file(tmp_path: Path) -> None:
    model = cyclic()
    engine = NativeEngine(model, kv_cache_bytes=4 << 20, max_num_seqs=8, block_size=16)
    group = Group.from_prompt("a", [9, 4, 27], SamplingParams(max_tokens=5, n=3, ignore_eos=True))
    engine.add(group.samples)
    while engine.has_work:
        engine.step()
    with SampleStore(tmp_path / "store") as store:
        store.add([group])
        store.watch(group.samples)
        store.commit()
    found = load_rollouts(tmp_path / "store")
    want = [Rollout("a", [9, 4, 27], list(s.output_ids)) for s in group.samples]
    assert found == want
    lines = [json.dumps({"group": r.group, "prompt_ids": r.prompt_ids, "output_ids": r.output_ids}) for r in want]
    (tmp_path / "rollouts.jsonl").write_text("\n".join([*lines, ""]))
    assert load_rollouts(tmp_path / "rollouts.jsonl") == want
    (tmp_path / "rollouts.jsonl").write_text('{"prompt_ids": [1]}')
    with pytest.raises(ValueError, match=r"line 1: KeyError\('output_ids'\)"):
        load_rollouts(tmp_path / "rollouts.jsonl")
    with pytest.raises(ValueError, match="neither a store's directory nor a file"):
        load_rollouts(tmp_path / "nowhere")


def test_whole_groups_are_held_out() -> None:
    train, held = hold_out(rollouts(), 0.25, seed=1)
    assert {r.group for r in train} & {r.group for r in held} == set()
    assert (len(train), len(held)) == (18, 6)
    with pytest.raises(ValueError, match="at least two groups"):
        train_mtp(cyclic(), rollouts(1), None, quick())
    with pytest.raises(ValueError, match="token 99, the target's vocabulary 48"):
        train_mtp(cyclic(), [Rollout("a", [1], [99])], None, quick())
    with pytest.raises(ValueError, match="minutes must be above 0, not 0"):
        TrainConfig(minutes=0)


def test_only_frequent_tokens_are_drafted(trained: tuple[Any, MTPHead, Path]) -> None:
    model, _, _ = trained
    made = rollouts()
    common = sorted({token for r in made for token in r.output_ids})[:20]
    some = [Rollout(r.group, r.prompt_ids, [t for t in r.output_ids if t in common] or [common[0]]) for r in made]
    head = train_mtp(model, some, None, quick(minutes=0.02, vocabulary=20))
    assert head.vocabulary is not None
    assert head.vocabulary.tolist() == common
    drafter = MTPDrafter(head)
    engine = NativeEngine(
        model, kv_cache_bytes=4 << 20, max_num_seqs=8, block_size=16, drafter=drafter, controller=FixedLength(2)
    )
    (sample,) = Group.from_prompt("a", [9, 4], SamplingParams(max_tokens=12, ignore_eos=True)).samples
    engine.add([sample])
    while engine.has_work:
        engine.step()
    assert engine.stats().num_draft_tokens > 0


def test_the_command(trained: tuple[Any, MTPHead, Path], tmp_path: Path) -> None:
    import typer

    from longtail.bench import spec_train_cli

    model, head, _ = trained
    model.save_pretrained(tmp_path / "target")
    lines = [json.dumps({"group": r.group, "prompt_ids": r.prompt_ids, "output_ids": r.output_ids}) for r in rollouts()]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    app = typer.Typer()
    app.command("train")(spec_train_cli.train)
    given = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "out"), "--minutes", "0.03", "--json"]
    done = CliRunner().invoke(app, [*given, "--samples", str(tmp_path / "rollouts.jsonl"), "--vocabulary", "0"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["version"] == MTPHead.load(tmp_path / "out").version == 1
    assert record["trained_on"]["samples"] == 22
    for wrong, message in (
        (["--samples", "x", "--generate", "2"], "either --samples, or --generate"),
        ([], "either --samples, or --generate"),
        (["--samples", "x", "--kind", "eagle"], "no drafter 'eagle'"),
    ):
        with pytest.raises(ValueError, match=message):
            CliRunner().invoke(app, [*given, *wrong], catch_exceptions=False)
    assert "tokens a step" in [str(column.header) for column in table(head.record).columns]
