"""`sbert-embed --ray` and `Embedder` on a Ray cluster of several local nodes, with kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sbert_infer.embed import Embedder
from sbert_infer.embed.cli import main

BLOCK, BLOCKS = 4096, 14


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node for drivers and checkpoints, and two more."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 100 << 20, "memory": 3 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
    for _ in range(2):
        cluster.add_node(num_cpus=2, **small)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    texts = [None if n % 997 == 0 else f"text number {n % 211}" for n in range(BLOCK * BLOCKS - 100)]
    names = [f"doc {n}" for n in range(len(texts))]
    pq.write_table(pa.table({"name": names, "text": texts}), path, row_group_size=10_000)
    return path


def command(corpus: Path, artifact: Path, output: Path, cluster: Any) -> list[str]:
    options = ["--id-column", "name", "--part-rows", str(BLOCK), f"--ray={cluster.address}"]
    return [str(corpus), str(artifact), "-o", str(output), *options]


def start(args: list[str]) -> subprocess.Popen[str]:
    full = [sys.executable, "-m", "sbert_infer.embed.cli", *args]
    return subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_files(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    while len(list(folder.glob("*.parquet"))) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def actors_of(node: Any) -> list[int]:
    """The processes on a node that hold an engine."""
    raylet = node.all_processes["raylet"][0].process.pid
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, parent = (folder / "cmdline").read_text(), (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended meanwhile
            continue
        if "MapWorker" in name and int(parent) == raylet:
            found.append(int(folder.name))
    return found


def test_every_row_comes_out_once_whatever_is_killed(
    tmp_path: Path, cluster: Any, corpus: Path, small_onnx: Path
) -> None:
    output = tmp_path / "vectors"
    args = command(corpus, small_onnx, output, cluster)
    driver = start(args)
    wait_for_files(driver, output, 1)
    actors = [pid for node in (cluster.head_node, *cluster.worker_nodes) for pid in actors_of(node)]
    os.kill(actors[0], signal.SIGKILL)
    wait_for_files(driver, output, 3)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    wait_for_files(driver, output, 6)
    driver.kill()
    driver.communicate()
    done = len(list(output.glob("*.parquet")))
    assert done < BLOCKS
    for _ in range(3):  # until Ray has noticed that the node is gone, the command may fail, and is run once more
        again = start(args)
        log = again.communicate()[0]
        if again.returncode == 0:
            break
    assert again.returncode == 0, log
    check_rows(output, corpus, small_onnx)


def test_a_machine_of_two_cores_resumes(tmp_path: Path, corpus: Path, small_onnx: Path) -> None:
    """Ray needs one actor more than in the first run, and would wait for a core for ever."""
    output = tmp_path / "vectors"
    args = command(corpus, small_onnx, output, SimpleNamespace(address="local"))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:2])  # inherited
    try:
        driver = start(args)
        wait_for_files(driver, output, 2)
        driver.kill()
        driver.communicate()
        assert len(list(output.glob("*.parquet"))) < BLOCKS
        again = start(args)
        assert "vectors in" in again.communicate()[0]
    finally:
        os.sched_setaffinity(0, allowed)
    assert again.returncode == 0
    check_rows(output, corpus, small_onnx)


def test_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of the files that are whole, and speed without those of an earlier run."""
    pytest.importorskip("ray")
    from sbert_infer.embed.ray import job
    from sbert_infer.embed.ray.output import OutputFolder

    output = tmp_path / "vectors"
    folder = OutputFolder(str(output))
    folder.begin({}, restart=False, force=False)
    pq.write_table(pa.table({"row": [0, 1]}), output / "earlier.parquet")
    (output / "half.parquet").write_bytes(b"PAR1")
    (output / "note.txt").write_text("no rows")
    monkeypatch.setattr(job, "LINE_S", 0.1)
    printed = ""
    with job.printed_lines(folder):
        while "2 rows written, 0 rows/s, 0 s\n" not in printed:
            printed += capsys.readouterr().err
        pq.write_table(pa.table({"row": [2, 3, 4]}), output / "half.parquet")
        while "\n5 rows written, " not in printed:
            printed += capsys.readouterr().err
    capsys.readouterr()
    time.sleep(0.3)
    assert capsys.readouterr().err == ""
    OutputFolder(str(tmp_path / "gone")).count_rows()  # nothing there to list, and no error


def check_rows(output: Path, corpus: Path, small_onnx: Path) -> None:
    """The output must hold what one machine writes, each row once."""
    found = pq.read_table(output).sort_by("row")
    texts = pq.read_table(corpus)["text"].to_pylist()
    assert found["row"].to_pylist() == list(range(len(texts)))
    assert found["name"].to_pylist() == [f"doc {n}" for n in range(len(texts))]
    good = np.array([text is not None for text in texts])
    assert found["error"].to_pylist() == [None if text else "text is null" for text in texts]
    assert found["embedding"].is_valid().to_pylist() == good.tolist()
    embed = Embedder(small_onnx, workers=1)
    for start in range(0, len(texts), BLOCK):
        block = [text for text in texts[start : start + BLOCK] if text is not None]
        rows = found.slice(start, BLOCK).filter(pa.array(good[start : start + BLOCK]))["embedding"].combine_chunks()
        assert rows.flatten().to_numpy().tobytes() == embed.encode(block).tobytes()


