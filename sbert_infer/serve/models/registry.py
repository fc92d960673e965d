"""All served models: found by name, and reloaded on demand."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from sbert_infer.errors import SbertInferError
from sbert_infer.serve.models.served_model import INPUT_TYPES, Model
from sbert_infer.serve.settings import ModelFile, Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.types import Observe, Priority

logger = logging.getLogger(__name__)


class Models:
    """All models, in the order given. The first one is the default."""

    def __init__(self, settings: Settings, observer: Callable[[str], Observe]) -> None:
        self._any_name = settings.any_model_name
        self._models = [
            Model(name, file, settings, observer(name))
            for name, file in zip(_unique_names(settings.models), settings.models, strict=True)
        ]
        self._by_name = {model.name: model for model in self._models}
        self._reloading = asyncio.Lock()
        self.draining = False

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """The values that a request's fields may have with these models, as JSON schemas."""
        prompts = sorted({name for model in self._models for name in model.engine.engine.prompts})
        dim = max(model.manifest.dim for model in self._models)
        longest = max(model.manifest.max_length for model in self._models)
        input_types = {"enum": [*dict.fromkeys([*INPUT_TYPES, *prompts]), None]}
        dimensions = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": dim}, {"type": "null"}]}
        limit = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": longest}, {"type": "null"}]}
        return {
            "model": {} if self._any_name else {"enum": [*self._by_name, None]},
            "prompt_name": {"enum": [*prompts, None]},
            **dict.fromkeys(("input_type", "task"), input_types),
            **dict.fromkeys(("dimensions", "output_dimension"), dimensions),
            **dict.fromkeys(("truncate_prompt_tokens", "max_tokens", "max_tokens_per_doc"), limit),
        }

    @property
    def first(self) -> Model:
        """The default model."""
        return self._models[0]

    def has(self, kind: str) -> bool:
        """Whether there is a model of this kind."""
        return any(model.manifest.kind == kind for model in self._models)

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here."""
        return not self.draining and all(model.ready for model in self._models)

    def check_room(self, priority: Priority | None, key: Hashable) -> None:
        """Raise the error that a request for one text would get now, if there is only one model.

        Which of several models a request is for is known once its body is read; then that model's
        own queue refuses and counts it.
        """
        if len(self._models) > 1 or not self.first.is_open:
            return
        if refusal := self.first.engine.refusal(priority, key):
            self.first.engine.count_refusal(refusal)
            raise refusal

    async def open(self) -> None:
        """Open all models, one after the other."""
        for model in self._models:
            await model.open()
        self._add_own_names()

    def get(self, name: str | None) -> Model:
        """The model of this name."""
        if name is None and (len(self._models) == 1 or self._any_name):
            return self.first
        if name is None:
            raise Problem("invalid_request", f"several models are served, name one of: {self._listed()}", param="model")
        if (model := self._by_name.get(name)) is not None:
            return model
        if self._any_name:
            return self.first
        raise Problem(
            "model_not_found", f"model {name[:80]!r} is not served here, only: {self._listed()}", param="model"
        )

    def get_typed(self, name: str | None) -> tuple[Model, str | None]:
        """The model of this name, and what its inputs are if the name says so, as NIM's may.

        "minilm-query" and "minilm-passage" are the model "minilm".
        """
        if name is not None and name not in self._by_name:
            base, _, input_type = name.rpartition("-")
            if input_type in ("query", "passage") and base in self._by_name:
                return self._by_name[base], input_type
        return self.get(name), None

    def find(self, name: str | None, kind: str) -> Model:
        """The model of this name; by default the first of this kind, or else the first of all."""
        if name is not None:
            return self.get(name)
        return next((model for model in self._models if model.manifest.kind == kind), self.first)

    @property
    def reloading(self) -> bool:
        """Whether a reload is under way."""
        return self._reloading.locked()

    async def reload(self, count: Callable[[str, str], object]) -> None:
        """Open every file again, and `count` each result.

        The first file that can't be served ends the reload: its model and those after it stay.
        """
        async with self._reloading:
            for model in self._models:
                try:
                    await model.open()
                except Exception as error:  # whatever it is, the old model stays
                    count(model.name, "failed")
                    unchanged = f"{model.name} was not reloaded, the model opened before still serves"
                    message = f"{unchanged}: {_reason(error, model)}"
                    logger.error("%s", message)
                    raise Problem("reload_failed", message) from error
                count(model.name, "ok")
                logger.info("reloaded %s", model.name)

    async def close(self, drain_s: float) -> None:
        """Let calls end for `drain_s`, and free everything."""
        self.draining = True
        await asyncio.gather(*(model.close(drain_s) for model in self._models))

    def _add_own_names(self) -> None:
        """Also serve each model under the name it was exported with, if no other has that name."""
        own = Counter(model.manifest.name for model in self._models)
        for model in self._models:
            name = model.manifest.name
            if own[name] == 1 and name not in self._by_name:
                self._by_name[name] = model
                model.names.append(name)

    def _listed(self) -> str:
        return ", ".join(self._by_name)


def _reason(error: Exception, model: Model) -> str:
    """Why a file can't be served, without naming its folder."""
    if isinstance(error, (SbertInferError, ValueError)):
        return str(error).replace(str(model.path), model.path.name)
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{model.path.name}: {reason or type(error).__name__}"


def _unique_names(files: Sequence[ModelFile]) -> list[str]:
    names = [file.served_name for file in files]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(
                f"{count} models are called {name}: give them names, as in first={files[names.index(name)].path}"
            )
    return names
