"""The parity certificate: good artifacts get one, bad ones are refused with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from sbert_infer.errors import ParityError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import sentence
from sbert_infer.export.reference.encoder import Reference, load_reference
from sbert_infer.export.verify.parity import Bounds, _overlap, certify, expect, mixed_batches
from sbert_infer.export.verify.probe_texts import is_odd
from sbert_infer.similarity import cosine
from tests.models.checkpoints import ODD_TEXTS, TEXTS

MakeCheckpoint = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
EXACT = Bounds.of("fp32")
SHORT = ExportOptions(max_length=8)  # few texts to compare


@pytest.fixture
def reference(make_checkpoint: MakeCheckpoint) -> Reference:
    return load_reference(read_checkpoint(make_checkpoint()))


def perturbed(model: ir.Model, change: Callable[[Any], Any]) -> ir.Model:
    """The model with one large weight changed."""
    value = max(model.graph.initializers.values(), key=lambda v: v.const_value.nbytes if v.const_value else 0)
    assert value.const_value is not None
    value.const_value = ir.tensor(change(value.const_value.numpy().copy()), name=value.name)
    return model


def test_good_artifact(reference: Reference, export_checkpoint: MakeCheckpoint) -> None:
    done: list[int] = []
    certificate = certify(export_checkpoint(), expect(reference, ALL_TEXTS), EXACT, done.append)
    assert certificate.texts == len(ALL_TEXTS)
    assert certificate.threshold == 0.9999
    assert 0.99999 < certificate.min_cosine <= certificate.mean_cosine <= 1 + 1e-9
    assert 0 < certificate.max_abs < 1e-5
    assert certificate.batch_max_abs < 1e-5
    assert certificate.top10_overlap == 1
    limit = reference.checkpoint.max_length
    tokens = [len(reference.tokenizer(text, truncation=True, max_length=limit).input_ids) for text in ALL_TEXTS]
    assert sum(done) >= 2 * sum(tokens)  # alone and mixed, where some run twice


def test_certificate_is_what_was_measured(reference: Reference, export_checkpoint: MakeCheckpoint) -> None:
    path = export_checkpoint(int8=True)
    certificate = certify(path, expect(reference, ALL_TEXTS), Bounds.everywhere(0.5))
    expected = reference.encode(ALL_TEXTS)
    with Engine(path, on_truncate="ignore") as engine:
        vectors = engine.encode(ALL_TEXTS)
    assert certificate.max_abs == pytest.approx(np.abs(vectors - expected).max(), abs=1e-6)
    cosines, odd = (vectors * expected).sum(1), np.array([is_odd(text) for text in ALL_TEXTS])
    assert certificate.min_cosine == pytest.approx(cosines[~odd].min(), abs=1e-6)
    assert certificate.mean_cosine == pytest.approx(cosines[~odd].mean(), abs=1e-6)
    assert certificate.odd_min_cosine == pytest.approx(cosines[odd].min(), abs=1e-6)


@pytest.mark.parametrize("text", [*TEXTS[:1], "a", "[CLS] [SEP] <s> </s> <pad> [MASK] [UNK]"])
def test_odd_texts_have_a_bound_of_their_own(
    text: str, reference: Reference, export_checkpoint: MakeCheckpoint
) -> None:
    """A vector that is off by a cosine of 0.95 is refused for a text that people write."""
    expected = expect(reference, [*TEXTS[1:], text])
    right = expected.vectors[-1]
    aside = np.random.default_rng(0).normal(size=right.shape).astype(np.float32)
    aside -= right * (aside @ right) / (right @ right)
    expected.vectors[-1] = right + aside * (np.linalg.norm(right) / np.linalg.norm(aside) * 0.329)  # cosine 0.95
    if is_odd(text):
        certificate = certify(export_checkpoint(), expected, Bounds.of("int8"))
        assert certificate.odd_min_cosine == pytest.approx(0.95, abs=0.001)
        assert certificate.min_cosine > 0.9999
        with pytest.raises(ParityError, match=r"at least 0\.96 is needed"):
            certify(export_checkpoint(), expected, Bounds(0.98, 0.96))
    with pytest.raises(ParityError, match=r"the lowest cosine to the reference is 0\.9[45]"):
        certify(export_checkpoint(), expected, Bounds.of("fp32") if is_odd(text) else Bounds.of("int8"))


def test_bad_artifact(
    reference: Reference, traced: Callable[[], ir.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.onnx"
    export(reference.checkpoint.source, target, SHORT)
    before = target.read_bytes()
    noise = np.random.default_rng(0)
    monkeypatch.setattr(
        sentence, "convert", lambda *_, **__: perturbed(traced(), lambda w: w + noise.random(w.shape, np.float32))
    )
    with pytest.raises(ParityError) as caught:
        export(reference.checkpoint.source, target, ExportOptions(max_length=8, force=True))
    lines = str(caught.value).splitlines()
    assert "at least 0.9999 is needed" in lines[0]
    assert "nothing was written" in lines[0]
    worst = [float(line.split()[0]) for line in lines[1:]]
    assert len(worst) == 3
    assert worst == sorted(worst)
    assert f"is {worst[0]:.6f}" in lines[0]
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_nan_in_the_graph(
    reference: Reference, traced: Callable[[], ir.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentence, "convert", lambda *_, **__: perturbed(traced(), lambda w: w * np.float32(np.nan)))
    with pytest.raises(ParityError, match="gives NaN or infinity") as caught:
        export(reference.checkpoint.source, tmp_path / "model.onnx", SHORT)
    assert "nothing was written" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_nan_in_the_checkpoint(reference: Reference) -> None:
    with torch.no_grad():
        next(reference.encoder.parameters())[5:] = torch.nan
    with pytest.raises(ParityError, match=r"the checkpoint itself, in PyTorch, .* of \d+ texts"):
        expect(reference, ALL_TEXTS)


def test_prompts_are_compared(make_checkpoint: MakeCheckpoint, export_checkpoint: MakeCheckpoint) -> None:
    path = export_checkpoint()
    checkpoint = replace(read_checkpoint(make_checkpoint()), prompts={"query": "Find this: "})
    assert certify(path, expect(load_reference(checkpoint), TEXTS), EXACT).min_cosine > 0.9999
    modules = (replace(checkpoint.pooling, include_prompt=False), *checkpoint.modules[1:])
    other = load_reference(replace(checkpoint, modules=modules))  # differs only where there is a prompt
    with pytest.raises(ParityError, match="the lowest cosine"):
        certify(path, expect(other, TEXTS), EXACT)


def test_the_certificate_is_in_the_file(export_checkpoint: MakeCheckpoint) -> None:
    parity = open_artifact(export_checkpoint()).manifest.parity
    assert set(parity) == {
        *("texts", "max_length", "min_cosine", "mean_cosine", "odd_min_cosine", "max_abs", "batch_max_abs"),
        *("top10_overlap", "threshold"),
    }


def test_mixed_batches_hold_every_text_and_mix_lengths() -> None:
    texts = ["x" * n for n in range(300)]
    batches = mixed_batches(texts)
    assert {row for batch in batches for row in batch} == set(range(300))
    assert all(max(batch) - min(batch) > 8 for batch in batches if len(batch) == 8)
    assert [0, 1, 2, 3, 296, 297, 298, 299] in batches
    assert {row for batch in mixed_batches(["a"]) for row in batch} == {0}


def test_zero_vectors_agree_only_with_each_other() -> None:
    zero, one = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    assert cosine(zero, zero) == 1
    assert cosine(zero, one) == 0
    assert cosine(one, 2 * one) == pytest.approx(1)


def test_overlap_counts_common_neighbours() -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    assert _overlap(vectors, vectors * 3) == 1
    assert _overlap(vectors, vectors[::-1].copy()) < 0.6
