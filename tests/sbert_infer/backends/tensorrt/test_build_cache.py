"""The cache of TensorRT engines: built once, by one process, and never returned damaged."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from sbert_infer import EngineError
from sbert_infer._util.cache import cache_folder
from sbert_infer.backends.tensorrt.build_cache import cached, engine_key, forget, kept


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_made_once(folder: Path) -> None:
    made = []

    def make() -> bytes:
        made.append(1)
        return b"engine" * 1000

    key = engine_key("model", "tensorrt", "10.13", "sm89")
    assert kept(key) is None
    assert [cached(key, make) for _ in range(3)] == [b"engine" * 1000] * 3
    assert kept(key) == b"engine" * 1000
    assert len(made) == 1
    assert [path.suffix for path in sorted(folder.rglob("*.*"))] == [".engine", ".lock"]  # and nothing else is left


def test_forgotten() -> None:
    cached("k", lambda: b"old")
    forget("k")
    forget("k")
    assert cached("k", lambda: b"new") == b"new"


def test_keys_tell_apart() -> None:
    keys = {
        engine_key("model", "10.1", "sm89"),
        engine_key("model", "10.1", "sm90"),
        engine_key("model", "10.2", "sm89"),
    }
    assert len(keys) == 3
    assert engine_key("ab", "c") != engine_key("a", "bc")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_one_is_made_again(damage: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached("k", lambda: b"good" * 100)
    (file,) = folder.rglob("*.engine")
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes({"flip": bytes(content), "cut": bytes(content[:150]), "empty": b""}[damage])
    assert kept("k") is None
    assert cached("k", lambda: b"new" * 100) == b"new" * 100
    assert "damaged" in caplog.text
    assert cached("k", lambda: b"never") == b"new" * 100


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail() -> bytes:
        raise EngineError("no such layer")

    with pytest.raises(EngineError, match="no such layer"):
        cached("k", fail)
    assert not list(folder.rglob("*.engine"))
    assert cached("k", lambda: b"fine") == b"fine"


def test_a_folder_that_can_not_be_written(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(EngineError, match="SBERT_INFER_CACHE"):
        cached("k", lambda: b"x")


def test_a_full_disk_does_not_lose_what_was_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sbert_infer.backends.tensorrt.build_cache.staged", full)
    assert cached("k", lambda: b"built") == b"built"
    assert "No space left" in caplog.text


def build_slowly(log: str) -> None:
    def make() -> bytes:
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return b"engine"

    if cached("k", make) != b"engine":
        os._exit(1)


def test_processes_wait_for_the_one_that_builds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "builders"
    processes = [context.Process(target=build_slowly, args=(str(log),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(log.read_text().split()) == 1


def build_and_die() -> None:
    cached("k", lambda: os._exit(9))


def test_a_builder_that_dies_holds_nobody_up() -> None:
    process = multiprocessing.get_context("fork").Process(target=build_and_die)
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert cached("k", lambda: b"mine") == b"mine"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cache_folder() == folder
    monkeypatch.delenv("SBERT_INFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cache_folder() == Path("/some/where/sbert-infer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "sbert-infer"
