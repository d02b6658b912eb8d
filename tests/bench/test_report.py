"""The report: the answer, the numbers and the pictures are in it; nothing is fetched, nothing unescaped."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from longtail import Event
from longtail.bench import analysis, answer, plots, report
from longtail.bench.trace import TraceWriter

FIGURES = ("tail", "what-if", "slots", "active", "breakdown", "ledger", "staleness", "lengths")


@pytest.fixture
def numbers(synthetic: pd.DataFrame) -> dict[str, dict[str, Any]]:
    return analysis.summary(synthetic)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, synthetic_writer: TraceWriter) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    df = synthetic_writer.frame()
    meta = {"cpu": "<b>fast</b> & furious", "versions": {"torch": "2.13"}}
    report.write_report(path, df, analysis.summary(df), meta)
    return path.read_text()


def test_the_page_holds_answer_numbers_and_settings(page: str, numbers: dict[str, dict[str, Any]]) -> None:
    assert answer.headline(numbers) in page
    assert page.index('class="answer"') < page.index("<table")
    for run in numbers.values():
        assert f"{run['tokens_trained']:,d}" in page
        assert f"{run['tokens_per_second']:,.1f}" in page
        assert f"{100 * run['bubble_share']:.1f}\u00a0%" in page
    ratio = numbers["token-budget"]["tokens_per_second"] / numbers["sync"]["tokens_per_second"]
    assert f"({ratio:.2f}\u00d7)" in page
    assert page.count('<th scope="row">token-budget</th>') == 4 + 2  # a row an iteration, and where its seconds went
    assert "torch: 2.13" in page and "synthetic" in page


def test_the_ledger_is_shown_where_there_is_one(synthetic: pd.DataFrame, numbers: dict[str, dict[str, Any]]) -> None:
    assert "<h2>Ledger</h2>" not in report.render(synthetic, numbers, {})
    with_ledger = copy.deepcopy(numbers)
    with_ledger["sync"]["ledger"] = {"generated": 12_345, "zero-variance": 67}
    text = report.render(synthetic, with_ledger, {})
    assert '<th scope="row">zero-variance</th><td>67</td><td>\u2013</td>' in text and "<td>12,345</td>" in text


def test_a_setting_is_said_once() -> None:
    """A trace's list repeats the settings of its runs, some as they were asked for: only what they lack is added."""
    writer = TraceWriter()
    for run, tokens in (("x/a", 7), ("y/b", 8)):
        listen = writer.listener(run)
        settings = {"model": "m", "learning_rate": 0.5, "stop": [1, 2], "max_tokens": tokens}
        listen(Event("run_start", 0.0, detail=json.dumps(settings)))
        listen(Event("run_end", 1.0))
    df = writer.frame()
    meta = {"model": "m", "learning_rate": 0.5, "stop": (1, 2), "max_tokens (x)": 7, "max_tokens (y)": None, "cpu": "c"}
    meta |= {"cores (x)": 1, "cores (y)": 2}
    page = report.render(df, analysis.summary(df), meta)
    shown = page[page.index("Settings and machine") :]
    rows = re.findall(r'<th scope="row">([^<]*)</th>', shown)
    assert rows == ["model", "learning_rate", "stop", "max_tokens", "cpu", "cores (x)", "cores (y)"]


def test_foreign_text_is_escaped(page: str) -> None:
    assert "<b>fast</b>" not in page
    assert "&lt;b&gt;fast&lt;/b&gt; &amp; furious" in page


def test_run_names_and_settings_are_escaped_everywhere() -> None:
    name = '<script>alert("1")</script>'
    writer = TraceWriter()
    writer.listener(name)(Event("run_start", 0.0, detail='{"model": "<img src=x>"}'))
    writer.listener(name)(Event("finish", 1.0, sample="a", num_tokens=3, detail="stop"))
    df = writer.frame()
    text = report.render(df, analysis.summary(df), {})
    assert "<script" not in text and "<img" not in text
    assert "&lt;script&gt;" in text and "&lt;img src=x&gt;" in text


def test_pictures_are_inline_with_alt_texts_and_their_own_ids(page: str) -> None:
    pictures = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == len(FIGURES)
    ids: list[str] = []
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img" and len(root.get("aria-label") or "") > 40
        own = [element.get("id", "") for element in root.iter() if element.get("id")]
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', picture)
        assert {first or second for first, second in used} <= set(own)
        ids += own
        assert plots.INK not in picture and plots.PAPER not in picture
    assert len(ids) == len(set(ids))


