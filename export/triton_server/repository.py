"""A model repository for Triton Inference Server that serves an artifact: text in, vector out.

    <name>/                 the ensemble: what clients call
    <name>_tokenizer/1/     model.py, tokenizer.json, settings.json; the Python backend
    <name>_model/1/         model.onnx, for onnxruntime

It has never been run in the server itself; see docs/triton.md for what was checked instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx

from sbert_infer._util.cores import usable_cores
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import ENCODER, Artifact, check_one_route
from sbert_infer.artifact.plan_file import CPU_GRAPH, CUDA_GRAPH, MODEL, Plan
from sbert_infer.errors import ExportError
from sbert_infer.export.precision.borrowed_weights import inline_weights
from sbert_infer.export.triton_server import config as triton_config
from sbert_infer.export.triton_server.config import Served
from sbert_infer.export.triton_server.graph import served_dim, serving_graph

_CPU_BATCH_TOKENS = 512  # as `Engine` runs them
_CPU_MOST_TOKENS = 8192  # Triton counts texts, not tokens: a limit for many long ones that run together
_GPU_BATCH_TOKENS = 16384  # as `Engine` runs them; not measured
_SHORTEST_EDGE = 16


@dataclass(frozen=True)
class TritonRepository:
    """What was written."""

    folder: Path
    served: Served
    note: str  # how it differs from what one may expect; mostly empty

    def summary(self) -> str:
        """A few lines for people."""
        served = self.served
        runs = f"onnxruntime on {'GPUs' if served.gpu else 'CPUs'}"
        edges = ", ".join(map(str, served.edges))
        lines = [
            f"{self.folder}  Triton repository: {served.name}, from text to {served.dim} numbers",
            f"  runs     {runs}, up to {served.max_batch} texts together, padded to {edges} tokens",
            *([f"  note     {self.note}"] if self.note else []),
            f"  use      tritonserver --model-repository {self.folder}",
        ]
        return "\n".join(lines)


def check_repository(artifact: Path, folder: Path, force: bool) -> None:
    """Raise `ExportError` if the models of `artifact` can't or must not be written to `folder`."""
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder} is a file: name a folder for the Triton repository")
    if not folder.absolute().parent.is_dir():
        raise ExportError(f"the folder {folder.absolute().parent} does not exist")
    there = [name for name in _model_names(_served_name(artifact)) if (folder / name).exists()]
    if there and not force:
        raise ExportError(f"{folder / there[0]} exists: give --force to replace it, or another --triton-repository")


def write_repository(path: str | Path, folder: str | Path, *, force: bool = False) -> TritonRepository:
    """Write the three models that serve the artifact at `path` to the repository `folder`.

    Other models in `folder` stay. The model has one instance for each core of this machine or, on
    GPUs, one for each GPU.
    """
    path, folder = Path(path), Path(folder)
    check_repository(path, folder, force)
    artifact = open_artifact(path)
    check_one_route(artifact, "a Triton repository")
    if artifact.manifest.kind != ENCODER:
        raise ExportError(f"{path} is a {artifact.manifest.kind}: --triton-repository is for sentence encoders")
    served = _served(artifact)
    with _staging(folder) as staged:
        _write_tokenizer(staged / f"{served.name}_tokenizer", artifact, served)
        _write_model(staged / f"{served.name}_model", artifact, served)
        _write_ensemble(staged / served.name, served)
        _put_in_place(staged, folder, served.name)
    return TritonRepository(folder, served, _note(artifact))


