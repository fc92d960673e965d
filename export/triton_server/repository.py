"""A model repository for Triton Inference Server that serves an artifact: text in, vector out.

    <name>/                 the ensemble: what clients call
    <name>_tokenizer/1/     model.py, tokenizer.json, settings.json; the Python backend
    <name>_model/1/         model.onnx for onnxruntime, or TensorRT engines

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
from sbert_infer.artifact.manifest import ENCODER, Artifact
from sbert_infer.artifact.plan_file import MODEL, EngineFile, Plan
from sbert_infer.artifact.profiles import make_profiles, most_tokens
from sbert_infer.errors import ExportError
from sbert_infer.export.triton_server import config as triton_config
from sbert_infer.export.triton_server.config import Served
from sbert_infer.export.triton_server.graph import served_dim, serving_graph

_CPU_BATCH_TOKENS = 512  # as `Engine` runs them
_CPU_MOST_TOKENS = 8192  # Triton counts texts, not tokens: a limit for many long ones that run together


@dataclass(frozen=True)
class TritonRepository:
    """What was written."""

    folder: Path
    served: Served
    note: str  # how it differs from what one may expect; mostly empty

    def summary(self) -> str:
        """A few lines for people."""
        served = self.served
        runs = "TensorRT" if served.engines else f"onnxruntime on {'GPUs' if served.gpu else 'CPUs'}"
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
    if artifact.manifest.kind != ENCODER:
        raise ExportError(f"{path} is a {artifact.manifest.kind}: --triton-repository is for sentence encoders")
    engines, note = _usable_engines(artifact)
    served = _served(artifact, engines)
    with _staging(folder) as staged:
        _write_tokenizer(staged / f"{served.name}_tokenizer", artifact, served)
        _write_model(staged / f"{served.name}_model", artifact, served, engines)
        _write_ensemble(staged / served.name, served)
        _put_in_place(staged, folder, served.name)
    return TritonRepository(folder, served, note)


def _served_name(artifact: Path) -> str:
    """`model.int8.onnx` -> `model_int8`: a name that fits URLs, folders and configurations."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", artifact.name.removesuffix(artifact.suffix))


def _model_names(name: str) -> tuple[str, ...]:
    """Names in the order of putting them in place: the ensemble last, since it needs the others."""
    return f"{name}_model", f"{name}_tokenizer", name


def _usable_engines(artifact: Artifact) -> tuple[dict[str, EngineFile], str]:
    """TensorRT engines that Triton can run, by compute capability; if none, the reason why."""
    if not isinstance(artifact, Plan):
        return {}, ""
    if artifact.pooling != "graph":
        raise ExportError(f"{artifact.path}: Triton needs the pooling in the graph: export it with --pooling graph")
    if not artifact.engines:
        return {}, "no TensorRT engine inside: onnxruntime runs the FP16 model on the GPU"
    usable = {_capability(engine.target): engine for engine in artifact.engines if engine.runtime == "tensorrt"}
    if not usable:
        return {}, "Triton can't run engines of TensorRT-RTX: onnxruntime runs the FP16 model on the GPU"
    manifest = artifact.manifest
    if not manifest.include_prompt or served_dim(manifest) < manifest.dim:
        why = "cut vectors" if manifest.include_prompt else "leave the prompt out of pooling"
        return {}, f"in Triton an engine can't {why} as this model does: onnxruntime runs the FP16 model on the GPU"
    return usable, ""


def _capability(target: str) -> str:
    """`sm89` -> `8.9`, as Triton writes it."""
    digits = target.removeprefix("sm")
    return f"{digits[:-1]}.{digits[-1]}"


def _served(artifact: Artifact, engines: dict[str, EngineFile]) -> Served:
    manifest = artifact.manifest
    if isinstance(artifact, Plan):
        profiles = artifact.profiles
        budget, max_batch = most_tokens(profiles), min(profile.max_batch for profile in profiles)
    else:
        buckets = max(1, (manifest.max_length - 1).bit_length() - 3)  # each about twice as long as the one before
        profiles = make_profiles(None, manifest.max_length, _CPU_BATCH_TOKENS, buckets)
        budget = _CPU_BATCH_TOKENS
        max_batch = max(1, min(profiles[0].max_batch, _CPU_MOST_TOKENS // manifest.max_length))
    gpu = isinstance(artifact, Plan)
    return Served(
        name=_served_name(artifact.path),
        dim=served_dim(manifest),
        edges=tuple(profile.length for profile in profiles),
        max_batch=max_batch,
        batch_tokens=budget,
        prompt_length=not manifest.include_prompt,
        gpu=gpu,
        instances=1 if gpu else usable_cores(),
        fused=manifest.fusion.get("attention", 0) > 0 and not gpu,
        engines={capability: _file_name(engine) for capability, engine in engines.items()},
    )


def _file_name(engine: EngineFile) -> str:
    return Path(engine.name).with_suffix(".plan").name


def _write_tokenizer(folder: Path, artifact: Artifact, served: Served) -> None:
    manifest = artifact.manifest
    names = ("max_length", "truncation_side", "padding_side", "pad_id", "include_prompt", "default_prompt_name")
    settings = {name: getattr(manifest, name) for name in names}
    settings |= {"prompts": dict(manifest.prompts), "edges": served.edges}
    _write(folder / "config.pbtxt", triton_config.tokenizer_config(served))
    _write(folder / "1" / "model.py", Path(__file__).with_name("tokenizer.py").read_text(encoding="utf-8"))
    _write(folder / "1" / "tokenizer.json", artifact.tokenizer_json)
    _write(folder / "1" / "settings.json", json.dumps(settings, ensure_ascii=False, indent=1) + "\n")


def _write_model(folder: Path, artifact: Artifact, served: Served, engines: dict[str, EngineFile]) -> None:
    _write(folder / "config.pbtxt", triton_config.model_config(served))
    if isinstance(artifact, Plan) and engines:
        for engine in engines.values():
            _write(folder / "1" / _file_name(engine), artifact.read(engine.name))
        return
    if isinstance(artifact, Plan):
        model = onnx.load_model_from_string(artifact.read(MODEL))
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
