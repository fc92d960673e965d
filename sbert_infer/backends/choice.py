"""What `sbert-tune` has chosen on this machine: how a model runs fastest that is near enough.

A choice is kept in the user's cache under the seal of the artifact that it is for. It names the
file to open by its path and its seal, and all that it depends on: the processor, how many cores may
be used, and the versions of packages. If any of these has changed, there is no choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sbert_infer._util.cache import CACHE_VARIABLE
from sbert_infer._util.cores import cpu_quota, usable_cores
from sbert_infer._util.hardware import cpu_name, instruction_sets
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.backends.select import BackendOptions
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build_cache import engine_key, keep_verdict, kept_verdict
from sbert_infer.backends.tensorrt.cuda_packages import version
from sbert_infer.errors import ArtifactError, EngineError

_VERSION = 1  # of what is kept: another one is not read
_PACKAGES = ("sbert-infer", "onnxruntime", "onnxruntime-gpu", "openvino", "tokenizers")
_GPU_PACKAGES = ("tensorrt", "tensorrt_rtx", "cuda-bindings", "torch", "triton")


class NoChoiceError(EngineError):
    """There is no choice for an artifact, or none that still holds; `command` makes one."""

    def __init__(self, message: str, command: str) -> None:
        self.command = command
        super().__init__(message)


@dataclass(frozen=True)
class Choice:
    """The fastest way to run a model here whose vectors are near enough to the eager model's."""

    path: str  # of the artifact to open
    seal: str  # its sha256
    model: str  # its fingerprint without the precision: that of the artifact that this is for
    device: str | None
    workers: int | None
    threads: int | None
    max_batch_tokens: int | None
    backend: str  # what runs it, as it describes itself
    ratio: float  # its speed, by that of the artifact that this is for, with default options
    cosine: float  # the lowest on the canaries
    min_cosine: float  # that was asked for
    command: str  # that has made the choice
    conditions: Mapping[str, str]

    @property
    def options(self) -> BackendOptions:
        """The options with which to open the artifact."""
        return BackendOptions(self.device, False, self.workers, self.threads, self.max_batch_tokens)

    def __str__(self) -> str:
        tokens = "" if self.max_batch_tokens is None else f", {self.max_batch_tokens} tokens a batch"
        found = f"{self.ratio:.2f}x the default, lowest cosine {self.cosine:.6f} ({self.min_cosine:g} was asked)"
        return f"{Path(self.path).name} with {self.backend}{tokens}: {found}"


def remember(artifact: Artifact, choice: Choice) -> None:
    """Keep the choice for `artifact`, instead of any before."""
    content = json.dumps(asdict(choice)).encode()
    with suppress(RuntimeError):  # no home folder
        keep_verdict(_key(artifact), content)
        if kept_verdict(_key(artifact)) == content:
            return
    raise EngineError(f"the choice can't be kept: set {CACHE_VARIABLE} to a folder that can be written")


def recall(artifact: Artifact) -> tuple[Choice, Artifact]:
    """Return the choice for `artifact`, and the artifact to open; raise `NoChoiceError`."""
    command = f"sbert-tune {artifact.path}"
    kept = None
    with suppress(RuntimeError):  # no home folder
        kept = kept_verdict(_key(artifact))
    if kept is None:
        raise NoChoiceError("sbert-tune has chosen nothing for this file on this machine", command)
    choice = Choice(**json.loads(kept))
    if changed := _changed(choice.conditions):
        raise NoChoiceError(f"what sbert-tune chose is void: {changed}", choice.command)
    name = Path(choice.path).name
    try:
        chosen = artifact if choice.seal == artifact.sha256 else open_artifact(choice.path)
    except (OSError, ArtifactError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        what = f"what sbert-tune chose, {name}, can't be opened: {reason.removeprefix(f'{choice.path}: ')}"
        raise NoChoiceError(what, choice.command) from error
    if chosen.sha256 != choice.seal or fingerprint(chosen).model != fingerprint(artifact).model:
        raise NoChoiceError(f"what sbert-tune chose is void: {name} has changed", choice.command)
    return choice, chosen


def conditions() -> dict[str, str]:
    """Return what a choice depends on besides the artifacts."""
    here = {"cores": usable_cores(), "CPU quota": cpu_quota(), "CPU": cpu_name(), "instructions": instruction_sets()}
    found = {name: str(value) for name, value in here.items()}
    packages = list(_PACKAGES)
    if cuda.driver_problem() is None:
        packages += _GPU_PACKAGES
        found["GPUs"] = ", ".join(map(cuda.device_name, range(cuda.device_count())))
        found["driver's CUDA"], found["driver"] = str(cuda.driver_cuda()), cuda.driver_release() or "unknown"
    return found | {package: version(package) or "not installed" for package in packages}


def _changed(before: Mapping[str, str]) -> str:
    """Return the first condition that is another one now, with both; "" if there is none."""
    now = conditions()
    changes = (name for name in {**before, **now} if before.get(name) != now.get(name))
    return next((f"{name} was {before.get(name, 'none')}, and is {now.get(name, 'none')}" for name in changes), "")


def _key(artifact: Artifact) -> str:
    return engine_key("choice", _VERSION, artifact.sha256)
