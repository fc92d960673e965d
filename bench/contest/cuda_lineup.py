"""Who takes part on a GPU. None of these entries has been run on one yet.

The reference is the eager model in FP32 on the GPU as well: on the CPU it would take hours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sbert_infer.artifact.manifest import RERANKER, Artifact
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.bench.contest.lineup import EAGER, SENTENCE_TRANSFORMERS, Contestant
from sbert_infer.bench.errors import BenchError

BATCH_SIZES = (32, 64, 128, 256, 512)  # a GPU needs more texts than a CPU
TENSORRT, ONNXRUNTIME = "tensorrt", "onnxruntime"  # what must run our entries, as `Engine.info` says it
# FP16 with attention over unpadded texts: what a user of sentence-transformers can have.
FLASH = Contestant(
    f"{SENTENCE_TRANSFORMERS} fp16, flash attention, unpadded",
    "fp16",
    {
        "kind": SENTENCE_TRANSFORMERS,
        "backend": "torch",
        "device": "cuda",
        "model_kwargs": {"dtype": "float16", "attn_implementation": "flash_attention_2"},
        "unpadded": True,
    },
    needs=(SENTENCE_TRANSFORMERS, "flash-attn"),
    third_party=True,
    tunable=True,
    own_batch_size=32,
    sorts=True,
    batch_sizes=BATCH_SIZES,
)


def cuda_line_up(
    artifacts: Sequence[Artifact], checkpoint: Mapping[str, Any], not_exported: Mapping[str, str]
) -> list[Contestant]:
    """List all contestants, the eager reference first.

    `checkpoint` is what the loaders need to know about it; `not_exported` says why there is no plan
    for a place of pooling.
    """
    if artifacts[0].manifest.kind == RERANKER:
        raise BenchError("--device cuda measures sentence encoders; rerankers are measured on CPUs")
    known = {**checkpoint, "max_length": artifacts[0].manifest.max_length}
    eager = Contestant(
        EAGER,
        "fp32",
        {"kind": "eager", **known, "device": "cuda", "dtype": "float32"},
        own_batch_size=32,
        sorts=True,
        batch_sizes=BATCH_SIZES,
    )
    half = dataclasses.replace(eager, name=f"{EAGER} fp16", family="fp16", spec={**eager.spec, "dtype": "float16"})
    entries = [eager, dataclasses.replace(half, tunable=True), *_ours(artifacts)]
    entries += [
        Contestant(_tensorrt_name(pooling, "fp16"), "fp16", {}, out=why) for pooling, why in not_exported.items()
    ]
    return [*entries, dataclasses.replace(FLASH, spec={**known, **FLASH.spec})]


def _ours(artifacts: Sequence[Artifact]) -> list[Contestant]:
    """Each plan with TensorRT; the first, and FP32 artifacts, as on a machine without TensorRT."""
    plans = [artifact for artifact in artifacts if isinstance(artifact, Plan)]
    others = [one for one in artifacts if not isinstance(one, Plan) and one.manifest.precision != "int8"]
    return [
        *(_entry(_tensorrt_name(plan.pooling, plan.manifest.precision), plan, TENSORRT) for plan in plans),
        *(
            _entry(f"sbert-infer {one.manifest.precision}, onnxruntime", one, ONNXRUNTIME)
            for one in [*plans[:1], *others]
        ),
    ]


def _tensorrt_name(pooling: str, precision: str) -> str:
    return f"sbert-infer {precision}, TensorRT, pooling in the {pooling}"


def _entry(name: str, artifact: Artifact, runs: str) -> Contestant:
    spec = {"kind": "engine", "artifact": str(artifact.path.resolve()), "device": "cuda", "runs": runs}
    return Contestant(name, artifact.manifest.precision, spec, ours=True)
