"""A driver that is too old for a package is noticed before the package is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sbert_infer import EngineError
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build import build_engine
from sbert_infer.backends.tensorrt.cuda_packages import driver_too_old, made_for, tensorrt_majors, version
from sbert_infer.types import Shape
from tests.doubles.packages import install, install_onnxruntime_gpu, install_tensorrt


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages are found before the real ones."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    return lambda there: monkeypatch.setattr(cuda, "driver_cuda", lambda: there)


def torch_file(cuda_version: str) -> dict[str, str]:
    return {"torch/version.py": f"__all__ = ['cuda']\n__version__ = '2.13.0'\ncuda: Optional[str] = {cuda_version}\n"}


def test_what_packages_are_made_for(site: Path) -> None:
    install_tensorrt(site)
    install_tensorrt(site, "1.7.1.116", module="tensorrt_rtx", major=12)
    install_onnxruntime_gpu(site, "1.26.0", "12.8")
    install(site, "cuda-bindings", "12.9.4")
    install(site, "torch", "2.13.0", torch_file("'13.0'"))
    names = ("tensorrt", "onnxruntime-gpu", "cuda-bindings", "torch")
    assert [made_for(name) for name in names] == [13, 12, 12, 13]
    assert 12 in tensorrt_majors("tensorrt_rtx")


@pytest.mark.parametrize("cuda_version", ["None", "unreadable"])
def test_what_is_not_known(cuda_version: str, site: Path) -> None:
    install(site, "torch", "2.13.0", torch_file(cuda_version))
    install(site, "tensorrt", "10.13.3")  # as a system package installs it
    install(site, "onnxruntime-gpu", "1.31.1")
    assert [made_for(name) for name in ("torch", "tensorrt", "onnxruntime-gpu")] == [None, None, None]
    assert version("tensorrt") == "10.13.3"


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (None, None),
        ((13, 0), None),
        ((14, 1), None),
        (
            (12, 4),
            "tensorrt 11.4.0.106 is made for CUDA 13, which needs NVIDIA driver 580 or newer, and this driver has "
            "CUDA 12.4: update the driver, or pip uninstall -y tensorrt tensorrt-cu13 tensorrt-cu13-libs "
            "tensorrt-cu13-bindings && pip install tensorrt-cu12 'cuda-bindings<13'",
        ),
        (
            (11, 8),
            "tensorrt 11.4.0.106 is made for CUDA 13, which needs NVIDIA driver 580 or newer, and this driver has "
            "CUDA 11.8: update the driver",
        ),
    ],
)
def test_tensorrt(
    there: tuple[int, int] | None, problem: str | None, site: Path, driver: Callable[[tuple[int, int] | None], None]
) -> None:
    install_tensorrt(site)
    driver(there)
    assert driver_too_old("tensorrt") == problem


@pytest.mark.parametrize(
    ("package", "cure"),
    [
        ("cuda-bindings", "pip install 'cuda-bindings<13'"),
        ("onnxruntime-gpu", "pip install 'onnxruntime-gpu[cuda,cudnn]<1.27'"),
        ("torch", "pip install 'torch<2.11'"),
    ],
)
def test_the_cure_for_other_packages(
    package: str, cure: str, site: Path, driver: Callable[[tuple[int, int] | None], None]
) -> None:
    install_onnxruntime_gpu(site)
    install(site, "cuda-bindings", "13.5.0")
    install(site, "torch", "2.13.0", torch_file("'13.0'"))
    driver((12, 8))
    assert str(driver_too_old(package)).endswith(f"update the driver, or {cure}")


def test_nothing_is_built_that_the_driver_can_not_run(
    site: Path, driver: Callable[[tuple[int, int] | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sbert_infer.backends.tensorrt.versions import TensorRT

    install_tensorrt(site)
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    driver((12, 2))
    trt = TensorRT(None, "tensorrt", "11.4.0.106", False, True, False, False)  # no module: it must not be touched
    with pytest.raises(EngineError, match=r"made for CUDA 13.* pip install tensorrt-cu12"):
        build_engine(trt, b"", [Shape(1, 8, 2)])
