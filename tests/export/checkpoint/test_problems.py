"""Everything that is wrong with a checkpoint is reported at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from tests.export.checkpoint.problems import MODEL, POOLING, SETTINGS, edit_modules, problems_of, the_problem
from tests.models.checkpoints import edit_json

MakeCheckpoint = Callable[..., Path]


def test_all_problems_at_once(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(dense=[{"out_features": 16}])
    edit_json(path / POOLING, pooling_mode="attention", mystery=1)
    edit_json(path / "2_Dense/config.json", activation_function="os.system")
    edit_json(path / MODEL, similarity_fn_name="hamming", default_prompt_name="nope")
    edit_json(path / SETTINGS, query_length=32)
    (path / "model.safetensors").unlink()
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    for needle in (
        *("'attention'", "'mystery'", "'os.system'", "'hamming'", "'nope'", "'query_length'"),
        *("no weights", "no tokenizer", f"{path}: 8 problems"),
    ):
        assert needle in message


EDITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pooling mode": (POOLING, {"pooling_mode": "attention"}, "unknown pooling mode 'attention'"),
    "pooling mode type": (POOLING, {"pooling_mode": 3}, "must be a name or a list"),
    "pooling key": (POOLING, {"pooling_mode_attention": True}, "unknown key 'pooling_mode_attention'"),
    "pooling width": (POOLING, {"embedding_dimension": 48}, "takes vectors of 48, but is given 32"),
    "pooling without width": (POOLING, {"embedding_dimension": ...}, "'embedding_dimension' must be an integer"),
    "dense activation": ("2_Dense/config.json", {"activation_function": "torch.nn.Module"}, "'torch.nn.Module'"),
    "dense code": ("2_Dense/config.json", {"activation_function": "evil.Tanh"}, "'evil.Tanh'"),
    "dense width": ("2_Dense/config.json", {"in_features": 31}, "tensor 'linear.weight' has shape [16, 32]"),
    "dense bias": ("2_Dense/config.json", {"bias": False}, "unknown tensor 'linear.bias'"),
    "dense residual": ("2_Dense/config.json", {"use_residual": True}, "tensor 'residual.weight' is missing"),
    "dense on tokens": ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "'token_embeddings'"),
    "dense key": ("2_Dense/config.json", {"gate": 1}, "unknown key 'gate'"),
    "norm width": ("3_LayerNorm/config.json", {"dimension": 8}, "tensor 'norm."),
    "norm without width": ("3_LayerNorm/config.json", {"dimension": ...}, "'dimension' must be an integer"),
    "normalize tokens": ("4_Normalize/config.json", {"module_input_name": "token_embeddings"}, "'token_embeddings'"),
    "task": (SETTINGS, {"transformer_task": "fill-mask"}, "'fill-mask'"),
    "output": (SETTINGS, {"module_output_name": "sentence_embedding"}, "'module_output_name'"),
    "modality": (SETTINGS, {"modality_config": {"image": {"method": "forward"}}}, "'image'"),
    "method": (
        SETTINGS,
        {"modality_config": {"text": {"method": "get_text_features", "method_output_name": None}}},
        "get_text_features",
    ),
    "processing": (SETTINGS, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "text.add_special_tokens"),
    "query length": (SETTINGS, {"query_length": 32}, "'query_length'"),
    "document length": (SETTINGS, {"document_length": 32}, "'document_length'"),
    "expansion": (SETTINGS, {"query_expansion": {"strategy": "fixed"}}, "'query_expansion'"),
    "tokenizer path": (SETTINGS, {"tokenizer_name_or_path": "other"}, "'tokenizer_name_or_path'"),
    "model args": (SETTINGS, {"model_args": {"num_labels": 3}}, "'model_args' sets 'num_labels'"),
    "tokenizer args": (SETTINGS, {"tokenizer_args": {"padding_side": "left"}}, "'tokenizer_args' sets 'padding_side'"),
    "config args": (SETTINGS, {"config_kwargs": {"hidden_act": "relu"}}, "'config_kwargs' sets 'hidden_act'"),
    "settings key": (SETTINGS, {"mystery": 1}, "unknown key 'mystery' (= 1)"),
    "max length type": (SETTINGS, {"max_seq_length": "long"}, "'max_seq_length' must be an integer"),
    "max length": (SETTINGS, {"max_seq_length": 2}, "max length 2 is too small"),
    "prompt": (MODEL, {"prompts": {"query": 3}}, "prompt 'query' must be a string"),
    "prompts": (MODEL, {"prompts": ["query: "]}, "'prompts' must be an object"),
    "default prompt": (MODEL, {"default_prompt_name": "nope"}, "'nope'"),
    "similarity": (MODEL, {"similarity_fn_name": "maxsim"}, "unknown similarity 'maxsim'"),
    "truncate_dim": (MODEL, {"truncate_dim": 0}, "'truncate_dim'"),
    "kind": (MODEL, {"model_type": "CrossEncoder"}, "CrossEncoder"),
    "model key": (MODEL, {"mystery": 1}, "unknown key 'mystery'"),
    "encoder-decoder": ("config.json", {"is_encoder_decoder": True}, "encoder-decoder"),
    "model type": ("config.json", {"model_type": "martian"}, "'martian'"),
    "no pad token": ("tokenizer_config.json", {"pad_token": None}, "no padding token"),
}


@pytest.mark.parametrize("case", EDITS)
def test_problem(case: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(dense=[{"out_features": 16}], layer_norm=True)
    file, changes, needle = EDITS[case]
    read_checkpoint(path)
    edit_json(path / file, **changes)
    assert any(needle in problem for problem in problems_of(path))


def test_two_first_modules(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_modules(path, lambda entries: entries[1].update(type="sentence_transformers.models.StaticEmbedding"))
    assert "(found: Transformer, StaticEmbedding, Normalize)" in problems_of(path)[0]


def test_transformer_of_its_own_code(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_modules(path, lambda entries: entries[0].update(type="custom_st.Transformer"))
    assert "'custom_st.Transformer' is not supported" in the_problem(path, trust_remote_code=True)


@pytest.mark.parametrize("outside", ["../other", "/etc", "C:\\x", "a\\..\\..\\b"])
def test_module_path_outside(outside: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_modules(path, lambda entries: entries[1].update(path=outside))
    assert "leads out of the checkpoint" in problems_of(path)[0]


def test_module_order(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_modules(path, lambda entries: entries.reverse())
    assert any("must be a Transformer" in problem for problem in problems_of(path))
    edit_modules(path, lambda entries: entries.insert(0, entries.pop()))  # Transformer, Normalize, Pooling
    assert "comes before Pooling" in the_problem(path)
    edit_modules(path, lambda entries: entries.pop())
    assert any("no Pooling module" in problem for problem in problems_of(path))


def test_dense_does_not_follow_on_pooling(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(dense=[{"out_features": 16}])
    edit_json(path / POOLING, pooling_mode=["cls", "mean"])
    assert the_problem(path) == "2_Dense: takes vectors of 32, but is given 64"


@pytest.mark.parametrize("content", ["", "{", "[1]", "3", "\x80"])
@pytest.mark.parametrize("file", ["config.json", "modules.json", POOLING, SETTINGS, MODEL])
def test_broken_json(file: str, content: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    (path / file).write_bytes(content.encode("latin-1"))
    assert any(file in problem for problem in problems_of(path))


def test_missing_files(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    for file in ("config.json", POOLING):
        (path / file).unlink()
    assert set(problems_of(path)) >= {"config.json is missing", f"{POOLING} is missing"}
    (path / "modules.json").unlink()
    assert any("modules.json is missing, though" in problem for problem in problems_of(path))


def test_empty_folder(tmp_path: Path) -> None:
    problems = problems_of(tmp_path)
    assert len(problems) == 3
    assert "config.json is missing" in problems


def test_missing_shard(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    shards = {key: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, key in enumerate(weights)}
    for shard in set(shards.values()):
        part = {key: tensor for key, tensor in weights.items() if shards[key] == shard}
        save_file(part, path / shard, metadata={"format": "pt"})
    edit_json(path / "model.safetensors.index.json", metadata={}, weight_map=shards)
    read_checkpoint(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in the_problem(path)


def test_module_weights(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(dense=[{"out_features": 16}], layout="old")
    file = path / "2_Dense" / "pytorch_model.bin"
    torch.save(torch.nn.Linear(2, 2), file)  # a whole pickled module: code, not plain tensors
    assert "can't be read safely" in the_problem(path)
    torch.save({"linear.weight": torch.zeros(16, 32)}, file)
    assert the_problem(path) == "2_Dense: tensor 'linear.bias' is missing from the weights"
    file.unlink()
    assert "2_Dense: no weights" in the_problem(path)


def test_layer_pooling_that_would_be_skipped(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(layer_pooling=1)
    edit_json(path / "config.json", output_hidden_states=False)
    assert "'output_hidden_states'" in the_problem(path)


def test_layer_pooling_of_another_depth(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(layer_pooling=1)
    edit_json(path / "config.json", num_hidden_layers=3)
    assert "weighs 2 layers, but the transformer has 3" in the_problem(path)


def test_adapter(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_json(path / "adapter_config.json", peft_type="PROMPT_TUNING")
    assert "only LORA is supported" in the_problem(path)


def test_code_of_the_checkpoint(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    auto_map = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}
    edit_json(path / "config.json", auto_map=auto_map)
    read_checkpoint(path)  # transformers has a BERT of its own
    edit_json(path / "config.json", model_type="martian")
    assert "--trust-remote-code" in problems_of(path)[0]


def test_token_types(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    for step in tokenizer["post_processor"]["single"]:
        next(iter(step.values()))["type_id"] = 1
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    edit_json(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", model_input_names=inputs)
    assert "token types" in the_problem(path)
