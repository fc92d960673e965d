"""The plan file: everything that was written is read back, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import ArtifactError, CorruptError, Engine, VersionError
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.plan_file import (
    CPU_GRAPH,
    CUDA_GRAPH,
    MODEL,
    EngineFile,
    PackedRowsModel,
    Plan,
    open_plan,
    write_plan,
)
from sbert_infer.types import Shape

ENGINES = {
    EngineFile("tensorrt_rtx", "1.7.1.116", "sm89"): b"first engine" * 50,
    EngineFile("tensorrt", "10.13.3", "sm90"): b"second engine" * 50,
}
ROWS = PackedRowsModel(("input_ids", "segment_ids", "starts", "ends"), 32, (Shape(1, 16, 4), Shape(8, 64, 16)))


@pytest.fixture(scope="module")
def plan_file(small_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a plan with arbitrary bytes as graphs and engines. Shared: change only a copy."""
    artifact = open_artifact(small_onnx)
    path = tmp_path_factory.mktemp("plan") / "model.plan"
    with path.open("wb") as file:
        write_plan(
            file,
            replace(artifact.manifest, precision="fp16"),
            artifact.tokenizer_json,
            model=b"weights" * 1000,
            cpu_graph=b"graph" * 100,
            cuda_graph=b"other graph" * 100,
            engines=ENGINES,
            rows=ROWS,
            pooling="graph",
        )
    return path


def test_round_trip(plan_file: Path, small_onnx: Path) -> None:
    plan, original = open_plan(plan_file), open_artifact(small_onnx)
    assert plan.manifest == replace(original.manifest, precision="fp16")
    assert plan.tokenizer_json == original.tokenizer_json
    assert (plan.engines, plan.rows, plan.pooling) == (tuple(ENGINES), ROWS, "graph")
    assert plan.read(MODEL) == b"weights" * 1000
    assert plan.read(CPU_GRAPH) == b"graph" * 100
    assert plan.read(CUDA_GRAPH) == b"other graph" * 100
    assert {engine: plan.read(engine.name) for engine in plan.engines} == ENGINES


def test_an_ordinary_zip_that_is_not_compressed(plan_file: Path) -> None:
    with zipfile.ZipFile(plan_file) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[:2] == ["manifest.json", "tokenizer.json"]
        assert "engines/tensorrt_rtx-1.7.1.116-sm89.engine" in archive.namelist()
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        assert json.loads(archive.read("manifest.json"))["plan_version"] == 2


def test_the_same_content_gives_the_same_bytes(plan_file: Path, tmp_path: Path) -> None:
    plan = open_plan(plan_file)
    with (tmp_path / "again.plan").open("wb") as file:
        write_plan(
            file,
            plan.manifest,
            plan.tokenizer_json,
            model=plan.read(MODEL),
            cpu_graph=plan.read(CPU_GRAPH),
            cuda_graph=plan.read(CUDA_GRAPH),
            engines=ENGINES,
            rows=plan.rows,
            pooling=plan.pooling,
        )
    assert (tmp_path / "again.plan").read_bytes() == plan_file.read_bytes()


def contents(plan: Plan) -> list[Any]:
    return [
        plan.manifest,
        plan.tokenizer_json,
        plan.engines,
        plan.rows,
        *(plan.read(name) for name in plan.members),
    ]


def test_a_flipped_bit_is_noticed_or_without_effect(plan_file: Path, tmp_path: Path) -> None:
    whole, expected = plan_file.read_bytes(), contents(open_plan(plan_file))
    bad = tmp_path / "bad.plan"
    noticed = 0
    places = random.Random(0).sample(range(4, len(whole)), 400)  # noqa: S311  # the first bytes make it a zip at all
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        bad.write_bytes(flipped)
        with suppress(ArtifactError):
            assert contents(open_plan(bad)) == expected  # the bit was in a date or the like
            continue
        noticed += 1
    assert noticed > 300


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_a_torn_file(share: float, plan_file: Path, tmp_path: Path) -> None:
    whole = plan_file.read_bytes()
    (tmp_path / "torn.plan").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CorruptError, match=r"torn\.plan: damaged"):
        Engine(tmp_path / "torn.plan")


def rewrite(source: Path, target: Path, change: Any, comment: bytes | None = None) -> Path:
    """Write a copy with a changed manifest, and a matching hash unless `comment` is given."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "manifest.json":
                head = json.loads(content)
                change(head)
                content = json.dumps(head).encode()
                new.comment = hashlib.sha256(content).hexdigest().encode() if comment is None else comment
            new.writestr(name, content)
    return target


def test_a_changed_manifest(plan_file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(plan_file) as archive:
        comment = archive.comment
    changed = rewrite(plan_file, tmp_path / "a.plan", lambda head: head["model"].update(dim=5), comment)
    with pytest.raises(CorruptError, match=r"a\.plan: damaged .its manifest"):
        open_plan(changed)


def test_a_newer_format(plan_file: Path, tmp_path: Path) -> None:
    newer = rewrite(plan_file, tmp_path / "a.plan", lambda head: head.update(plan_version=3))
    with pytest.raises(VersionError, match=r"a\.plan: plan format 3.*upgrade"):
        open_plan(newer)


def test_an_older_format(plan_file: Path, tmp_path: Path) -> None:
    older = rewrite(plan_file, tmp_path / "a.plan", lambda head: head.update(plan_version=1))
    with pytest.raises(VersionError, match=r"a\.plan: plan format 1, .*export it again with `sbert-export"):
        open_plan(older)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.update(extra=1),
        lambda head: head.pop("rows"),
        lambda head: head["model"].update(extra=1),
        lambda head: head["members"].pop("cpu.onnx"),
        lambda head: head["rows"].pop("hidden"),
        lambda head: head["engines"][0].update(colour="red"),
        lambda head: head.update(members=3),
    ],
)
def test_a_manifest_that_does_not_fit(change: Any, plan_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"a\.plan: "):
        open_plan(rewrite(plan_file, tmp_path / "a.plan", change))


def test_another_zip_says_so(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("photo.jpg", b"x")
    with pytest.raises(ArtifactError, match="not a plan of sbert-infer"):
        Engine(tmp_path / "photos.zip")
