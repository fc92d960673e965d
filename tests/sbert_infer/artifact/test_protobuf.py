"""The protobuf reader reads real models correctly, and raises only ValueError for other bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.external_data_helper import _get_all_tensors, uses_external_data

from sbert_infer.artifact.protobuf import bytes_field, external_locations, fields


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    for read in (lambda view: list(fields(view)), external_locations):
        with contextlib.suppress(ValueError):
            read(memoryview(data))


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), st.binary(max_size=300))))
def test_fields_are_read_as_written(entries: list[tuple[int, bytes]]) -> None:
    message = b"".join(bytes_field(number, content) for number, content in entries)
    assert [(number, bytes(content)) for number, content in fields(memoryview(message))] == entries


@pytest.mark.parametrize(
    "data", [b"\x12", b"\x12\x05abc", b"\x0d\0\0\0", b"\x09\0\0", b"\x08\x80", b"\x80" * 11, b"\x0b"]
)
def test_a_message_that_ends_too_early(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"past the end|unknown wire type"):
        list(fields(memoryview(data)))


def external(name: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in (("offset", "0"), ("location", name), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def everywhere() -> onnx.ModelProto:
    """Return a model with an external tensor in every place that can hold one."""
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=external("in a subgraph's node"))],
        "inner",
        [],
        [],
        initializer=[external("in a subgraph")],
    )
    branch = helper.make_node("If", ["x"], ["y"], then_branch=inner)
    several = helper.make_node("Odd", [], [], domain="d", values=[external("in a list of tensors")])
    graphs = helper.make_node("Odd", [], [], domain="d", graphs=[inner])
    sparse = onnx.SparseTensorProto(values=external("sparse values"), indices=external("sparse indices"), dims=[1])
    graph = helper.make_graph([branch, several, graphs], "g", [], [], initializer=[external("in the graph")])
    graph.sparse_initializer.append(sparse)
    in_node = helper.make_node("Constant", [], ["s"], sparse_value=sparse)
    function = helper.make_function(
        "d", "F", [], [], [helper.make_node("Constant", [], ["f"], value=external("in a function")), in_node], []
    )
    model = helper.make_model(graph, functions=[function])
    training = model.training_info.add()
    training.initialization.initializer.append(external("in training"))
    training.algorithm.initializer.append(external("in an algorithm"))
    return model


def test_every_place_is_searched() -> None:
    assert external_locations(memoryview(everywhere().SerializeToString())) == {
        "in the graph",
        "in a subgraph",
        "in a subgraph's node",
        "in a list of tensors",
        "sparse values",
        "sparse indices",
        "in a function",
        "in training",
        "in an algorithm",
    }


def test_all_that_onnx_itself_finds_is_found(small_onnx: Path, tmp_path: Path) -> None:
    assert external_locations(memoryview(small_onnx.read_bytes())) == set()
    model = onnx.load_model(small_onnx)
    onnx.save_model(
        model, tmp_path / "split.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0
    )
    split = onnx.load_model(tmp_path / "split.onnx", load_external_data=False)
    expected = {
        entry.value
        for tensor in _get_all_tensors(split)
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert len(expected) > 20
    assert external_locations(memoryview((tmp_path / "split.onnx").read_bytes())) == expected
