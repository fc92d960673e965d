"""The command `sbert-bench --serve`: a load test of servers."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from sbert_infer import __version__
from sbert_infer.bench.console import OUTPUT, SETTINGS, finish, long_run, make_workloads, text_options
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.load.offline import Offline
from sbert_infer.bench.load.page import render_load_page
from sbert_infer.bench.load.schedule import parse_levels, parse_sizes
from sbert_infer.bench.load.server import LoadSettings
from sbert_infer.bench.load.session import run_load
from sbert_infer.bench.load.table import render_load
from sbert_infer.bench.load.target import Target, is_url, parse_target
from sbert_infer.bench.report.results import write_reports

EXAMPLES = """\b
Examples:
  sbert-bench --serve http://127.0.0.1:8080              each vector checked against that of the text alone
  sbert-bench model.onnx --serve http://127.0.0.1:8080   ... against Engine.encode without a server
  sbert-bench model.onnx --serve ours=http://127.0.0.1:8080 theirs=http://127.0.0.1:8081/v1 --html load.html
  sbert-bench --serve http://127.0.0.1:8080 --rates 50,100,200 --duration 30 --pid 4711

Each round finds a server's saturation with clients that wait for responses. Then requests arrive at random at shares
of it, whether or not earlier ones got a response; latency counts from when a request was due, so that a stall shows.
Servers take turns. The first is compared with the others. The exit code is 1 if a vector was wrong.

A URL is what OpenAI's clients call the base URL; without a path, /v1 is added.
"""
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command("sbert-bench --serve", epilog=EXAMPLES, context_settings=SETTINGS)
@click.argument("sources", nargs=-1, required=True, metavar="[ARTIFACT_OR_CHECKPOINT] [NAME=]URL...")
@click.option(
    "--rates",
    default="10%,30%,50%,70%,90%,110%,5x",
    show_default=True,
    help="Levels of load: shares of the saturation, or requests per second.",
)
@click.option(
    "--duration", "duration_s", type=_SECONDS, default=5.0, show_default=True, help="Seconds per turn at one level."
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Turns per server.")
@click.option("--clients", type=click.IntRange(1, 4096), default=64, show_default=True, help="Clients at saturation.")
@click.option(
    "--inputs-per-request", default="1", show_default=True, help="Texts per request: a number or a range, 1-32."
)
@click.option("--encoding-format", type=click.Choice(["base64", "float"]), default="base64", show_default=True)
@click.option(
    "--timeout", "timeout_s", type=_SECONDS, default=10.0, show_default=True, help="Seconds before a client gives up."
)
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=0), default=0.0, help="Seconds to wait for a server to start."
)
@click.option("--model", default="", help="Model to request. [the first that the server lists]")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent to every server.")
@click.option(
    "--min-cosine", type=click.FloatRange(0, 1), default=0.99999, show_default=True, help="Below it, a vector is wrong."
)
@click.option("--p99-ms", type=_SECONDS, help="Bound for comparing loads. [4 times the first server's lone p99]")
@click.option(
    "--pid", "pids", type=int, multiple=True, help="A server's process, to measure its memory; in the URLs' order."
)
@text_options
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed for texts, arrivals and order."
)
@click.option("--trust-remote-code", is_flag=True, help="Run model code from the checkpoint.")
@click.option("--markdown", is_flag=True, help="Print the tables as markdown.")
@click.option("--json", "json_file", type=OUTPUT, help="Write all figures to this file.")
@click.option("--html", "html_file", type=OUTPUT, help="Write a self-contained page with plots.")
@click.version_option(__version__)
def load(
    sources: tuple[str, ...],
    workloads: tuple[tuple[str, int | None], ...],
    texts_file: Path | None,
    num_texts: int,
    seed: int,
    rates: str,
    inputs_per_request: str,
    model: str,
    api_key: str,
    pids: tuple[int, ...],
    trust_remote_code: bool,
    markdown: bool,
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Measure OpenAI-compatible embedding servers under rising load, and check every vector."""
    with long_run(json_file, html_file) as (folder, progress):
        targets = [replace(one, model=model, api_key=api_key) for one in _targets(sources, pids)]
        if importlib.util.find_spec("httptools") is None:
            raise BenchError("--serve needs httptools: pip install 'sbert-infer[bench]'")
        settings = LoadSettings(levels=parse_levels(rates), sizes=parse_sizes(inputs_per_request), seed=seed, **options)
        made = make_workloads(workloads, texts_file, num_texts, seed)
        texts = tuple(dict.fromkeys(text for part in made.values() for text in part))
        with _offline(sources, folder, trust_remote_code) as offline:
            results = run_load(targets, " + ".join(made), texts, settings, offline, progress)
        write_reports(results, json_file, html_file, render_load_page)
    finish(render_load(results, markdown=markdown), results.stamp, right=not results.wrong_texts)


def _targets(sources: tuple[str, ...], pids: tuple[int, ...]) -> list[Target]:
    targets = [parse_target(source) for source in sources if is_url(source)]
    if not targets:
        raise BenchError(f"--serve needs a URL such as http://127.0.0.1:8080, got {' '.join(sources)}")
    if len({target.name for target in targets}) < len(targets):
        raise BenchError("two servers have one name: give them others, --serve first=URL second=URL")
    if pids and len(pids) != len(targets):
        raise BenchError(f"--pid was given {len(pids)} times for {len(targets)} servers: one for each, in their order")
    return [replace(target, pid=pid) for target, pid in zip_longest(targets, pids)]


def _offline(sources: tuple[str, ...], folder: Path, trust_remote_code: bool) -> AbstractContextManager[Offline | None]:
    """Open the model among `sources`, if there is one."""
    models = [source for source in sources if not is_url(source)]
    if len(models) > 1:
        raise BenchError(f"one artifact or checkpoint to compare with, got {len(models)}: {', '.join(models)}")
    return closing(Offline(models[0], folder, trust_remote_code=trust_remote_code)) if models else nullcontext()
