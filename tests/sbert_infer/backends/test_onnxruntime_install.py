"""onnxruntime and onnxruntime-gpu in each other's way, and CUDA from pip's packages."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from sbert_infer import EngineError
from sbert_infer.backends import onnxruntime_install
from sbert_infer.backends.onnxruntime_cuda import OnnxCudaBackend
from sbert_infer.backends.onnxruntime_install import preload_cuda, require_cuda
from sbert_infer.backends.onnxruntime_session import FileModel, import_onnxruntime
from sbert_infer.backends.tensorrt import cuda
from tests.doubles.packages import install, install_onnxruntime_gpu

REINSTALL = "pip install --force-reinstall --no-deps onnxruntime-gpu"


class FakeOnnxruntime:
    """Replaces the module onnxruntime."""

    __version__ = "1.31.1"

    def __init__(self, *providers: str, printed: str = "") -> None:
        self.providers, self.printed = providers, printed
        self.preloads = 0

    def get_available_providers(self) -> list[str]:
        return [*self.providers, "CPUExecutionProvider"]

    def preload_dlls(self, cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: Any = None) -> None:
        self.preloads += 1
        print(self.printed)


def imported(*folders: Path) -> str:
    """What importing onnxruntime gives in a process that finds these folders first."""
    code = (
        f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}\n"
        "from sbert_infer.backends.onnxruntime_session import import_onnxruntime\n"
        "try: print(import_onnxruntime().__name__)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_what_uninstalling_one_of_two_leaves(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime-gpu", "1.31.1", {"onnxruntime/__init__.py": ""})
    message = imported(tmp_path)
    assert message.startswith("EngineError the installed onnxruntime is broken (it is empty)")
    assert message.endswith(REINSTALL)


def test_files_of_two_versions(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime-gpu", "1.26.0", {"onnxruntime/__init__.py": "from onnxruntime.capi import missing"})
    install(tmp_path, "onnxruntime", "1.31.1", {"onnxruntime/capi/__init__.py": ""})
    message = imported(tmp_path)
    assert message.startswith("EngineError the installed onnxruntime is broken (cannot import name 'missing'")
    assert message.endswith(f"onnxruntime and onnxruntime-gpu are both installed, into the same folder: {REINSTALL}")


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match=r"not installed: pip install 'sbert-infer\[cpu\]'"):
        import_onnxruntime()


def test_a_package_that_onnxruntime_lacks(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime", "1.31.1", {"onnxruntime/__init__.py": "import no_such_package"})
    message = imported(tmp_path)
    assert "No module named 'no_such_package'" in message
    assert message.endswith("pip install --force-reinstall --no-deps onnxruntime")


@pytest.mark.parametrize(
    ("packages", "cure"),
    [
        (["onnxruntime"], r"pip uninstall -y onnxruntime && pip install 'sbert-infer\[gpu\]'$"),
        (["onnxruntime-gpu"], f"lost its CUDA provider: {REINSTALL}$"),
        (["onnxruntime", "onnxruntime-gpu"], f"both installed.* the one without CUDA came last: {REINSTALL}$"),
    ],
)
def test_no_cuda_provider(packages: list[str], cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_install, "version", lambda name: "1.31.1" if name in packages else None)
    with pytest.raises(EngineError, match=cure):
        require_cuda(FakeOnnxruntime())


def test_a_driver_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install_onnxruntime_gpu(tmp_path))
    there = FakeOnnxruntime("CUDAExecutionProvider")
    for driver in (None, (13, 0)):
        monkeypatch.setattr(cuda, "driver_cuda", lambda driver=driver: driver)
        require_cuda(there)
    monkeypatch.setattr(cuda, "driver_cuda", lambda: (12, 4))
    with pytest.raises(EngineError, match=r"onnxruntime-gpu 1.31.1 is made for CUDA 13.*'onnxruntime-gpu.*<1.27'"):
        require_cuda(there)


def test_cuda_is_loaded_once_and_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    there = FakeOnnxruntime(printed="Failed to load libcublas.so.13:\n no such file")
    assert preload_cuda(there) == preload_cuda(there) == "Failed to load libcublas.so.13: no such file"
    assert there.preloads == 1
    assert capsys.readouterr().out == ""
    assert preload_cuda(object()) == ""  # an onnxruntime before 1.21


def test_the_real_onnxruntime_can_be_asked() -> None:
    ours = inspect.signature(FakeOnnxruntime.preload_dlls).parameters
    assert list(ours)[1:] == list(inspect.signature(onnxruntime.preload_dlls).parameters)
    assert preload_cuda(onnxruntime) == ""  # one for CPUs has nothing to load


@pytest.mark.parametrize(("printed", "why"), [("libcudnn.so.9 is missing", "libcudnn.so.9 is missing"), ("", "cuDNN")])
def test_a_provider_that_does_not_start(
    printed: str, why: str, small_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime would fall back to the CPU without a word."""
    there = FakeOnnxruntime("CUDAExecutionProvider", printed=printed)
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    def open_session(model: Any, threads: int, providers: Any, **_: Any) -> Any:
        assert there.preloads == 1  # before the session is opened
        assert (providers[0][0], providers[0][1]["device_id"]) == ("CUDAExecutionProvider", "1")
        return session

    monkeypatch.setattr("sbert_infer.backends.onnxruntime_cuda.import_onnxruntime", lambda: there)
    monkeypatch.setattr("sbert_infer.backends.onnxruntime_cuda.open_session", open_session)
    with pytest.raises(EngineError, match=rf"can't use cuda:1.*{why}.*pip install 'onnxruntime-gpu\[cuda,cudnn\]'"):
        OnnxCudaBackend(FileModel(small_onnx), [1])
