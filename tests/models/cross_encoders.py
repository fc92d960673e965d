"""Small random cross-encoders, saved by sentence-transformers in its layouts."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

from sentence_transformers import CrossEncoder
from torch import nn

from tests.models.checkpoints import ODD_TEXTS, TEXTS, edit_json
from tests.models.families import MAX_LENGTH, randomize, write_transformer

LAYOUTS = ("new", "middle", "old", "plain")

# Every length up to far over the limit, on either side, and what trips tokenizers.
PAIRS = [
    *zip(TEXTS, TEXTS[::-1], strict=True),
    *((text, TEXTS[index % len(TEXTS)]) for index, text in enumerate(ODD_TEXTS)),
    *((TEXTS[index % len(TEXTS)], " ".join(TEXTS[:index])) for index in range(len(TEXTS))),
    (" ".join(TEXTS), "short"),
    (" ".join(TEXTS), " ".join(TEXTS[::-1])),
    (TEXTS[0], TEXTS[0]),
]


def write_cross_encoder(
    folder: Path,
    family: str = "bert",
    *,
    labels: int = 1,
    layout: str = "new",
    activation: nn.Module | None = None,
    max_length: int = MAX_LENGTH,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    seed: int = 0,
) -> Path:
    """Write one into `folder` and return it.

    `layout` is that of sentence-transformers since 5.4 ("new"), 4 and 5 ("middle") and 3 ("old"),
    or a model that was never in it ("plain").
    """
    write_transformer(folder, family, max_length=max_length, seed=seed)
    with contextlib.redirect_stderr(io.StringIO()):  # the head is new, as transformers reports
        model = CrossEncoder(
            str(folder),
            num_labels=labels,
            activation_fn=activation,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            device="cpu",
        )
    randomize(model.model, seed)
    shutil.rmtree(folder)
    model.save(str(folder), create_model_card=False)
    if layout != "new":
        path = f"{type(activation).__module__}.{type(activation).__name__}"
        _to_older_layout(folder, layout, None if activation is None else path)
    return folder


def _to_older_layout(folder: Path, layout: str, activation: str | None) -> None:
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    changes: dict[str, dict[str, Any]] = {
        "middle": {"sentence_transformers": {"activation_fn": activation, "version": "4.1.0"}},
        "old": {"sbert_ce_default_activation_function": activation},
        "plain": {},
    }
    if activation is not None:
        edit_json(folder / "config.json", **changes[layout])


def cross_encoder(folder: Path) -> CrossEncoder:
    """The checkpoint in sentence-transformers."""
    return CrossEncoder(str(folder), device="cpu")
