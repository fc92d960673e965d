"""A graph run as it is, to look at what is inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from sbert_infer._util.cores import usable_cores

_SMALL_BYTES = 1024


class InnerSession:
    """A session that optimizes nothing away, and can give values from inside the graph.

    Large constants are not copied: a protobuf message could not hold more than 2 GB of them.
    """

    def __init__(self, model: ir.Model, inner: Sequence[str] = ()) -> None:
        """Open `model`; `inner` are names of values that it is to give besides its outputs."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        options.intra_op_num_threads = usable_cores()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # cores are needed between runs
        options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy every weight
        options.enable_cpu_mem_arena = False  # it would keep the memory of the largest batch
        graph, self._constants = model.clone(), dict[str, Any]()  # kept, since onnxruntime uses their memory
        for name, value in graph.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > _SMALL_BYTES:
                array = np.ascontiguousarray(tensor.numpy())
                self._constants[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
                value.const_value = ir.ExternalTensor(
                    "in memory", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=name
                )
        options.add_external_initializers(list(self._constants), list(self._constants.values()))
        proto = ir.to_proto(graph)
        known = {output.name for output in proto.graph.output}
        for name in inner:
            if name not in known:
                proto.graph.output.add().name = name
        self._session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, names: Sequence[str], inputs: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[np.float32]]:
        """The values `names`."""
        values: list[npt.NDArray[np.float32]] = self._session.run(list(names), dict(inputs))
        return values