def test_nothing_is_fetched(page: str) -> None:
    assert not re.search(r'(?:src|href)\s*=\s*"(?:https?:)?//|url\(\s*["\']?https?:|@import|<script|<link', page)


def test_the_same_trace_gives_the_same_page(synthetic: pd.DataFrame, numbers: dict[str, dict[str, Any]]) -> None:
    assert report.render(synthetic, numbers, {}) == report.render(synthetic, numbers, {})


def rated(numbers: dict[str, dict[str, Any]], **changes: float) -> dict[str, dict[str, Any]]:
    """The numbers with the second run's trained and generated rates set as multiples of the first's."""
    changed = copy.deepcopy(numbers)
    for key, ratio in changes.items():
        changed["token-budget"][key] = ratio * changed["sync"][key]
    return changed


def test_headline_says_gain_loss_or_neither(numbers: dict[str, dict[str, Any]]) -> None:
    cost = f"took {numbers['sync']['tail_seconds']:.1f} s"
    gain = answer.headline(rated(numbers, tokens_per_second=1.5))
    assert cost in gain and "gained: 1.50 times the trained tokens per second of sync" in gain
    loss = answer.headline(rated(numbers, tokens_per_second=0.7, tokens_generated_per_second=1.2))
    assert "did not pay here: 0.70 times" in loss and "generated 1.20 times as fast" in loss
    assert "still pending at the end" in loss
    slower = answer.headline(rated(numbers, tokens_per_second=0.7, tokens_generated_per_second=0.9))
    assert "because steps with fuller slots" in slower
    even = answer.headline(rated(numbers, tokens_per_second=1.01, tokens_generated_per_second=1.0))
    assert "trained as many tokens per second" in even


def test_reasons_name_what_weighs(numbers: dict[str, dict[str, Any]]) -> None:
    text = "\n".join(answer.reasons(rated(numbers, tokens_generated_per_second=0.9)))
    assert "was still pending at the end" in text and "tokens computed again" in text
    assert "Fuller slots did not make token-budget faster" in text
    broken = copy.deepcopy(numbers)
    broken["sync"].update(complete=False, tokens_unaccounted=12)
    text = "\n".join(answer.reasons(broken))
    assert "sync did not reach its end" in text and "12 generated tokens have no place" in text


def test_a_run_that_did_nothing_still_has_a_page() -> None:
    writer = TraceWriter()
    for run in ("sync", "token-budget"):
        writer.listener(run)(Event("run_start", 0.0))
        writer.listener(run)(Event("run_end", 1.0))
    df = writer.frame()
    text = report.render(df, analysis.summary(df), {"note": None})
    assert "trained nothing" in text and text.count("<svg ") == len(FIGURES)


def test_figures_save_for_a_paper(synthetic: pd.DataFrame, tmp_path: Path) -> None:
    figures = plots.all_figures(synthetic)
    assert tuple(figures) == FIGURES
    for name, figure in figures.items():
        plots.save(figure, tmp_path / f"{name}.pdf")
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_bars_of_the_timeline_are_the_intervals(synthetic: pd.DataFrame) -> None:
    figure = plots.slot_timeline(synthetic)
    held = analysis.intervals(synthetic)
    drawn = [len(axes.patches) for axes in figure.axes]
    assert drawn == [(held["run"] == run).sum() for run in ("sync", "token-budget")]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_plots_leave_no_global_state(synthetic: pd.DataFrame) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.svg(plots.time_breakdown(synthetic), "label", "p")
    assert dict(matplotlib.rcParams) == before


def test_no_remedy_is_named_for_a_tail_that_is_nothing_of_the_run(numbers: dict[str, dict[str, Any]]) -> None:
    assert "Most would help" in " ".join(answer.why(numbers))
    little = copy.deepcopy(numbers)
    first = next(iter(little.values()))
    for row in first["what_if"]:
        row["speedup"] = 1.001
    sentences = " ".join(answer.why(little))
    assert "Most would help" not in sentences and "less than 2% faster" in sentences.replace("\u00a0", "")
