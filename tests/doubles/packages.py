"""Doubles of installed packages: the metadata that pip writes, and files with their contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, version: str, files: Mapping[str, str] | None = None) -> Path:
    """Make `folder`, when it is on the path, hold a package of this name and version."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    for path, content in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    return folder


def install_tensorrt(folder: Path, version: str = "11.4.0.106", *, module: str = "tensorrt", major: int = 13) -> Path:
    """Make `folder` hold what `pip install tensorrt` brings, without TensorRT itself."""
    for name in (module, f"{module}_cu{major}", f"{module}_cu{major}_libs", f"{module}_cu{major}_bindings"):
        install(folder, name, version)
    return folder


def install_onnxruntime_gpu(folder: Path, version: str = "1.31.1", cuda: str = "13.0") -> Path:
    """Make `folder` hold onnxruntime-gpu's metadata, made for this CUDA."""
    info = f"package_name = 'onnxruntime-gpu'\n__version__ = '{version}'\ncuda_version = '{cuda}'\n"
    return install(folder, "onnxruntime-gpu", version, {"onnxruntime/capi/build_and_package_info.py": info})
