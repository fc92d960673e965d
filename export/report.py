"""What people read about an artifact: after an export, and by `sbert-export --inspect`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.canaries import canaries_of
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.artifact.manifest import ENCODER, MULTI_VECTOR, RERANKER, SPARSE_ENCODER, Artifact, Manifest
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.backends.openvino_install import why_no_bf16
from sbert_infer.encode.multi_vector import role_of

# -------------------------------------------------------------------------------------------------
# after an export


def warnings(checkpoint: str, manifest: Manifest, portable: bool) -> Iterator[str]:
    """What may be wrong, though the vectors are right."""
    fusion = manifest.fusion
    wanted = {"attention": fusion["layers"], "gelu": fusion["gelu_layers"]}
    missing = [f"{name} {fusion[name]} of {n}" for name, n in wanted.items() if fusion[name] < n]
    if missing and not portable:
        yield f"not all of the graph was fused ({', '.join(missing)}): it is right, but slower"
    if portable and manifest.precision == "bf16" and "openvino" not in manifest.versions:
        why = why_no_bf16() or "it could not when this was exported"
        yield f"BF16 can't run here ({why}): compared in FP32, which proves no more than the rounding of the weights"
    folder = Path(checkpoint)
    if manifest.kind == ENCODER and folder.is_dir() and not (folder / "modules.json").is_file():
        # A language model, or a reranker, becomes a sentence encoder as easily as any transformer.
        what = "no modules.json: taken as a plain transformer with mean pooling, as sentence-transformers would"
        yield f"{folder} has {what}"


def summarize(manifest: Manifest, path: Path, portable: bool) -> str:
    """A few lines about the artifact at `path`, which was just written."""
    fusion = manifest.fusion
    size = sum(file.stat().st_size for file in [path, *(path.parent / f.name for f in manifest.data_files)])
    graph = "graph    standard operators only"
    if not portable:
        graph = f"fused    {_fused(manifest)}; skip-layer-norm kept apart as add and norm, which is faster"
    if not fusion["layers"]:
        graph = "graph    a lookup and a mean: there is nothing to fuse"
    uses = {RERANKER: "Reranker({!r}).rank(query, [...])", MULTI_VECTOR: "Engine({!r}).encode_query([...])"}
    use = uses.get(manifest.kind, "Engine({!r}).encode([...])")
    lines = [
        f"{path}  {_megabytes(size)}, {manifest.precision}, weights sha256 {manifest.weights_sha256[:12]}",
        f"  {graph}",
        *(f"  kept     {kept}" for kept in _kept(manifest)),
        f"  parity   {_detailed_parity(manifest)} of up to {manifest.parity['max_length']} tokens",
        *_tensorrt_engines(path),
        *(f"  {name:<9}{text}" for name, text in _routes(manifest)),
        f"  use      {use.format(str(path))}",
    ]
    return "\n".join(lines)


def _detailed_parity(manifest: Manifest) -> str:
    parity = manifest.parity
    difference, texts = _difference(manifest), f"on {parity.get('texts')} texts"
    if manifest.kind == RERANKER:
        return f"{difference}, on {parity['pairs']} pairs"
    if manifest.kind == MULTI_VECTOR:
        return f"{difference} of the tokens of {parity['texts']} texts"
    difference += f", top-10 overlap {parity['top10_overlap']:.1%}"
    if manifest.kind == SPARSE_ENCODER:
        difference += f", {parity['active_overlap']:.2%} of {parity['active_dims']:.0f} active dimensions"
    return f"{difference}, {texts}"


def _difference(manifest: Manifest) -> str:
    """How far the artifact is from the reference."""
    parity = manifest.parity
    if manifest.kind == RERANKER:
        difference = f"max-abs {parity['max_abs']:.1e} of scores that spread by {parity['spread']:.1e}"
        return f"{difference}, {parity['rank_agreement']:.2%} in the same order"
    cosine = f"cosine min {parity['min_cosine']:.6f}, mean {parity['mean_cosine']:.6f}"
    odd = parity.get("odd_min_cosine", 1.0)
    if odd < parity["min_cosine"] - 0.001:  # shown where it tells something
        cosine += f" (odd texts, such as emoji: min {odd:.4f})"
    return f"{cosine}, max-abs {parity['max_abs']:.1e}"


def _tensorrt_engines(path: Path) -> list[str]:
    """A line about a plan's TensorRT engines."""
    plan = open_artifact(path)
    if not isinstance(plan, Plan):
        return []
    names = ", ".join(engine.describe() for engine in plan.engines)
    missing = "none inside: one is built at first use on a machine with a GPU and TensorRT; or see --target"
    return [f"  engines  {names or missing}"]


