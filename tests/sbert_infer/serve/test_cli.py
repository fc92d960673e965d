"""The command's help, and one line for each mistake."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sbert_infer.serve import cli
from sbert_infer.serve.settings import ModelFile, Settings


def invoke(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(cli.main, arguments, env=environment)


def error_of(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    return str(line)


def test_help_has_examples_and_every_setting() -> None:
    text = invoke("--help").stdout
    assert "Examples:" in text
    options = {name.replace("_", "-") for name in Settings.__dataclass_fields__} - {"models", "keys", "admin-keys"}
    options = (options - {"cors-origins", "allowed-hosts", "workers"}) | {"cors-origin", "allowed-host"}
    assert [name for name in options if f"--{name}" not in text] == []


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "no.onnx"
    assert error_of(str(missing)).startswith(f"error: {missing}: No such file or folder: give a file of sbert-export")
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"junk")
    assert error_of(str(junk)).startswith(f"error: {junk}: not an artifact of sbert-infer")
    assert "2 models are called junk" in error_of(str(junk), str(junk))
    assert "--tls-cert and --tls-key go together" in error_of(str(junk), "--tls-cert", str(junk))
    assert "no certificate with its key" in error_of(str(junk), "--tls-cert", str(junk), "--tls-key", str(junk))
    keys = tmp_path / "keys"
    keys.touch()
    assert "holds no key" in error_of(str(junk), "--api-key-file", str(keys))
    assert "MODEL or NAME=MODEL" in error_of("name=")
    assert "8 to 16 hexadecimal digits, got '123'" in error_of(str(junk), "--expect-fingerprint", "123")
    assert "of b, but no model has that name" in error_of(str(junk), "--expect-fingerprint", "b=0123456789")
    assert "as in NAME=01234567" in error_of(str(junk), f"b={junk}", "--expect-fingerprint", "01234567")


@pytest.mark.parametrize(
    "name", [f"SBERT_SERVE_{kind}_KEY{file}" for kind in ("API", "ADMIN") for file in ("", "_FILE")]
)
def test_an_empty_variable_does_not_turn_keys_off(name: str) -> None:
    result = invoke("x.onnx", **{name: "" if name.endswith("_FILE") else " "})
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {name} is set, but empty")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drain-s", "nan"), "'--drain-s'"),
        (("--drain-s", "inf"), "'--drain-s'"),
        (("--max-delay-ms", "inf"), "'--max-delay-ms'"),
        (("--timeout-s", "0"), "'--timeout-s'"),
        (("--cors-origin", "example.org"), "'example.org' is no origin such as https://"),
        (("--cors-origin", "https://example.org/"), "'https://example.org/' is no origin"),
        (("--allowed-host", "https://example.org"), "'https://example.org' is no host such as"),
        (("--allowed-host", "example.org:80"), "'example.org:80' is no host such as"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("x.onnx", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_queue_that_holds_no_text(served_onnx: Path) -> None:
    message = error_of(str(served_onnx), "--port", "0", "--max-queue-tokens", "5")
    assert message.startswith("error: --max-queue-tokens 5 is less than the ")


def test_an_address_that_is_taken(served_onnx: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"error: 127.0.0.1:{port}: Address already in use"
        assert error_of(str(served_onnx), "--port", str(port)) == message
        assert error_of(str(served_onnx), "--port", "0", "--metrics-port", str(port)) == message
    assert error_of(str(served_onnx), "--host", "no.such.host.invalid").startswith("error: no.such.host.invalid")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of servers, which are not started."""
    settings: list[Settings] = []

    class Seen:
        def __init__(self, given: Settings) -> None:
            settings.append(given)

        def run(self) -> None: ...

    monkeypatch.setattr(cli, "_import_server", lambda: (Seen, lambda as_json: nullcontext()))
    return settings


def test_options_reach_the_settings(seen: list[Settings]) -> None:
    assert invoke("x.onnx", "--verify", "always", "--compute", "auto", "--cache-mb", "12.5").exit_code == 0
    assert invoke("x.onnx").exit_code == 0
    given, default = ((each.verify, each.compute, each.cache_mb) for each in seen)
    assert (given, default) == (("always", "auto", 12.5), ("once", None, 0.0))


@pytest.mark.parametrize("plural", ["", "S"])
def test_options_come_from_the_environment(seen: list[Settings], plural: str) -> None:
    environment = {
        "SBERT_SERVE_MODELS": "a=x.onnx y.onnx",
        "SBERT_SERVE_PORT": "9000",
        "SBERT_SERVE_LOG_JSON": "1",
        f"SBERT_SERVE_CORS_ORIGIN{plural}": "https://a.example https://b.example",
        f"SBERT_SERVE_ALLOWED_HOST{plural}": "a.example *.b.example",
        "SBERT_SERVE_API_KEY": "k",
        "SBERT_SERVE_ADMIN_KEY": "boss",
    }
    result = invoke("--timeout-s", "5", **environment)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert settings.models == (ModelFile(Path("x.onnx"), "a"), ModelFile(Path("y.onnx")))
    assert ModelFile.parse("./minilm").path == Path("minilm").absolute()  # and no name on the hub
    assert (settings.port, settings.log_json, settings.timeout_s) == (9000, True, 5.0)
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert settings.allowed_hosts == ("a.example", "*.b.example")
    assert (settings.keys, settings.admin_keys) == (("k",), ("boss",))
    assert "'k'" not in repr(settings)
    assert "boss" not in repr(settings)


def test_a_missing_package_is_named_with_its_remedy() -> None:
    code = "import sys; sys.modules['msgspec'] = None; from sbert_infer.serve.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "x.onnx"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: msgspec is not installed, serving needs it: pip install 'sbert-infer[serve]'\n"
