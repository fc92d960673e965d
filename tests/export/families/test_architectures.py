"""Newer architectures: sentence-transformers' vectors in all precisions, and their graphs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import dynamic_module_utils

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.plan_file import open_plan
from sbert_infer.errors import CheckpointError, ExportError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.graph.trace import convert
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.reference.encoder import Reference, load_reference
from tests.models.checkpoints import ODD_TEXTS, TEXTS, edit_json
from tests.models.families import LAYERS, NEWER, randomize
from tests.models.graphs import Array, assert_close, cosine, nodes, run

MakeCheckpoint = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
LENGTH = 24
IDENTITY = {"bias": False, "activation_function": "Identity"}
CAUSAL = {"pooling": ("lasttoken",), "padding_side": "left"}

# As these models come: gtr and sentence-t5, gte-modernbert, Qwen3-Embedding, embeddinggemma, ...
CASES: dict[str, dict[str, Any]] = {
    "modernbert": {"pooling": ("cls",), "normalize": False},
    "t5": {"dense": [{"out_features": 24, **IDENTITY}]},
    "deberta-v2": {"pooling": ("mean",)},
    "nomic_bert": {"prompts": {"query": "search_query: ", "document": "search_document: "}},
    "gte": {"pooling": ("cls",)},
    "qwen2": CAUSAL,
    "qwen3": {**CAUSAL, "prompts": {"query": "Instruct: find\nQuery:"}},
    "gemma3_text": {"dense": [{"out_features": 48, **IDENTITY}, {"out_features": 24, **IDENTITY}]},
}
GELU = ("modernbert", "deberta-v2", "gte", "gemma3_text")


class Exported(NamedTuple):
    """A checkpoint, sentence-transformers' vectors, and its artifacts by precision."""

    checkpoint: Path
    model: SentenceTransformer
    artifacts: dict[str, Path]


@pytest.fixture(scope="module", params=NEWER)
def exported(
    request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint, export_checkpoint: MakeCheckpoint
) -> Exported:
    """All three artifacts of a family."""
    family, options = request.param, {"max_length": LENGTH, **CASES[request.param]}
    checkpoint = make_checkpoint(family, **options)
    precisions: dict[str, dict[str, bool]] = {"fp32": {}, "int8": {"int8": True}, "fp16": {"fp16": True}}
    artifacts = {name: export_checkpoint(family, **options, **given) for name, given in precisions.items()}
    return Exported(checkpoint, SentenceTransformer(str(checkpoint), device="cpu"), artifacts)


def test_vectors(exported: Exported) -> None:
    with Engine(exported.artifacts["fp32"], on_truncate="ignore") as engine:
        for prompt in {None, *filter(None, engine.prompts.values())}:
            expected = exported.model.encode(ALL_TEXTS, prompt=prompt)
            vectors = engine.encode(ALL_TEXTS, prompt=prompt)
            assert cosine(vectors, expected).min() > 0.999999
            assert_close(vectors, expected, 1e-5)
        assert_close(np.stack([engine.encode(text) for text in ALL_TEXTS]), engine.encode(ALL_TEXTS), 1e-5)
        assert len(np.unique(engine.encode(TEXTS).round(2), axis=0)) == len(TEXTS), "the texts must be told apart"
        assert engine.max_seq_length == exported.model.max_seq_length == LENGTH


@pytest.mark.parametrize(("precision", "lowest"), [("int8", 0.98), ("fp16", 0.9999)])
def test_lower_precision(exported: Exported, precision: str, lowest: float) -> None:
    with Engine(exported.artifacts[precision], on_truncate="ignore", device="cpu") as engine:
        assert engine.info["precision"] == precision
        vectors = engine.encode(ALL_TEXTS)
        assert cosine(vectors, exported.model.encode(ALL_TEXTS)).min() > lowest
        assert_close(np.stack([engine.encode(text) for text in ALL_TEXTS]), vectors, 1e-5)


def test_attention_is_fused(exported: Exported) -> None:
    fusion = open_artifact(exported.artifacts["fp32"]).manifest.fusion
    gelus = LAYERS if any(name in exported.checkpoint.name for name in GELU) else 0
    assert fusion == {"layers": LAYERS, "attention": LAYERS, "gelu_layers": gelus, "gelu": gelus}
    assert not nodes(onnx.load(exported.artifacts["fp32"]), "Softmax")


