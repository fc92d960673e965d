"""How each contestant is loaded and called. Runs inside `worker.py`.

Its interpreter may lack sbert_infer, so this imports the standard library and numpy only; each
loader imports what it needs. A loader takes the `Spec` of a contestant in lineup.py and returns an
`Encode`: a function of texts, a batch size (None: the library's own default) and a prompt (None:
the model's default) that returns vectors [texts, dim]. With `pairs` in the spec, for rerankers, it
takes pairs of texts and returns scores [pairs, labels], from before the activation, which would
hide differences between large scores. Everything else in a loader follows the library's own
documentation.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[Any]
Spec = dict[str, Any]
Encode = Callable[[list[Any], int | None, str | None], Vectors]


class UnsupportedError(Exception):
    """The library can't run this model at all."""


# Ours ---------------------------------------------------------------------------------------------


def load_engine(spec: Spec) -> Encode:
    """Load `sbert_infer.Engine` or, for pairs, `sbert_infer.Reranker` the ordinary way.

    `runs` in the spec names what must run it. For onnxruntime on a GPU, this process is one of a
    machine without TensorRT.
    """
    from sbert_infer import Engine, Reranker

    runs = spec.get("runs")
    if runs == "onnxruntime":
        sys.modules.update(dict.fromkeys(("tensorrt", "tensorrt_rtx")))  # type: ignore[arg-type]  # None: can't import
    kind: Any = Reranker if spec.get("pairs") else Engine
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = kind(spec["artifact"], device=spec.get("device"), on_truncate="ignore")
    if runs and not model.info["backend"].startswith(runs):
        why = str(caught[-1].message) if caught else f"it runs with {model.info['backend']}"
        raise UnsupportedError(f"{runs} does not run it: {why}")

    def encode(texts: list[Any], batch_size: int | None, prompt: str | None) -> Vectors:
        if kind is Engine:
            return np.asarray(model.encode(texts, prompt=prompt, batch_size=batch_size))
        scores = model.predict(texts, prompt=prompt, batch_size=batch_size, activation_fn="identity")
        return np.asarray(scores).reshape(len(texts), -1)

    encode.padding = lambda: model.last_stats.padding  # type: ignore[attr-defined]
    return encode


def load_eager(spec: Spec) -> Encode:
    """Load the eager PyTorch reference; on CUDA in any `dtype`."""
    import torch

    from sbert_infer.bench.inside.checkpoint_facts import load_reference

    reference = load_reference(spec)
    checkpoint = reference.checkpoint
    default = checkpoint.prompts[checkpoint.default_prompt_name] if checkpoint.default_prompt_name else ""
    if spec.get("device", "cpu") != "cpu":
        return _on_device(reference.to(spec["device"], getattr(torch, spec["dtype"])), default, spec["device"])

    def encode(texts: list[Any], batch_size: int | None, prompt: str | None) -> Vectors:
        prompt, size = default if prompt is None else prompt, batch_size or 32
        if spec.get("pairs"):
            return np.asarray(reference.score([(prompt + left, right) for left, right in texts], batch_size=size))
        return np.asarray(reference.encode(texts, prompt=prompt, batch_size=size))[:, : checkpoint.truncate_dim]

    return encode


def _on_device(reference: Any, default: str, device: str) -> Encode:
    import torch

    @torch.inference_mode()
    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        prompt = default if prompt is None else prompt
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        size = batch_size or 32
        parts = []
        for start in range(0, len(order), size):
            ids, mask = reference.tokenize([prompt + texts[i] for i in order[start : start + size]])
            skip = torch.tensor(reference.prompt_length(prompt), device=device)
            parts.append(reference(ids.to(device), mask.to(device), skip))
        vectors: Vectors = torch.cat(parts).float().cpu().numpy()  # the copy waits for the GPU to finish
        return vectors[np.argsort(order), : reference.checkpoint.truncate_dim]

    return encode


def load_onnxruntime(spec: Spec) -> Encode:
    """Load the artifact's graph into a default session: batches as given, padded to the longest."""
    import onnxruntime

    from sbert_infer.artifact import open_artifact
    from sbert_infer.text.tokenizer import Tokenizer

    artifact = open_artifact(spec["artifact"])
    manifest = artifact.manifest
    tokenizer = Tokenizer(artifact.tokenizer_json, manifest.max_length, manifest.truncation_side)
    session = onnxruntime.InferenceSession(spec["artifact"], providers=["CPUExecutionProvider"])
    default = manifest.prompts[manifest.default_prompt_name] if manifest.default_prompt_name else ""

    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        prompt = default if prompt is None else prompt
        fixed = {} if manifest.include_prompt else {"prompt_length": np.array(tokenizer.prompt_length(prompt))}
        parts, size = [], batch_size or 32
        for start in range(0, len(texts), size):
            batch = tokenizer([prompt + text for text in texts[start : start + size]])
            rows = np.arange(len(batch.lengths))
            ids, mask, _ = batch.padded(rows, int(batch.lengths.max()), manifest.pad_id, manifest.padding_side)
            parts.append(session.run(["sentence_embedding"], {"input_ids": ids, "attention_mask": mask, **fixed})[0])
        return np.concatenate(parts)[:, : manifest.truncate_dim]

    return encode


