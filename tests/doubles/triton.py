"""A double of Triton Inference Server for our ensembles. It does not prove that Triton loads them.

The configurations are parsed with Triton's own protobuf definition and checked against the rules in
its documentation and error messages: names and folders agree, the tensors between steps have the
same type and shape, and all texts of a batch have one shape. The Python step sees the names of
`triton_python_backend_utils`; the ONNX model runs in onnxruntime on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

Array = npt.NDArray[Any]

NUMPY_TYPES: dict[int, Any] = {
    model_config_pb2.TYPE_STRING: np.object_,
    model_config_pb2.TYPE_INT64: np.int64,
    model_config_pb2.TYPE_FP32: np.float32,
    model_config_pb2.TYPE_BOOL: np.bool_,
}
ONNX_TYPES = {"tensor(int64)": model_config_pb2.TYPE_INT64, "tensor(float)": model_config_pb2.TYPE_FP32}


KIND_CPU, KIND_GPU = model_config_pb2.ModelInstanceGroup.KIND_CPU, model_config_pb2.ModelInstanceGroup.KIND_GPU


class RefusedError(Exception):
    """An error that a client gets instead of a response."""


# The interface of a Python model ------------------------------------------------------------------


class TritonError:
    """Replaces `pb_utils.TritonError`."""

    INTERNAL, INVALID_ARG = 1, 3

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """Replaces `pb_utils.Tensor`."""

    def __init__(self, name: str, array: Array) -> None:
        assert isinstance(array, np.ndarray)
        assert array.dtype in NUMPY_TYPES.values(), f"{name}: no type of Triton's for {array.dtype}"
        self._name = name
        self._array: Array = array.copy()

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array


class InferenceRequest:
    """Replaces `pb_utils.InferenceRequest`."""

    def __init__(self, inputs: Sequence[Tensor], parameters: Mapping[str, object]) -> None:
        self._inputs = {tensor.name(): tensor for tensor in inputs}
        self._parameters = json.dumps(parameters) if parameters else ""

    def parameters(self) -> str:
        return self._parameters


class InferenceResponse:
    """Replaces `pb_utils.InferenceResponse`."""

    def __init__(self, output_tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self._outputs, self._error = output_tensors, error

    def output_tensors(self) -> Sequence[Tensor]:
        return self._outputs

    def error(self) -> TritonError | None:
        return self._error


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the input of that name, None if there is none, as in the server."""
    return inference_request._inputs.get(name)


def _utils() -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    for thing in (TritonError, Tensor, InferenceRequest, InferenceResponse, get_input_tensor_by_name):
        setattr(module, thing.__name__, thing)
    return module


# The server ---------------------------------------------------------------------------------------


@dataclass
class Request:
    """A client's request: texts, or other inputs of a model."""

    inputs: Mapping[str, Array]
    parameters: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, *texts: str | bytes, **parameters: object) -> Request:
        rows = [[text.encode() if isinstance(text, str) else text] for text in texts]
        return cls({"text": np.array(rows, np.object_)}, parameters)


Outcome = dict[str, Array] | RefusedError


def read_config(folder: Path) -> Any:
    """Read the configuration of the model in `folder`; raise for an unknown field or wrong type."""
    config = text_format.Parse((folder / "config.pbtxt").read_text("utf-8"), model_config_pb2.ModelConfig())
    assert config.name == folder.name
    assert any((folder / "1").iterdir())
    return config


