"""The command `sbert-serve`."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import Any, get_args

import click

from sbert_infer import __version__
from sbert_infer.artifact.exports import MODEL_PRECISIONS
from sbert_infer.encode.self_check import Verify
from sbert_infer.errors import EngineError, SbertInferError
from sbert_infer.opening import Compute
from sbert_infer.serve.settings import ModelFile, Settings, expecting

EXAMPLES = """\b
Examples:
  sbert-serve model.onnx                                   http://127.0.0.1:8080, for this machine only
  sbert-serve model.onnx --host 0.0.0.0 --api-key-file keys.txt
  sbert-serve fast=model.int8.onnx exact=model.onnx        several models, chosen by the field `model`
  sbert-serve sentence-transformers/all-MiniLM-L6-v2       exported when it is first used, then kept
  sbert-serve model.onnx --any-model-name                  for clients whose model name can't be changed
  sbert-serve model.plan --port 0 --log-json               a free port, JSON logs
  kill -HUP PID                                            reads models, keys and certificate again
  kill PID                                                 finishes requests in progress, then ends

Try it:
  curl 127.0.0.1:8080/v1/embeddings -H 'Content-Type: application/json' -d '{"input": "A cat sat."}'

Open http://127.0.0.1:8080 to see it work. Every option is also an environment variable: SBERT_SERVE_PORT=9000 is
--port 9000; SBERT_SERVE_API_KEY and SBERT_SERVE_ADMIN_KEY are one key. See docs/serving.md.
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "auto_envvar_prefix": "SBERT_SERVE"}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT = click.IntRange(min=1)


