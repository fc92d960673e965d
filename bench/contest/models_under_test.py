"""What is measured: artifacts of one checkpoint, and that checkpoint for the eager reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import ENCODER, RERANKER, Artifact
from sbert_infer.backends.openvino_install import why_no_bf16
from sbert_infer.bench.errors import BenchError
from sbert_infer.export.options import ExportOptions, default_output

# What a checkpoint is exported to for CPUs, by precision.
_PRECISIONS = {"fp32": ExportOptions(), "int8": ExportOptions(int8=True), "bf16": ExportOptions(bf16=True)}


Announce = Callable[[str], object]
Exported = tuple[list[Path], dict[str, str]]  # the files, and why others could not be made


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
    announce: Announce = lambda line: None,
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
        export = _export_for_cpu if device == "cpu" else _export_for_gpu
        made, not_exported = export(source, folder, code, announce)
        files += map(str, made)
    artifacts = tuple(open_artifact(file) for file in files)
    _check_same(artifacts)
    found = named[0] if named else _sibling(artifacts)
    return ModelsUnderTest(artifacts[0].manifest.name, found, artifacts, not_exported)


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


def _export_for_cpu(source: str, folder: Path, flags: Sequence[str], announce: Announce) -> Exported:
    """Export in every precision that runs here, in one call: that reads the checkpoint once."""
    files = {precision: folder / default_output(source, one).name for precision, one in _PRECISIONS.items()}
    if why := why_no_bf16():
        announce(f"no BF16: {why}")
        del files["bf16"]
    announce(f"exporting {source} to {', '.join(file.name for file in files.values())}")
    failed = _export(source, folder, [*(f"--{precision}" for precision in files), *flags])
    missing = [precision for precision, file in files.items() if not file.exists()]
    not_exported = {}
    for precision in missing:  # several: each alone, since one may have kept the others from being tried
        why = failed if len(missing) == 1 else _export(source, files[precision], [f"--{precision}", *flags])
        if why and precision == "fp32":
            raise BenchError(why)
        if why:
            not_exported[precision] = why
    return [file for precision, file in files.items() if precision not in not_exported], not_exported


def _export_for_gpu(source: str, folder: Path, flags: Sequence[str], announce: Announce) -> Exported:
    """Export a plan that pools in the graph, and one that pools in the kernel if the model can."""
    files = {"graph": folder / "model.plan", "kernel": folder / "kernel.plan"}
    not_exported = {}
    for pooling, file in files.items():
        announce(f"exporting {source} to {file.name}")
        why = _export(source, file, ["--fp16", "--pooling", pooling, *flags])
        if why and pooling == "graph":
            raise BenchError(why)
        if why:
            not_exported[pooling] = why
    return [file for pooling, file in files.items() if pooling not in not_exported], not_exported


def _export(source: str, target: Path, flags: Sequence[str]) -> str:
    """Export in a separate process, so that this one stays small. Return why that failed, or ""."""
    command = [sys.executable, "-m", "sbert_infer.export.cli", source, "-o", str(target), "-q", *flags]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)  # noqa: S603 - our own
    failed = done.stderr.strip().removeprefix("error: ") or f"the export of {source} failed"
    return failed if done.returncode else ""