# ---------------------------------------------------------------------------------------- who sees
# whom, and from where


def converted(path: Path, *, portable: bool = False) -> tuple[Reference, onnx.ModelProto]:
    reference = load_reference(read_checkpoint(path))
    return reference, ir.to_proto(convert(reference, portable=portable))


def vectors_of(reference: Reference, model: onnx.ModelProto, side: str = "right") -> Array:
    """The graph's vectors of all texts in one batch, padded on the given side."""
    reference.tokenizer.padding_side = side
    ids, mask = reference.tokenize(ALL_TEXTS)
    return run(model, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})


SEEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "causal, half of it local": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "GroupQueryAttention MultiHeadAttention",
    ),
    "a window that holds every text": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": LENGTH, "max_window_layers": 0},
        "GroupQueryAttention GroupQueryAttention",
    ),
    "bidirectional": ("qwen3", {"is_causal": False}, "MultiHeadAttention MultiHeadAttention"),
    "heads of an odd width": ("qwen3", {"head_dim": 12}, "MultiHeadAttention MultiHeadAttention"),
    "causal and local": (
        "gemma3_text",
        {"use_bidirectional_attention": False},
        "MultiHeadAttention GroupQueryAttention",
    ),
}


@pytest.mark.parametrize("case", SEEN)
def test_who_sees_whom(case: str, make_checkpoint: MakeCheckpoint) -> None:
    family, config, operators = SEEN[case]
    path = make_checkpoint(family, max_length=LENGTH, pooling=("mean", "lasttoken"), config=config)
    reference, model = converted(path)
    found = [node.op_type for node in model.graph.node if node.op_type.endswith("Attention")]
    assert found == operators.split()
    if "MultiHeadAttention" not in found:  # then no [length, length] is made, which long texts could not afford
        assert not nodes(model, "And", "Where", "GatherND")
    expected = SentenceTransformer(str(path), device="cpu").encode(ALL_TEXTS)
    assert_close(vectors_of(reference, model), expected, 1e-5)


def test_a_causal_model_is_padded_on_the_right(make_checkpoint: MakeCheckpoint) -> None:
    """There causality hides padding, whatever the checkpoint says; a portable graph allows both."""
    path = make_checkpoint("qwen3", max_length=LENGTH, **CASES["qwen3"])
    model = SentenceTransformer(str(path), device="cpu")
    assert model.tokenizer.padding_side == "left"
    reference, portable = converted(path, portable=True)
    assert reference.tokenizer.padding_side == "right"
    for side in ("left", "right"):
        assert_close(vectors_of(reference, portable, side), model.encode(ALL_TEXTS), 1e-5)


def test_a_text_without_a_token(copy_checkpoint: MakeCheckpoint) -> None:
    """An empty text, without special tokens: sentence-transformers crashes if it is alone."""
    path = copy_checkpoint("qwen2", max_length=LENGTH, **CASES["qwen2"])
    edit_json(path / "tokenizer.json", post_processor=None)
    model = SentenceTransformer(str(path), device="cpu")
    with pytest.raises(RuntimeError):
        model.encode("")
    reference = load_reference(read_checkpoint(path))
    alone, batched = reference.encode([""]), reference.encode(["", *TEXTS])
    assert_close(batched[1:], model.encode(list(TEXTS)), 1e-5)
    np.testing.assert_array_equal(alone[0], batched[0])
    assert np.isfinite(alone).all()


def test_unknown_attention_is_refused_by_name(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint("gemma2", max_length=LENGTH)
    with pytest.raises(ExportError, match="Gemma2Attention uses 'softcap'"):
        converted(path)


# -------------------------------------------------------------------------------------------------
# weights


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("t5", transformers.T5ForConditionalGeneration),
        ("modernbert", transformers.ModernBertForMaskedLM),
        ("qwen3", transformers.Qwen3ForCausalLM),
    ],
)
def test_what_training_left_over_is_ignored(family: str, whole: Any, copy_checkpoint: MakeCheckpoint) -> None:
    """A decoder, and heads that predict words."""
    path = copy_checkpoint(family, max_length=LENGTH, **CASES[family])
    model = whole(transformers.AutoConfig.from_pretrained(path))
    randomize(model, seed=1)
    model.save_pretrained(path)
    expected = SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    assert_close(load_reference(read_checkpoint(path)).encode(TEXTS), expected, 1e-5)