# Theirs -------------------------------------------------------------------------------------------


def load_sentence_transformers(spec: Spec) -> Encode:
    """Load sentence-transformers with the backend that `spec` names."""
    from sentence_transformers import SentenceTransformer

    options: Spec = dict(spec.get("model_kwargs", {}))
    if spec.get("file"):
        options["file_name"] = spec["file"]
    if spec["backend"] == "onnx":
        options["provider"] = "CPUExecutionProvider"
    model = SentenceTransformer(
        spec["model"],
        device=spec.get("device", "cpu"),
        backend=spec["backend"],
        trust_remote_code=spec.get("trust_remote_code", False),
        model_kwargs=options or None,
    )
    if spec.get("unpadded") and not getattr(model[0], "can_flatten_inputs", False):
        raise UnsupportedError("sentence-transformers can't leave out the padding of this model's inputs")
    if spec.get("max_length"):
        model.max_seq_length = spec["max_length"]
    if spec.get("compile"):
        model[0].compile(dynamic=True)  # without `dynamic` it would compile for every new shape

    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        options = {"batch_size": batch_size} if batch_size else {}
        return np.asarray(model.encode(texts, prompt=prompt, show_progress_bar=False, **options))

    return encode


def load_cross_encoder(spec: Spec) -> Encode:
    """Load sentence-transformers' `CrossEncoder`."""
    from sentence_transformers import CrossEncoder
    from torch.nn import Identity

    code = spec.get("trust_remote_code", False)
    model = CrossEncoder(spec["model"], device="cpu", max_length=spec["max_length"], trust_remote_code=code)

    def score(pairs: list[Any], batch_size: int | None, prompt: str | None) -> Vectors:
        options: Spec = {"batch_size": batch_size} if batch_size else {}
        if prompt is not None:
            options["prompt"] = prompt
        scores = model.predict(pairs, show_progress_bar=False, activation_fn=Identity(), **options)
        return np.asarray(scores).reshape(len(pairs), -1)

    return score


