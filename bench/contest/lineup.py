"""Who takes part on a CPU: our engine, the eager reference, and other libraries if installed.

To add a rival, add a `Contestant` to `RIVALS` here, and to inside/loaders.py the function that
loads it; if it needs files made from the checkpoint, also a function in inside/converters.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbert_infer._util.hardware import instruction_sets
from sbert_infer.artifact.manifest import RERANKER, Artifact
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.bench.errors import BenchError

OURS = "sbert-infer"
EAGER = "eager PyTorch"
SENTENCE_TRANSFORMERS = "sentence-transformers"
TUNED = ", tuned"  # suffix of the name of a tuned entry
BATCH_SIZES = (8, 16, 32, 64, 128)  # tried for each rival's tuned entry, on CPUs

# The lowest cosine with the eager reference's vector that is still right, by family.
MIN_COSINE = {"fp32": 0.999, "fp16": 0.999, "bf16": 0.99, "int8": 0.95}
# For rerankers: the largest error of a score, in standard deviations of the reference's scores, and
# the lowest correlation with them, for families whose rounding changes every score.
MAX_ERROR = {"fp32": 1e-3, "fp16": 1e-2}
MIN_CORRELATION = {"fp32": 0.999, "fp16": 0.999, "bf16": 0.99, "int8": 0.95}


@dataclass(frozen=True)
class Contestant:
    """One entry, which runs in a process of its own."""

    name: str
    family: str  # fp32, fp16, bf16 or int8
    spec: Mapping[str, Any]  # arguments for its loader, which `kind` names
    ours: bool = False
    needs: tuple[str, ...] = ()  # packages, by their names on PyPI
    third_party: bool = False  # runs in the rivals' interpreter
    current: bool = False  # runs in ours if it is installed there, in a newer version than the rivals' others allow
    converter: str = ""  # makes the files it runs, by its name in inside/converters.py
    model_files: str = ""  # glob pattern of those files; by default the checkpoint's weights
    tuned: bool = False  # sorted by length and with the best batch size, both by us
    tunable: bool = False
    tuned_spec: Mapping[str, Any] = field(default_factory=dict)  # what else is tuned: further arguments for its loader
    own_batch_size: int | None = None  # the library's default, in texts
    sorts: bool = False  # the library itself sorts by length
    on_sigill: Mapping[str, str] = field(default_factory=dict)  # environment to retry with after SIGILL
    same_graph: bool = False  # runs the graph of another entry: only its speed is of interest
    batch_sizes: tuple[int, ...] = BATCH_SIZES  # tried for its tuned entry
    out: str = ""  # why it can't take part, if that is known before
    note: str = ""  # shown with its results

    @property
    def own_quality(self) -> bool:
        """Whether its vectors can differ from those of the other entries."""
        return not self.tuned and not self.same_graph

    def as_tuned(self) -> Contestant:
        """Return the entry for the same library in its best configuration."""
        spec = {**self.spec, **self.tuned_spec}
        return dataclasses.replace(self, name=f"{self.name}{TUNED}", spec=spec, tuned=True)


_ST = SENTENCE_TRANSFORMERS
_ONNX = (_ST, "optimum", "onnxruntime", "onnx")
_OPENVINO = (_ST, "optimum-intel", "openvino")
# oneDNN trusts the CPU's flags, but some hypervisors announce AMX and then refuse it. This turns
# off AMX alone.
_WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


def _rival(name: str, spec: Mapping[str, Any], needs: tuple[str, ...], **more: Any) -> Contestant:
    """Make an entry for another library; what is not given is as in most of them."""
    more = {"family": "fp32", "own_batch_size": 32, "sorts": True, **more}
    return Contestant(name, spec=spec, needs=needs, third_party=True, tunable=True, **more)


def _sentence_transformers(
    name: str, needs: tuple[str, ...], backend: str = "torch", options: Mapping[str, Any] | None = None, **more: Any
) -> Contestant:
    return _rival(f"{_ST} {name}", {"kind": _ST, "backend": backend, **(options or {})}, needs, **more)


def _sentence_transformers_onnx(name: str, **more: Any) -> Contestant:
    return _sentence_transformers(name, _ONNX, "onnx", model_files="onnx/model.onnx", **more)


def _sentence_transformers_openvino(name: str, precision: str, **more: Any) -> Contestant:
    """Name the precision, which OpenVINO would else choose by the CPU."""
    options = {"model_kwargs": {"ov_config": {"INFERENCE_PRECISION_HINT": precision}}} if precision else {}
    more = {"needs": _OPENVINO, "converter": "openvino", "on_sigill": _WITHOUT_AMX, **more}
    return _sentence_transformers(name, backend="openvino", options=options, model_files="openvino/*.bin", **more)


def _ctranslate2(name: str, family: str, converter: str) -> Contestant:
    return _rival(
        name,
        {"kind": "ctranslate2"},
        ("ctranslate2", "transformers"),  # the latter for its converter
        family=family,
        converter=converter,
        model_files="model.bin",
        sorts=False,
        tuned_spec={"batch_per_core": True},
    )


def _llama_cpp(name: str, family: str, converter: str) -> Contestant:
    needs = ("xllamacpp", "gguf", "safetensors", "tokenizers")
    return _rival(
        name,
        {"kind": "llama.cpp"},
        needs,
        family=family,
        converter=converter,
        model_files="model.gguf",
        own_batch_size=1,
        sorts=False,
    )


RIVALS: tuple[Contestant, ...] = (
    _sentence_transformers("torch", (_ST,), current=True),
    _sentence_transformers("torch.compile", (_ST,), options={"compile": True}, current=True),
    _sentence_transformers_onnx("onnx", converter="onnx"),
    _sentence_transformers_onnx("onnx O3", converter="onnx-O3"),
    _sentence_transformers_openvino("openvino", "f32"),
    _sentence_transformers_openvino("openvino bf16", "bf16", family="bf16"),
    _sentence_transformers_openvino(
        "openvino int8", "", family="int8", converter="openvino-int8", needs=(*_OPENVINO, "nncf", "datasets")
    ),
    _sentence_transformers_onnx("onnx int8", converter="onnx-int8", family="int8"),
    _rival(
        "fastembed",
        {"kind": "fastembed"},
        ("fastembed", *_ONNX),  # the latter for the ONNX file that it runs
        converter="onnx",
        model_files="onnx/model.onnx",
        own_batch_size=256,
        sorts=False,
    ),
    _rival("infinity", {"kind": "infinity"}, ("infinity_emb", _ST)),
    _ctranslate2("ctranslate2", "fp32", "ctranslate2"),
    _ctranslate2("ctranslate2 int8", "int8", "ctranslate2-int8"),
    _llama_cpp("llama.cpp f16", "fp16", "gguf-f16"),
    _llama_cpp("llama.cpp q8_0", "int8", "gguf-q8_0"),
)
PAIR_RIVALS: tuple[Contestant, ...] = (_rival(f"{_ST} CrossEncoder", {"kind": "cross-encoder"}, (_ST,)),)

# Packages whose versions are recorded with the results.
PACKAGES = tuple(
    sorted(
        {package for rival in (*RIVALS, *PAIR_RIVALS) for package in rival.needs}
        | {"sbert-infer", "numpy", "tokenizers", "torch", "transformers", "optimum-onnx"}
        | {"flash-attn", "onnxruntime-gpu", "tensorrt", "tensorrt-cu12", "tensorrt-rtx-cu13", "triton"}
    )
)


def line_up(
    artifacts: Sequence[Artifact], checkpoint: Mapping[str, Any], not_exported: Mapping[str, str] | None = None
) -> list[Contestant]:
    """List all contestants on the CPU, installed or not, the eager reference first.

    `checkpoint` is what the loaders need to know about it; `not_exported` says why there is no
    artifact in a precision.
    """
    known = {**checkpoint, "max_length": artifacts[0].manifest.max_length}
    eager = Contestant(EAGER, "fp32", {"kind": "eager", **known}, own_batch_size=32, sorts=True)
    missing = (not_exported or {}).items()
    engines = [*_engines(artifacts), *(Contestant(f"{OURS} {kind}", kind, {}, out=why) for kind, why in missing)]
    if artifacts[0].manifest.kind == RERANKER:
        own, rivals = [eager, *engines], PAIR_RIVALS
    else:
        own, rivals = [eager, *engines, *_plain_onnxruntime(artifacts)], RIVALS
    has_bf16 = not {"AVX-512 BF16", "AMX BF16"}.isdisjoint(instruction_sets())
    lacking = "" if has_bf16 else "this CPU has no BF16"
    return [
        *own,
        *(
            dataclasses.replace(rival, spec={**known, **rival.spec}, out=lacking if rival.family == "bf16" else "")
            for rival in rivals
        ),
    ]


def settle(contestants: Iterable[Contestant], ours: Mapping[str, str]) -> list[Contestant]:
    """Let those that may run in our interpreter do so if it has what they need, and say so."""
    return [
        dataclasses.replace(one, third_party=False, note=f"{one.needs[0]} {ours[one.needs[0]]}")
        if one.current and set(one.needs) <= set(ours)
        else one
        for one in contestants
    ]


def not_installed(contestants: Iterable[Contestant], ours: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Names of the contestants that lack a package, given the versions in the two interpreters."""
    return {one.name for one in contestants if not set(one.needs) <= set(theirs if one.third_party else ours)}


