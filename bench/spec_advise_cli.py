"""`longtail spec advise`: will speculation pay on this machine, for this model?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Adds the command `advise`."""
    app.command("advise")(advise)


def advise(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    store: Annotated[
        Path | None,
        typer.Option(help="Sample store whose finished samples tell the acceptance", show_default="make rollouts"),
    ] = None,
    minutes: Annotated[float, typer.Option(help="To measure for")] = 2.0,
    batches: Annotated[str, typer.Option(help="Sequences that decode at once, comma-separated")] = "1,2,4,8,16,32",
    drafters: Annotated[str, typer.Option(help="Comma-separated; a>b: the first that has something to say")] = (
        "ngram,group,group>ngram"
    ),
    tasks: Annotated[str, typer.Option(help="Task mix of the rollouts")] = "mixed",
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the rollouts")] = 0.7,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="2")] = None,
    out: Annotated[Path, typer.Option(help="Directory for advice.json and advice.png")] = Path("runs/advise"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """Will speculation pay here? Profiles the engine, replays the drafters on rollouts, says at which batch sizes."""
    from longtail.bench import plots, spec_advise
    from longtail.bench.models import resolve_model

    try:
        sizes = tuple(int(batch) for batch in batches.split(",") if batch.strip())
    except ValueError:
        raise ValueError(f"batches: {batches!r} is not whole numbers with commas between them") from None
    settings = {} if threads is None else {"threads": threads}
    config = spec_advise.AdviseConfig(
        model=resolve_model(model, progress=lambda text: console.print(text, style="dim", highlight=False)),
        store=store,
        minutes=minutes,
        batches=sizes,
        drafters=tuple(name.strip() for name in drafters.split(",") if name.strip()),
        tasks=tasks,
        temperature=temperature,
        **settings,
    )
    with console.status("measuring") as status:
        result = spec_advise.run(config, progress=lambda text: status.update(text))
    out.mkdir(parents=True, exist_ok=True)
    (out / "advice.json").write_text(json.dumps(result, indent=1))
    plots.save(spec_advise.picture(result), out / "advice.png")
    console.print(spec_advise.table(result))
    for line in result["verdict"]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Picture: {out / 'advice.png'}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(result))
