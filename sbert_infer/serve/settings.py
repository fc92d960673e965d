"""The settings of a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sbert_infer.artifact.hub import HubModel
from sbert_infer.encode.self_check import Verify
from sbert_infer.opening import Compute

MAX_INPUTS = 2048  # texts in a request, as OpenAI has it
_FINGERPRINT = re.compile("[0-9a-fA-F]{8,16}")


@dataclass(frozen=True)
class ModelFile:
    """A model to serve: an artifact, or a checkpoint by its folder or its name on the hub."""

    path: Path
    name: str | None = None
    expected: str | None = None  # how its fingerprint must begin, `exact` or `model`

    @property
    def served_name(self) -> str:
        """The name given; by default that of the file without its suffix, or of the checkpoint."""
        if self.name is not None:
            return self.name
        return self.path.stem if self.path.suffix in (".onnx", ".plan") else self.path.name.partition("@")[0]

    @classmethod
    def parse(cls, text: str) -> ModelFile:
        """Parse `path` or `name=path`."""
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            return cls(_path(text))
        if not name or not path:
            raise ValueError(f"a model is given as MODEL or NAME=MODEL, got {text!r}")
        return cls(_path(path), name)


def _path(text: str) -> Path:
    """The path; absolute if it can only be one: `./model` must not be looked for on the hub."""
    return Path(text) if HubModel.parse(text) else Path(text).absolute()


def expecting(files: Sequence[ModelFile], given: Sequence[str]) -> tuple[ModelFile, ...]:
    """Return the files with their expected fingerprints, given as `HEX` or `NAME=HEX`."""
    expected: dict[str, str] = {}
    for text in given:
        name, _, digits = text.rpartition("=")
        if not _FINGERPRINT.fullmatch(digits):
            raise ValueError(f"a fingerprint has 8 to 16 hexadecimal digits, got {text!r}")
        if not name and len(files) > 1:
            raise ValueError(f"several models are served: say whose fingerprint {text} is, as in NAME={text}")
        expected[name or files[0].served_name] = digits.lower()
    if unknown := expected.keys() - {file.served_name for file in files}:
        raise ValueError(f"a fingerprint is expected of {min(unknown)}, but no model has that name")
    return tuple(replace(file, expected=expected.get(file.served_name, file.expected)) for file in files)


@dataclass(frozen=True)
class Settings:
    """The values of the options of `sbert-serve`; their help texts explain them."""

    models: tuple[ModelFile, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    metrics_port: int | None = None
    keys: tuple[str, ...] = field(default=(), repr=False)  # besides those in the file
    api_key_file: Path | None = None
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # besides those in the file
    admin_key_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    model_precision: str | None = None
    workers: int | None = None  # for Ray only: the command takes every core that it may use
    max_batch_tokens: int | None = None
    verify: Verify = "once"
    compute: Compute | None = None
    max_queue_tokens: int = 2**20
    max_delay_ms: float = 2.0
    max_wait_s: float = 1.0
    timeout_s: float = 30.0
    cache_mb: float = 0.0
    auto_truncate: bool | None = None  # None: as each contract has it
    allow_token_ids: bool = False
    any_model_name: bool = False
    max_body_bytes: int = 16 * 2**20
    max_connections: int = 4096
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    drain_delay_s: float = 0.0
    drain_s: float = 30.0
    log_json: bool = False
    otlp_endpoint: str | None = None  # None: as OpenTelemetry's variables say
