"""The command `python -m sbert_infer.bench.gpu_model`: what to expect of GPUs, computed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from sbert_infer.artifact import open_artifact
from sbert_infer.bench.console import FILE, SETTINGS, plain_errors
from sbert_infer.bench.gpu_model.forecast import MAX_BATCH_TOKENS, SLOTS, plan_work
from sbert_infer.bench.gpu_model.host import HostCosts, measure_host
from sbert_infer.bench.gpu_model.roofline import GPUS, MODELS
from sbert_infer.bench.gpu_model.table import assumptions, render
from sbert_infer.bench.workloads import WORKLOADS, make_workload
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.text.packing import Packer
from sbert_infer.text.shapes import choose_shapes
from sbert_infer.text.tokenizer import Tokenizer

_SIZE = click.IntRange(min=1)


@click.command(context_settings=SETTINGS)
@click.option("--gpu", "gpus", multiple=True, type=click.Choice(list(GPUS)), help="A GPU; repeatable. [all]")
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="Sizes; repeatable. [all]")
@click.option("--workload", "workloads", multiple=True, type=click.Choice(list(WORKLOADS)), help="Texts; repeatable.")
@click.option("--cores", type=_SIZE, default=8, show_default=True, help="Cores for tokenizing.")
@click.option("--slots", type=_SIZE, default=SLOTS, show_default=True, help="Batches under way on the GPU.")
@click.option("--pieces", type=_SIZE, default=1, show_default=True, help="Pieces in which windows are tokenized.")
@click.option("--max-batch-tokens", type=_SIZE, default=MAX_BATCH_TOKENS, show_default=True, help="Of a batch.")
@click.option("--measure", type=FILE, help="An artifact: measure the host's costs here, with its tokenizer.")
def main(
    gpus: tuple[str, ...],
    models: tuple[str, ...],
    workloads: tuple[str, ...],
    cores: int,
    slots: int,
    pieces: int,
    max_batch_tokens: int,
    measure: Path | None,
) -> None:
    """Print what to expect of GPUs, computed from data sheets. Nothing is run on a GPU."""
    with plain_errors():
        host = replace(_measure(measure) if measure else HostCosts(), pieces=pieces)
        works = [
            (workload, plan_work(MODELS[model], workload, max_batch_tokens))
            for model in models or MODELS
            for workload in workloads or ("short", "mixed", "long")
        ]
        click.echo(render(works, [GPUS[name] for name in gpus or GPUS], host, cores, slots))
        click.echo("\nComputed, not run on a GPU. Assumed:")
        for line in assumptions(host, cores, slots):
            click.echo(f"- {line}")


def _measure(path: Path) -> HostCosts:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    artifact = open_artifact(path)
    longest, dim = artifact.manifest.max_length, artifact.manifest.dim
    packer = Packer(choose_shapes(None, longest, dim, MAX_BATCH_TOKENS), dim)
    return measure_host(Tokenizer(artifact.tokenizer_json, longest), make_workload("mixed", WINDOW_TEXTS), packer)


if __name__ == "__main__":
    main()
