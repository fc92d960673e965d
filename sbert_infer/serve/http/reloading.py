"""Reloading: keys, certificate and models are read again while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from sbert_infer.serve.http.auth import Access
from sbert_infer.serve.http.tls import Certificate
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem

logger = logging.getLogger(__name__)


class Reloading:
    """Reads everything again that may have changed on disk."""

    def __init__(
        self, models: Models, access: Access, certificate: Certificate | None, settings: Settings, metrics: Metrics
    ) -> None:
        self._models, self._access, self._certificate, self._metrics = models, access, certificate, metrics
        files = (settings.api_key_file, settings.admin_key_file, settings.tls_cert, settings.tls_key)
        self._files = [file for file in files if file is not None]

    @property
    def in_progress(self) -> bool:
        """Whether models are being opened again."""
        return self._models.reloading

    async def reload(self) -> None:
        """Read keys, then the certificate, then the models: a key that was revoked ends at once.

        What can't be read stays as it was, and ends the reload.
        """
        await self._read(self._access.read, "nothing was reloaded")
        if self._certificate is not None:
            await self._read(self._certificate.read, "neither certificate nor models were reloaded")
        if self._files:
            logger.info("read again: %s", ", ".join(file.name for file in self._files))
        await self._models.reload(self._metrics.count_reload)

    async def _read(self, read: Callable[[], None], failure: str) -> None:
        try:
            await asyncio.to_thread(read)
        except (OSError, ValueError) as error:
            message = f"{failure}: {_reason(error, self._files)}"
            logger.error("%s", message)
            raise Problem("reload_failed", message) from error


def _reason(error: OSError | ValueError, files: list[Path]) -> str:
    """Why a file can't be read, without naming its folder."""
    reason = f"{error.filename or 'a file'}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
    for file in files:
        reason = reason.replace(str(file), file.name)
    return reason
