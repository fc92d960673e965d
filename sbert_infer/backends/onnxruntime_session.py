"""ONNX models, in a file or in a plan, and onnxruntime sessions that run them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.onnx_file import Part
from sbert_infer.artifact.plan_file import CPU_GRAPH, CUDA_GRAPH, MODEL, Plan
from sbert_infer.backends.base import Batch
from sbert_infer.backends.onnxruntime_install import broken
from sbert_infer.errors import EngineError

_GRAPH = "graph.onnx"


@dataclass(frozen=True)
class FileModel:
    """A model in a file of its own, or a part of a file with several routes."""

    path: Path
    fused: bool = True  # whether the export fused the graph for onnxruntime
    part: Part | None = None

    @property
    def size(self) -> int:
        """Approximate size of the weights in memory, in bytes."""
        return self.path.stat().st_size if self.part is None else self.part.stop - self.part.start

    def read(self) -> tuple[str | bytes, dict[str, bytes]]:
        """Return the model's path or bytes, and the contents of further files with its weights."""
        return str(self.path) if self.part is None else self.part.read(), {}


@dataclass(frozen=True)
class PlanModel:
    """A graph inside a plan. It is read again for each session, so its bytes are not kept."""

    fused: ClassVar[bool] = True

    plan: Plan
    name: str  # CPU_GRAPH or CUDA_GRAPH, which use the weights in MODEL; the first widens them to FP32

    @property
    def path(self) -> Path:
        """The path of the plan."""
        return self.plan.path

    @property
    def size(self) -> int:
        """Approximate size of the weights in memory, in bytes."""
        return self.plan.members[MODEL][0] * (2 if self.name == CPU_GRAPH else 1)

    def read(self) -> tuple[str | bytes, dict[str, bytes]]:
        """Return the model's bytes, and the contents of further files with its weights."""
        return self.plan.read(self.name), {MODEL: self.plan.read(MODEL)}


OnnxModel = FileModel | PlanModel


def cuda_model(plan: Plan) -> PlanModel:
    """Return the graph of `plan` for a GPU: a BF16 plan has only the one for CPUs, in FP32."""
    return PlanModel(plan, CUDA_GRAPH if CUDA_GRAPH in plan.members else CPU_GRAPH)


@dataclass(frozen=True)
class Graph:
    """Names of the inputs that a session needs and of the outputs that it returns."""

    inputs: frozenset[str]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, session: Any) -> Graph:
        """Return the names of the inputs and outputs of `session`."""
        needed = frozenset(value.name for value in session.get_inputs())
        return cls(needed, tuple(value.name for value in session.get_outputs()))

    def feed(self, batch: Batch) -> dict[str, npt.NDArray[np.int64]]:
        """Return the arrays of `batch` by the names of the graph's inputs."""
        arrays = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if "token_type_ids" in self.inputs:
            arrays["token_type_ids"] = np.zeros_like(batch.ids) if batch.token_types is None else batch.token_types
        if batch.prompt_length or "prompt_length" in self.inputs:  # if not listed, its default is 0
            arrays["prompt_length"] = np.array(batch.prompt_length)
        return arrays


def open_session(
    model: OnnxModel,
    threads: int,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    *,
    plan_memory: bool = True,
) -> Any:
    """Open a session that uses `threads` threads for each run.

    With `plan_memory` onnxruntime keeps, for every shape that it has seen, where in one block of
    memory each tensor goes.
    """
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = plan_memory
    if model.fused:  # onnxruntime's own fusions would undo some of the export's, which are better
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with ExitStack() as stack:
        content = _place(model, options, stack)
        try:
            return onnxruntime.InferenceSession(content, options, providers=list(providers))
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"{model.path}: onnxruntime {onnxruntime.__version__} can't load it: {error}") from error


def _place(model: OnnxModel, options: Any, stack: ExitStack) -> str | bytes:
    """Return the model's path or bytes, and make its further weights available to onnxruntime."""
    content, files = model.read()
    if not files:
        return content
    if hasattr(options, "add_external_initializers_from_files_in_memory"):
        sizes = [len(file) for file in files.values()]
        options.add_external_initializers_from_files_in_memory(list(files), list(files.values()), sizes)
        stack.callback(files.clear)  # onnxruntime keeps no reference: hold the bytes until it has loaded them
        return content
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="sbert-infer-")))  # onnxruntime before 1.24
    for name, data in {**files, _GRAPH: content}.items():
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(folder / _GRAPH)


def import_onnxruntime() -> Any:
    """Import onnxruntime, or raise an error that says how to install or repair it."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise EngineError(broken(str(error))) from error
        raise EngineError("onnxruntime is not installed: pip install 'sbert-infer[cpu]'") from error
    except ImportError as error:  # files of two versions, or a library that does not load
        raise EngineError(broken(" ".join(str(error).split()))) from error
    if not hasattr(onnxruntime, "InferenceSession"):  # left by uninstalling one of two onnxruntime packages
        raise EngineError(broken("it is empty"))
    return onnxruntime