class Model:
    """A model of the repository with its configuration."""

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self.folder = folder
        self.shapes: list[tuple[int, ...]] = []  # shape of the first input of every batch

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Batch requests: neighbours of one shape run together, up to `max_batch_size` texts."""
        for request in requests:
            self._check(request.inputs, self.config.input)
        outcomes: list[Outcome] = []
        for _, group in groupby(requests, lambda request: [array.shape[1:] for array in request.inputs.values()]):
            batch: list[Request] = []
            for request in group:
                if batch and sum(map(_size, batch)) + _size(request) > self.config.max_batch_size:
                    outcomes += self._run_batch(batch)
                    batch = []
                batch.append(request)
            outcomes += self._run_batch(batch)
        for outcome in outcomes:
            if not isinstance(outcome, RefusedError):
                self._check(outcome, self.config.output)
        return outcomes

    def _run_batch(self, batch: list[Request]) -> list[Outcome]:
        texts = sum(map(_size, batch))
        self.shapes.append((texts, *batch[0].inputs[self.config.input[0].name].shape[1:]))
        outcomes = self.execute(batch)
        assert len(outcomes) == len(batch)
        return outcomes

    def _check(self, arrays: Mapping[str, Array], tensors: Any) -> None:
        assert sorted(arrays) == sorted(tensor.name for tensor in tensors)
        for tensor in tensors:
            array = arrays[tensor.name]
            assert array.dtype == NUMPY_TYPES[tensor.data_type], tensor.name
            assert len(array.shape) == 1 + len(tensor.dims)
            assert all(want in (-1, size) for want, size in zip(tensor.dims, array.shape[1:], strict=True)), tensor.name
            assert 0 < len(array) <= self.config.max_batch_size

    def execute(self, batch: Sequence[Request]) -> list[Outcome]:
        raise NotImplementedError


class PythonModel(Model):
    """Runs `1/model.py` like the Python backend."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        assert self.config.backend == "python"
        spec = importlib.util.spec_from_file_location(f"triton_double_{folder.name}", folder / "1" / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get("triton_python_backend_utils")
        sys.modules["triton_python_backend_utils"] = _utils()
        try:
            spec.loader.exec_module(module)
        finally:
            if before is None:
                del sys.modules["triton_python_backend_utils"]
        self.model = module.TritonPythonModel()
        config = json_format.MessageToJson(self.config, preserving_proto_field_name=True)
        self.model.initialize({"model_config": config, "model_name": folder.name, "model_version": "1"})

    def execute(self, batch: Sequence[Request]) -> list[Outcome]:
        requests = [
            InferenceRequest([Tensor(*item) for item in request.inputs.items()], request.parameters)
            for request in batch
        ]
        outcomes: list[Outcome] = []
        for response in self.model.execute(requests):
            error = response.error()
            if error is not None:
                outcomes.append(RefusedError(error.message()))
            else:
                outcomes.append({tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()})
        return outcomes


class OnnxModel(Model):
    """Runs `1/model.onnx` like the onnxruntime backend, but always on a CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.session = onnxruntime.InferenceSession(folder / "1" / "model.onnx")
        self._check_signature(self.config.input, self.session.get_inputs())
        outputs = {output.name: output for output in self.session.get_outputs()}
        self._check_signature(self.config.output, [outputs[output.name] for output in self.config.output])
        for sample in self.config.model_warmup:
            self.warm_up(sample)

    def execute(self, batch: Sequence[Request]) -> list[Outcome]:
        names = [output.name for output in self.config.output]
        joined = {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
        results = self.session.run(names, joined)
        ends = np.cumsum([_size(request) for request in batch])[:-1]
        parts = [np.split(result, ends) for result in results]
        return [dict(zip(names, each, strict=True)) for each in zip(*parts, strict=True)]

    def warm_up(self, sample: Any) -> None:
        assert all(value.zero_data for value in sample.inputs.values())
        inputs = {
            name: np.zeros((sample.batch_size, *value.dims), NUMPY_TYPES[value.data_type])
            for name, value in sample.inputs.items()
        }
        (outcome,) = self.run([Request(inputs)])
        assert isinstance(outcome, dict)
        assert all(np.isfinite(array).all() for array in outcome.values())

    @staticmethod
    def _check_signature(tensors: Any, values: Sequence[Any]) -> None:
        """Check names, types and shapes. Optional inputs may not be in the configuration."""
        assert sorted(tensor.name for tensor in tensors) == sorted(value.name for value in values)
        by_name = {value.name: value for value in values}
        for tensor in tensors:
            value = by_name[tensor.name]
            assert ONNX_TYPES[value.type] == tensor.data_type
            assert isinstance(value.shape[0], str)  # the batch dimension
            assert [size if isinstance(size, int) else -1 for size in value.shape[1:]] == list(tensor.dims)


class Server:
    """All models of a repository; `infer` calls an ensemble."""

    def __init__(self, repository: Path) -> None:
        self.ensembles: dict[str, Any] = {}
        self.models: dict[str, Model] = {}
        for folder in sorted(repository.iterdir()):
            model = Model(folder)
            if model.config.platform == "ensemble":
                self.ensembles[folder.name] = model.config
            else:
                python = model.config.backend == "python"
                self.models[folder.name] = PythonModel(folder) if python else OnnxModel(folder)
        for config in self.ensembles.values():
            check_ensemble(config, {name: model.config for name, model in self.models.items()})

    def infer(self, ensemble: str, *requests: Request) -> list[Outcome]:
        """Return the outcomes of requests that arrive together; refused ones skip later steps."""
        config = self.ensembles[ensemble]
        tensors = [dict(request.inputs) for request in requests]
        errors: dict[int, RefusedError] = {}
        for step in config.ensemble_scheduling.step:
            alive = [index for index in range(len(requests)) if index not in errors]
            inputs = [{key: tensors[index][value] for key, value in step.input_map.items()} for index in alive]
            called = [Request(each, requests[index].parameters) for each, index in zip(inputs, alive, strict=True)]
            for index, outcome in zip(alive, self.models[step.model_name].run(called), strict=True):
                if isinstance(outcome, RefusedError):
                    errors[index] = outcome
                else:
                    tensors[index] |= {value: outcome[key] for key, value in step.output_map.items()}
        names = [output.name for output in config.output]
        return [errors.get(index) or {name: each[name] for name in names} for index, each in enumerate(tensors)]


def check_ensemble(config: Any, models: Mapping[str, Any]) -> None:
    """Check the rules that the server checks when it loads an ensemble."""
    tensors = {tensor.name: _signature(tensor) for tensor in config.input}
    for step in config.ensemble_scheduling.step:
        model = models[step.model_name]
        assert config.max_batch_size <= model.max_batch_size
        assert set(step.input_map) == {tensor.name for tensor in model.input}
        assert set(step.output_map) <= {tensor.name for tensor in model.output}
        for tensor in model.input:
            assert tensors[step.input_map[tensor.name]] == _signature(tensor), tensor.name
        tensors |= {step.output_map[tensor.name]: _signature(tensor) for tensor in model.output}
    for tensor in config.output:
        assert tensors[tensor.name] == _signature(tensor), tensor.name


def _signature(tensor: Any) -> tuple[int, tuple[int, ...]]:
    return tensor.data_type, tuple(tensor.dims)


def _size(request: Request) -> int:
    return len(next(iter(request.inputs.values())))
