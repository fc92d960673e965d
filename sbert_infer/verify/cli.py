"""The command `sbert-verify`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import numpy as np

from sbert_infer import Engine, Reranker, __version__
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import ENCODER, RERANKER, Artifact, check_one_route
from sbert_infer.encode.self_check import RIGHT
from sbert_infer.errors import EmbedError, SbertInferError, TextError
from sbert_infer.verify.compare import compare
from sbert_infer.verify.report import render, report_here, report_target
from sbert_infer.verify.server import Server, ServerError
from sbert_infer.verify.texts import SHORT, long_texts, over_limit
from sbert_infer.verify.truth import Made, Stated, Truth

EXAMPLES = """\b
Examples:
  sbert-verify model.onnx                             are the vectors of this machine right?
  sbert-verify model.plan --device cuda:1             and those of that GPU?
  sbert-verify model.onnx http://127.0.0.1:8080       does this server, of OpenAI's or TEI's contract?
  sbert-verify model.onnx https://example.org/v1/embeddings --model minilm --key-env MY_KEY
  sbert-verify model.onnx vectors.parquet             are these the vectors of its column `text`?
  sbert-verify model.onnx vectors.parquet --texts corpus.jsonl --prompt-name query
  sbert-verify model.onnx vectors.npy --texts corpus.txt --json

What differs is named: normalisation, prompt, truncation, pooling, precision, dimensions or model. The exit code is 0
if the vectors are right, 1 if they are not or can't be had, and 2 for a wrong option.
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)


@click.command("sbert-verify", epilog=EXAMPLES, context_settings=_CONTEXT)
@click.argument("artifact", type=_FILE)
@click.argument("target", required=False)
@click.option("--device", metavar="NAME", help="Where to run ARTIFACT: cpu, cuda or cuda:1. [the best there is]")
@click.option(
    "--min-cosine", type=click.FloatRange(0, 1), help="Lowest cosine of TARGET that is right. [by the precision]"
)
@click.option(
    "--prompt-name", metavar="NAME", help="Prompt before each text. [that of sbert-embed, or the default one]"
)
@click.option("--prompt", metavar="TEXT", help="The prompt itself; '' for none.")
@click.option("--normalize", is_flag=True, help="TARGET scales vectors to length 1. [as sbert-embed did]")
@click.option("--truncate-dim", type=_COUNT, metavar="N", help="TARGET keeps N numbers of a vector. [as sbert-embed]")
@click.option("--model", metavar="NAME", help="The model's name on the server. [its first]")
@click.option("--key-env", default="SBERT_VERIFY_KEY", show_default=True, help="Variable that holds the server's key.")
@click.option("--key-file", type=_FILE, help="File that holds the server's key.")
@click.option("--texts", type=_FILE, help="File with the texts of a TARGET that does not hold them.")
@click.option("--text-column", default="text", show_default=True, metavar="NAME", help="Column that holds the texts.")
@click.option("--embedding-column", default="embedding", show_default=True, metavar="NAME", help="That of the vectors.")
@click.option("--rows", type=_COUNT, default=256, show_default=True, help="Rows of a file that are encoded again.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.version_option(__version__)
def main(artifact: Path, target: str | None, as_json: bool, **options: Any) -> None:
    """Say whether vectors are those of ARTIFACT: of this machine, or of TARGET.

    TARGET is the address of a server, or a Parquet or .npy file.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            report = _verify(open_artifact(artifact), target, options)
        for warning in caught:
            click.echo(f"warning: {warning.message}", err=True)
    except (SbertInferError, OSError) as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(1)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else render(report))
    sys.exit(0 if report["verdict"] == RIGHT else 1)


def _verify(artifact: Artifact, target: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Verify this machine and, if its vectors are right, the target."""
    if target is not None and artifact.manifest.kind != ENCODER:
        raise ValueError(f"{artifact.path} is no sentence encoder: only those can be compared with a server or a file")
    if target is not None:
        check_one_route(artifact, "a comparison with a server or a file")
    if target is not None and "://" not in target and not Path(target).is_file():
        raise ValueError(f"{target} is no file, and no address such as http://127.0.0.1:8080")
    opener = Reranker if artifact.manifest.kind == RERANKER else Engine
    with opener(artifact, device=options["device"], on_truncate="ignore", verify="never") as engine:
        here = report_here(engine)
        if target is None or here["differences"] or not isinstance(engine, Engine):
            return here
        if "://" not in target:
            return _verify_file(engine, target, options)
        made = Made(engine.resolve_prompt(options["prompt"], options["prompt_name"]), **_vectors(options))
        truth = Truth(engine, made, options["min_cosine"])
        normalized = engine.manifest.normalized or made.normalize
        server = Server(target, model=options["model"], key=_key(options), normalize=normalized)
        texts, found = _ask(truth, server)
        return report_target(engine, target, texts, compare(truth, texts, found), server.stated())


def _vectors(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("normalize", "truncate_dim")}


def _ask(truth: Truth, server: Server) -> tuple[list[str], Any]:
    """Return texts, short ones, long ones and one over the limit, and the server's vectors."""
    texts = [*SHORT, *long_texts(truth.count_tokens, truth.limit)]
    found = server.encode(texts)
    longer = over_limit(truth.count_tokens, truth.limit)
    try:
        return [*texts, *longer], np.concatenate([found, server.encode(longer)]) if longer else found
    except ServerError as error:
        if not 400 <= error.status < 500:
            raise
        return texts, found  # it refuses texts over the limit, as it may


def _key(options: dict[str, Any]) -> str | None:
    if options["key_file"] is not None:
        return str(options["key_file"].read_text(encoding="utf-8").strip())
    return os.environ.get(options["key_env"])


def _verify_file(engine: Engine, target: str, options: dict[str, Any]) -> dict[str, Any]:
    """Verify some rows of a file, by default made as it says itself."""
    try:
        from sbert_infer.verify.vectors_file import origin_of, read_sample
    except ImportError as error:
        raise EmbedError(f"{error.name} is not installed: pip install 'sbert-infer[embed]'") from error
    made, stated, origin = _vectors(options), None, origin_of(Path(target))
    prompt, name = options["prompt"], options["prompt_name"]
    if origin is not None:
        stated = Stated(origin.fingerprint.exact, origin.fingerprint)
        made["normalize"] |= origin.normalize
        made["truncate_dim"] = made["truncate_dim"] or min(origin.dim, engine.manifest.dim)
        prompt = origin.prompt if prompt is None and name is None else prompt
    truth = Truth(engine, Made(engine.resolve_prompt(prompt, name), **made), options["min_cosine"])
    columns = {name: options[name] for name in ("text_column", "embedding_column")}
    sample = read_sample(Path(target), options["rows"], texts_from=options["texts"], **columns)
    bad = np.flatnonzero(~np.isfinite(sample.vectors).all(axis=1))
    if len(bad):
        raise TextError(f"{target} has a vector with NaN or infinity, of {sample.texts[bad[0]]!r:.60}", int(bad[0]))
    return report_target(engine, target, sample.texts, compare(truth, sample.texts, sample.vectors), stated)
