"""`longtail spec advise`: figures and words from costs made by hand, stores, and one small real run. No times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from matplotlib.image import imread
from typer.testing import CliRunner

from longtail.bench import plots, spec_advise, spec_advise_cli
from longtail.bench.spec_advise import Acceptances, AdviseConfig
from longtail.bench.spec_replay import Replayed
from longtail.partial_rollout.store import SampleStore
from longtail.sample import Group
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.step_cost import StepCost
from longtail.version import PolicyVersion

pytestmark = pytest.mark.usefixtures("threads_as_before")
DRAFTS = 4


def costs(batch: int, slope: float) -> StepCost:
    """A pass over n rows takes 1 + slope * (n / batch - 1) seconds."""
    rows = [batch * (1 + n) for n in range(DRAFTS + 1)]
    return StepCost.from_points((n, 1.0 + slope * (n / batch - 1.0)) for n in rows for _ in range(5))


def given(*by_position: float) -> Acceptances:
    return Acceptances(list(by_position), 1.0 + float(np.cumprod(by_position).sum()), 0.0)


def test_verdict_from_costs_by_hand() -> None:
    """Rows are free at batch 1 and 2 (0.5 + 0.25 + 0.125 + 0.0625 tokens are gained: 1.94x), cost 0.6 of a step a draft
    at 16 and 32, and as much as a step at 64."""
    curves = {1: costs(1, 0.0), 2: costs(2, 0.0), 16: costs(16, 0.6), 32: costs(32, 0.6), 64: costs(64, 1.0)}
    rows = spec_advise.advice(curves, {"group": given(*[0.5] * DRAFTS), "ngram": given(*[0.3] * DRAFTS)}, DRAFTS)
    assert [row.batch for row in rows] == [1, 2, 16, 32, 64]
    first, third = rows[0].drafters[0], rows[2].drafters[0]
    assert first.speedup == pytest.approx(1.9375) and first.length == DRAFTS
    assert first.acceptance == pytest.approx(0.5, abs=1e-4)
    assert third.speedup == 1.0 and third.length == 0.0
    assert third.break_even == pytest.approx(0.6, abs=1e-3) and third.acceptance == pytest.approx(0.5, abs=1e-4)
    assert rows[4].drafters[0].break_even is None
    assert spec_advise.verdict(rows) == [
        "At batch 1 to 2 drafting with group pays: 1.9x expected.",
        "At batch 16 to 32 drafting does not pay: break-even acceptance 0.60 against 0.50 measured (group).",
        "At batch 64 drafting does not pay: not even drafts that are always right would.",
    ]


def test_the_verdict_names_each_drafter_where_it_is_best() -> None:
    def row(batch: int, **speeds: float) -> spec_advise.Advice:
        expected = [spec_advise.Expected(name, s, 2.0, 0.31, 0.62) for name, s in speeds.items()]
        return spec_advise.Advice(batch, 0.1, expected)

    rows = [row(1, ngram=1.2, group=1.44), row(4, ngram=1.3, group=1.12), row(8, ngram=1.1, group=1.0)]
    assert spec_advise.verdict([*rows, row(16, ngram=1.0, group=1.005), row(32, ngram=1.0, group=1.005)]) == [
        "At batch 1 drafting with group pays: 1.4x expected.",
        "At batch 4 to 8 drafting with ngram pays: 1.1x to 1.3x expected.",
        "From batch 16 on drafting does not pay: break-even acceptance 0.62 against 0.31 measured (group).",
    ]


def test_drafting_pays_exactly_where_the_acceptance_is_above_the_break_even() -> None:
    """The two figures that stand side by side never contradict the verdict, whatever the curve and the acceptance."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        batch = int(rng.integers(1, 9))
        rises = np.concatenate([[1.0], rng.exponential(rng.uniform(0.05, 0.6), DRAFTS)]).cumsum()
        cost = StepCost.from_points((batch * (1 + n), float(s)) for n, s in enumerate(rises) for _ in range(50))
        own = given(*rng.uniform(0.0, 1.0, DRAFTS))
        row = spec_advise.advice({batch: cost}, {"d": own}, DRAFTS)[0].drafters[0]
        even = 1.0 if row.break_even is None else row.break_even
        seen.add(row.speedup > 1.0)
        if row.speedup > 1.0:
            assert row.acceptance >= even - 1e-3
        else:
            assert row.acceptance <= even + 1e-3
    assert seen == {True, False}


def test_one_number_for_an_acceptance_by_position() -> None:
    """With one draft each 0.6; with two, of which the second is never accepted, a + a * a = 0.6."""
    assert spec_advise.equivalent([0.6, 0.0], 4, 4, 2) == pytest.approx(0.6, abs=1e-4)
    assert spec_advise.equivalent([0.6, 0.0], 4, 8, 2) == pytest.approx((3.4**0.5 - 1) / 2, abs=1e-4)
    assert spec_advise.equivalent([0.3, 0.3], 2, 3, 2) == pytest.approx(0.3, abs=1e-4)


def test_steps_without_a_draft_count_as_rejected() -> None:
    """Eight steps, in four of which something was drafted: 2 first tokens and 1 second one accepted."""
    out = Replayed(steps=8, tokens=11, judged_by_position=[4, 2, 1], accepted_by_position=[2, 1, 0])
    by_position = spec_advise.unconditional(out)
    assert by_position == [2 / 8, 1 / 2, 0.0]
    assert np.cumprod(by_position).sum() == 3 / 8 == out.acceptance_length - 1