def test_embedder_in_a_pipeline(cluster: Any, small_onnx: Path, encode: Any) -> None:
    import ray

    ray.init(address=cluster.address, ignore_reinit_error=True, log_to_driver=False)
    try:
        texts = [f"text number {n}" for n in range(50)]
        rows = ray.data.from_items([{"text": text} for text in texts])
        found = rows.map_batches(Embedder, fn_constructor_args=(str(small_onnx),), concurrency=1).take_all()
    finally:
        ray.shutdown()
    expected = dict(zip(texts, encode(texts), strict=True))
    assert len(found) == 50
    for row in found:
        np.testing.assert_allclose(row["embedding"], expected[row["text"]], rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["arrow", "numpy", "pandas"])
def test_embedder_takes_every_kind_of_batch(small_onnx: Path, encode: Any, kind: str) -> None:
    texts = ["one", "two", "three"]
    embed = Embedder(small_onnx, normalize=True, truncate_dim=8, embedding_column="v")
    expected = encode(texts, normalize_embeddings=True, truncate_dim=8)
    table = pa.table({"text": texts, "n": [1, 2, 3]})
    make: dict[str, Callable[[], Any]] = {
        "arrow": lambda: table,
        "numpy": lambda: {"text": np.array(texts, object), "n": np.array([1, 2, 3])},
        "pandas": table.to_pandas,
    }
    found = embed(make[kind]())
    vectors = found["v"].to_pylist() if kind == "arrow" else list(found["v"])
    assert np.array(vectors, np.float32).tobytes() == expected.tobytes()
    assert list(found["n"].to_pylist() if kind == "arrow" else found["n"]) == [1, 2, 3]


def test_embedder_refuses_what_needs_the_whole_corpus(small_onnx: Path) -> None:
    with pytest.raises(ValueError, match="'int8' needs the ranges of the whole corpus"):
        Embedder(small_onnx, precision="int8")


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (["--ray", "--format", "npy"], "--format can't be used with --ray", 2),
        (["--ray", "--workers", "2"], "--workers can't be used with --ray", 2),
        (["--ray-cpus", "2"], "--ray-cpus can't be used without --ray", 2),
        (["--ray", "in.parquet"], "'in.parquet' is no address of a Ray cluster", 2),
        (["--ray", "--precision", "int8"], "needs the ranges of the whole corpus", 1),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, small_onnx: Path, options: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "in.txt"), str(small_onnx), "-o", str(tmp_path / "out.parquet"), *options])
    assert stopped.value.code == code
    assert message in capsys.readouterr().err


def test_columns_that_the_output_has_itself_are_refused(
    tmp_path: Path, small_onnx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one", "error": "none", "row": 7}\n')
    for number, (options, name) in enumerate(
        [([], "row"), (["--id-column", "row"], "error"), (["--columns", "row"], "row")]
    ):
        with pytest.raises(SystemExit):
            main(
                [str(tmp_path / "in.jsonl"), str(small_onnx), "-o", str(tmp_path / f"{number}"), "--ray=auto", *options]
            )
        assert f"in.jsonl has a column {name!r}" in capsys.readouterr().err


def test_all_files_get_the_same_columns(tmp_path: Path) -> None:
    from sbert_infer.embed.ray.output import OutputFolder
    from tests.sbert_infer.embed.test_reuse import make_origin

    folder = OutputFolder(str(tmp_path / "out"))
    folder.begin({"a": 1}, restart=False, force=False)
    blocks: list[dict[str, Any]] = [{"n": [1, 2], "error": [None, "x"]}, {"n": ["three"], "m": [0.5]}, {"n": [None]}]
    for number, block in enumerate(blocks):
        table = pa.table({"row": pa.array(range(number * 10, number * 10 + len(block["n"]))), **block})
        table = table if "error" in block else table.append_column("error", pa.nulls(len(table), pa.string()))
        pq.write_table(table, tmp_path / "out" / f"{number}.parquet")
    assert "3 vectors in 3 files\n  no vector  1 rows" in folder.finish(make_origin())
    first, *others = [pq.read_schema(path).remove_metadata() for path in (tmp_path / "out").glob("*.parquet")]
    assert all(other.equals(first) for other in others)
    found = pq.read_table(tmp_path / "out").sort_by("row").to_pydict()
    assert found["row"] == [0, 1, 10, 20]
    assert found["n"] == ["1", "2", '"three"', None]  # JSON: the only type that holds them all
    assert found["m"] == [None, None, 0.5, None]


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    from sbert_infer.embed.ray.output import OutputFolder
    from sbert_infer.errors import EmbedError

    folder = OutputFolder(str(tmp_path / "out"))
    folder.begin({"artifact": "a" * 64}, restart=False, force=False)
    folder.begin({"artifact": "a" * 64}, restart=False, force=False)
    with pytest.raises(EmbedError, match=r"the artifact has changed .* use --restart"):
        folder.begin({"artifact": "b" * 64}, restart=False, force=False)
    (tmp_path / "out" / "old.parquet").touch()
    folder.begin({"artifact": "b" * 64}, restart=True, force=False)
    assert not (tmp_path / "out" / "old.parquet").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.parquet").touch()
    with pytest.raises(EmbedError, match="other exists: choose another name, or replace it with --force"):
        OutputFolder(str(tmp_path / "other")).begin({}, restart=True, force=False)
