"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sbert_infer.encode.self_check import Verify

MAX_INPUTS = 2048  # texts in a request, as OpenAI has it


@dataclass(frozen=True)
class ModelFile:
    """A model to serve: an artifact, or a checkpoint by its folder or its name on the hub."""

    path: Path
    name: str | None = None

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
            return cls(Path(text))
        if not name or not path:
            raise ValueError(f"a model is given as MODEL or NAME=MODEL, got {text!r}")
        return cls(Path(path), name)


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
    max_queue_tokens: int = 2**20
    max_delay_ms: float = 2.0
    max_wait_s: float = 1.0
    timeout_s: float = 30.0
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
