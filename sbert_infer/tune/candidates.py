"""What may be tried: files of one checkpoint, devices, workers and threads, tokens per batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sbert_infer._util.cores import usable_cores
from sbert_infer.artifact.exports import open_model
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.artifact.manifest import Artifact, check_one_route
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.backends.base import Backend
from sbert_infer.backends.select import BackendOptions
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.errors import ArtifactError

_MOST_THREADS = 8  # that share one batch
_CPU_BATCHES = (0.5, 2, 4)  # times the backend's own tokens per batch
_SOME = 2  # batches that each worker has in a round
_GPU_BATCHES = (0.25, 0.5)  # its own are the most


@dataclass(frozen=True)
class Candidate:
    """An artifact, and the options to open it with."""

    artifact: Artifact
    options: BackendOptions = field(default_factory=BackendOptions)


def open_artifacts(names: Sequence[str]) -> list[Artifact]:
    """Open files, or checkpoints by name, each once, and check that they are of one model."""
    artifacts = list({artifact.sha256: artifact for artifact in map(open_model, names)}.values())
    first, *others = artifacts
    for artifact in artifacts:
        check_one_route(artifact, "sbert-tune")
        if artifact.manifest.canaries is None:
            cure = "it was made before artifacts had them: export it again"
            raise ArtifactError(f"{artifact.path} has no canaries to tell right vectors by; {cure}")
    for other in others:
        here, there = fingerprint(first), fingerprint(other)
        if here.model != there.model:
            parts = [part for part in here.differences(there) if part != "precision"]
            what = f"{other.path} is of another checkpoint than {first.path}"
            raise ArtifactError(f"{what}: its {' and '.join(parts)} differ{'s' * (len(parts) == 1)}")
    return artifacts


def ways(artifacts: Sequence[Artifact]) -> Iterator[Candidate]:
    """Yield each artifact on each device that it may run on, first the first by default."""
    has_gpu = cuda.driver_problem() is None
    for artifact in artifacts:
        precision, is_plan = artifact.manifest.precision, isinstance(artifact, Plan)
        gpu_first = ["cuda", "cpu"] if is_plan else ["cpu", "cuda"]
        devices = gpu_first if has_gpu and precision != "int8" else ["cpu"]
        if artifact is artifacts[0]:
            yield Candidate(artifact)
            devices = devices[1:]  # the first one is the default
        # In FP32, as it else would, a BF16 file runs no better than one in FP32.
        strict = precision == "bf16" and not is_plan
        yield from (Candidate(artifact, BackendOptions(device, strict=strict)) for device in devices)


def layouts(best: Candidate, backend: Backend) -> Iterator[Candidate]:
    """Yield other ways to share the cores; none on a GPU."""
    if backend.device != "cpu":
        return
    cores, threads = usable_cores(), 2
    if cores > 1:  # one worker for each core that two hardware threads share
        yield _with(best, workers=cores // 2, threads=1)
    while threads <= min(cores, _MOST_THREADS):
        yield _with(best, workers=cores // threads, threads=threads)
        threads *= 2


def batches(best: Candidate, backend: Backend, tokens: int) -> Iterator[Candidate]:
    """Yield other numbers of tokens per batch, if each worker has some such batches of `tokens`."""
    for factor in _CPU_BATCHES if backend.device == "cpu" else _GPU_BATCHES:
        size = int(backend.max_batch_tokens * factor)
        if size * backend.workers * _SOME <= tokens:
            yield _with(best, max_batch_tokens=size)


def _with(candidate: Candidate, **options: Any) -> Candidate:
    return Candidate(candidate.artifact, replace(candidate.options, **options))


def file_of(candidate: Candidate) -> str:
    """Return the name of the candidate's file."""
    return Path(candidate.artifact.path).name
