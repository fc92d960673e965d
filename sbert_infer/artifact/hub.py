"""Models of the Hugging Face hub: their names, and which of their commits a name means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_HUB_ID = re.compile(r"(?P<repository>(\w[\w.-]*/)?\w[\w.-]*)(@(?P<revision>\S+))?")
_OWNER = "sentence-transformers"  # of a model whose name has no owner, as sentence-transformers has it
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0

Found = TypeVar("Found")


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, written `OWNER/NAME`, `NAME`, or either with `@REVISION`."""

    repository: str
    revision: str | None = None  # a branch, a tag or a commit; None for the newest commit

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Read a name; None if it can't be one."""
        match = _HUB_ID.fullmatch(text)
        return cls(match["repository"], match["revision"]) if match else None

    @property
    def name(self) -> str:
        """The name without owner and revision."""
        return self.repository.rpartition("/")[2]

    @property
    def commit(self) -> str | None:
        """The revision, if it is a commit."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    def info(self) -> Any:
        """Ask the hub for the commit (`sha`) and its files (`siblings`)."""
        import huggingface_hub

        api = huggingface_hub.HfApi()
        return self._first(lambda repository: api.model_info(repository, revision=self.revision, timeout=_TIMEOUT_S))

    def download(self, files: list[str]) -> Path:
        """Download these files, or find them from an earlier time, and return their folder."""
        return self._first(lambda repository: self._snapshot(repository, allow_patterns=files))

    def downloaded(self) -> Path:
        """Return the folder of an earlier download; its name is the commit."""
        return self._first(lambda repository: self._snapshot(repository, local_files_only=True))

    def _snapshot(self, repository: str, **options: Any) -> Path:
        import huggingface_hub

        return Path(huggingface_hub.snapshot_download(repository, revision=self.revision, **options))

    def _first(self, find: Callable[[str], Found]) -> Found:
        """Return the first result; a name without an owner may be that of two repositories."""
        if "/" not in self.repository:
            try:
                return find(f"{_OWNER}/{self.repository}")
            except Exception:  # the errors of the hub and of its HTTP library share no base class
                return find(self.repository)
        return find(self.repository)
