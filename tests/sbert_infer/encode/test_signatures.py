"""What type checkers know of `encode`. `types_of_results` is for mypy, which `make lint` runs."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

from sbert_infer import Engine
from sbert_infer.encode import signatures

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from typing_extensions import assert_type


def types_of_results(engine: Engine, tensors: bool) -> None:
    assert_type(engine.encode("a"), npt.NDArray[np.float32])
    assert_type(engine.encode(["a", "b"], batch_size=8, normalize_embeddings=True), npt.NDArray[np.float32])
    assert_type(engine.encode_query("a"), npt.NDArray[np.float32])
    assert_type(engine.encode_document(["a"], convert_to_tensor=True), torch.Tensor)
    assert_type(engine.encode(["a"], convert_to_tensor=True), torch.Tensor)
    assert_type(engine.encode(["a"], convert_to_tensor=tensors), Any)
    assert_type(engine.encode(["a"], convert_to_numpy=False), Any)
    assert_type(engine.encode(["a"], precision="int8"), Any)
    assert_type(engine.encode(["a"], output_value="token_embeddings"), Any)
    engine.encode(["a"], normalise_embeddings=True)  # type: ignore[call-overload]


def test_each_signature_has_all_arguments() -> None:
    own = list(inspect.signature(Engine.encode).parameters)
    more = list(signatures.EncodeArguments.__annotations__)
    tree = ast.parse(inspect.getsource(signatures.Encode)).body[0]
    assert isinstance(tree, ast.ClassDef)
    calls = [node.args for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(calls) == 3
    for call in calls:
        assert [each.arg for each in (*call.args, *call.kwonlyargs)] + more == own
