"""The paper scaled down: made data, few layers, few steps; and what its tables say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sbert_infer import Engine

ROOT = Path(__file__).parents[2]
MODELS = ["softmax-cls", "triplet-max"]
PAIRS, SENTENCES, SAMPLE = 320, 60, 40


@pytest.fixture(scope="module", autouse=True)
def root_in_path() -> Iterator[None]:
    """Import as `python -m examples.paper` does in the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("bert", config={"max_position_embeddings": 128})


def invoke(*arguments: object) -> Result:
    from examples.paper.__main__ import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of a run that trains one real layer."""
    folder = tmp_path_factory.mktemp("paper") / "trained"
    only = [part for name in MODELS for part in ("--only", name)]
    result = invoke("--base", minilm_path, "--layers", 1, "--pairs", PAIRS, *only, "--output", folder)
    assert result.exit_code == 0, result.output
    return result.output, folder


@pytest.fixture(scope="module")
def timed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of a run that measures speed."""
    folder = tmp_path_factory.mktemp("paper") / "timed"
    sizes = ["--sentences", SENTENCES, "--sample", SAMPLE]
    result = invoke("--base", tiny, *sizes, "--only", "speed", "--output", folder)
    assert result.exit_code == 0, result.output
    return result.output, folder


def table(output: str, title: str) -> list[list[str]]:
    """Cells of the rows under a title."""
    lines = output.split(title)[1].split("##")[0].splitlines()
    rows = [line.replace("\\|", "/").strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return rows[1:]


def test_training_lowers_the_loss(trained: tuple[str, Path]) -> None:
    rows = table(trained[0], "## Trained on")
    assert [row[1] for row in rows] == ["cls", "max"]
    for row in rows:
        first, last = (float(part) for part in row[2].split(" to "))
        assert last < first, row


def test_the_regression_learns_from_scored_pairs(minilm_path: Path) -> None:
    from examples.paper.data import load_data
    from examples.paper.models import bi_encoder
    from examples.paper.objectives import OBJECTIVES, train

    objective = next(objective for objective in OBJECTIVES if objective.name == "cosine")
    model = bi_encoder(str(minilm_path), "mean", max_tokens=64, layers=1)
    losses = train(model, objective, load_data(None, None, 160))
    assert len(losses) == 10
    assert sum(losses[-3:]) < sum(losses[:3])


def test_an_artifact_has_the_quality_of_the_model_it_was_made_of(trained: tuple[str, Path]) -> None:
    for row in table(trained[0], "## Trained on"):
        before, after, exported = row[3:]
        assert after == exported
        assert after != before


def test_the_artifacts_are_the_trained_models(trained: tuple[str, Path]) -> None:
    from sentence_transformers import SentenceTransformer

    from examples.paper.scenes import make_sts

    texts = [text for pair in make_sts(8, seed=5) for text in pair[:2]]
    for name in MODELS:
        expected = SentenceTransformer(str(trained[1] / name), device="cpu").encode(texts)
        with Engine(trained[1] / f"{name}.onnx") as engine:
            np.testing.assert_allclose(engine.encode(texts), expected, atol=1e-5)


def test_the_table_of_speeds_has_every_way_and_says_what_is_extrapolated(timed: tuple[str, Path]) -> None:
    rows = table(timed[0], f"## The most similar two of {SENTENCES} sentences")
    pairs = SENTENCES * (SENTENCES - 1) // 2
    assert {row[0]: row[3] for row in rows} == {
        "cross-encoder: sentence-transformers": f"{SAMPLE} pairs of {pairs:,}",
        "cross-encoder: Reranker": f"{SAMPLE} pairs of {pairs:,}",
        "bi-encoder: sentence-transformers, batches as given": f"{SAMPLE} texts of {SENTENCES}",
        "bi-encoder: sentence-transformers, sorted by length": f"{SAMPLE} texts of {SENTENCES}",
        "bi-encoder: Engine": f"all {SENTENCES} texts",
        "bi-encoder: then the cosines": f"all {pairs:,} pairs",
    }


def test_the_pair_it_shows_is_the_most_similar_one(timed: tuple[str, Path]) -> None:
    from examples.documentation import sentences

    texts = sentences(SENTENCES)
    with Engine(timed[1] / "bi-encoder.onnx", on_truncate="ignore") as engine:
        vectors = engine.encode(texts, normalize_embeddings=True)
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -2)
    left, right = sorted(int(index) for index in np.unravel_index(scores.argmax(), scores.shape))
    assert f"{scores.max():.4f}  {texts[left]}\n        {texts[right]}\n" in timed[0]


