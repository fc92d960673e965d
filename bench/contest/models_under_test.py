"""What is measured: artifacts of one checkpoint, and that checkpoint for the eager reference."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbert_infer._util.hardware import instruction_sets
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import ENCODER, RERANKER, Artifact
from sbert_infer.bench.errors import BenchError


@dataclass(frozen=True)
class _Export:
    """What a checkpoint is exported to."""

    name: str
    flags: tuple[str, ...] = ()  # of `sbert-export`
    may_lack: str = ""  # not every model has this one: what is missing then


_EXPORTS = {
    "cpu": (
        _Export("model.onnx"),
        _Export("model.int8.onnx", ("--int8",), may_lack="int8"),
        _Export("model.bf16.onnx", ("--bf16",), may_lack="bf16"),
    ),
    "cuda": (
        _Export("model.plan", ("--fp16",)),
        _Export("kernel.plan", ("--fp16", "--pooling", "kernel"), may_lack="kernel"),
    ),
}


@dataclass(frozen=True)
class ModelsUnderTest:
    """Artifacts of one checkpoint with one length limit, and where that checkpoint is."""

    name: str
    checkpoint: str  # a folder or a hub id
    artifacts: tuple[Artifact, ...]
    not_exported: Mapping[str, str] = field(
        default_factory=dict
    )  # precision, or place of a plan's pooling -> why there is no such artifact

    @property
    def pairs(self) -> bool:
        """Whether they are rerankers, whose inputs are pairs of texts."""
        return self.artifacts[0].manifest.kind == RERANKER


def open_models(
    sources: Sequence[str],
    checkpoint: str | None,
    folder: Path,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    announce: Callable[[str], object] = lambda line: None,
) -> ModelsUnderTest:
    """Open the artifacts among `sources`; export a checkpoint to `folder`, for `device`."""
    files = [source for source in sources if Path(source).is_file()]
    checkpoints = [source for source in sources if source not in files]
    if missing := [source for source in checkpoints if source.endswith((".onnx", ".plan"))]:
        raise BenchError(f"{missing[0]} does not exist")
    named = sorted({*checkpoints, *([checkpoint] if checkpoint else [])})
    if len(named) > 1:
        raise BenchError(f"one checkpoint at a time, got {len(named)}: {', '.join(named)}")
    code = ["--trust-remote-code"] if trust_remote_code else []
    not_exported: dict[str, str] = {}
    for source in checkpoints:
        for one in exports(device, importlib.util.find_spec("openvino") is not None, instruction_sets()):
            announce(f"exporting {source} to {one.name}")
            why = _export(source, folder / one.name, [*one.flags, *code])
            if why and not one.may_lack:
                raise BenchError(why)
            if why:
                not_exported[one.may_lack] = why
            else:
                files.append(str(folder / one.name))
    artifacts = tuple(open_artifact(file) for file in files)
    _check_same(artifacts)
    found = named[0] if named else _sibling(artifacts)
    return ModelsUnderTest(artifacts[0].manifest.name, found, artifacts, not_exported)


def exports(device: str, openvino: bool, instructions: Collection[str]) -> list[_Export]:
    """List what a checkpoint is exported to: BF16 only where it runs, with OpenVINO."""
    return [one for one in _EXPORTS[device] if one.may_lack != "bf16" or (openvino and has_bf16(instructions))]


def has_bf16(instructions: Collection[str]) -> bool:
    """Whether a CPU with these instruction sets multiplies in BF16."""
    return not {"AVX-512 BF16", "AMX BF16"}.isdisjoint(instructions)


def check_weights(models: ModelsUnderTest, weights_sha256: str) -> None:
    """Refuse a checkpoint whose weights are not those that the artifacts were made from."""
    expected = models.artifacts[0].manifest.weights_sha256
    if weights_sha256 != expected:
        raise BenchError(
            f"{models.artifacts[0].path} was not made from {models.checkpoint}: its weights have sha256 "
            f"{expected[:12]}, the checkpoint's {weights_sha256[:12]}; name the right one with --checkpoint"
        )


def _sibling(artifacts: Sequence[Artifact]) -> str:
    """Find the folder named like an artifact beside it: model.onnx, model.int8.onnx -> model/."""
    tried = []
    for artifact in artifacts:
        name = artifact.path.name.removesuffix(".plan").removesuffix(".onnx")
        folder = artifact.path.with_name(name.removesuffix(".int8").removesuffix(".bf16"))
        if folder.is_dir():
            return str(folder)
        tried.append(str(folder))
    places = ", ".join(dict.fromkeys(tried))
    raise BenchError(f"the eager reference needs the checkpoint: no folder {places}; add --checkpoint FOLDER")


def _check_same(artifacts: Sequence[Artifact]) -> None:
    first = artifacts[0]
    if first.manifest.kind not in (ENCODER, RERANKER):
        kind = first.manifest.kind.replace("_", " ").replace("-", " ")
        raise BenchError(f"{first.path} is a {kind}: sbert-bench measures models with one vector a text, and rerankers")
    for other in artifacts[1:]:
        if other.manifest.weights_sha256 != first.manifest.weights_sha256:
            raise BenchError(f"{first.path} and {other.path} are of different checkpoints: measure one at a time")
        if other.manifest.max_length != first.manifest.max_length:
            lengths = f"{first.manifest.max_length} and {other.manifest.max_length}"
            raise BenchError(f"{first.path} and {other.path} have different length limits: {lengths} tokens")


def _export(source: str, target: Path, flags: Sequence[str]) -> str:
    """Export in a separate process, so that this one stays small. Return why that failed, or ""."""
    command = [sys.executable, "-m", "sbert_infer.export.cli", source, "-o", str(target), "-q", *flags]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)  # noqa: S603 - our own
    failed = done.stderr.strip().removeprefix("error: ") or f"the export of {source} failed"
    return failed if done.returncode else ""