# -------------------------------------------------------------------------------------------------
# --inspect


def inspect(path: Path) -> str:
    """All that the artifact at `path` contains. Raises `ArtifactError` if any byte has changed."""
    artifact = open_artifact(path)
    size = path.stat().st_size + sum(file.size for file in artifact.manifest.data_files)
    plan = isinstance(artifact, Plan)
    first = f"{path}  {'plan' if plan else 'ONNX'}, {_megabytes(size)}, {artifact.manifest.precision}"
    rows = [
        *_model(artifact.manifest),
        *_proof(artifact),
        *(_plan(artifact) if isinstance(artifact, Plan) else _onnx(artifact)),
    ]
    return "\n".join([first, *(f"  {name:<10}{text}" for name, text in rows)])


def _routes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What a file with several routes holds besides the one that is described."""
    for task, (start, stop) in (manifest.other_routes or {}).items():
        yield "routes", f"{manifest.route} (default), described here; {task}, {_megabytes(stop - start)}"


def _model(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What every artifact has."""
    parity = manifest.parity
    yield "model", f"{manifest.name} ({manifest.architecture}), weights sha256 {manifest.weights_sha256}"
    yield from {RERANKER: _scores, MULTI_VECTOR: _token_vectors}.get(manifest.kind, _vectors)(manifest)
    yield from _routes(manifest)
    for name, prompt in manifest.prompts.items():
        default = "  (default)" if name == manifest.default_prompt_name else ""
        yield "prompt", f"{name}: {json.dumps(prompt, ensure_ascii=False)}{default}"
    compared = f"on {parity.get('texts')} texts"
    if manifest.kind == RERANKER:
        compared = f"on {parity['pairs']} pairs, correlation {parity['correlation']:.6f}"
    if manifest.precision == "bf16" and "openvino" not in manifest.versions and manifest.fusion["attention"] == 0:
        compared += " in FP32"
    for kept in _kept(manifest):
        yield "kept", kept
    yield "parity", f"{_difference(manifest)}, {compared}; at least {parity['threshold']} was asked for"
    yield "made by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def _proof(artifact: Artifact) -> Iterator[tuple[str, str]]:
    """What vectors can be recognised by, and checked with."""
    found, canaries = fingerprint(artifact), canaries_of(artifact)
    yield "print", f"{found.exact}, of the model in any precision {found.model}"
    texts = "none: sbert-verify can't check it" if canaries is None else f"{len(canaries.texts)} texts"
    yield "canaries", texts if canaries is None else f"{texts} with the eager model's vectors, for sbert-verify"


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


def _onnx(artifact: Artifact) -> Iterator[tuple[str, str]]:
    fused = artifact.manifest.fusion["attention"]
    yield "fused", _fused(artifact.manifest) if fused else "nothing: standard operators only"
    for file in artifact.manifest.data_files:
        yield "weights", f"{file.name}  {_megabytes(file.size)}  sha256 {file.sha256}"
    yield "checked", "every byte is as it was written"


def _plan(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "pooled", "in the graph" if plan.pooling == "graph" else "by the Triton kernel, after the graph"
    for shape in plan.rows.shapes:
        texts = f"up to {shape.segments} texts" if shape.segments > 1 else "one text"
        yield "shape", f"{shape.rows} x {shape.length} tokens, {texts} in a row"
    for engine in plan.engines:
        yield "engine", engine.describe()
    if not plan.engines:
        yield "engine", "none inside: one is built at first use on a machine with a GPU and TensorRT"
    for name, (size, digest) in plan.members.items():
        plan.read(name)  # checks its hash
        yield "member", f"{name}  {_megabytes(size)}  sha256 {digest}"
    yield "checked", "every member is as it was written"


def _fused(manifest: Manifest) -> str:
    """How many nodes were fused."""
    fusion = manifest.fusion
    return f"{fusion['attention']} of {fusion['layers']} attention, {fusion['gelu']} of {fusion['gelu_layers']} gelu"


def _kept(manifest: Manifest) -> Iterator[str]:
    """A line about the weights that an 8-bit model has in FP32, if there are any."""
    if names := manifest.parity.get("kept_fp32"):
        yield f"{len(names)} weights in FP32, which cost too much in 8 bits: {', '.join(names)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
