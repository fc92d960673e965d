"""The roofline against what NVIDIA measured, and the arithmetic behind it."""

from __future__ import annotations

import pytest

from sbert_infer.bench.gpu_model.roofline import GPUS, MODELS, Gpu, Model
from sbert_infer.types import Shape

BASE = MODELS["BERT base"]
LARGE = Model("BERT large", layers=24, hidden=1024, max_length=512)

# Milliseconds of BERT with TensorRT in FP16, copies left out: averages in demo/BERT/README.md of
# NVIDIA/TensorRT. (GPU, model, rows, length) -> milliseconds.
MEASURED = {
    ("T4", BASE, 32, 128): 36.63,
    ("T4", BASE, 128, 128): 144.20,
    ("T4", BASE, 32, 384): 114.90,
    ("T4", LARGE, 128, 128): 482.84,
    ("L4", BASE, 32, 128): 13.41,
    ("L4", BASE, 128, 128): 66.09,
    ("L4", BASE, 32, 384): 50.51,
    ("L4", LARGE, 128, 128): 218.06,
    ("A100 40 GB", BASE, 32, 128): 3.90,
    ("A100 40 GB", BASE, 128, 128): 15.29,
    ("A100 40 GB", BASE, 32, 384): 12.89,
    ("A100 40 GB", LARGE, 128, 128): 48.82,
    ("L40S", BASE, 32, 128): 3.96,
    ("L40S", BASE, 128, 128): 17.33,
    ("L40S", BASE, 32, 384): 14.03,
    ("L40S", LARGE, 128, 128): 64.41,
}
# One row alone: launches, and weights from memory, which the L2 caches of L4 and L40S partly hold.
MEASURED_ALONE = {
    ("T4", BASE, 1, 128): 1.95,
    ("L4", BASE, 1, 128): 1.01,
    ("A100 40 GB", BASE, 1, 128): 0.63,
    ("L40S", BASE, 1, 128): 0.48,
}


def computed_ms(name: str, model: Model, rows: int, length: int) -> float:
    return 1e3 * model.run_s(Shape(rows, length, 1), GPUS[name])


@pytest.mark.parametrize(("case", "measured"), MEASURED.items(), ids=str)
def test_it_is_close_to_what_nvidia_measured(case: tuple[str, Model, int, int], measured: float) -> None:
    assert computed_ms(*case) == pytest.approx(measured, rel=0.27)
    if case[2] * case[3] == 16384 or case[3] == 384:  # batches as large as ours
        assert computed_ms(*case) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("case", "measured"), MEASURED_ALONE.items(), ids=str)
def test_a_single_row_is_of_the_right_size(case: tuple[str, Model, int, int], measured: float) -> None:
    assert computed_ms(*case) == pytest.approx(measured, rel=0.65)


def test_only_gpus_that_were_compared_are_marked_as_measured() -> None:
    assert {name for name, gpu in GPUS.items() if gpu.measured} == {name for name, *_ in MEASURED}


def test_operations_per_token() -> None:
    shape = Shape(32, 512, 128)
    model = MODELS["MiniLM-L6"]
    assert model.flops(shape) == 32 * 512 * 6 * (24 * 384**2 + 4 * 512 * 384)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_nothing_is_faster_than_its_ceilings(gpu: Gpu, model: Model) -> None:
    weights = 2 * model.layers * 12 * model.hidden**2  # bytes
    for shape in (Shape(1, 64, 16), Shape(128, 128, 32), Shape(32, 512, 128)):
        assert model.run_s(shape, gpu) >= model.flops(shape) / (gpu.tera_flops * 1e12)
        assert model.run_s(shape, gpu) >= weights / (gpu.gb_per_s * 1e9)
