"""How to export, and how progress is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from sbert_infer.artifact.hub import HubModel
from sbert_infer.errors import ExportError

MAX_BATCH_TOKENS = 16384  # of a plan's TensorRT engines: enough to fill a large GPU, not measured on one yet

Progress = Callable[[int], object]  # takes the work done since the last call, in tokens if not said otherwise
# Announces a step: name, detail, and all of its work, 0 if it is not known.
Step = Callable[[str, str, int], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class ExportOptions:
    """How to export. The defaults give an FP32 graph fused for onnxruntime."""

    int8: bool = False
    fp16: bool = False  # a plan, for GPUs
    bf16: bool = False  # for CPUs; with `fp16`: a plan in BF16, for a model that FP16 can't hold
    portable: bool = False  # standard operators only
    max_length: int | None = None  # tokens; the checkpoint's own limit by default
    calibration: Sequence[str] = ()  # texts like those to be encoded, for int8 and fp16
    lengths: Sequence[int] = ()  # tokens of the texts to be encoded, for the row lengths of a plan
    targets: Sequence[str] | None = None  # GPUs to build TensorRT engines for; by default this machine's, if any
    max_batch_tokens: int = MAX_BATCH_TOKENS  # of the largest shapes of a plan's TensorRT engines
    pooling: str = "graph"  # or "kernel": a plan's vectors are pooled by the Triton kernel
    # Outputs of the graph. With "tokens" also a vector for each token; with "sparse" and "multi"
    # also those of bge-m3's additional layers.
    outputs: Sequence[str] = ("sentence",)
    min_cosine: float | None = None  # the parity threshold; by precision if not given
    route: str | None = None  # the one to export of a model with several (Router)
    force: bool = False  # replace an existing file
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.int8 and self.portable:
            raise ExportError("--int8 needs operators of onnxruntime: it can't be --portable")
        if self.fp16 and (self.int8 or self.portable):
            raise ExportError("--fp16 writes a plan: it can't be combined with --int8 or --portable")
        if self.bf16 and (self.int8 or self.portable):
            raise ExportError("--bf16 has standard operators, and 16 bits: leave out --portable and --int8")
        if not self.fp16 and (self.lengths or self.targets is not None or self.pooling != "graph"):
            raise ExportError("--lengths, --target and --pooling are for --fp16")
        if self.pooling not in ("graph", "kernel"):
            raise ExportError(f"the pooling of a plan must be 'graph' or 'kernel', got {self.pooling!r}")
        if unknown := [name for name in self.outputs if name not in ("sentence", "tokens", "sparse", "multi")]:
            takes = "--outputs takes sentence,sparse,multi of a bge-m3, and else takes sentence and tokens"
            raise ExportError(f"{takes}, got {', '.join(map(repr, unknown))}")
        if "sentence" not in self.outputs or (self.fp16 and len(self.outputs) > 1):
            raise ExportError("--outputs must name sentence, and for --fp16 nothing else")
        if self.all_outputs and set(self.outputs) != {"sentence", "sparse", "multi"}:
            raise ExportError("--outputs sparse and multi go together: sentence,sparse,multi")
        if self.min_cosine is not None and not 0 < self.min_cosine <= 1:
            raise ExportError(f"the lowest cosine accepted must be above 0 and at most 1, got {self.min_cosine}")

    @property
    def token_output(self) -> bool:
        """Whether the graph also gives token vectors."""
        return "tokens" in self.outputs

    @property
    def all_outputs(self) -> bool:
        """Whether the graph also gives the outputs of bge-m3's additional layers."""
        return "sparse" in self.outputs or "multi" in self.outputs

    @property
    def standard(self) -> bool:
        """Whether the graph of an ONNX model has standard operators only."""
        return self.portable or (self.bf16 and not self.fp16)

    @property
    def precision(self) -> str:
        """The precision's name in the manifest."""
        if self.bf16:
            return "bf16"
        if self.fp16:
            return "fp16"
        return "int8" if self.int8 else "fp32"


def default_output(source: str, options: ExportOptions) -> Path:
    """`some/model/` -> `model.onnx`, `model.int8.onnx`, `model.bf16.onnx` or `model.plan`, here."""
    name = source_name(source)
    if options.fp16:
        return Path(f"{name}.plan")
    return Path(f"{name}.onnx" if options.precision == "fp32" else f"{name}.{options.precision}.onnx")


def source_name(source: str) -> str:
    """The name of a folder, or of a model of the hub without owner and revision."""
    model = HubModel.parse(source)
    if model is None or Path(source).is_dir():
        return Path(source).resolve().name
    return model.name


def no_progress(count: int) -> None:
    """Report nothing."""


def silent(name: str, detail: str, total: int) -> AbstractContextManager[Progress]:
    """A step that is not reported."""
    return nullcontext(no_progress)
