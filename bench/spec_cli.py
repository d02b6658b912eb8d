"""`longtail spec`: about speculative decoding. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from longtail.bench import spec_advise_cli
from longtail.bench.engines import check_engine
from longtail.bench.spec_train_cli import train

if TYPE_CHECKING:
    from longtail.bench.spec_audit import AuditReport

app = typer.Typer(
    no_args_is_help=True, help="Speculative decoding: will it pay, is it lossless, and a drafter to train."
)
spec_advise_cli.register(app)
app.command("train")(train)
console = Console(stderr=True)


@app.command()
def audit(
    engine: Annotated[str, typer.Option(help="native, or vllm")] = "native",
    model: Annotated[
        str | None,
        typer.Option(
            help="tiny (random, made on the spot), a name, a directory or a hub id",
            show_default="smollm2-135m if it has been made, else tiny",
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(help="Comma-separated: the engine's by name, and the audit's own (likely: often right; unlikely)"),
    ] = "ngram,group,likely,unlikely",
    numerics: Annotated[str, typer.Option(help="exact: bits are compared; fast: up to rounding")] = "exact",
    seconds: Annotated[float, typer.Option(help="Time for the whole audit")] = 120.0,
    effect: Annotated[float, typer.Option(help="Bias to be found: wrong drafts accepted with this probability")] = 0.02,
    false_alarm: Annotated[float, typer.Option(help="Probability that an engine without fault fails")] = 1e-6,
    tolerance: Annotated[float, typer.Option(help="What rounding may do to a log-probability")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and samples")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads", show_default="all; 1 for tiny")] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="vllm: counter (longtail's sampler, as VllmEngine has it) or vllm (its own)",
            show_default="counter; with --uncorrected vllm",
        ),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Greedy samples alone")] = False,
    uncorrected: Annotated[
        bool, typer.Option("--uncorrected", help="vllm: as it is installed, its known faults not corrected")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as the last line of stdout")] = False,
) -> None:
    """Prove or refute that drafting changes nothing: greedy equality, streams, log-probabilities, ends, and the exact
    distribution by chi-square. Status 1 if it changes something."""
    check_engine(engine)
    if numerics not in ("exact", "fast"):
        raise ValueError(f"numerics must be exact or fast, not {numerics!r}")
    from longtail.bench import spec_audit

    config = spec_audit.AuditConfig(
        drafters=spec_audit.parse_names("drafter", drafter),
        seconds=seconds,
        effect=effect,
        false_alarm=false_alarm,
        tolerance=tolerance,
        only_greedy=greedy,
        seed=seed,
    )
    if (uncorrected or sampling is not None) and engine != "vllm":
        raise ValueError("sampling, uncorrected: they are settings of vLLM; leave them out, or use --engine vllm")
    if sampling not in (None, "counter", "vllm"):
        raise ValueError(f"sampling must be counter or vllm, not {sampling!r}")
    if uncorrected and sampling == "counter":
        raise ValueError("sampling: counter does not use what is corrected; leave it out with --uncorrected")
    with console.status("loading the model") as status, ExitStack() as opened:
        if engine == "vllm":
            scratch = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            own = uncorrected or sampling == "vllm"
            subject, reference, close = _vllm(model, own, not uncorrected, scratch)
            opened.callback(close)
        else:
            subject, reference = _native(model, numerics, threads)
        report = spec_audit.audit(subject, reference, config, progress=lambda text: status.update(text))
    console.print(spec_audit.table(report))
    for sentence in spec_audit.sentences(report):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    _write(report, out, as_json)
    if not report.passed:
        raise typer.Exit(1)


def _native(model: str | None, numerics: str, threads: int | None) -> tuple[Any, Any]:
    from longtail.bench.models import is_made, resolve_model
    from longtail.bench.spec_audit_engine import native_engine, tiny_model
    from longtail.bench.spec_audit_reference import ModelReference

    if model is None:
        model = "smollm2-135m" if is_made("smollm2-135m") else "tiny"
    console.print(f"model {model}, numerics {numerics}", style="dim", highlight=False)
    if model == "tiny":
        loaded, tokenizer = tiny_model()
    else:
        loaded, tokenizer = _load(str(resolve_model(model)))
    tiny = model == "tiny"
    threads = 1 if tiny and threads is None else threads
    subject = native_engine(
        loaded,
        tokenizer,
        numerics=numerics,  # type: ignore[arg-type]
        slots=128 if tiny else 32,
        threads=threads,
    )
    return subject, ModelReference(loaded)


def _vllm(model: str | None, own: bool, corrected: bool, scratch: Path) -> tuple[Any, Any, Callable[[], None]]:
    """own: with vLLM's own samplers. scratch: a directory for a model that is made. -> what is audited, its reference,
    and what ends it"""
    from longtail.bench.models import is_made, resolve_model
    from longtail.bench.spec_audit_engine import tiny_model
    from longtail.bench.spec_audit_reference import ModelReference
    from longtail.bench.spec_audit_vllm import TINY, VllmSize, VllmUnderAudit, by_counter

    if model is None:
        model = "smollm2-135m" if is_made("smollm2-135m") else "tiny"
    sampler = ", vLLM's own samplers" if own else ""
    console.print(f"model {model}{sampler}{'' if corrected else ', uncorrected'}", style="dim", highlight=False)
    if model == "tiny":
        loaded, tokenizer = tiny_model(**TINY[corrected])
        loaded.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        source, size = str(scratch), VllmSize()
    else:
        source, size = str(resolve_model(model)), VllmSize(slots=32)
        loaded, tokenizer = _load(source)
    reference = ModelReference(loaded)
    if own:
        subject = VllmUnderAudit(source, corrected=corrected, size=size)
        return subject, reference, subject.close
    audited, engine = by_counter(source, tokenizer, size)
    return audited, reference, engine.close


def _load(source: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    try:
        return loaded, AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        console.print(f"stop strings are not audited: {source} has no tokenizer ({error})", highlight=False)
        return loaded, None


def _write(report: AuditReport, out: Path | None, as_json: bool) -> None:
    if out is None and not as_json:
        return
    from longtail.bench.machine import describe

    found = report.as_json() | {"machine": describe()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1))
    if as_json:
        print(json.dumps(found))
