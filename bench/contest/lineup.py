"""Who takes part: ours, the eager reference, and other libraries where they are installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbert_infer.artifact.manifest import RERANKER, Artifact
from sbert_infer.artifact.plan_file import Plan

__all__ = [
    "BATCH_SIZES",
    "EAGER",
    "MAX_ERROR",
    "MIN_CORRELATION",
    "MIN_COSINE",
    "PACKAGES",
    "TUNED",
    "Contestant",
    "file_mb",
    "line_up",
    "not_installed",
]

EAGER = "eager PyTorch"
TUNED = ", tuned"  # how the name of a tuned entry ends
BATCH_SIZES = (8, 16, 32, 64, 128)  # tried for each rival's tuned entry

# Cosine with the eager reference's vector that every text must reach, by family. Below it, an entry
# is wrong.
MIN_COSINE = {"fp32": 0.999, "fp16": 0.999, "int8": 0.95}
# For rerankers: the largest error of a score, in standard deviations of the reference's scores, and
# how the scores must correlate where rounding changes all of them.
MAX_ERROR = {"fp32": 1e-3, "fp16": 1e-2}
MIN_CORRELATION = {"fp32": 0.999, "fp16": 0.999, "int8": 0.95}


@dataclass(frozen=True)
class Contestant:
    """One entry, run in a process of its own."""

    name: str
    family: str  # fp32, fp16 or int8
    spec: Mapping[str, Any]  # what its loader in loaders.py needs
    ours: bool = False
    needs: tuple[str, ...] = ()  # packages, by their names on PyPI
    third_party: bool = False  # runs in the rivals' interpreter
    prepare: Mapping[str, Any] | None = None  # files to make of the checkpoint first
    tuned: bool = False  # sorted by length and with the best batch size, both by us
    tunable: bool = False
    own_batch_size: int | None = None  # texts; its default
    sorts: bool = False  # by length, by itself
    on_sigill: Mapping[str, str] = field(default_factory=dict)  # environment to try if the CPU refuses its code
    same_graph: bool = False  # as another entry's: only its speed is of interest

    @property
    def own_quality(self) -> bool:
        """Whether its vectors are worth examining beside those of the other entries."""
        return not self.tuned and not self.same_graph

    def tuned_twin(self) -> Contestant:
        """The same library in a fair configuration."""
        return dataclasses.replace(self, name=f"{self.name}{TUNED}", tuned=True)


_ST = "sentence-transformers"
_ONNX = (_ST, "optimum", "onnxruntime", "onnx")
_PLAIN_ONNX = {"backend": "onnx", "prepare": "plain"}


def _st(
    name: str, backend: str, prepare: str | None, needs: tuple[str, ...], family: str = "fp32", **more: Any
) -> Contestant:
    return Contestant(
        name=f"{_ST} {name}",
        family=family,
        spec={"kind": _ST, "backend": backend},
        needs=needs,
        third_party=True,
        prepare={"backend": backend, "prepare": prepare} if prepare else None,
        tunable=True,
        own_batch_size=32,
        sorts=True,
        **more,
    )


# oneDNN trusts the CPU's flags; under some hypervisors AMX is announced and then refused. All but
# AMX stays on.
_NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}

THIRD_PARTY = (
    _st("torch", "torch", None, (_ST,)),
    _st("onnx", "onnx", "plain", _ONNX),
    _st("onnx O3", "onnx", "O3", _ONNX),
    _st("openvino", "openvino", "plain", (_ST, "optimum-intel", "openvino"), on_sigill=_NO_AMX),
    _st("onnx int8", "onnx", "int8", _ONNX, family="int8"),
    Contestant(
        name="fastembed",
        family="fp32",
        spec={"kind": "fastembed"},
        needs=("fastembed", *_ONNX),  # the latter for the ONNX file that it runs
        third_party=True,
        prepare=_PLAIN_ONNX,
        tunable=True,
        own_batch_size=256,
    ),
    Contestant(
        name="infinity",
        family="fp32",
        spec={"kind": "infinity"},
        needs=("infinity_emb", _ST),
        third_party=True,
        tunable=True,
        own_batch_size=32,
        sorts=True,
    ),
)

_OF_PAIRS = (dataclasses.replace(_st("CrossEncoder", "torch", None, (_ST,)), spec={"kind": "cross-encoder"}),)

# Whose versions are part of a result.
PACKAGES = tuple(
    sorted(
        {package for rival in THIRD_PARTY for package in rival.needs}
        | {"sbert-infer", "numpy", "tokenizers", "torch", "transformers", "optimum-onnx"}
    )
)


def line_up(artifacts: Sequence[Artifact], checkpoint: Mapping[str, Any], cuda: Mapping[str, Any]) -> list[Contestant]:
    """Every contestant, installed or not, the eager reference first. `checkpoint` is what its loaders need to know."""
    limit = {"max_length": artifacts[0].manifest.max_length}
    eager = Contestant(EAGER, "fp32", {"kind": "eager", **checkpoint, **limit}, own_batch_size=32, sorts=True)
    pairs = artifacts[0].manifest.kind == RERANKER
    own = [eager, *_engines(artifacts, cuda["available"])]
    if not pairs:
        own = [eager, *_on_cuda(eager, cuda), *own[1:], *_plain_onnxruntime(artifacts)]
    rivals = _OF_PAIRS if pairs else THIRD_PARTY
    return [*own, *(dataclasses.replace(rival, spec={**checkpoint, **limit, **rival.spec}) for rival in rivals)]


def not_installed(contestants: Iterable[Contestant], ours: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Names of the contestants that lack a package, given the versions found in the two interpreters."""
    return {one.name for one in contestants if not set(one.needs) <= set(theirs if one.third_party else ours)}