# --------------------------------------------------------------------------------------------- code
# of the checkpoint

CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class NewConfig(PreTrainedConfig):
    model_type = "new"

    def __init__(self, vocab_size=400, hidden_size=32, num_hidden_layers=2, **options):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**options)


class NewModel(PreTrainedModel):
    config_class = NewConfig

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [torch.nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_hidden_layers)]
        self.layers = torch.nn.ModuleList(layers)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **options):
        hidden = self.embeddings(input_ids)
        away = ((1 - attention_mask[:, None, :]) * -1e4).to(hidden.dtype)
        for layer in self.layers:
            scores = layer(hidden) @ hidden.transpose(1, 2) + away
            hidden = hidden + scores.softmax(-1) @ hidden
        return BaseModelOutput(last_hidden_state=hidden)
"""


@pytest.fixture
def own_code(copy_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the type "new", like the gte models, which contains its model's code."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = copy_checkpoint(max_length=LENGTH)
    auto_map = {"AutoConfig": "modeling.NewConfig", "AutoModel": "modeling.NewModel"}
    edit_json(path / "config.json", model_type="new", auto_map=auto_map, num_hidden_layers=2)
    (path / "modeling.py").write_text(CODE, encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    vocabulary = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": (vocabulary, 32)}
    for layer in (0, 1):
        shapes |= {f"layers.{layer}.weight": (32, 32), f"layers.{layer}.bias": (32,)}
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_own_code_is_refused(own_code: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the model type 'new'; it needs code of its own: --trust-remote-code"):
        read_checkpoint(own_code)


def test_own_code_that_is_trusted(own_code: Path, tmp_path: Path) -> None:
    manifest = export(own_code, tmp_path / "new.onnx", ExportOptions(trust_remote_code=True))
    assert (manifest.architecture, manifest.fusion["attention"], manifest.fusion["layers"]) == ("new", 0, 2)
    model = SentenceTransformer(str(own_code), device="cpu", trust_remote_code=True)
    with Engine(tmp_path / "new.onnx", on_truncate="ignore") as engine:
        assert_close(engine.encode(ALL_TEXTS), model.encode(ALL_TEXTS), 1e-5)


def test_own_code_that_does_not_know_of_packed_rows(own_code: Path, tmp_path: Path) -> None:
    """Its attention would see the other texts of a row, so a plan gives each text its own."""
    steps = []

    def step(name: str, detail: str, total: int) -> AbstractContextManager[Progress]:
        steps.append(f"{name} {detail}")
        return nullcontext(no_progress)

    export(own_code, tmp_path / "new.plan", ExportOptions(fp16=True, targets=[], trust_remote_code=True), step=step)
    shapes = open_plan(tmp_path / "new.plan").rows.shapes
    assert {shape.segments for shape in shapes} == {1}
    (rows,) = (detail for detail in steps if detail.startswith("rows"))
    found = re.search(r"this model's texts can't share a row: cosine (\S+) to the text alone$", rows)
    assert found is not None
    assert -1 <= float(found[1]) < 0.9999


@pytest.mark.parametrize(("key", "value"), [("n_embd", 48), ("n_layer", 4), ("rotary_emb_base", 10_000)])
def test_a_nomic_config_that_transformers_does_not_read(key: str, value: int, copy_checkpoint: MakeCheckpoint) -> None:
    """Nomic's code has other names for some values; transformers would use its defaults."""
    path = copy_checkpoint("nomic_bert", max_length=LENGTH, **CASES["nomic_bert"])
    read_checkpoint(path)
    edit_json(path / "config.json", **{key: value})
    with pytest.raises(CheckpointError, match=f"'{key}' is {value}.*--trust-remote-code"):
        read_checkpoint(path)