# ---- stores


def filled(directory: Path, top: int = 200) -> None:
    """Two groups of finished samples that repeat themselves, the second with one that is still running."""
    with SampleStore(directory) as store:
        groups = [Group.from_prompt(f"g{g}", [5, 6, 7], SamplingParams(n=2, max_tokens=100)) for g in range(2)]
        store.add(groups)
        samples = [sample for group in groups for sample in group.samples]
        for sample in samples:
            for i in range(24):
                sample.append(10 + i % 6 if i < 23 else top, -1.0, PolicyVersion(0), "test", "computed")
            sample.status, sample.finish_reason = "finished", "length"
        samples[-1].status, samples[-1].finish_reason = "running", None
        store.watch(samples)
        store.commit()


def test_finished_samples_of_a_store(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    groups = spec_advise.read_store(tmp_path / "store", 256)
    assert [len(group) for group in groups] == [1, 2]  # the newest first, and only what is finished
    prompt, output = groups[1][0]
    assert list(prompt) == [5, 6, 7] and list(output) == [*[10 + i % 6 for i in range(23)], 200]
    accepted = spec_advise.replayed(groups, "ngram", DRAFTS)
    assert accepted.acceptance_length > 1.5 and accepted.by_position[0] > 0.3
    with pytest.raises(ValueError, match="holds token 200, and the model has 150"):
        spec_advise.read_store(tmp_path / "store", 150)


def test_a_store_that_says_nothing(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "store") as store:
        store.add([Group.from_prompt("g", [5], SamplingParams(n=2, max_tokens=9))])
    with pytest.raises(ValueError, match="has no finished samples"):
        spec_advise.read_store(tmp_path / "store", 256)


# ---- real runs


def command(arguments: list[str]) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    spec_advise_cli.register(app)
    return CliRunner().invoke(app, ["advise", *arguments], env={"COLUMNS": "140"})


def check_picture(path: Path) -> None:
    """Something is drawn in the left half and in the right one."""
    assert path.stat().st_size > 5000
    pixels = imread(path)[..., :3]
    half = pixels.shape[1] // 2
    for part in (pixels[:, :half], pixels[:, half:]):
        assert (np.abs(part - pixels[0, 0]).max(-1) > 0.3).mean() > 0.002


@pytest.mark.parametrize("with_store", [False, True])
def test_the_command(tiny_task_model: Path, tmp_path: Path, with_store: bool) -> None:
    out = tmp_path / "out"
    arguments = ["--model", str(tiny_task_model), "--minutes", "0.01", "--batches", "1,3", "--drafters"]
    arguments += ["ngram,group>ngram", "--tasks", "arithmetic", "--threads", "1", "--out", str(out), "--json"]
    if with_store:
        filled(tmp_path / "store")
        arguments += ["--store", str(tmp_path / "store")]
    result = command(arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads((out / "advice.json").read_text())
    assert printed["machine"]["threads"] == 1
    assert printed["streams"]["samples"] == 3 if with_store else printed["streams"]["samples"] > 3
    assert [row["batch"] for row in printed["rows"]] == [1, 3]
    for row in printed["rows"]:
        assert row["step_seconds"] > 0 and [own["drafter"] for own in row["drafters"]] == ["ngram", "group>ngram"]
        assert all(own["speedup"] >= 1.0 and 0 <= own["acceptance"] <= 1 for own in row["drafters"])
    # Every batch size with every draft length, twice a round at least, as rows that were really in the pass.
    lengths = (0, 1, 2, 3, 4, 6, 8)
    assert [(p["batch"], p["drafts"]) for p in printed["profile"]] == [(b, n) for b in (1, 3) for n in lengths]
    assert all(len(p["seconds"]) >= 2 and p["rows"] == p["batch"] * (1 + p["drafts"]) for p in printed["profile"])
    assert set(printed["acceptance"]) == {"ngram", "group>ngram"}
    for text in ("Will speculation pay here?", "break-even", "group>ngram", "drafting", "advice.png"):
        assert text in result.stderr
    assert printed["verdict"] and all(line in result.stderr for line in printed["verdict"])
    check_picture(out / "advice.png")


def test_a_picture_where_nothing_pays(tmp_path: Path) -> None:
    rows = spec_advise.advice({1: costs(1, 1.0), 4: costs(4, 1.0)}, {"group": given(0.2, 0.2)}, DRAFTS)
    figure = spec_advise.picture({"rows": [dataclasses.asdict(row) for row in rows]})
    assert figure.texts[0].get_text() == "Drafting does not pay at any of these batch sizes"
    plots.save(figure, tmp_path / "none.png")
    check_picture(tmp_path / "none.png")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("minutes", 0.0),
        ("minutes", float("nan")),
        ("batches", ()),
        ("batches", (2, 2)),
        ("batches", (0,)),
        ("drafters", ()),
        ("drafters", ("group", "group")),
        ("max_drafts", 0),
        ("group_size", 0),
        ("threads", 0),
        ("temperature", -1.0),
        ("max_tokens", 0),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        AdviseConfig(model="x", **{field: value})


def test_wrong_options_are_named(tiny_task_model: Path) -> None:
    for option, value, message in (("--batches", "1,x", "batches"), ("--drafters", "grop", "did you mean 'group'")):
        result = command(["--model", str(tiny_task_model), option, value])
        assert isinstance(result.exception, ValueError) and message in str(result.exception)
