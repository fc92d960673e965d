"""A checkpoint's files: in a local folder, or fetched from the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from sbert_infer.artifact.hub import HubModel
from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.modules import Problems, read_json


def locate(source: str, trust_remote_code: bool = False) -> Path:
    """The local folder of `source`, downloaded if it is a model of the hub."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).is_file():
        what = "a file: name the folder of a checkpoint, or a hub id; --inspect and --triton-repository take artifacts"
        raise CheckpointError(source, [what])
    missing = "neither a folder here nor a model that could be fetched from the hub"
    if (model := HubModel.parse(source)) is None:
        raise CheckpointError(source, [f"{missing} (it can't be the name of one)"])
    try:
        info = model.info()
        files = needed_files((file.rfilename for file in info.siblings or []), trust_remote_code)
        return HubModel(model.repository, info.sha).download(files)
    except Exception as error:  # see HubModel
        try:  # without a network, the files of an earlier download are as good
            return model.downloaded()
        except Exception:
            raise CheckpointError(source, [f"{missing} ({first_line(error)})"]) from error


def needed_files(files: Iterable[str], trust_remote_code: bool = False) -> list[str]:
    """The files of a repository that a checkpoint needs; `.bin` only without safetensors."""
    paths = [PurePosixPath(file) for file in files]
    safe = {path.parent for path in paths if path.match("model*.safetensors")}
    patterns = [
        "*.json",
        "*.txt",
        "*.model",
        "model*.safetensors",
        "adapter_model.safetensors",
        "*_linear.pt",
        "artifact.metadata",
        *(["*.py"] if trust_remote_code else []),
    ]
    return [
        str(path)
        for path in paths
        if path.parts[0] not in ("onnx", "openvino")
        and (any(map(path.match, patterns)) or (path.match("pytorch_model*.bin") and path.parent not in safe))
    ]


def weight_files(folder: Path, name: str, problems: Problems) -> list[Path]:
    """The weight files in use: safetensors rather than `.bin`, one file rather than shards."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            weight_map = read_json(index, f"{name}{index.name}", problems).get("weight_map", {})
            shards = [folder / shard for shard in sorted(set(weight_map.values()))]
            problems += [
                f"{name}{shard.name} is missing, though {index.name} lists it"
                for shard in shards
                if not shard.is_file()
            ]
            return shards
    problems.append(f"{name or 'the folder'} has no weights (model.safetensors or pytorch_model.bin)")
    return []


def shown(folder: Path, root: Path) -> str:
    """Prefix of a file's name in messages: relative to the checkpoint, empty at its top."""
    return "" if folder == root else f"{folder.relative_to(root).as_posix()}/"


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if there is no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
