"""Files are replaced whole or not at all, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest

from sbert_infer._util.files import locked, staged


@pytest.fixture(params=["unnamed", "named"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of staging: with files that have no name, and where a system has none."""
    if request.param == "unnamed":
        if not hasattr(os, "O_TMPFILE"):
            pytest.skip("no O_TMPFILE")
    else:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return str(request.param)


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_commit_puts_the_file_in_place(kind: str, tmp_path: Path, umask: int) -> None:
    target = tmp_path / "model.onnx"
    for content in (b"first", b"second, longer"):
        with staged(target) as file:
            file.path.write_bytes(content)
            assert file.path.read_bytes() == content
            assert not target.exists() or target.read_bytes() == b"first"
            file.commit()
        assert target.read_bytes() == content
        assert names(tmp_path) == ["model.onnx"]
        assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_without_commit_nothing_happened(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    with staged(target) as file:
        file.path.write_bytes(b"abandoned")
    assert names(tmp_path) == []
    target.write_bytes(b"old")
    with contextlib.suppress(KeyError), staged(target) as file:
        file.path.write_bytes(b"failed")
        raise KeyError
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["model.onnx"]


def test_a_commit_that_fails_leaves_the_old(kind: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with staged(tmp_path / "folder") as file:
        file.path.write_bytes(b"new")
        with pytest.raises(OSError, match="folder"):
            file.commit()
    assert names(tmp_path) == ["folder"]


def test_a_folder_that_does_not_exist(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), staged(tmp_path / "nowhere" / "model.onnx"):
        pytest.fail("staged in a folder that does not exist")


def test_a_link_stays_a_link(kind: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "real.onnx").write_bytes(b"old")
    (tmp_path / "link.onnx").symlink_to("store/real.onnx")
    with staged(tmp_path / "link.onnx") as file:
        file.path.write_bytes(b"new")
        file.commit()
    assert (tmp_path / "link.onnx").is_symlink()
    assert (tmp_path / "store" / "real.onnx").read_bytes() == b"new"


def test_descriptors_are_closed(kind: str, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for commit in (True, False):
        with staged(tmp_path / "model.onnx") as file:
            file.path.write_bytes(b"x")
            if commit:
                file.commit()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


SCRIPT = """
import os, resource, signal, sys
from pathlib import Path
from sbert_infer._util.files import staged

how, kind, target = sys.argv[1:]
if kind == "named":
    vars(os).pop("O_TMPFILE", None)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with staged(Path(target)) as file:
    file.path.write_bytes(b"x" * 90_000)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    file.path.write_bytes(b"x" * 200_000)
    file.commit()
"""


def test_a_full_disk_leaves_the_old_file(kind: str, tmp_path: Path) -> None:
    """The limit on a file's size stands in for a full disk: both end a write midway."""
    (tmp_path / "model.onnx").write_bytes(b"old")
    command = [sys.executable, "-c", SCRIPT, "fill", kind, str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert (tmp_path / "model.onnx").read_bytes() == b"old"
    assert names(tmp_path) == ["model.onnx"]


def test_a_kill_leaves_no_debris(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"old")
    command = [sys.executable, "-c", SCRIPT, "kill", "unnamed", str(tmp_path / "model.onnx")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    assert (tmp_path / "model.onnx").read_bytes() == b"old"
    assert names(tmp_path) == ["model.onnx"]


HOLD = """
import sys
from pathlib import Path
from sbert_infer._util.files import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def is_held(path: Path) -> bool:
    try:
        with locked(path, wait=False):
            return False
    except BlockingIOError as error:
        return bool(error.filename == str(path))


def test_a_lock_is_held_once_and_leaves_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with locked(path):
            assert is_held(path)
        assert not is_held(path)
    with contextlib.suppress(KeyError), locked(path):
        raise KeyError
    assert not is_held(path)
    assert names(tmp_path) == ["lock"]


@pytest.mark.parametrize("end", ["leave", "kill"])
def test_a_lock_ends_with_its_process(end: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        assert is_held(path)
        if end == "kill":
            process.kill()
        else:
            process.communicate("")
        process.wait()
        assert not is_held(path)


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        assert process.stdin is not None
        Timer(0.2, process.stdin.close).start()
        with locked(path):
            assert is_held(path)
