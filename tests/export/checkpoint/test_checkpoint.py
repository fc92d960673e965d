"""Checkpoints are read in every spelling, and whatever is wrong with one is listed at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils._validators import validate_repo_id
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint, weights_sha256
from sbert_infer.export.checkpoint.hub import needed_files
from sbert_infer.export.checkpoint.modules import (
    DenseSpec,
    LayerNormSpec,
    NormalizeSpec,
    PoolingSpec,
    WeightedLayerPoolingSpec,
)
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.checkpoint.transformer import load_tokenizer
from tests.models.checkpoints import MAX_LENGTH, edit_json

MakeCheckpoint = Callable[..., Path]

POOLING = "1_Pooling/config.json"
SETTINGS = "sentence_bert_config.json"
MODEL = "config_sentence_transformers.json"


def problems_of(path: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path, **options)
    return caught.value.problems


def the_problem(path: Path, **options: Any) -> str:
    problems = problems_of(path, **options)
    assert len(problems) == 1, problems
    return problems[0]


def edit_modules(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    file = path / "modules.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    change(entries)
    file.write_text(json.dumps(entries), encoding="utf-8")


# -------------------------------------------------------------------------------------------------------
# reading


def test_minilm(minilm_path: Path) -> None:
    checkpoint = read_checkpoint(minilm_path)
    assert checkpoint == Checkpoint(
        source=str(minilm_path),
        name=minilm_path.name,
        path=minilm_path,
        transformer_path=minilm_path,
        model_type="bert",
        modules=(PoolingSpec(384, ("mean",)), NormalizeSpec()),
        max_length=256,
        prompts={"query": "", "document": ""},
        default_prompt_name=None,
        similarity="cosine",
        truncate_dim=None,
        do_lower_case=False,
        trust_remote_code=False,
    )
    assert checkpoint.dim == 384


@pytest.mark.parametrize("layout", ["new", "old"])
def test_every_module(layout: str, make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(
        pooling=("cls", "mean_sqrt_len_tokens"),
        include_prompt=False,
        layer_pooling=1,
        dense=[{"out_features": 16, "bias": False, "activation_function": "GELU", "use_residual": True}],
        layer_norm=True,
        layout=layout,
    )
    checkpoint = read_checkpoint(path)
    assert checkpoint.modules == (
        WeightedLayerPoolingSpec(path / "1_WeightedLayerPooling", 32, 1, 2),
        PoolingSpec(32, ("cls", "mean_sqrt_len"), include_prompt=False),
        DenseSpec(path / "3_Dense", 64, 16, bias=False, activation="GELU", residual=True),
        LayerNormSpec(path / "4_LayerNorm", 16),
        NormalizeSpec(),
    )
    assert (checkpoint.dim, checkpoint.pooling.modes) == (16, ("cls", "mean_sqrt_len"))


def test_settings(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(
        prompts={"query": "q: ", "task": "t: "}, default_prompt_name="task", similarity="dot", truncate_dim=8
    )
    checkpoint = read_checkpoint(path)
    assert checkpoint.prompts == SentenceTransformer(str(path), device="cpu").prompts
    assert checkpoint.prompts == {"query": "q: ", "document": "", "task": "t: "}
    assert (checkpoint.default_prompt_name, checkpoint.similarity, checkpoint.truncate_dim) == ("task", "dot", 8)
    assert checkpoint.dim == 32


def test_old_names_of_the_settings_file(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint("xlm-roberta", layout="old", max_length=32)
    (path / SETTINGS).rename(path / "sentence_xlm-roberta_config.json")
    edit_json(path / "sentence_xlm-roberta_config.json", max_seq_length=20, do_lower_case=True)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.max_length, checkpoint.do_lower_case) == (20, True)


def test_dropout_is_the_identity(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    (path / "3_Dropout").mkdir()
    edit_json(path / "3_Dropout" / "config.json", dropout=0.2)
    dropout = {"idx": 3, "name": "3", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"}
    edit_modules(path, lambda entries: entries.append(dropout))
    assert read_checkpoint(path).modules == (PoolingSpec(32, ("mean",)), NormalizeSpec())


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, ("cls", "lasttoken")),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_len",)),
        ({"pooling_mode": ["mean", "cls"], "pooling_mode_max_tokens": True}, ("mean", "cls")),
    ],
    ids=str,
)
def test_pooling_spellings(config: dict[str, Any], modes: tuple[str, ...], copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    (path / POOLING).write_text(json.dumps({"word_embedding_dimension": 32, **config}), encoding="utf-8")
    assert read_checkpoint(path).pooling.modes == modes


@pytest.mark.parametrize(
    ("architecture", "is_causal", "mode"),
    [("BertModel", None, "mean"), ("BertForCausalLM", None, "lasttoken"), ("BertForCausalLM", False, "mean")],
)
def test_plain_transformer(
    architecture: str, is_causal: bool | None, mode: str, copy_checkpoint: MakeCheckpoint
) -> None:
    path = copy_checkpoint()
    for name in ("modules.json", SETTINGS, MODEL):
        (path / name).unlink()
    edit_json(path / "config.json", architectures=[architecture], **({} if is_causal is None else {"is_causal": False}))
    assert read_checkpoint(path).modules == (PoolingSpec(32, (mode,)),)


def test_known_arguments(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(layout="old")
    edit_json(
        path / SETTINGS,
        model_args={"torch_dtype": "float16", "add_pooling_layer": False, "trust_remote_code": True},
        tokenizer_args={"model_max_length": 30},
        config_args={"use_cache": False},
    )
    checkpoint = read_checkpoint(path)
    assert (checkpoint.max_length, checkpoint.trust_remote_code) == (30, False)


def test_tokenizer_drops_baked_in_settings(minilm_path: Path) -> None:
    tokenizer = load_tokenizer(read_checkpoint(minilm_path))
    assert tokenizer.is_fast
    assert tokenizer.model_max_length == 256
    assert tokenizer.backend_tokenizer.truncation is None
    assert tokenizer.backend_tokenizer.padding is None


def test_transformers_stays_as_it_was(minilm_path: Path) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    read_checkpoint(minilm_path)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_weights_sha256(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(dense=[{"out_features": 16}])
    hashes = {weights_sha256(read_checkpoint(path))}
    assert hashes == {weights_sha256(read_checkpoint(path))}
    for file in (path / "model.safetensors", path / "2_Dense" / "model.safetensors"):
        save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
        hashes.add(weights_sha256(read_checkpoint(path)))
    edit_json(path / MODEL, prompts={"query": "q: "})
    hashes.add(weights_sha256(read_checkpoint(path)))
    assert len(hashes) == 3


# --------------------------------------------------------------------------------------------------
# length limit


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "albert", "distilbert"])
def test_limit_never_exceeds_the_position_table(family: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(family, layout="old")
    edit_json(path / SETTINGS, max_seq_length=1000)
    checkpoint = read_checkpoint(path)
    assert checkpoint.max_length == MAX_LENGTH
    model = SentenceTransformer(str(path), device="cpu")
    model.max_seq_length = MAX_LENGTH
    model.encode("word " * 200)  # the table holds that many
    model.max_seq_length = MAX_LENGTH + 1
    with pytest.raises((IndexError, RuntimeError)):  # and not one more
        model.encode("word " * 200)


def test_limit_of_the_tokenizer(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_json(path / "tokenizer_config.json", model_max_length=40)
    assert read_checkpoint(path).max_length == 40
    edit_json(path / "tokenizer_config.json", model_max_length=10**30)
    assert read_checkpoint(path).max_length == MAX_LENGTH


def test_limit_of_the_user(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint("roberta", layout="old")
    edit_json(path / SETTINGS, max_seq_length=20)
    assert read_checkpoint(path, max_length=64).max_length == 64
    assert the_problem(path, max_length=65) == "max length 65 is more than the 64 tokens that the model allows"
    assert "max length 2 is too small" in the_problem(path, max_length=2)


# -------------------------------------------------------------------------------------------------------
# problems


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
    edit_json(path / "adapter_config.json", peft_type="LORA")
    assert "merge" in the_problem(path)


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


# -----------------------------------------------------------------------------------------------------------
# hub


def test_needed_files() -> None:
    wanted = ["config.json", "model.safetensors", "vocab.txt", "spiece.model", "2_Dense/pytorch_model.bin"]
    wanted += ["artifact.metadata", "sparse_linear.pt"]
    unwanted = [
        *("pytorch_model.bin", "training_args.bin", "tf_model.h5", "rust_model.ot", "README.md", "modeling.py"),
        *("onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin", "pytorch_model.bin.md"),
    ]
    assert needed_files([*wanted, *unwanted]) == wanted
    assert needed_files(["pytorch_model.bin", "modeling.py"]) == ["pytorch_model.bin"]
    assert needed_files(["modeling.py"], trust_remote_code=True) == ["modeling.py"]


class FakeHub:
    """The hub with one repository, whose files are those of a local folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache

    def model_info(self, repo_id: str, timeout: float) -> Any:
        names = [str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def snapshot_download(self, repo_id: str, allow_patterns: list[str]) -> str:
        for name in allow_patterns:
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / name, self.cache / name)
        return str(self.cache)


class Offline:
    """The hub without a network."""

    def model_info(self, repo_id: str, timeout: float) -> Any:
        validate_repo_id(repo_id)
        raise ConnectionError("no network\nmore")


def test_hub_id(make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(make_checkpoint(layout="old"), tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    checkpoint = read_checkpoint("someone/some-model")
    assert (checkpoint.name, checkpoint.source, checkpoint.path) == ("some-model", "someone/some-model", tmp_path)


def test_hub_id_from_the_cache(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = "a" * 40
    repository = tmp_path / "models--someone--some-model"
    snapshot = Path(shutil.copytree(make_checkpoint(), repository / "snapshots" / revision))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_checkpoint("someone/some-model").path == snapshot


@pytest.mark.parametrize("source", ["someone/some-model", "./no/such/folder", "no such name"])
def test_not_found(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="neither a folder here nor a model") as caught:
        read_checkpoint(source)
    assert len(caught.value.problems) == 1
    assert "\n" not in caught.value.problems[0]
