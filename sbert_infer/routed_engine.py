"""The part of `Engine` for models that have a graph for each task (`Router`), all in one file."""

from __future__ import annotations

from typing import Any, TypeVar

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.artifact.onnx_file import open_routes
from sbert_infer.base_engine import COPIED_OPTIONS, BaseEngine

Self = TypeVar("Self", bound="RoutedEngine")


class RoutedEngine(BaseEngine):
    """An engine for the default route of its file, with further engines for the other routes."""

    _routes: dict[str, Any]

    def _apply(self, manifest: Manifest) -> None:
        options: dict[str, Any] = {name: getattr(self._options, name) for name in COPIED_OPTIONS}
        options |= {"verify": self._self_check.verify}
        parts = open_routes(self.artifact)
        self._routes = {task: type(self)(part, **options) for task, part in parts.items()}

    def for_task(self: Self, task: str | None) -> Self:
        """Return the engine of the route for `task`, with the settings of this one."""
        other: Self | None = self._routes.get(task or "")
        if other is None:
            return self
        for name in ("on_truncate", *self.settings):
            if name != "max_seq_length" and getattr(other, name) != getattr(self, name):
                setattr(other, name, getattr(self, name))
        return other

    def close(self) -> None:
        """Stop the workers and free the model. A second call does nothing."""
        super().close()
        for other in self._routes.values():
            other.close()

    def _check_max_seq_length(self, value: int) -> None:
        if self._routes:
            raise ValueError(f"max_seq_length: not for {self.manifest.name}, which has several routes")
        super()._check_max_seq_length(value)