def _served_name(artifact: Path) -> str:
    """`model.int8.onnx` -> `model_int8`: a name that fits URLs, folders and configurations."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", artifact.name.removesuffix(artifact.suffix))


def _model_names(name: str) -> tuple[str, ...]:
    """Names in the order of putting them in place: the ensemble last, since it needs the others."""
    return f"{name}_model", f"{name}_tokenizer", name


def _note(artifact: Artifact) -> str:
    """What one may expect of a plan and does not get."""
    if not isinstance(artifact, Plan):
        return ""
    if CUDA_GRAPH not in artifact.members:
        return f"a plan in {artifact.manifest.precision} has no 16-bit graph for onnxruntime: it runs in FP32"
    if artifact.engines:
        return "its TensorRT engines take packed rows, which Triton can't fill: onnxruntime runs the FP16 graph"
    return ""


def _served(artifact: Artifact) -> Served:
    manifest, gpu = artifact.manifest, isinstance(artifact, Plan)
    edges = _edges(manifest.max_length)
    budget, most = (_GPU_BATCH_TOKENS,) * 2 if gpu else (_CPU_BATCH_TOKENS, _CPU_MOST_TOKENS)
    return Served(
        name=_served_name(artifact.path),
        dim=served_dim(manifest),
        edges=edges,
        max_batch=max(1, min(budget // edges[0], most // manifest.max_length)),
        batch_tokens=budget,
        prompt_length=not manifest.include_prompt,
        gpu=gpu,
        instances=1 if gpu else usable_cores(),
        fused=manifest.fusion.get("attention", 0) > 0,
    )


def _edges(longest: int) -> tuple[int, ...]:
    """The lengths that texts are padded to, each twice as long as the one before.

    Requests have few shapes then, and a text runs with less than as much padding again. All but the
    last are a multiple of 8, as onnxruntime's kernels for FP16 want them.
    """
    edges = [_SHORTEST_EDGE]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return (*edges[:-1], longest)


def _write_tokenizer(folder: Path, artifact: Artifact, served: Served) -> None:
    manifest = artifact.manifest
    names = ("max_length", "truncation_side", "padding_side", "pad_id", "include_prompt", "default_prompt_name")
    settings = {name: getattr(manifest, name) for name in names}
    settings |= {"prompts": dict(manifest.prompts), "edges": served.edges}
    _write(folder / "config.pbtxt", triton_config.tokenizer_config(served))
    _write(folder / "1" / "model.py", Path(__file__).with_name("tokenizer.py").read_text(encoding="utf-8"))
    _write(folder / "1" / "tokenizer.json", artifact.tokenizer_json)
    _write(folder / "1" / "settings.json", json.dumps(settings, ensure_ascii=False, indent=1) + "\n")


def _write_model(folder: Path, artifact: Artifact, served: Served) -> None:
    _write(folder / "config.pbtxt", triton_config.model_config(served))
    if isinstance(artifact, Plan):
        graph = CUDA_GRAPH if CUDA_GRAPH in artifact.members else CPU_GRAPH
        model = inline_weights(artifact.read(graph), {MODEL: artifact.read(MODEL)})
    else:
        model = onnx.load_model(artifact.path, load_external_data=False)
    serving_graph(model, artifact.manifest)
    _write(folder / "1" / "model.onnx", model.SerializeToString())
    for file in artifact.manifest.data_files:  # of a model over 2 GB
        shutil.copyfile(artifact.path.parent / file.name, folder / "1" / file.name)
        _sync(folder / "1" / file.name)


def _write_ensemble(folder: Path, served: Served) -> None:
    _write(folder / "config.pbtxt", triton_config.ensemble_config(served))
    # It has no model file, but the server requires a version folder, and not every storage keeps
    # an empty one.
    _write(folder / "1" / "README", "An ensemble has no file of its own: see ../config.pbtxt\n")


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, always removed: the server must not see half a model."""
    target = folder.absolute()
    try:
        place = target if target.is_mount() else target.parent  # nothing can be moved into a mounted folder in one step
        staged = Path(tempfile.mkdtemp(dir=place, prefix=f".{target.name}.", suffix=".staging"))
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise ExportError(f"{folder} can't be written: {error.strerror or error}") from error


def _put_in_place(staged: Path, folder: Path, name: str) -> None:
    """Move each model in one step, or the whole repository if it does not exist yet."""
    staged.chmod(0o755)  # a temporary folder is private, but the server may run as another user
    if not folder.exists():
        staged.rename(folder)
        return
    for model in _model_names(name):
        if (folder / model).exists():
            (folder / model).rename(staged / f"old_{model}")
        (staged / model).rename(folder / model)
