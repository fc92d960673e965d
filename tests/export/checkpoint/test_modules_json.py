"""modules.json: unsupported modules are refused by name, and one of several routes is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer

from sbert_infer.export.checkpoint.modules_json import REFUSED, Routes, read_routes
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.reference.encoder import load_reference
from tests.export.checkpoint.problems import problems_of
from tests.models.checkpoints import ODD_TEXTS, TEXTS, edit_json
from tests.models.graphs import assert_close

MakeCheckpoint = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]


def set_type(path: Path, index: int, kind: str) -> None:
    entries = json.loads((path / "modules.json").read_text(encoding="utf-8"))
    entries[index]["type"] = kind
    (path / "modules.json").write_text(json.dumps(entries), encoding="utf-8")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str, index: int, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    name = f"sentence_transformers.models.{kind}"
    set_type(path, index, name)
    assert problems_of(path)[0] == f"modules.json: module type '{name}' is not supported ({REFUSED[kind]})"


@pytest.mark.parametrize("kind", ["custom_st.Pooling", "custom_st.LSTM", "sentence_transformers.models.Invented"])
def test_unknown_by_name(kind: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    set_type(path, 1, kind)
    assert problems_of(path)[0].startswith(f"modules.json: module type '{kind}' is not supported (supported: Transf")


# -------------------------------------------------------------------------------------------------
# routes


@pytest.fixture(scope="module")
def routed(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries by a table, documents by a transformer."""
    source = make_checkpoint()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    table = torch.randn(tokenizer.get_vocab_size(), 32, generator=torch.Generator().manual_seed(0))
    routes = {
        "query": [StaticEmbedding(tokenizer, embedding_weights=table)],
        "document": [Transformer(str(source)), Pooling(32, pooling_mode="mean")],
    }
    path = tmp_path_factory.mktemp("routed") / "tiny-routed"
    model = SentenceTransformer(modules=[Router(routes), Normalize()], device="cpu")
    model.save(str(path), create_model_card=False)
    return path


@pytest.mark.parametrize(("route", "kind"), [("query", "static"), ("document", "bert")])
def test_route(route: str, kind: str, routed: Path) -> None:
    checkpoint = read_checkpoint(routed, route=route)
    assert checkpoint.model_type == kind
    expected = SentenceTransformer(str(routed), device="cpu").encode(ALL_TEXTS, task=route)
    assert_close(load_reference(checkpoint).encode(ALL_TEXTS), expected, 1e-6)


@pytest.mark.parametrize("name", ["router_config.json", "config.json"])  # the second is that of Asym
def test_routes_after_pooling(name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """As Asym is used: one transformer, and a Dense for each route."""
    source = make_checkpoint(normalize=False)
    dense = {route: [Dense(32, 8, activation_function=torch.nn.Tanh())] for route in ("query", "doc")}
    modules = [Transformer(str(source)), Pooling(32), Router(dense)]
    model = SentenceTransformer(modules=modules, device="cpu")
    path = tmp_path / "asym"
    model.save(str(path), create_model_card=False)
    (path / "2_Router" / "router_config.json").rename(path / "2_Router" / name)
    if name == "config.json":
        set_type(path, 2, "sentence_transformers.models.Asym")
    vectors = {}
    for route in dense:
        vectors[route] = load_reference(read_checkpoint(path, route=route)).encode(TEXTS)
        assert_close(vectors[route], model.encode(list(TEXTS), task=route), 1e-6)
    assert abs(vectors["query"] - vectors["doc"]).max() > 0.01


def test_the_route_must_be_named(routed: Path, make_checkpoint: MakeCheckpoint) -> None:
    assert "export each to a file of its own, with --route query, --route document and -o" in problems_of(routed)[0]
    assert problems_of(routed, route="answer")[0].endswith("there is no route 'answer', only query, document")
    (problem,) = problems_of(make_checkpoint(), route="query")
    assert "no routes" in problem


def test_routes_that_fit_into_one_file(routed: Path, tmp_path: Path) -> None:
    assert read_routes(routed) == Routes("query", "document")  # the first is the default, if none is named
    path = Path(shutil.copytree(routed, tmp_path / "routed"))
    file = path / "router_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for parameters, found in (
        ({"default_route": "document"}, Routes("document", "query")),
        ({"default_route": None, "allow_empty_key": False}, None),
        ({"route_mappings": {"('title', None)": "query"}}, None),
    ):
        edit_json(file, parameters=parameters)
        assert read_routes(path) == found
    edit_json(file, structure={**content["structure"], "title": []}, parameters={})
    assert read_routes(path) is None
    edit_json(file, structure=[], parameters=7)
    assert read_routes(path) is None


def test_a_module_of_a_route_is_refused_by_name(routed: Path, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    set_type(path, 1, "sentence_transformers.models.Router")
    edit_json(path / "1_Pooling" / "router_config.json", types={"x": "evil.Code"}, structure={"query": ["x", "../y"]})
    problems = problems_of(path, route="query")
    assert "1_Pooling/router_config.json: module type 'evil.Code' is not supported" in problems[0]
    assert "'1_Pooling/../y' leads out of the checkpoint" in problems[1]
