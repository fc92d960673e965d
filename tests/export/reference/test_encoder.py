"""The reference gives the vectors of sentence-transformers, for every family, module and layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.reference.encoder import Reference, load_reference
from tests.models.checkpoints import FAMILIES, MAX_LENGTH, ODD_TEXTS, TEXTS, edit_json
from tests.models.graphs import assert_close

MakeCheckpoint = Callable[..., Path]
Vectors = np.ndarray[Any, np.dtype[Any]]

TOLERANCE = 1e-6
ALL_TEXTS = TEXTS + ODD_TEXTS
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPT = "represent this: "


def reference(path: Path, **options: Any) -> Reference:
    return load_reference(read_checkpoint(path), **options)


def theirs(path: Path, prompt: str | None = None) -> Vectors:
    vectors: Vectors = SentenceTransformer(str(path), device="cpu").encode(list(ALL_TEXTS), prompt=prompt)
    return vectors


def assert_same(path: Path, prompt: str = "") -> Vectors:
    vectors = reference(path).encode(ALL_TEXTS, prompt=prompt)
    assert_close(vectors, theirs(path, prompt or None), TOLERANCE)
    assert len(np.unique(vectors[: len(TEXTS)].round(2), axis=0)) == len(TEXTS), "the texts must be told apart"
    return vectors


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, layout: str, make_checkpoint: MakeCheckpoint) -> None:
    assert_same(make_checkpoint(family, layout=layout))


def test_real_minilm(minilm_path: Path) -> None:
    vectors = assert_same(minilm_path)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("mode", MODES)
def test_pooling_mode(mode: str, padding_side: str, make_checkpoint: MakeCheckpoint) -> None:
    assert_same(make_checkpoint("roberta", pooling=(mode,), normalize=False, padding_side=padding_side))


@pytest.mark.parametrize("mode", MODES)
def test_padding_on_the_left_of_counted_positions(mode: str, make_checkpoint: MakeCheckpoint) -> None:
    """BERT counts positions from the first column, so padding on the left changes its vectors."""
    path = make_checkpoint(pooling=(mode,), normalize=False, padding_side="left")
    model = SentenceTransformer(str(path), device="cpu")
    alone = np.stack([model.encode(text) for text in ALL_TEXTS])
    assert_close(reference(path).encode(ALL_TEXTS), alone, 1e-5)  # batched against alone
    assert np.abs(model.encode(list(ALL_TEXTS)) - alone).max() > 0.01


@pytest.mark.parametrize("modes", [("cls", "mean"), MODES, MODES[::-1], ("mean", "mean")])
def test_concatenated_modes_keep_their_order(modes: tuple[str, ...], make_checkpoint: MakeCheckpoint) -> None:
    vectors = assert_same(make_checkpoint(pooling=modes, normalize=False))
    assert vectors.shape[1] == 32 * len(modes)


@pytest.mark.parametrize(("family", "padding_side"), [("bert", "right"), ("roberta", "right"), ("roberta", "left")])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "max"])  # theirs gives -inf where nothing is left
def test_prompt_left_out(family: str, mode: str, padding_side: str, make_checkpoint: MakeCheckpoint) -> None:
    options: dict[str, Any] = {"pooling": (mode,), "normalize": False, "padding_side": padding_side}
    without = assert_same(make_checkpoint(family, include_prompt=False, **options), PROMPT)
    kept = assert_same(make_checkpoint(family, **options), PROMPT)
    assert mode == "lasttoken" or np.abs(without - kept).max() > 0.01


def test_nothing_left_to_pool_is_finite(make_checkpoint: MakeCheckpoint) -> None:
    model = reference(make_checkpoint(pooling=MODES, include_prompt=False))
    assert np.isfinite(model.encode(["a", "b"], prompt=" ".join(TEXTS))).all()  # the prompt alone fills the limit
    ids, mask = model.tokenize(["a text", ""])
    mask[1] = 0
    assert torch.isfinite(model(ids, mask)).all()


DENSE = [
    {"out_features": 16},
    {"out_features": 16, "bias": False, "activation_function": "Identity"},
    {"out_features": 16, "use_residual": True, "activation_function": "GELU"},
    {"out_features": 32, "use_residual": True, "activation_function": "ReLU"},
]


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("dense", [*([one] for one in DENSE), DENSE[:2]], ids=str)
def test_dense(dense: list[dict[str, Any]], layout: str, make_checkpoint: MakeCheckpoint) -> None:
    assert_same(make_checkpoint(dense=dense, normalize=False, layout=layout))


@pytest.mark.parametrize("layout", ["new", "old"])
def test_layer_norm(layout: str, make_checkpoint: MakeCheckpoint) -> None:
    assert_same(make_checkpoint(layer_norm=True, normalize=False, layout=layout))


@pytest.mark.parametrize("family", ["bert", "mpnet"])
@pytest.mark.parametrize("layer_start", [0, 1])
def test_layer_pooling(layer_start: int, family: str, make_checkpoint: MakeCheckpoint) -> None:
    weighted = assert_same(make_checkpoint(family, layer_pooling=layer_start, normalize=False))
    plain = assert_same(make_checkpoint(family, normalize=False))
    assert np.abs(weighted - plain).max() > 0.01


def test_layouts_are_identical(make_checkpoint: MakeCheckpoint) -> None:
    options: dict[str, Any] = {"pooling": ("cls", "mean"), "dense": DENSE[2:3], "layer_norm": True}
    new, old = (reference(make_checkpoint("roberta", layout=layout, **options)) for layout in ("new", "old"))
    assert new.checkpoint.modules != old.checkpoint.modules  # only by their folders
    np.testing.assert_array_equal(new.encode(ALL_TEXTS), old.encode(ALL_TEXTS))


def test_transformer_in_a_subfolder(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(layout="old")
    expected = reference(path).encode(ALL_TEXTS)
    (path / "0_Transformer").mkdir()
    for file in path.iterdir():
        if file.is_file() and file.name not in ("modules.json", "config_sentence_transformers.json"):
            shutil.move(file, path / "0_Transformer" / file.name)
    text = (path / "modules.json").read_text(encoding="utf-8")
    (path / "modules.json").write_text(text.replace('"path": ""', '"path": "0_Transformer"'), encoding="utf-8")
    np.testing.assert_array_equal(assert_same(path), expected)


def test_plain_transformer_is_mean_pooled(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (path / name).unlink()
    assert_same(path)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "albert"])
def test_lower_case(family: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(family, layout="old")
    before = reference(path).encode(["SHIPS pass"])
    edit_json(path / "sentence_bert_config.json", do_lower_case=True)
    assert_same(path)
    changed = np.abs(reference(path).encode(["SHIPS pass"]) - before).max() > 0.01
    assert changed == (family != "albert")  # ALBERT's tokenizer lowercases anyway


def test_stored_fp16_is_computed_in_fp32(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    weights = {key: tensor.half() for key, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", dtype="float16")
    model = reference(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    save_file({key: tensor.float() for key, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"})
    edit_json(path / "config.json", dtype="float32")
    np.testing.assert_allclose(model.encode(ALL_TEXTS), theirs(path), rtol=0, atol=TOLERANCE)


def test_old_parameter_names(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    expected = reference(path).encode(ALL_TEXTS)
    weights = {}
    for key, tensor in load_file(path / "model.safetensors").items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        weights[f"bert.{key}"] = tensor
    weights |= {"cls.predictions.bias": torch.zeros(3), "bert.embeddings.position_ids": torch.zeros(1, 3)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(reference(path).encode(ALL_TEXTS), expected)


def test_eager_attention(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint("xlm-roberta")
    sdpa, eager = (reference(path, attention=name) for name in ("sdpa", "eager"))
    configs: list[Any] = [sdpa.encoder.config, eager.encoder.config]
    assert [config._attn_implementation for config in configs] == ["sdpa", "eager"]
    assert_close(sdpa.encode(ALL_TEXTS), eager.encode(ALL_TEXTS), TOLERANCE)


def test_alone_or_in_a_batch(make_checkpoint: MakeCheckpoint) -> None:
    model = reference(make_checkpoint("mpnet", pooling=MODES))
    batched = model.encode(ALL_TEXTS)
    for batch_size in (1, 5):
        assert_close(model.encode(ALL_TEXTS, batch_size=batch_size), batched, 1e-5)


def test_no_texts(make_checkpoint: MakeCheckpoint) -> None:
    assert reference(make_checkpoint()).encode([]).shape == (0, 32)


def test_cut_at_max_length(make_checkpoint: MakeCheckpoint) -> None:
    model = load_reference(read_checkpoint(make_checkpoint(), max_length=7))
    ids, mask = model.tokenize([*TEXTS, "a"])
    assert ids.shape == mask.shape == (len(TEXTS) + 1, 7)
    assert mask[-1].tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert reference(make_checkpoint()).tokenize([" ".join(TEXTS)])[0].shape == (1, MAX_LENGTH)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_prompt_length(family: str, make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(family)
    model = reference(path)
    transformer = SentenceTransformer(str(path), device="cpu")[0]
    for prompt in (PROMPT, "x", " ", " ".join(TEXTS)):
        assert model.prompt_length(prompt) == transformer._get_prompt_length(prompt)
    assert model.prompt_length("") == 0


@pytest.mark.parametrize("options", [{}, {"layer_pooling": 1}], ids=str)
def test_exportable_with_dynamic_shapes(options: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    model = reference(make_checkpoint(pooling=MODES, include_prompt=False, dense=DENSE[2:3], **options))
    ids, mask = model.tokenize(TEXTS[:3])
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (ids, mask, torch.tensor(2)), dynamic_shapes=(dims, dims, None)).module()
    for texts, length in ((["x"], 0), (TEXTS, 5)):
        ids, mask = model.tokenize(texts)
        args = (ids, mask, torch.tensor(length))
        torch.testing.assert_close(exported(*args), model(*args), rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------
# broken weights


def broken(path: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        reference(path)
    return caught.value.problems


def test_every_wrong_weight_is_listed(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    weights = load_file(path / "model.safetensors")
    del weights["encoder.layer.0.output.dense.bias"]
    weights = {key: tensor for key, tensor in weights.items() if not key.startswith("pooler.")}  # unused: no problem
    weights["encoder.layer.1.output.dense.bias"] = torch.zeros(7)
    weights["encoder.layer.9.output.dense.bias"] = torch.zeros(32)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    problems = broken(path)
    assert len(problems) == 3
    for number, needle in enumerate(("lack 'encoder.layer.0.", "hold 'encoder.layer.9.", "shape [7]")):
        assert needle in problems[number]


def test_missing_pooler_is_fine(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    weights = load_file(path / "model.safetensors")
    kept = {key: tensor for key, tensor in weights.items() if not key.startswith("pooler.")}
    assert len(kept) < len(weights)
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    assert_same(path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of the checkpoint ran",)


def test_pickled_code_does_not_run(copy_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy_checkpoint(layout="old")
    torch.save({"x": Evil()}, path / "pytorch_model.bin")
    (problem,) = broken(path)
    assert "can't be loaded" in problem
    assert "code of the checkpoint ran" not in capsys.readouterr().out


def test_cut_safetensors(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    (problem,) = broken(path)
    assert "can't be loaded" in problem
