"""A BERT of base size with random weights, to measure the speed of the size that most models have.

    python -m sbert_infer.bench.base_model minilm/ bert-base-random-weights/

Tokenizer, pooling and limits are those of the given checkpoint. Speed does not depend on the
weights; quality does, so its name says what they are.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

BASE: Mapping[str, int] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_WEIGHTS = ("*.safetensors", "*.bin", "*.onnx", "*.h5", "*.ot", "onnx", "openvino")


def write_base_model(source: Path, target: Path, sizes: Mapping[str, int] = BASE) -> None:
    """Write a checkpoint to `target` that is `source` with other sizes and random weights."""
    import torch
    from transformers import AutoConfig, AutoModel

    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_WEIGHTS))
    config = AutoConfig.from_pretrained(source)
    for name, size in sizes.items():
        setattr(config, name, size)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(target)
    for file in target.glob("*_Pooling/config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        widths = {name for name in settings if name.endswith("embedding_dimension")}  # the name has changed
        settings |= dict.fromkeys(widths, sizes["hidden_size"])
        file.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def main() -> None:
    """Run the command."""
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m sbert_infer.bench.base_model CHECKPOINT TARGET")
    write_base_model(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