class _Finite(click.FloatRange):
    """A range without NaN and infinity, which `FloatRange` lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _Host(click.ParamType):  # type: ignore[type-arg]  # no older click has any
    """A name of the server as in the header Host, without a port; *.NAME for all below it."""

    name = "host"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", value):
            self.fail(f"{value!r} is no host such as example.org, *.example.org or [::1]", param, ctx)
        return str(value)


class _Origin(click.ParamType):  # type: ignore[type-arg]  # no older click has any
    """The `Origin` that a browser sends, `null` for a local file, or * for all."""

    name = "origin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", value):
            self.fail(f"{value!r} is no origin such as https://example.org or http://localhost:3000", param, ctx)
        return str(value)


_SECONDS = _Finite(min=0, min_open=True)


@click.command("sbert-serve", epilog=EXAMPLES, context_settings=_CONTEXT)
@click.argument("models", nargs=-1, required=True, metavar="[NAME=]MODEL...", envvar="SBERT_SERVE_MODELS")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every network.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Also serve /metrics and /health here, to anyone.")
@click.option("--api-key-file", type=_FILE, help="Keys that clients must send, one a line. [none: no key needed]")
@click.option("--admin-key-file", type=_FILE, help="Keys for /admin/reload, one a line. [none: SIGHUP only]")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    type=_Host(),
    multiple=True,
    metavar="HOST",
    envvar=["SBERT_SERVE_ALLOWED_HOST", "SBERT_SERVE_ALLOWED_HOSTS"],
    help="Name under which the server may be asked. [any]",
)
@click.option("--tls-cert", type=_FILE, help="Certificate chain (PEM), for https.")
@click.option("--tls-key", type=_FILE, help="Its private key (PEM).")
@click.option(
    "--cors-origin",
    "cors_origins",
    type=_Origin(),
    multiple=True,
    metavar="ORIGIN",
    envvar=["SBERT_SERVE_CORS_ORIGIN", "SBERT_SERVE_CORS_ORIGINS"],
    help="Websites whose pages may send requests.",
)
@click.option(
    "--model-precision",
    type=click.Choice(MODEL_PRECISIONS),
    help="To which precision to export a checkpoint. [fp32]",
)
@click.option("--max-batch-tokens", type=_COUNT, metavar="N", help="Tokens that run together. [the backend's best]")
@click.option(
    "--verify",
    type=click.Choice(get_args(Verify)),
    default="once",
    show_default=True,
    help="Compare vectors of this machine with the eager model's, which a model file holds for some texts.",
)
@click.option(
    "--compute",
    type=click.Choice(get_args(Compute)),
    help="auto: what sbert-tune has chosen for the model on this machine. [as the file is]",
)
@click.option("--max-queue-tokens", type=_COUNT, default=2**20, show_default=True, help="Tokens that may wait.")
@click.option(
    "--max-delay-ms",
    type=_Finite(min=0),
    default=2.0,
    show_default=True,
    help="How long a batch that is not full waits for more while others run.",
)
@click.option(
    "--max-wait-s",
    type=_SECONDS,
    default=1.0,
    show_default=True,
    help="Refuse requests that would wait longer, if hundreds of others wait.",
)
@click.option("--timeout-s", type=_SECONDS, default=30.0, show_default=True, help="Limit for the work on a request.")
@click.option(
    "--cache-mb",
    type=_Finite(min=0),
    default=0.0,
    show_default=True,
    help="Memory of each model for vectors of texts that were sent before.",
)
@click.option(
    "--expect-fingerprint",
    "expected",
    multiple=True,
    metavar="[NAME=]HEX",
    envvar="SBERT_SERVE_EXPECT_FINGERPRINT",
    help="Serve a model only if its fingerprint begins like this.",
)
@click.option(
    "--auto-truncate/--no-auto-truncate",
    default=None,
    help="Cut, or refuse, texts over the model's limit if a request says nothing. [as each contract has it]",
)
@click.option("--allow-token-ids", is_flag=True, help="Accept ids of the model's own tokenizer instead of texts.")
@click.option("--any-model-name", is_flag=True, help="Serve requests for unknown models with the first one.")
@click.option("--max-body-bytes", type=_COUNT, default=16 * 2**20, show_default=True, help="Also after decompression.")
@click.option("--max-connections", type=_COUNT, default=4096, show_default=True, help="More are refused.")
@click.option("--read-timeout-s", type=_SECONDS, default=30.0, show_default=True, help="Limit for slow senders.")
@click.option("--write-timeout-s", type=_SECONDS, default=60.0, show_default=True, help="Limit for stalled readers.")
@click.option(
    "--drain-delay-s",
    type=_Finite(min=0),
    default=0.0,
    show_default=True,
    help="On SIGTERM, go on listening this long while no longer ready.",
)
@click.option("--drain-s", type=_SECONDS, default=30.0, show_default=True, help="Then, limit for requests in progress.")
@click.option("--log-json", is_flag=True, help="Log lines as JSON.")
@click.option("--otlp-endpoint", metavar="URL", help="Send traces here. [as OTEL_EXPORTER_OTLP_ENDPOINT says, or none]")
@click.version_option(__version__)
def main(models: tuple[str, ...], **options: Any) -> None:
    """Serve MODELs over HTTP, for clients of OpenAI and of text-embeddings-inference.

    MODEL is a file that sbert-export wrote, or a checkpoint: a folder, or a name on the Hugging
    Face hub, with @REVISION if need be. A checkpoint is exported when it is first used, and kept.
    """
    try:
        server_type, logging_to_stderr = _import_server()
        if (options["tls_cert"] is None) != (options["tls_key"] is None):
            raise ValueError("--tls-cert and --tls-key go together")
        keys, admin_keys = _key_in_environment("API"), _key_in_environment("ADMIN")
        files = expecting([ModelFile.parse(model) for model in models], options.pop("expected"))
        settings = Settings(models=files, keys=keys, admin_keys=admin_keys, **options)
        server = server_type(settings)
        with logging_to_stderr(settings.log_json):
            server.run()
    except KeyboardInterrupt:  # while a model is opened; later the server handles it
        raise SystemExit(130) from None
    except (SbertInferError, ValueError) as error:
        raise SystemExit(_error(str(error))) from None
    except OSError as error:
        culprit = error.filename or f"{options['host']}:{options['port']}"
        raise SystemExit(_error(f"{culprit}: {error.strerror or error}")) from None


def _import_server() -> tuple[Any, Any]:
    """Import the server late, since the runtime installs without its packages."""
    try:
        from sbert_infer.serve.logs import logging_to_stderr
        from sbert_infer.serve.server import Server
    except ImportError as error:
        message = f"{error.name} is not installed, serving needs it: pip install 'sbert-infer[serve]'"
        raise EngineError(message) from error
    return Server, logging_to_stderr


def _key_in_environment(kind: str) -> tuple[str, ...]:
    """The key in a variable. An empty variable would turn keys off, so it is refused."""
    variable = f"SBERT_SERVE_{kind}_KEY"
    for name in (variable, f"{variable}_FILE"):
        if name in os.environ and not os.environ[name].strip():
            raise ValueError(f"{name} is set, but empty: set it to a key or a file of keys, or unset it")
    key = os.environ.get(variable)
    return () if key is None else (key.strip(),)


def _error(message: str) -> int:
    click.echo(f"error: {message}", err=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
