"""The tokenizer step of a Triton Inference Server repository: texts in, padded token ids out.

`sbert-export --triton-repository` copies this file to `<name>_tokenizer/1/model.py`, beside
`tokenizer.json` and `settings.json`. It runs in the server's Python backend and needs numpy and
tokenizers, nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # only in the server

Ids = npt.NDArray[np.int64]


class TritonPythonModel:
    """Responds to each request separately: one that can't be tokenized fails alone."""

    def initialize(self, args: dict[str, str]) -> None:
        """Called once by the server, with the model's configuration."""
        folder = Path(__file__).parent
        self._settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self._edges = np.array(self._settings["edges"])
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._backend.no_padding()
        self._backend.enable_truncation(self._settings["max_length"], direction=self._settings["truncation_side"])
        special = self._backend.get_added_tokens_decoder().items()
        self._special_ids = {id for id, token in special if token.special}
        self._on_truncate: str = json.loads(args["model_config"])["parameters"]["on_truncate"]["string_value"]
        if self._on_truncate not in ("report", "error"):
            raise ValueError(f"the parameter on_truncate must be 'report' or 'error', got {self._on_truncate!r}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request. All their texts are tokenized together, on all cores."""
        read = [self._read(request) for request in requests]
        texts = [text for _, texts, _ in read for text in texts]
        encodings = iter(self._backend.encode_batch_fast(texts) if texts else ())
        return [
            _refused(problem) if problem else self._respond([next(encodings) for _ in texts], prompt)
            for prompt, texts, problem in read
        ]

    def _read(self, request: Any) -> tuple[str, list[str], str]:
        """The prompt, the texts that begin with it, and a problem or an empty string."""
        try:
            prompt = self._prompt(json.loads(request.parameters() or "{}"))
            values = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()  # [texts, 1], of bytes
            texts = [prompt + _decoded(value, index) for index, value in enumerate(values.reshape(-1).tolist())]
        except ValueError as error:
            return "", [], str(error)
        return prompt, texts, ""

    def _prompt(self, parameters: dict[str, Any]) -> str:
        """The request's `prompt`, the one named by its `prompt_name`, or the model's default."""
        if "prompt" in parameters:
            return str(parameters["prompt"])
        prompts: dict[str, str] = self._settings["prompts"]
        name = parameters.get("prompt_name", self._settings["default_prompt_name"])
        if name is not None and name not in prompts:
            raise ValueError(f"prompt_name {name!r} is not among the model's prompts: {sorted(prompts)}")
        return "" if name is None else prompts[name]

    def _respond(self, encodings: list[tokenizers.Encoding], prompt: str) -> Any:
        truncated = np.array([[bool(encoding.overflowing)] for encoding in encodings])  # [texts, 1]
        if truncated.any() and self._on_truncate == "error":
            limit = self._settings["max_length"]
            return _refused(f"text {int(truncated.argmax())} is longer than the model's limit of {limit} tokens")
        ids, mask = self._padded([encoding.ids for encoding in encodings])
        outputs = {"input_ids": ids, "attention_mask": mask, "truncated": truncated}
        if not self._settings["include_prompt"]:
            outputs["prompt_length"] = np.full((len(encodings), 1), self._prompt_length(prompt), np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def _padded(self, rows: list[list[int]]) -> tuple[Ids, Ids]:
        """Ids and mask, [texts, length], padded to a bucket's length: requests have few shapes."""
        longest = max(map(len, rows))
        length = int(self._edges[np.searchsorted(self._edges, longest)])
        ids = np.full((len(rows), length), self._settings["pad_id"], np.int64)
        mask = np.zeros((len(rows), length), np.int64)
        for index, row in enumerate(rows):
            place = slice(length - len(row), length) if self._settings["padding_side"] == "left" else slice(len(row))
            ids[index, place], mask[index, place] = row, 1
        return ids, mask

    def _prompt_length(self, prompt: str) -> int:
        """Tokens excluded from pooling: the prompt's, less a final special one."""
        ids = self._backend.encode(prompt).ids if prompt else []
        return len(ids) - 1 if ids and ids[-1] in self._special_ids else len(ids)


def _decoded(value: bytes, index: int) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"text {index} is not UTF-8: {error.reason} at byte {error.start}") from error


def _refused(problem: str) -> Any:
    error = pb_utils.TritonError(problem, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
