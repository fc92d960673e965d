"""What `sbert-export --inspect` shows: all that an artifact says of itself, its bytes checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import MULTI_VECTOR, RERANKER, SPARSE_ENCODER, Artifact, Manifest
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.encode.multi_vector import role_of

__all__ = ["inspect"]


def inspect(path: Path) -> str:
    """A report on the artifact at `path`. Raises `ArtifactError` if a byte of it is not what was written."""
    artifact = open_artifact(path)
    size = path.stat().st_size + sum(file.size for file in artifact.manifest.data_files)
    plan = isinstance(artifact, Plan)
    first = f"{path}  {'plan' if plan else 'ONNX'}, {_megabytes(size)}, {artifact.manifest.precision}"
    rows = [*_model(artifact.manifest), *(_plan(artifact) if isinstance(artifact, Plan) else _onnx(artifact))]
    return "\n".join([first, *(f"  {name:<10}{text}" for name, text in rows)])


def _model(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What every artifact says."""
    yield "model", f"{manifest.name} ({manifest.architecture}), weights sha256 {manifest.weights_sha256}"
    yield from {RERANKER: _scores, MULTI_VECTOR: _token_vectors}.get(manifest.kind, _vectors)(manifest)
    for name, prompt in manifest.prompts.items():
        default = "  (default)" if name == manifest.default_prompt_name else ""
        yield "prompt", f"{name}: {json.dumps(prompt, ensure_ascii=False)}{default}"
    yield "parity", f"{_parity(manifest)}; at least {manifest.parity['threshold']} was asked for"
    yield "made by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def _vectors(manifest: Manifest) -> Iterator[tuple[str, str]]:
    dims = f"{manifest.dim} dimensions"
    if manifest.kind == SPARSE_ENCODER:
        dims += f", sparse, at most {manifest.max_active_dims} active" if manifest.max_active_dims else ", sparse"
    yield "vectors", f"{dims}, texts of up to {manifest.max_length} tokens, {manifest.similarity}"
    pooling = " + ".join(manifest.pooling) + (", scaled to length 1" if manifest.normalized else "")
    yield "pooling", pooling + ("" if manifest.include_prompt else ", without the prompt")


def _token_vectors(manifest: Manifest) -> Iterator[tuple[str, str]]:
    scaled = ", scaled to length 1" if manifest.normalized else ""
    yield "vectors", f"{manifest.dim} dimensions for each token{scaled}, {manifest.similarity}"
    for task in ("query", "document"):
        role = role_of(manifest, task)
        filled = f", filled up to {role.expand_to} tokens" if role.expand_to else ""
        skipped = f", {len(role.skip_ids)} kinds of tokens left out" if role.skip_ids else ""
        yield task, f"up to {role.max_length} tokens{filled}{skipped}"


def _scores(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "reranker", f"pairs of up to {manifest.max_length} tokens, activation {manifest.activation}"
    yield "labels", ", ".join(manifest.labels)


def _parity(manifest: Manifest) -> str:
    parity = manifest.parity
    if manifest.kind == RERANKER:
        difference = f"max-abs {parity['max_abs']:.1e} of scores that spread by {parity['spread']:.1e}"
        order = f"{parity['rank_agreement']:.2%} in the same order"
        return f"{difference}, {order}, on {parity['pairs']} pairs, correlation {parity['correlation']:.6f}"
    cosine = f"cosine min {parity['min_cosine']:.6f}, mean {parity['mean_cosine']:.6f}"
    return f"{cosine}, max-abs {parity['max_abs']:.1e}, on {parity['texts']} texts"


def _onnx(artifact: Artifact) -> Iterator[tuple[str, str]]:
    fusion = artifact.manifest.fusion
    nodes = f"{fusion['attention']} of {fusion['layers']} attention, {fusion['gelu']} of {fusion['gelu_layers']} gelu"
    yield "fused", nodes if fusion["attention"] else "nothing: standard operators only"
    for file in artifact.manifest.data_files:
        yield "weights", f"{file.name}  {_megabytes(file.size)}  sha256 {file.sha256}"
    yield "checked", "every byte is as it was written"


def _plan(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "pooled", "in the graph" if plan.pooling == "graph" else "by the Triton kernel, after the graph"
    for profile in plan.profiles:
        yield "profile", f"{profile.length} tokens, up to {profile.max_batch} texts, tuned for {profile.best_batch}"
    for engine in plan.engines:
        yield "engine", engine.describe()
    if not plan.engines:
        yield "engine", "none inside: one is built at first use on a machine with a GPU and TensorRT"
    for name, (size, digest) in plan.members.items():
        plan.read(name)  # checks it
        yield "member", f"{name}  {_megabytes(size)}  sha256 {digest}"
    yield "checked", "every member is as it was written"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
