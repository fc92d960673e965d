"""A bad file is refused with one line that says why, before a native library sees its bytes."""

from __future__ import annotations

import hashlib
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from sbert_infer import ArtifactError, CorruptError, Engine, VersionError
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import DataFile, Manifest
from sbert_infer.artifact.onnx_file import _seal, append_metadata, sha256
from sbert_infer.artifact.protobuf import bytes_field


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return `refuse(content, error)`, which returns the message if an engine refuses this content.

    It must do so before onnxruntime sees the file.
    """

    def blocked() -> None:
        pytest.fail("onnxruntime was reached")

    monkeypatch.setattr("sbert_infer.backends.onnxruntime_session.import_onnxruntime", blocked)

    def refuse(content: bytes | None, error: type[Exception], path: Path | None = None) -> str:
        path = path or tmp_path / "bad.onnx"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(error) as raised:
            Engine(path)
        message = str(raised.value)
        assert type(raised.value) is error
        assert str(path) in message
        assert "\n" not in message
        return message

    return refuse


def sealed(path: Path, model: bytes, manifest: Manifest | str, tokenizer_json: str = "{}") -> bytes:
    """Return an artifact, as the export would write it, around any model and manifest."""

    class Text(str):  # a manifest with any content
        def to_json(self) -> str:
            return str(self)

    path.write_bytes(model)
    with path.open("r+b") as file:
        append_metadata(file, Text(manifest) if isinstance(manifest, str) else manifest, tokenizer_json)  # type: ignore[arg-type]
    return path.read_bytes()


def graph_of(artifact: Path) -> bytes:
    return bytes(onnx.load_model(artifact).SerializeToString())


def test_truncated_anywhere(small_onnx: Path, refuse: Callable[..., str]) -> None:
    whole = small_onnx.read_bytes()
    for size in (64, 100, 5000, len(whole) // 2, *(len(whole) - cut for cut in (1, 17, 81, 82, 103, 104, 2000))):
        assert "damaged" in refuse(whole[:size], CorruptError)
    for size in (1, 5, 10):  # too little is left to recognise it
        assert "sbert-export" in refuse(whole[:size], ArtifactError)


def test_something_behind_the_end(small_onnx: Path, refuse: Callable[..., str]) -> None:
    refuse(small_onnx.read_bytes() + b"\n", CorruptError)
    refuse(small_onnx.read_bytes() * 2, CorruptError)


def test_any_flipped_bit(small_onnx: Path, refuse: Callable[..., str], tmp_path: Path) -> None:
    whole = small_onnx.read_bytes()
    manifest = whole.index(b"format_version")
    picked = random.Random(0).sample(range(len(whole)), 60)  # noqa: S311
    places = [*picked, 64, manifest, manifest + 17, *range(len(whole) - 125, len(whole))]
    for place in places:
        bad = bytearray(whole)
        bad[place] ^= 1 << place % 8
        refuse(bytes(bad), CorruptError)
    (tmp_path / "good.onnx").write_bytes(whole)
    assert open_artifact(tmp_path / "good.onnx").manifest.dim == 32  # without a flipped bit it opens


@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"just some text\n" * 100, b"@" * 200, b"\xff" * 64])
def test_not_ours(content: bytes, refuse: Callable[..., str]) -> None:
    if content:
        assert "not an artifact of sbert-infer" in refuse(content, ArtifactError)
    else:
        assert "empty" in refuse(content, CorruptError)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"just some text\n" * 100, "a text, "),
        (b"sbert-infer is the first word of this text\n" * 9, "a text, "),
        (b'{"model_type": "bert"}' * 9, "JSON, "),
        (b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32"}}' * 9, "weights in the format safetensors, "),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 3, "a pointer of Git LFS"),
    ],
)
def test_what_it_is_instead(content: bytes, what: str, refuse: Callable[..., str]) -> None:
    assert f"bad.onnx: {what}" in refuse(content, ArtifactError)


def test_a_plain_onnx_model_is_not_ours(refuse: Callable[..., str]) -> None:
    model = helper.make_model(helper.make_graph([], "g", [], []), producer_name="pytorch")
    assert "an ONNX model of another program" in refuse(model.SerializeToString(), ArtifactError)


def test_a_zip_is_not_ours(refuse: Callable[..., str], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.onnx", "w") as file:
        file.writestr("manifest.json", "{}" * 100)
    refuse(None, ArtifactError)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.onnx"):
        Engine(tmp_path / "nowhere.onnx")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.onnx"):
        Engine(str(tmp_path / "nowhere.onnx"))


def test_a_seal_that_points_elsewhere(small_onnx: Path, refuse: Callable[..., str]) -> None:
    # The hash in the seal can't cover the seal itself, so a wrong offset, before or inside the
    # metadata, must be noticed in another way.
    whole = small_onnx.read_bytes()
    offset = int(whole[-16:])
    for other in {*range(offset - 300, len(whole), 7), *range(offset - 40, offset + 40), 0, len(whole) - 103} - {
        offset
    }:
        refuse(whole[:-16] + b"%016d" % other, CorruptError)


def test_a_newer_format(small_onnx: Path, refuse: Callable[..., str], tmp_path: Path) -> None:
    manifest = replace(open_artifact(small_onnx).manifest, format_version=2)
    message = refuse(sealed(tmp_path / "new", graph_of(small_onnx), manifest), VersionError)
    assert "format 2, this sbert-infer reads up to 1: upgrade" in message
    # A newer format may have any keys, but the message must name its version.
    other = json.dumps({"format_version": 3, "compressed": True})
    assert "format 3" in refuse(sealed(tmp_path / "newer", graph_of(small_onnx), other), VersionError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotation": "left"}, "unknown: rotation"),
        ({"dim": ...}, "missing or unknown: dim"),
        ({"data_files": [{"name": "x"}]}, "not a readable artifact"),
        ({"pooling": None}, "not a readable artifact"),
    ],
)
def test_a_manifest_of_other_keys(
    change: dict[str, Any], message: str, small_onnx: Path, refuse: Callable[..., str], tmp_path: Path
) -> None:
    entries = json.loads(open_artifact(small_onnx).manifest.to_json()) | change
    text = json.dumps({key: value for key, value in entries.items() if value is not ...})
    error = ArtifactError if "unknown" in message else CorruptError
    assert message in refuse(sealed(tmp_path / "odd", graph_of(small_onnx), text), error)


@pytest.mark.parametrize("manifest", ["", "[]", "[1]", "7", "null", '"text"', "{"])
def test_a_manifest_that_is_none(manifest: str, refuse: Callable[..., str], tmp_path: Path) -> None:
    refuse(sealed(tmp_path / "odd", b"", manifest), VersionError if manifest == "[]" else CorruptError)


def test_a_tokenizer_that_is_none(small_onnx: Path, refuse: Callable[..., str], tmp_path: Path) -> None:
    bad = sealed(tmp_path / "odd", graph_of(small_onnx), open_artifact(small_onnx).manifest, '{"version": "9.9"}')
    assert "tokenizers can't read its tokenizer" in refuse(bad, ArtifactError)


def test_a_manifest_survives_the_file(small_onnx: Path, tmp_path: Path) -> None:
    manifest = replace(open_artifact(small_onnx).manifest, name="ünï\n\0", prompts={"q": "🙂 "}, truncate_dim=None)
    sealed(tmp_path / "copy", graph_of(small_onnx), manifest, '{"ö": "\\u0000"}')
    artifact = open_artifact(tmp_path / "copy")
    assert artifact.manifest == manifest
    assert artifact.tokenizer_json == '{"ö": "\\u0000"}'


# Weights beside the model -------------------------------------------------------------------------


def model_with(location: str) -> onnx.ModelProto:
    tensor = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return helper.make_model(helper.make_graph([], "g", [], [], initializer=[tensor]))


@pytest.mark.parametrize("location", ["../x", "/etc/passwd", "sub/x", "..", ".", "", "*/_ORT_MEM_ADDR_/*", "./x"])
def test_weights_outside_the_folder(
    location: str, small_onnx: Path, refuse: Callable[..., str], tmp_path: Path
) -> None:
    # It is refused even if the manifest lists the file.
    manifest = replace(open_artifact(small_onnx).manifest, data_files=(DataFile(location, 16, "0" * 64),))
    bad = sealed(tmp_path / "odd", model_with(location).SerializeToString(), manifest)
    assert f"outside its folder: {location!r}" in refuse(bad, ArtifactError)


def test_weights_hidden_behind_the_metadata(small_onnx: Path, refuse: Callable[..., str], tmp_path: Path) -> None:
    # Protobuf messages concatenate, so a parser would merge a second graph anywhere in the file.
    manifest = open_artifact(small_onnx).manifest
    graph = model_with("../x").graph
    graph.node.add(op_type="Identity")  # with its name, it now parses like an entry of the metadata
    hidden = bytes_field(7, graph.SerializeToString())
    tampered = sealed(tmp_path / "odd", graph_of(small_onnx), manifest)
    assert "damaged" in refuse(_reseal(tampered, hidden), CorruptError)


def _reseal(artifact: bytes, extra: bytes) -> bytes:
    """Put `extra` between the manifest and the seal, with a matching hash, as a forger would."""
    forged = artifact[: -len(_seal("0" * 64, 0))] + extra
    return forged + _seal(hashlib.sha256(forged).hexdigest(), int(artifact[-16:]))


@pytest.fixture
def with_data(small_onnx: Path, tmp_path: Path) -> Path:
    """Path of an artifact with a weights file. It is sealed, so only the weights can be wrong."""
    (tmp_path / "bad.onnx.data").write_bytes(b"weights" * 1000)
    with (tmp_path / "bad.onnx.data").open("rb") as file:
        entry = DataFile("bad.onnx.data", 7000, sha256(file))
    manifest = replace(open_artifact(small_onnx).manifest, data_files=(entry,))
    sealed(tmp_path / "bad.onnx", model_with("bad.onnx.data").SerializeToString(), manifest)
    assert open_artifact(tmp_path / "bad.onnx").manifest.data_files == (entry,)
    return tmp_path / "bad.onnx.data"


def test_weights_that_are_missing(with_data: Path, refuse: Callable[..., str]) -> None:
    with_data.unlink()
    assert "weights file bad.onnx.data is missing" in refuse(None, ArtifactError)


def test_weights_that_were_changed(with_data: Path, refuse: Callable[..., str]) -> None:
    with_data.write_bytes(b"weights" * 999)
    assert "6993 bytes, 7000 were written" in refuse(None, CorruptError)
    with_data.write_bytes(b"weights" * 999 + b"weighty")
    assert "bad.onnx.data have changed" in refuse(None, CorruptError)


def test_weights_that_the_manifest_does_not_list(small_onnx: Path, refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    manifest = open_artifact(small_onnx).manifest
    bad = sealed(tmp_path / "odd", model_with("other").SerializeToString(), manifest)
    assert "its manifest lists []" in refuse(bad, ArtifactError)


def test_the_file_is_still_a_model_for_others(small_onnx: Path) -> None:
    model = onnx.load_model(small_onnx)
    onnx.checker.check_model(model.SerializeToString())
    assert {entry.key for entry in model.metadata_props} >= {"sbert_infer.manifest", "sbert_infer.tokenizer"}
