"""An artifact's graph for Triton's batching, where every input and output has a row per text."""

from __future__ import annotations

import onnx

from sbert_infer.artifact.manifest import SENTENCE, Manifest

_PROMPT_LENGTH = "prompt_length"
_WHOLE = "whole_sentence_embedding"


def served_dim(manifest: Manifest) -> int:
    """Length of the vectors that `Engine.encode` gives by default."""
    return min(manifest.dim, manifest.truncate_dim or manifest.dim)


def serving_graph(model: onnx.ModelProto, manifest: Manifest) -> None:
    """Change `model`, if necessary, so that its vectors are those of `Engine.encode`.

    The artifact's metadata is removed: the repository has it elsewhere, and its hash would not
    match any more.
    """
    del model.metadata_props[:]
    if not manifest.include_prompt:
        _prompt_length_per_text(model.graph)
    if served_dim(manifest) < manifest.dim:
        _cut_vectors(model.graph, served_dim(manifest))


def _prompt_length_per_text(graph: onnx.GraphProto) -> None:
    """Make `prompt_length`, one optional number for a whole batch, an input [batch, 1].

    The graph only adds it to a column [batch, 1], so nothing else changes; requests with different
    prompts may then run together.
    """
    kept = [tensor for tensor in graph.initializer if tensor.name != _PROMPT_LENGTH]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in graph.input:
        if value.name == _PROMPT_LENGTH:
            value.CopyFrom(onnx.helper.make_tensor_value_info(_PROMPT_LENGTH, onnx.TensorProto.INT64, [batch, 1]))


def _cut_vectors(graph: onnx.GraphProto, dim: int) -> None:
    """Keep the leading `dim` numbers of each vector, as the model's `truncate_dim` says."""
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == SENTENCE:
                    names[index] = _WHOLE
    bounds = {"cut_start": 0, "cut_end": dim, "cut_axis": 1}
    graph.initializer.extend(
        onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]) for name, value in bounds.items()
    )
    graph.node.append(onnx.helper.make_node("Slice", [_WHOLE, *bounds], [SENTENCE], name="cut"))
    output = next(value for value in graph.output if value.name == SENTENCE)
    output.type.tensor_type.shape.dim[1].dim_value = dim
