"""Plans in onnxruntime's CUDA provider, on a real GPU: `make test-gpu`. Not run on one yet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.artifact.plan_file import open_plan
from sbert_infer.backends.onnxruntime_cuda import OnnxCudaBackend
from sbert_infer.backends.onnxruntime_session import cuda_model
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.text.tokenizer import Tokenizer
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.graphs import Array, cosine

pytestmark = pytest.mark.gpu

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
# Lengths as a mask, padding on the left, a bias by position, causal attention, RMS norms.
CASES: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"padding_side": "left"},
    "mpnet": {},
    "qwen3": {},
    "t5": {},
}


@pytest.fixture(params=CASES)
def plan(request: pytest.FixtureRequest, export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint(request.param, fp16=True, **CASES[request.param])


def test_vectors_are_those_of_the_cpu(plan: Path) -> None:
    with Engine(plan, device="cpu", on_truncate="ignore") as engine:
        expected = engine.encode(ALL_TEXTS)
        pad_id, side = engine.manifest.pad_id, engine.manifest.padding_side
        tokenizer: Tokenizer = engine.pipeline.tokenizer
    with closing(OnnxCudaBackend(cuda_model(open_plan(plan)), [0])) as backend:
        pipeline = Pipeline(tokenizer, backend, pad_id=pad_id, padding_side=side)
        together: Array = pipeline.run_together(ALL_TEXTS)
        assert np.isfinite(together).all()
        assert cosine(together, expected).min() > 0.999
        alone = np.concatenate([pipeline.run_together([text]) for text in ALL_TEXTS])
        assert cosine(alone, expected).min() > 0.999
        pipeline.close()