@pytest.mark.parametrize("block", [1, 7, 40, 1000])
def test_most_similar_does_not_depend_on_the_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.paper import speed

    monkeypatch.setattr(speed, "BLOCK", block)
    vectors = np.random.default_rng(block).normal(size=(40, 8)).astype(np.float32)
    vectors[33] = 3 * vectors[5] + 0.001
    best = speed.most_similar(vectors)
    assert best[:2] == (5, 33)
    assert best.score == pytest.approx(1, abs=1e-4)


def test_no_test_sentence_is_trained_on() -> None:
    from examples.paper.data import load_data

    data = load_data(None, None, 2000)
    tested = {text for pair in data.test for text in pair[:2]}
    trained: list[Any] = [*(pair[:2] for pair in data.labelled), *(pair[:2] for pair in data.scored), *data.triplets]
    assert len(data.test) == 500
    assert tested.isdisjoint(text for texts in trained for text in texts)


def test_similarity_counts_what_two_scenes_share() -> None:
    from examples.paper.scenes import SLOTS, make_scenes, make_sts, similarity

    scene = next(make_scenes(0))
    assert similarity(scene, scene) == 5
    strangers = tuple(
        next(i for i in ideas if i.general != old.general) for ideas, old in zip(SLOTS, scene, strict=True)
    )
    assert similarity(scene, strangers) == 0
    assert len({pair.score for pair in make_sts(200, seed=0)}) > 10


def test_files_of_the_user_take_the_place_of_what_is_made(tmp_path: Path) -> None:
    from examples.paper.data import load_data

    sts, nli = tmp_path / "sts.csv", tmp_path / "nli.tsv"
    sts.write_text(
        "".join(f'a\tb\tc\t{n}\t{n % 6}\tleft {n} "\tright {n}\textra\n' for n in range(10)), encoding="utf-8"
    )
    nli.write_text("premise\thypothesis\tlabel\nA\tyes\t0\nA\tmaybe\t1\nA\tno\t2\nB\tyes\t0\n", encoding="utf-8")
    data = load_data(nli, sts, 100)
    assert sorted(pair.left for pair in (*data.scored, *data.test)) == [f'left {n} "' for n in range(10)]
    assert len(data.test) == 2
    assert sorted(data.labelled) == [("A", "maybe", 1), ("A", "no", 2), ("A", "yes", 0), ("B", "yes", 0)]
    assert data.triplets == [("A", "yes", "no")]


@pytest.mark.parametrize(
    ("option", "content", "complaint"),
    [
        ("--sts", "a\tb\n", "line 1 is not as in the STS benchmark"),
        ("--nli", "A\tyes\t0\nA\tno\tcontradiction\n", "line 2 is not premise, hypothesis, and 0"),
        ("--nli", "A\tyes\t0\nB\tno\t2\n", "has no premise with both"),
    ],
)
def test_a_wrong_file_is_one_line(option: str, content: str, complaint: str, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.tsv"
    file.write_text(content, encoding="utf-8")
    result = invoke("--base", tiny, option, file)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {file} ")
    assert complaint in result.output
    assert result.output.count("\n") == 1


def test_an_existing_folder_is_not_written_to(tmp_path: Path) -> None:
    result = invoke("--output", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path} exists: name a new folder" in result.output


def test_it_runs_as_the_document_says_and_names_its_parts() -> None:
    from examples.paper.__main__ import PARTS
    from examples.paper.quality import MODELS as TRAINED

    command = [sys.executable, "-m", "examples.paper", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "python -m examples.paper --nli" in shown
    assert list(PARTS) == [*TRAINED, "speed"]
