"""Make the files that a library runs from the checkpoint. Runs inside `worker.py`, like loaders.py.

A converter takes a contestant's `Spec` and a folder to write to, and returns what to add to the
spec.
"""

from __future__ import annotations

import importlib
import json
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
Converter = Callable[[Spec, Path], Spec]


def sentence_transformers_files(spec: Spec, folder: Path, backend: str, variant: str = "") -> Spec:
    """Let sentence-transformers export for a backend: plain, optimized (O3) or in 8 bits.

    8 bits are static with OpenVINO, calibrated on the texts in `calibration`; dynamic with ONNX.
    """
    from sentence_transformers import SentenceTransformer

    code = spec.get("trust_remote_code", False)
    model = SentenceTransformer(spec["model"], device="cpu", backend=backend, trust_remote_code=code)
    if variant == "int8" and backend == "openvino":
        from sentence_transformers import export_static_quantized_openvino_model

        texts = json.loads(Path(spec["calibration"]).read_text(encoding="utf-8"))
        data = folder / "calibration"  # a dataset as the library loads it, by name and column
        data.mkdir(parents=True)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (data / "train.jsonl").write_text(lines, encoding="utf-8")
        export_static_quantized_openvino_model(model, None, str(folder), str(data), "default", "train", "text")
        shutil.rmtree(data)
    elif variant == "int8":
        from sentence_transformers import export_dynamic_quantized_onnx_model

        export_dynamic_quantized_onnx_model(model, quantization_config(), str(folder))
    elif variant == "O3":
        from sentence_transformers import export_optimized_onnx_model

        export_optimized_onnx_model(model, "O3", str(folder))
    model.save_pretrained(str(folder))  # the tokenizer and the modules that belong to the graph
    files = sorted([*folder.rglob("*.onnx"), *folder.rglob("*.xml")])
    made = [path for path in files if path.stem not in ("model", "openvino_model")]
    return {"model": str(folder), **({"file": f"{made[0].parent.name}/{made[0].name}"} if made else {})}


def quantization_config() -> str:
    """sentence-transformers' name for the best 8-bit arithmetic of this CPU."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "arm64"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "avx2"
    return next((name for name in ("avx512_vnni", "avx512", "avx2") if name in flags), "avx2")


def ctranslate2_files(spec: Spec, folder: Path, compute_type: str) -> Spec:
    """Let CTranslate2 convert the transformer. It has no pooling, which the loader adds."""
    converters: Any = importlib.import_module("ctranslate2.converters")
    quantization = None if compute_type == "float32" else compute_type
    converters.TransformersConverter(spec["model"]).convert(str(folder), quantization=quantization)
    return {"model": str(folder), "tokenizer": spec["model"], "compute_type": compute_type}


def gguf_file(spec: Spec, folder: Path, kind: str) -> Spec:
    """Write a BERT as llama.cpp reads it: matrices in `kind`, a type of ggml, the rest FP32."""
    gguf: Any = importlib.import_module("gguf")
    numpy_files: Any = importlib.import_module("safetensors.numpy")
    source = Path(spec["model"])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    if config["model_type"] != "bert" or tokenizer["model"]["type"] != "WordPiece":
        raise ValueError(f"only BERT with WordPiece is written for llama.cpp, not {config['model_type']}")
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "bert")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind}"))
    _add_sizes(writer, config)
    _add_vocabulary(writer, gguf, tokenizer)
    matrices = getattr(gguf.GGMLQuantizationType, kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in numpy_files.load_file(source / "model.safetensors").items():
        if "pooler." in name or "position_ids" in name:  # not used for vectors of texts
            continue
        known = names.get_name(name.removeprefix("bert."), try_suffixes=(".weight", ".bias"))
        if known == "token_embd.weight" or (tensor.ndim == 2 and known.startswith("blk.")):
            writer.add_tensor(known, gguf.quants.quantize(tensor.astype("float32"), matrices), raw_dtype=matrices)
        else:
            writer.add_tensor(known, tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"model": str(folder), "tokenizer": spec["model"], "file_path": str(folder / "model.gguf")}


def _add_sizes(writer: Any, config: Spec) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_causal_attention(False)


def _add_vocabulary(writer: Any, gguf: Any, tokenizer: Spec) -> None:
    """Add the tokens. llama.cpp marks the beginning of a word where WordPiece marks its inside."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    plain, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [token if token in special else token[2:] if token.startswith("##") else f"\u2581{token}" for token in tokens]
    )
    writer.add_token_types([control if token in special else plain for token in tokens])
    for name, token in (("bos", "[CLS]"), ("sep", "[SEP]"), ("eos", "[SEP]"), ("unk", "[UNK]"), ("pad", "[PAD]")):
        getattr(writer, f"add_{name}_token_id")(vocabulary[token])


CONVERTERS: dict[str, Converter] = {
    "onnx": partial(sentence_transformers_files, backend="onnx"),
    "onnx-O3": partial(sentence_transformers_files, backend="onnx", variant="O3"),
    "onnx-int8": partial(sentence_transformers_files, backend="onnx", variant="int8"),
    "openvino": partial(sentence_transformers_files, backend="openvino"),
    "openvino-int8": partial(sentence_transformers_files, backend="openvino", variant="int8"),
    "ctranslate2": partial(ctranslate2_files, compute_type="float32"),
    "ctranslate2-int8": partial(ctranslate2_files, compute_type="int8"),
    "gguf-f16": partial(gguf_file, kind="F16"),
    "gguf-q8_0": partial(gguf_file, kind="Q8_0"),
}
