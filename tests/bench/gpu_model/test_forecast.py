"""What keeps GPUs busy: slots, cores for tokenizing, and little Python."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbert_infer.backends.tensorrt import backend
from sbert_infer.bench.gpu_model.__main__ import main
from sbert_infer.bench.gpu_model.forecast import BUSY, SLOTS, Work, cores_needed, forecast, lone_text_s, plan_work
from sbert_infer.bench.gpu_model.host import HostCosts, measure_host
from sbert_infer.bench.gpu_model.roofline import GPUS, MODELS, Gpu
from sbert_infer.text.packing import Packer
from sbert_infer.text.shapes import choose_shapes
from sbert_infer.text.tokenizer import Tokenizer
from tests.repository.sources import ROOT

MANY = 96  # cores
SLOW = {"T4", "L4", "A10"}
# A calling thread that takes no time in Python, to see what the slots alone do.
NO_PYTHON_BETWEEN = replace(HostCosts(), collect_text_s=0, collect_s=0, plan_s=0, gather_s=0)


@pytest.fixture(scope="module")
def works() -> dict[tuple[str, str], Work]:
    return {(model, kind): plan_work(MODELS[model], kind) for model in MODELS for kind in ("short", "mixed", "long")}


def lowest(works: dict[tuple[str, str], Work], model: str, gpu: Gpu, host: HostCosts, slots: int = SLOTS) -> float:
    return min(forecast(work, gpu, host, MANY, slots).gpu_busy for (name, _), work in works.items() if name == model)


def test_the_simulation_has_the_slots_of_the_backend() -> None:
    assert vars(backend)["_SLOTS_PER_DEVICE"] == SLOTS


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_two_slots_keep_a_gpu_busy(gpu: Gpu, works: dict[tuple[str, str], Work]) -> None:
    assert lowest(works, "BERT base", gpu, HostCosts()) > BUSY
    assert lowest(works, "MiniLM-L6", gpu, NO_PYTHON_BETWEEN) > BUSY
    if gpu.name in SLOW:
        assert lowest(works, "MiniLM-L6", gpu, HostCosts()) > BUSY


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if gpu.name not in SLOW], ids=lambda gpu: gpu.name)
def test_one_slot_does_not(gpu: Gpu, works: dict[tuple[str, str], Work]) -> None:
    assert lowest(works, "MiniLM-L6", gpu, NO_PYTHON_BETWEEN, slots=1) < BUSY


def test_a_small_model_on_a_fast_gpu_waits_for_python(works: dict[tuple[str, str], Work]) -> None:
    """Known, and said so in docs/gpu.md: more slots or cores do not help."""
    work, gpu = works["MiniLM-L6", "short"], GPUS["H100"]
    for slots in (2, 4):
        found = forecast(work, gpu, HostCosts(), MANY, slots)
        assert found.gpu_busy < 0.6
        assert found.bottleneck == "Python"
    assert cores_needed(work, gpu, HostCosts()) is None


def test_too_few_cores_are_named(works: dict[tuple[str, str], Work]) -> None:
    work, gpu = works["BERT base", "short"], GPUS["H100"]
    needed = cores_needed(work, gpu, HostCosts())
    assert needed is not None
    assert needed > 1
    assert forecast(work, gpu, HostCosts(), needed).bottleneck == "GPU"
    one = forecast(work, gpu, HostCosts(), cores=1)
    assert one.bottleneck == "tokenizing"
    assert one.gpu_busy < BUSY
    assert one.tokens_per_s <= 1 / HostCosts().tokenize_s


def test_a_slow_link_is_named(works: dict[tuple[str, str], Work]) -> None:
    gpu = replace(GPUS["A10"], pcie_gb_per_s=0.5)
    assert forecast(works["MiniLM-L6", "short"], gpu, HostCosts(), MANY).bottleneck == "PCIe"


def test_all_texts_are_planned(works: dict[tuple[str, str], Work]) -> None:
    for work in works.values():
        for lengths, batches in zip(work.lengths, work.windows, strict=True):
            assert sorted(text for batch in batches for text in batch.texts.tolist()) == list(range(len(lengths)))


def test_a_lone_text_does_not_wait_for_a_batch() -> None:
    for model in MODELS.values():
        for gpu in GPUS.values():
            assert 1e-4 < lone_text_s(model, gpu, HostCosts()) < 2e-3


def test_the_command_prints_a_table() -> None:
    args = ["--gpu", "L4", "--model", "MiniLM-L6", "--workload", "short", "--cores", "4"]
    result = CliRunner().invoke(main, args, catch_exceptions=False)
    head, rule, row, *rest = result.output.splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| L4 | MiniLM-L6 | short | ")
    assert "Computed, not run on a GPU. Assumed:" in rest
    assert "- 4 cores for tokenizing, 1.00 us a token; 3 slots" in rest


def test_the_documented_table_is_what_the_command_prints(works: dict[tuple[str, str], Work]) -> None:
    """Within a tenth, so that a small change of the planner does not count as a new table."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    documented = {tuple(row[:3]): float(row[3].replace(",", "")) for row in cells if row[0] in GPUS}
    computed = {
        (gpu.name, model, kind): forecast(work, gpu, HostCosts(), cores=8).texts_per_s
        for gpu in GPUS.values()
        for (model, kind), work in works.items()
    }
    assert documented == pytest.approx(computed, rel=0.1)


def test_costs_are_measured(minilm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer((minilm_path / "tokenizer.json").read_text(encoding="utf-8"), 128)
    packer = Packer(choose_shapes(None, 128, 384, 1024), 384)
    costs = measure_host(tokenizer, [f"text number {number} of many" for number in range(200)], packer)
    assert costs.tokenize_s > 0
    assert costs.plan_s > 0
    assert min(asdict(costs).values()) >= 0