def load_fastembed(spec: Spec) -> Encode:
    """Load fastembed with a custom model: the ONNX file that sentence-transformers exports."""
    TextEmbedding: Any = importlib.import_module("fastembed").TextEmbedding
    description: Any = importlib.import_module("fastembed.common.model_description")
    kinds = description.PoolingType
    pooling = {"mean": kinds.MEAN, "cls": kinds.CLS, "lasttoken": kinds.LAST_TOKEN}
    if spec["head"] or spec["pooling"] not in pooling:
        raise UnsupportedError(f"fastembed has no {spec['head'] or spec['pooling'] + ' pooling'}")
    TextEmbedding.add_custom_model(
        model="sbert-bench/model",
        pooling=pooling[spec["pooling"]],
        normalization=spec["normalized"],
        sources=description.ModelSource(hf="sbert-bench/model"),
        dim=spec["dim"],
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding("sbert-bench/model", specific_model_path=spec["model"], cuda=False)

    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        texts = [(prompt or "") + text for text in texts]
        return np.stack(list(model.embed(texts, **({"batch_size": batch_size} if batch_size else {}))))

    return encode


def load_infinity(spec: Spec) -> Encode:
    """Load infinity's torch engine, whose batch size is fixed when it starts."""
    infinity: Any = importlib.import_module("infinity_emb")
    loop = asyncio.new_event_loop()
    engines: dict[int | None, Any] = {}

    def start(batch_size: int | None) -> Any:
        options: Spec = {"batch_size": batch_size} if batch_size else {}
        arguments = infinity.EngineArgs(
            model_name_or_path=spec["model"], engine="torch", device="cpu", model_warmup=False, **options
        )
        engine = infinity.AsyncEmbeddingEngine.from_args(arguments)
        loop.run_until_complete(engine.astart())
        return engine

    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        texts = [(prompt or "") + text for text in texts]
        if batch_size not in engines:
            for engine in engines.values():
                loop.run_until_complete(engine.astop())
            engines.clear()
            engines[batch_size] = start(batch_size)
        vectors, _ = loop.run_until_complete(engines[batch_size].embed(sentences=texts))
        return np.stack(vectors)

    return encode


def load_ctranslate2(spec: Spec) -> Encode:
    """Load CTranslate2's encoder, which takes tokens and returns a vector for each of them.

    With `batch_per_core` each core runs a batch of its own; by default all cores share one.
    """
    ctranslate2: Any = importlib.import_module("ctranslate2")
    pool, tokenize = _pooling(spec, "CTranslate2"), _tokenizer(spec)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads: Spec = {"inter_threads": cores, "intra_threads": 1} if spec.get("batch_per_core") else {}
    encoder = ctranslate2.Encoder(spec["model"], device="cpu", compute_type=spec["compute_type"], **threads)
    callers = ThreadPoolExecutor(cores if threads else 1)

    def run(ids: list[list[int]]) -> Vectors:
        return pool(np.array(encoder.forward_batch(ids).last_hidden_state), [len(one) for one in ids])

    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        ids, size = tokenize([(prompt or "") + text for text in texts]), batch_size or 32
        return np.concatenate(list(callers.map(run, (ids[at : at + size] for at in range(0, len(ids), size)))))

    return encode


def load_llama_cpp(spec: Spec) -> Encode:
    """Load llama.cpp's server in this process; the batch size is how many texts it works on."""
    llama: Any = importlib.import_module("xllamacpp")
    kinds = llama.llama_pooling_type
    pooling = {"mean": kinds.LLAMA_POOLING_TYPE_MEAN, "cls": kinds.LLAMA_POOLING_TYPE_CLS}
    if spec["head"] or spec["pooling"] not in pooling:
        raise UnsupportedError(f"llama.cpp has no {spec['head'] or spec['pooling'] + ' pooling'}")
    tokenize = _tokenizer(spec)
    servers: dict[int | None, Any] = {}

    def start(batch_size: int | None) -> Any:
        options = llama.CommonParams()
        options.model.path, options.embedding, options.verbosity = spec["file_path"], True, -1
        options.pooling_type = pooling[spec["pooling"]]
        options.embd_normalize = 2 if spec["normalized"] else -1
        options.n_parallel = batch_size or options.n_parallel
        options.n_ctx = options.n_parallel * spec["max_length"]
        options.n_ubatch = max(options.n_ubatch, spec["max_length"])  # a text can't be split
        return llama.Server(options)

    def encode(texts: list[str], batch_size: int | None, prompt: str | None) -> Vectors:
        if batch_size not in servers:
            servers.clear()
            servers[batch_size] = start(batch_size)
        reply = servers[batch_size].handle_embeddings({"input": tokenize([(prompt or "") + text for text in texts])})
        if "data" not in reply:
            raise RuntimeError(f"llama.cpp: {reply}")
        return np.array([one["embedding"] for one in sorted(reply["data"], key=lambda one: one["index"])])

    return encode


def _tokenizer(spec: Spec) -> Callable[[list[str]], list[list[int]]]:
    """Load the checkpoint's tokenizer for a library that takes tokens, with the true limit."""
    tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_file(f"{spec['tokenizer']}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(spec["max_length"])
    return lambda texts: [one.ids for one in tokenizer.encode_batch(texts)]


def _pooling(spec: Spec, library: str) -> Callable[[Vectors, list[int]], Vectors]:
    """Make the step from vectors of tokens to vectors of texts for a library that has none."""
    if spec["head"] or spec["pooling"] not in ("mean", "cls"):
        raise UnsupportedError(f"{library} with {spec['head'] or spec['pooling'] + ' pooling'} is not written")

    def pool(tokens: Vectors, lengths: list[int]) -> Vectors:
        if spec["pooling"] == "cls":
            vectors: Vectors = tokens[:, 0]
        else:
            vectors = np.stack([rows[:length].mean(axis=0) for rows, length in zip(tokens, lengths, strict=True)])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if spec["normalized"] else vectors

    return pool


# For testing the benchmark itself -----------------------------------------------------------------


def load_fake(spec: Spec) -> Encode:
    """Load a stand-in for a library that misbehaves, for the benchmark's own tests."""
    right = load_engine(spec)

    def encode(texts: list[Any], batch_size: int | None, prompt: str | None) -> Vectors:
        if "error" in spec:  # to add to the scores of pairs
            return np.asarray(right(texts, batch_size, prompt) + spec["error"])
        if len(texts) == 1:  # loading succeeds
            return right(texts, batch_size, prompt)
        if spec["fault"] == "crash":
            raise SystemExit("the fake contestant was told to crash")
        if spec["fault"] == "error":
            raise RuntimeError("the fake contestant was told to fail")
        print("chatter on stdout, which must not disturb the protocol")
        return np.roll(right(texts, batch_size, prompt), 1, axis=0)

    return encode


LOADERS: dict[str, Callable[[Spec], Encode]] = {
    "engine": load_engine,
    "eager": load_eager,
    "onnxruntime": load_onnxruntime,
    "sentence-transformers": load_sentence_transformers,
    "cross-encoder": load_cross_encoder,
    "fastembed": load_fastembed,
    "infinity": load_infinity,
    "ctranslate2": load_ctranslate2,
    "llama.cpp": load_llama_cpp,
    "fake": load_fake,
}
