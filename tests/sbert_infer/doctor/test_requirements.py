"""Which packages a GPU needs, by driver, GPU, platform and Python."""

from __future__ import annotations

import re
from typing import Any

import pytest
from packaging.requirements import Requirement

from sbert_infer import EngineError
from sbert_infer.doctor.requirements import gpu_requirements
from tests.repository.sources import ROOT

NEW: dict[str, Any] = {"system": "Linux", "processor": "x86_64", "python": (3, 12)}


@pytest.mark.parametrize(
    ("driver", "target", "options", "tensorrts", "onnxruntime", "torch"),
    [
        ((13, 0), "sm89", {}, ["tensorrt-cu13", "tensorrt-rtx-cu13"], "1.31.1", "2.13.0"),
        ((13, 3), "sm120", {}, ["tensorrt-cu13", "tensorrt-rtx-cu13"], "1.31.1", "2.13.0"),
        ((14, 0), "sm75", {}, ["tensorrt-cu13", "tensorrt-rtx-cu13"], "1.31.1", "2.13.0"),
        ((13, 0), "sm90", {}, ["tensorrt-cu13"], "1.31.1", "2.13.0"),
        ((13, 0), "sm100", {}, ["tensorrt-cu13"], "1.31.1", "2.13.0"),
        ((13, 0), "sm90", {"processor": "aarch64"}, ["tensorrt-cu13"], "1.31.1", "2.13.0"),
        ((12, 2), "sm86", {}, ["tensorrt-cu12", "tensorrt-rtx-cu12"], "1.26.0", "2.10.0"),
        ((12, 9), "sm90", {}, ["tensorrt-cu12"], "1.26.0", "2.10.0"),
        ((13, 0), "sm89", {"python": (3, 10)}, ["tensorrt-cu12", "tensorrt-rtx-cu12"], "1.23.2", "2.10.0"),
    ],
)
def test_a_gpu(
    driver: tuple[int, int], target: str, options: dict[str, Any], tensorrts: list[str], onnxruntime: str, torch: str
) -> None:
    found = {Requirement(line).name: Requirement(line) for line in gpu_requirements(driver, target, **(NEW | options))}
    assert [name for name in found if name.startswith("tensorrt")] == tensorrts
    assert str(found["onnxruntime-gpu"]) == f"onnxruntime-gpu[cuda,cudnn]=={onnxruntime}"
    assert found["torch"].specifier.contains(torch)
    major = tensorrts[0][-2:]
    assert all(found["cuda-bindings"].specifier.contains(each) == (each[:2] == major) for each in ("12.9.4", "13.5.0"))
    assert all(re.fullmatch(r"==[\d.]+", str(requirement.specifier)) for requirement in found.values())


@pytest.mark.parametrize(
    ("driver", "target", "options", "why"),
    [
        ((11, 8), "sm89", {}, "CUDA 11.8: update it to 580"),
        ((13, 0), "sm70", {}, "sm70 is older than sm75"),
        ((12, 8), "sm90", {"processor": "aarch64"}, "driver 580 or newer"),
        ((13, 0), "sm89", {"system": "Windows"}, "no list of GPU packages for Windows"),
    ],
)
def test_one_that_can_not_be_used(driver: tuple[int, int], target: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineError, match=why):
        gpu_requirements(driver, target, **(NEW | options))


def test_pins_are_those_of_the_other_environment() -> None:
    """Where both have a package, they have the same version of it."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE)
    pins = {(name.replace("_", "-"), version) for name, version in lines}
    found = [Requirement(line) for line in gpu_requirements((13, 0), "sm89", **NEW)]
    versions = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in found}
    assert ("onnxruntime", versions["onnxruntime-gpu"]) in pins
    for name in ("torch", "triton", "cuda-bindings", "tensorrt-rtx-cu13"):
        assert (name, versions[name]) in pins