def file_mb(contestant: Contestant) -> float | None:
    """The size of the model file that it runs."""
    spec = contestant.spec
    if "artifact" in spec:
        return _mb([Path(spec["artifact"]), Path(f"{spec['artifact']}.data")])
    folder = Path(spec["model"])
    if "file" in spec:
        return _mb([folder / spec["file"]])
    pattern = {"onnx": "onnx/model.onnx", "openvino": "openvino/*.bin"}.get(spec.get("backend", ""), "")
    if spec["kind"] == "fastembed":
        pattern = "onnx/model.onnx"
    found = list(folder.glob(pattern)) if pattern else []
    return _mb(found or list(folder.rglob("model*.safetensors")) or list(folder.rglob("pytorch_model*.bin")))


def _mb(files: Iterable[Path]) -> float | None:
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return sum(sizes) / 1e6 if sizes else None


def _engines(artifacts: Sequence[Artifact], gpu: bool) -> list[Contestant]:
    """Each artifact where it belongs; on a machine with a GPU, FP32 there, too, and plans on both."""
    families = [artifact.manifest.precision for artifact in artifacts]
    entries = []
    for artifact, family in zip(artifacts, families, strict=True):
        name = f"sbert-infer {family}" + (f" ({artifact.path.name})" if families.count(family) > 1 else "")
        plan = isinstance(artifact, Plan)
        places = {"cpu": ", CPU" if plan else ""} | ({"cuda": ", CUDA"} if gpu and family != "int8" else {})
        for device, suffix in places.items():
            place = {"artifact": str(artifact.path.resolve()), "device": device}
            spec = {"kind": "engine", "pairs": artifact.manifest.kind == RERANKER, **place}
            entries.append(Contestant(name + suffix, family, spec, ours=True, needs=("onnxruntime",)))
    return entries


def _plain_onnxruntime(artifacts: Sequence[Artifact]) -> list[Contestant]:
    """The same graph without our batching: shows what that is worth."""
    models = [artifact for artifact in artifacts if not isinstance(artifact, Plan)]
    return [
        Contestant(
            name="onnxruntime, plain",
            family=artifact.manifest.precision,
            spec={"kind": "onnxruntime", "artifact": str(artifact.path.resolve())},
            needs=("onnxruntime",),
            tunable=True,
            own_batch_size=32,
            same_graph=True,
        )
        for artifact in sorted(models, key=lambda one: one.manifest.precision != "fp32")[:1]
    ]


def _on_cuda(eager: Contestant, cuda: Mapping[str, Any]) -> list[Contestant]:
    if not cuda["available"]:
        return []
    spec = {**eager.spec, "device": "cuda", "dtype": "float16"}
    entries = [dataclasses.replace(eager, name=f"{EAGER} fp16, CUDA", family="fp16", spec=spec)]
    if cuda["flash_attention"]:
        flash = {**spec, "attention": "flash_attention_2"}
        entries.append(dataclasses.replace(entries[0], name=f"{EAGER} fp16 flash, CUDA", spec=flash))
    return entries
