"""`sbert-verify` against this machine, real servers and files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import append_metadata
from sbert_infer.serve.settings import ModelFile, Settings
from sbert_infer.verify import vectors_file
from sbert_infer.verify.cli import main
from sbert_infer.verify.texts import SHORT
from tests.sbert_infer.serve.conftest import start

Encode = Callable[[list[str]], Any]


@pytest.fixture(scope="session")
def plain_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    """A small model without prompts, whose vectors have length 1."""
    return export_checkpoint("bert", normalize=True)


def verify(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def differences(report: dict[str, Any]) -> list[str]:
    return [each["what"] for each in report["differences"]]


@contextmanager
def serving(encode: Encode, *, route: str = "/v1/embeddings", key: str | None = None) -> Iterator[str]:
    """A server of one route, with the vectors that `encode` gives; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            locked = key is not None and self.headers["Authorization"] != f"Bearer {key}"
            if self.path != route or locked:
                self.send_error(401 if locked else 404)
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            vectors = encode(body["inputs" if route == "/embed" else "input"]).tolist()
            if route != "/embed":
                rows = [{"index": index, "embedding": row} for index, row in enumerate(vectors)]
                vectors = {"data": rows[::-1]}
            answer = json.dumps(vectors).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def small_engine(plain_onnx: Path) -> Iterator[Engine]:
    with Engine(plain_onnx, on_truncate="ignore") as engine:
        yield engine


def test_this_machine(plain_onnx: Path, reranker_onnx: Path) -> None:
    for path in (plain_onnx, reranker_onnx):
        code, report = verify(path)
        assert (code, report["verdict"], report["differences"]) == (0, "right", [])
        assert report["target"] == "this machine"
    assert "lowest cosine" in CliRunner().invoke(main, [str(plain_onnx)]).output


