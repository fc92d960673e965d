"""Small random multi-vector encoders, in the layouts of sentence-transformers and PyLate."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from torch import nn

from sbert_infer.export.exporter import export
from sbert_infer.export.families import family
from tests.models.checkpoints import ODD_TEXTS, TEXTS, edit_json
from tests.models.families import MAX_LENGTH, WIDTH, randomize, write_transformer

DIM = 16
ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
FIXED: dict[str, Any] = {
    "query_expansion": {"strategy": "fixed", "length": 16},
    "document_length": 40,
    "mask": {"skiplist_words": list(string.punctuation)},
    "prompts": {"query": "find: ", "document": "a text: "},
}
MARKS = {"query": "[Q] ", "document": "[D] "}


def write_multi_vector(
    folder: Path,
    family: str = "bert",
    *,
    dense: Sequence[Mapping[str, Any]] = ({"out_features": DIM, "bias": False, "activation_function": nn.Identity()},),
    normalize: bool = True,
    mask: Mapping[str, Any] | None = None,
    prompts: dict[str, str] | None = None,
    similarity: str | None = None,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write one into `folder` and return it, with sentence-transformers' `settings` and `mask`."""
    write_transformer(folder, family, max_length=max_length, seed=seed)
    modules: list[nn.Module] = [Transformer(str(folder), **settings)]
    width = WIDTH
    for arguments in dense:
        modules.append(Dense(width, module_input_name="token_embeddings", **arguments))
        width = arguments["out_features"]
    for module in modules[1:]:
        randomize(module, seed + 1)
    modules += [MultiVectorMask(**mask)] if mask is not None else []
    modules += [Normalize(module_input_name="token_embeddings")] * normalize
    model = MultiVectorEncoder(modules=modules, prompts=prompts, similarity_fn_name=similarity, device="cpu")
    shutil.rmtree(folder)
    model.save(str(folder), create_model_card=False)
    return folder


def write_pylate(folder: Path, *, model_type: str | None = "ColBERT", **keys: Any) -> Path:
    """Write one as PyLate does, with its `keys`. The tokenizer does not find its marks."""
    write_multi_vector(folder, normalize=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(MARKS.values()))
    tokenizer.save_pretrained(folder)
    encoder = transformers.AutoModel.from_pretrained(folder)
    encoder.resize_token_embeddings(len(tokenizer))
    randomize(encoder, 0)
    encoder.save_pretrained(folder)
    entries = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    entries[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(entries), encoding="utf-8")
    edit_json(folder / "1_Dense" / "config.json", module_input_name=..., module_output_name=...)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 47, "do_lower_case": false}')
    settings: dict[str, Any] = {"model_type": model_type or ..., "similarity_fn_name": "MaxSim", "prompts": {}}
    marks = {f"{role}_prefix": mark for role, mark in MARKS.items()}
    edit_json(folder / "config_sentence_transformers.json", **{**settings, **marks, **keys})
    return folder


def write_stanford(folder: Path, family: str = "bert", metadata: Mapping[str, Any] | None = None) -> Path:
    """Write one as Stanford's code does: the projection is among the transformer's weights."""
    write_transformer(folder, family)
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    weights = load_file(folder / "model.safetensors")
    renamed = {f"{family}.{name}": tensor for name, tensor in weights.items()}
    projection = torch.randn(DIM, WIDTH, generator=torch.Generator().manual_seed(1))
    (folder / "model.safetensors").unlink()
    torch.save({**renamed, "linear.weight": projection}, folder / "pytorch_model.bin")
    if metadata is not None:
        (folder / "artifact.metadata").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: several would wait for each other on so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def export_multi_vector(once: Callable[..., Path], **settings: Any) -> tuple[Path, Path]:
    """A checkpoint of `write_multi_vector` and its artifact. Shared: change only a copy."""
    key = repr(("multi vector", sorted(settings.items())))
    folder = once(key, "colbert", lambda target: write_multi_vector(target, **settings))

    def write(target: Path) -> None:
        with pytest.MonkeyPatch.context() as patch, one_thread():
            patch.setattr(family, "probe_texts", lambda *_: ALL_TEXTS)
            export(folder, target)

    return folder, once(key, "colbert.onnx", write)
