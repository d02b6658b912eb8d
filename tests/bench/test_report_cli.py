"""`longtail report`: runs from disk, comparison that refuses unlike ones, many runs, and a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.bench.conftest import SyntheticRun, make_writer
from typer.testing import CliRunner

from longtail import Event, TraceError
from longtail.bench import analysis, display
from longtail.bench.cli import app
from longtail.bench.run_files import load
from longtail.bench.trace import TraceWriter

SETTINGS: dict[str, Any] = {"model": "m", "tasks": "mixed", "seed": 0, "iterations": 1, "prompts": 1, "group_size": 2,
                            "max_tokens": 9, "temperature": 0.7, "slots": 2}  # fmt: skip
VOID = {"meta", "link", "br", "hr", "img", "col", "input", "use", "path"}


def bench(
    path: Path, *, tokens: int = 3, prompt: int = 5, sample: str = "p0/0", grader: str = "math@1", **settings: Any
) -> Path:
    """A directory with a trace of one run."""
    path.mkdir()
    writer = TraceWriter()
    listen = writer.listener("sync")
    for event in (
        Event("run_start", 0.0, detail=json.dumps(SETTINGS | settings)),
        Event("iteration_start", 0.0),
        Event("submit", 0.0, sample=sample, group="p0", num_tokens=prompt),
        Event("admit", 0.0, sample=sample, group="p0", value=prompt),
        Event("step", 0.0, 1.0, num_seqs=1, num_tokens=tokens, num_output_tokens=tokens),
        Event("finish", 1.0, sample=sample, group="p0", num_tokens=tokens, detail="stop"),
        Event("grade", 1.0, sample=sample, group="p0", value=0.5, detail=grader),
        Event("hand_over", 1.0, group="p0", num_seqs=1, num_tokens=tokens),
        Event("iteration_end", 1.0),
        Event("run_end", 1.0),
    ):
        listen(event)
    writer.write(path / "trace.parquet", SETTINGS | settings)
    return path


def test_like_runs_are_compared(tmp_path: Path) -> None:
    loaded = load([bench(tmp_path / "a"), bench(tmp_path / "b", slots=4)])
    assert list(loaded.summary) == ["a/sync", "b/sync"] and loaded.unlike == []
    assert loaded.summary["a/sync"]["graders"] == ["math@1"]
    old = load([tmp_path / "a", bench(tmp_path / "old", grader="timed out after 3 s")])  # traces that do not say
    assert old.summary["old/sync"]["graders"] == [] and old.unlike == []
    assert loaded.meta["model"] == "m" and loaded.meta["slots (a)"] == 2 and loaded.meta["slots (b)"] == 4
    assert list(load([tmp_path / "a"]).summary) == ["sync"]
    assert list(load([tmp_path / "a" / "trace.parquet"]).summary) == ["sync"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "other"}, "model is m in a and other in b"),
        ({"tasks": "gsm"}, "tasks is mixed in a and gsm in b"),
        ({"seed": 1}, "seed is 0 in a and 1 in b"),
        ({"max_tokens": 99}, "max_tokens is 9 in a and 99 in b"),
        ({"temperature": None}, "temperature is 0.7 in a and unknown in b"),
        ({"grader": "math@2"}, "grader is math@1 in a and math@2 in b"),
        ({"grader": "math@2: timed out after 3 s"}, "grader is math@1 in a and math@2 in b"),
        ({"prompt": 6}, "prompts: sample p0/0 has 5 prompt tokens in a and 6 in b"),
        ({"tokens": 4}, "lengths: sample p0/0 has 3 output tokens in a and 4 in b"),
        ({"sample": "q0/0"}, "samples: none of a is in b"),
    ],
)
def test_unlike_runs_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    paths = [bench(tmp_path / "a"), bench(tmp_path / "b", **change)]
    with pytest.raises(ValueError, match=f"not alike: {says}"):
        load(paths)
    assert load(paths, anyway=True).unlike[0] == says
    done = CliRunner().invoke(app, ["report", *map(str, paths), "--anyway", "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert "These runs are not alike" in (tmp_path / "r.html").read_text()


def test_lengths_may_differ_in_fast_numerics(tmp_path: Path) -> None:
    assert load([bench(tmp_path / "a", numerics="fast"), bench(tmp_path / "b", numerics="fast", tokens=4)])
    assert load([bench(tmp_path / "c"), bench(tmp_path / "d", engine="vllm", tokens=4)])


def test_bad_files_are_named(tmp_path: Path) -> None:
    good = bench(tmp_path / "a")
    for name, data, says in [("empty", b"", "empty"), ("cut", (good / "trace.parquet").read_bytes()[:-30], "truncated"),
                             ("foreign", b"run,kind\n" * 9, "not a Parquet file")]:  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.parquet").write_bytes(data)
        with pytest.raises(TraceError, match=says) as caught:
            load([good, tmp_path / name])
        assert name in str(caught.value)
    with pytest.raises(TraceError, match="does not exist"):
        load([tmp_path / "none"])
    with pytest.raises(ValueError, match="given twice"):
        load([good, good])
    with pytest.raises(ValueError, match="none given"):
        load([])
    for text in ("{", "[]", '{"runs": 3}', '{"config": {}}'):
        (good / "summary.json").write_text(text)
        with pytest.raises(TraceError, match=r"summary\.json: damaged"):
            load([good])


def test_the_summary_beside_a_trace_brings_its_ledger(tmp_path: Path) -> None:
    good = bench(tmp_path / "a")
    runs = {"sync": {"ledger": {"generated": 3}, "speculation": None, "wall_seconds": 99}, "gone": {}}
    (good / "summary.json").write_text(json.dumps({"runs": runs}))
    numbers = load([good]).summary["sync"]
    assert numbers["ledger"] == {"generated": 3} and numbers["wall_seconds"] == 1.0


class Page(HTMLParser):
    """Tags that close as they should, columns of tables that match, texts of the first cells of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.widths: list[list[int]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.widths.append([])
        elif tag == "tr":
            self.widths[-1].append(0)
        elif tag in ("td", "th"):
            self.widths[-1][-1] += int(dict(attrs).get("colspan") or 1)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")


def seven_runs(tmp_path: Path) -> Path:
    writer = TraceWriter()
    for index in range(7):
        budget = None if index == 0 else 4000 + 400 * index
        SyntheticRun(writer.listener(f"strategy-{index}"), f"s{index}", budget).run()
    writer.write(tmp_path / "trace.parquet", {"model": "synthetic"})
    return tmp_path


def test_seven_runs_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(seven_runs(tmp_path))])
    assert done.exit_code == 0, done.output
    text = out.read_text()
    page = Page()
    page.feed(text)
    assert page.problems == [] and page.open == []
    assert all(len(set(widths)) == 1 for widths in page.widths if widths)
    assert "of 6 others" in done.output.lower() and "Most would help" in text
    assert text.count("<svg ") == 8
    summary = load([tmp_path]).summary
    table = display.summary_table({"runs": summary, "compare": analysis.compare(summary)})
    console = Console(width=80, record=True)
    console.print(table)
    lines = [line for line in console.export_text(clear=False).splitlines() if re.match(r" *strategy-\d ", line)]
    assert len(lines) == 7 and "1.00" in lines[0]
    assert "\u2026" not in console.export_text(clear=False)


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no headless browser here; the page is parsed by the tests above")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """Loads without an error on its console, asks for nothing, and every picture has a size."""
    make_writer().write(tmp_path / "trace.parquet", {})
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    page = tmp_path / "report.html"
    probe = """<script>addEventListener("load", () => { const boxes = [...document.querySelectorAll("figure svg")]
      .map(svg => svg.getBoundingClientRect()).filter(box => box.width > 300 && box.height > 80).length;
      const wide = document.documentElement.scrollWidth > innerWidth;
      document.title = `pictures ${boxes} wide ${wide} fetched ${performance.getEntriesByType("resource").length}`; })
      </script></body>"""
    page.write_text(page.read_text().replace("</body>", probe))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,900",
               f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=3000",
               "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None and title.group(1) == "pictures 8 wide false fetched 0"
    assert "CONSOLE" not in done.stderr