def test_wrong_vectors_of_this_machine(plain_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sbert_infer.backends.onnxruntime_cpu import OnnxBackend

    run = OnnxBackend.run
    monkeypatch.setattr(OnnxBackend, "run", lambda *a, **o: [found[:, ::-1] for found in run(*a, **o)])
    code, report = verify(plain_onnx)
    assert (code, report["verdict"]) == (1, "wrong")
    assert differences(report) == ["weights or arithmetic"]
    assert len(report["worst"]) == 3


def test_numbers_of_this_machine_that_are_not_finite(plain_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sbert_infer.backends.onnxruntime_cpu import OnnxBackend

    run = OnnxBackend.run
    monkeypatch.setattr(OnnxBackend, "run", lambda *a, **o: [found * np.float32("nan") for found in run(*a, **o)])
    code, report = verify(plain_onnx)
    assert (code, report["verdict"], report["found"], report["lowest_cosine"]) == (1, "wrong", 32, 0)
    assert differences(report) == ["arithmetic"]
    table = CliRunner().invoke(main, [str(plain_onnx)]).output
    assert "NaN or infinity in their batches 32, at most 0 is right, on 32 texts" in table


def test_vectors_that_are_wrong_in_batches_only(plain_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sbert_infer.backends.onnxruntime_cpu import OnnxBackend

    run = OnnxBackend.run

    def mixed_up(self: OnnxBackend, batch: Any, *args: Any, **options: Any) -> Any:
        return [found[::-1] for found in run(self, batch, *args, **options)]  # the rows

    monkeypatch.setattr(OnnxBackend, "run", mixed_up)
    assert differences(verify(plain_onnx)[1]) == ["batching"]


def test_an_older_artifact(plain_onnx: Path, tmp_path: Path) -> None:
    artifact = open_artifact(plain_onnx)
    older = tmp_path / "older.onnx"
    older.write_bytes(plain_onnx.read_bytes()[: int(plain_onnx.read_bytes()[-16:])])
    with older.open("r+b") as file:
        append_metadata(file, replace(artifact.manifest, canaries=None), artifact.tokenizer_json)
    code, report = verify(older)
    assert (code, report["verdict"]) == (1, "no canaries")
    assert "export it again" in CliRunner().invoke(main, [str(older)]).output


@pytest.mark.parametrize("route", ["", "/v1/embeddings", "/embed"])
def test_our_own_server(plain_onnx: Path, export_checkpoint: Callable[..., Path], route: str) -> None:
    running = start(Settings((ModelFile(plain_onnx, "small"),), port=0, drain_s=5.0))
    try:
        code, report = verify(plain_onnx, running.url + route)
        assert (code, report["verdict"]) == (0, "right")
        assert report["target"] == running.url + route
        assert report["stated"]["same"]
        # The same checkpoint with another pooling, and in 8 bits.
        other = export_checkpoint("bert", normalize=True, pooling=("cls",))
        code, report = verify(other, running.url + route)
        assert (code, report["verdict"]) == (1, "wrong")
        assert report["stated"]["differences"] == ["pooling"]
        near = export_checkpoint("bert", normalize=True, int8=True)  # near enough for who asks for less
        done = CliRunner().invoke(main, [str(near), running.url + route, "--min-cosine", "0.5"])
        assert done.exit_code == 0
        assert "not this one: other precision" in done.stdout
    finally:
        running.stop()


def test_a_server_that_cuts_texts_silently(plain_onnx: Path, small_engine: Engine) -> None:
    small_engine.max_seq_length = 32
    with serving(small_engine.encode) as url:
        code, report = verify(plain_onnx, url)
    assert (code, differences(report)) == (1, ["truncation"])
    assert "cut to 32 tokens" in report["differences"][0]["how"]


def test_a_server_in_8_bits(plain_onnx: Path, export_checkpoint: Callable[..., Path]) -> None:
    path = export_checkpoint("bert", normalize=True, int8=True)
    with Engine(path, on_truncate="ignore") as engine, serving(engine.encode, route="/embed") as url:
        code, report = verify(plain_onnx, url)
    assert (code, differences(report)) == (1, ["precision"])


def test_a_server_that_needs_a_key(plain_onnx: Path, small_engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    with serving(small_engine.encode, key="secret") as url:
        done = CliRunner().invoke(main, [str(plain_onnx), url])
        assert done.exit_code == 1
        assert "401" in done.stderr
        assert verify(plain_onnx, url, "--key-file", tmp_path / "key")[0] == 0
        done = CliRunner().invoke(main, [str(plain_onnx), url, "--key-env", "A_KEY"], env={"A_KEY": "secret"})
        assert done.exit_code == 0


@pytest.mark.parametrize("answer", [[[1.0], [2.0, 3.0]], [["a"]], [], [[float("inf")]], None, {"a": 1}])
def test_a_server_without_vectors(plain_onnx: Path, answer: Any) -> None:
    class Answer:
        def tolist(self) -> Any:
            return answer

    with serving(lambda texts: Answer(), route="/embed") as url:
        done = CliRunner().invoke(main, [str(plain_onnx), url + "/embed"])
    assert done.exit_code == 1
    assert "no list of vectors" in done.stderr


class SpeaksNoHttp(StreamRequestHandler):
    """Answers as an SSH server does."""

    def handle(self) -> None:
        length = 0
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        self.rfile.read(length)  # closing with unread bytes would reset the connection
        self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_a_server_that_speaks_no_http(plain_onnx: Path) -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), SpeaksNoHttp) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        done = CliRunner().invoke(main, [str(plain_onnx), f"http://127.0.0.1:{server.server_address[1]}"])
        server.shutdown()
        thread.join()
    assert done.exit_code == 1
    assert "did not answer as HTTP does" in done.stderr


def test_an_address_with_a_wrong_port(plain_onnx: Path) -> None:
    done = CliRunner().invoke(main, [str(plain_onnx), "http://127.0.0.1:port"])
    assert done.exit_code == 1
    assert "nonnumeric port" in done.stderr


def test_nobody_listens(plain_onnx: Path) -> None:
    done = CliRunner().invoke(main, [str(plain_onnx), "http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert "can't be reached" in done.stderr


def write(path: Path, texts: list[str], vectors: Any, groups: int = 2) -> Path:
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    pq.write_table(pa.table({"text": texts, "embedding": column}), path, row_group_size=-(-len(texts) // groups))
    return path


def test_a_parquet_file(
    plain_onnx: Path, small_engine: Engine, tmp_path: Path, export_checkpoint: Callable[..., Path]
) -> None:
    texts = SHORT * 3
    right = write(tmp_path / "right.parquet", texts, small_engine.encode(texts))
    code, report = verify(plain_onnx, right)
    assert (code, report["verdict"], report["texts"]) == (0, "right", len(texts))
    assert verify(plain_onnx, right, "--rows", 10)[1]["texts"] == 10

    mixed = small_engine.encode(texts)
    with Engine(export_checkpoint("roberta", normalize=True), on_truncate="ignore") as other:
        foreign = other.encode(texts)
    code, report = verify(plain_onnx, write(tmp_path / "foreign.parquet", texts, foreign))
    assert (code, differences(report)) == (1, ["model"])
    mixed[len(texts) // 2 :] = foreign[len(texts) // 2 :]  # only the second row group
    assert verify(plain_onnx, write(tmp_path / "mixed.parquet", texts, mixed))[0] == 1


def test_one_large_row_group(
    plain_onnx: Path, small_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors_file, "_BATCH_ROWS", 7)
    texts = [f"{text} {number}" for number in range(4) for text in SHORT]
    columns: dict[str, Any] = {"text_column": "text", "embedding_column": "embedding"}
    found = small_engine.encode(texts)
    path = write(tmp_path / "one.parquet", texts, found, groups=1)
    sample = vectors_file.read_sample(path, 30, **columns)
    rows = [texts.index(text) for text in sample.texts]
    assert (len(rows), rows[0], rows[-1], rows) == (30, 0, len(texts) - 1, sorted(rows))
    assert np.array_equal(sample.vectors, found[rows])

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(texts[:10]), encoding="utf-8")  # so that only these rows are read
    read: list[int] = []
    batches = pq.ParquetFile.iter_batches

    def counted(*args: Any, **options: Any) -> Iterator[Any]:
        for batch in batches(*args, **options):
            read.append(len(batch))
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    sample = vectors_file.read_sample(path, 30, **columns, texts_from=corpus)
    assert np.array_equal(sample.vectors, found[:10])
    assert read == [7, 7]


def test_a_file_says_how_it_was_made(small_onnx: Path, export_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(SHORT), encoding="utf-8")
    how = ["--prompt-name", "query", "--normalize", "--truncate-dim", "16", "--columns", "text"]
    for output in (tmp_path / "vectors.parquet", tmp_path / "vectors.npy"):
        command = [sys.executable, "-m", "sbert_infer.embed.cli", corpus, small_onnx, "-o", output, "-q", *how]
        subprocess.run(list(map(str, command)), check=True)
        code, report = verify(small_onnx, output, "--texts", corpus)
        assert (code, report["verdict"], report["stated"]["same"]) == (0, "right", True)
    code, report = verify(small_onnx, tmp_path / "vectors.parquet", "--prompt", "passage: ")
    assert (code, differences(report)) == (1, ["prompt"])
    code, report = verify(export_checkpoint("bert", normalize=True), tmp_path / "vectors.parquet")
    assert {"prompts", "pooling"} <= {*report["stated"]["differences"]}


def test_what_sbert_embed_writes(plain_onnx: Path, tmp_path: Path) -> None:
    corpus, vectors = tmp_path / "corpus.txt", tmp_path / "vectors.parquet"
    corpus.write_text("\n".join(SHORT), encoding="utf-8")
    for output in (vectors, tmp_path / "vectors.npy"):
        command = [sys.executable, "-m", "sbert_infer.embed.cli", corpus, plain_onnx, "-o", output, "-q"]
        subprocess.run(list(map(str, command)), check=True)
        assert verify(plain_onnx, output, "--texts", corpus)[0] == 0
        done = CliRunner().invoke(main, [str(plain_onnx), str(output)])
        assert done.exit_code == 1
        assert "--texts" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.parquet"], "is no file"),
        (["ftp://example.org"], "no address of a server"),
        (["--prompt-name", "other", "http://127.0.0.1:9"], "not among the model's prompts"),
    ],
)
def test_wrong_options(plain_onnx: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, [str(plain_onnx), *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


def test_files_that_can_not_be_compared(plain_onnx: Path, tmp_path: Path) -> None:
    texts = SHORT[:3]
    bits = write(tmp_path / "bits.parquet", texts, np.ones((3, 4), np.uint8))
    junk = tmp_path / "junk.parquet"
    junk.write_bytes(b"junk")
    for path, said in ((bits, "8 bits"), (junk, "no readable Parquet")):
        done = CliRunner().invoke(main, [str(plain_onnx), str(path)])
        assert done.exit_code == 1
        assert said in done.stderr
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(texts), encoding="utf-8")
    number = tmp_path / "number.npy"
    np.save(number, np.float32(1))
    for name, content, said in (
        ("empty.npy", b"", "no readable Parquet or .npy"),
        ("junk.npy", b"junk", "no readable Parquet or .npy"),
        ("short.npy", number.read_bytes()[:-1], "no readable Parquet or .npy"),
        ("number.npy", number.read_bytes(), "no vectors"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        done = CliRunner().invoke(main, [str(plain_onnx), str(path), "--texts", str(corpus)])
        assert (done.exit_code, said in done.stderr) == (1, True), done.output
    assert CliRunner().invoke(main, [str(plain_onnx), str(bits), "--embedding-column", "v"]).exit_code == 1


def test_only_sentence_encoders_have_targets(reranker_onnx: Path) -> None:
    done = CliRunner().invoke(main, [str(reranker_onnx), "http://127.0.0.1:9"])
    assert done.exit_code == 2
    assert "no sentence encoder" in done.stderr