def choose(contestants: Sequence[Contestant], absent: set[str], only: Sequence[str]) -> list[Contestant]:
    """Pick those installed and asked for, each tunable one followed by its tuned entry.

    The first, the reference, always takes part.
    """
    installed = [one for one in contestants if one.name not in absent]
    asked = [one for one in installed if not only or any(part in one.name for part in only)]
    if not asked:
        names = ", ".join(one.name for one in installed)
        raise BenchError(f"--only {' --only '.join(only)} leaves nobody; there are: {names}")
    chosen = asked if contestants[0] in asked else [contestants[0], *asked]
    return [entry for one in chosen for entry in ([one, one.as_tuned()] if one.tunable else [one])]


def file_mb(contestant: Contestant) -> float | None:
    """Size of the model files that it runs."""
    spec = contestant.spec
    if "artifact" in spec:
        return _mb([Path(spec["artifact"]), Path(f"{spec['artifact']}.data")])
    folder, pattern = Path(spec["model"]), spec.get("file", "").replace(".xml", ".bin") or contestant.model_files
    if pattern:
        return _mb(folder.glob(pattern))
    return _mb(folder.rglob("model*.safetensors")) or _mb(folder.rglob("pytorch_model*.bin"))


def _mb(files: Iterable[Path]) -> float | None:
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return sum(sizes) / 1e6 if sizes else None


def _engines(artifacts: Sequence[Artifact]) -> list[Contestant]:
    """List our entries, one for each artifact."""
    families = [artifact.manifest.precision for artifact in artifacts]
    entries = []
    for artifact, family in zip(artifacts, families, strict=True):
        name = f"{OURS} {family}" + (f" ({artifact.path.name})" if families.count(family) > 1 else "")
        place = {"artifact": str(artifact.path.resolve()), "device": "cpu"}
        spec = {"kind": "engine", "pairs": artifact.manifest.kind == RERANKER, **place}
        needs = "onnxruntime"
        if family == "bf16":  # onnxruntime would run it in FP32
            spec["runs"], needs = "OpenVINO", "openvino"
        entries.append(Contestant(name, family, spec, ours=True, needs=(needs,)))
    return entries


def _plain_onnxruntime(artifacts: Sequence[Artifact]) -> list[Contestant]:
    """Our graph without our batching, to show what that is worth; FP32 if there is an artifact."""
    models = [one for one in artifacts if not isinstance(one, Plan) and one.manifest.precision != "bf16"]
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
