"""TensorRT-RTX's runtime cache: the kernels that it compiles for this GPU while an engine runs.

They are kept in the user's cache folder, so that only the first process compiles them. The cache
saves time and nothing else: where it can't be made, read or written, that is logged, and the
engine runs all the same.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build_cache import engine_key, keep_kernels, kept_kernels
from sbert_infer.backends.tensorrt.versions import TensorRT

logger = logging.getLogger(__name__)


class RuntimeCache:
    """The runtime cache of one engine on one GPU.

    It holds TensorRT-RTX's object, which the runtime configuration only refers to, and which must
    outlive the contexts that use it.
    """

    def __init__(self, trt: TensorRT, config: Any, serialized: bytes, device: int) -> None:
        gpu = f"{cuda.device_name(device)} {cuda.compute_capability(device)}"
        self._key = engine_key(hashlib.sha256(serialized).hexdigest(), trt.name, trt.version, gpu)
        self._log, self._saved = trt.log, b""
        self._cache = config.create_runtime_cache()
        if self._cache is None:
            logger.warning("%s has no runtime cache: %s", trt.name, self._log.words())
            return
        self._load()
        if not config.set_runtime_cache(self._cache):
            logger.warning("%s refuses its runtime cache: %s", trt.name, self._log.words())

    def save(self) -> None:
        """Keep the kernels compiled so far. The engine's GPU must be current."""
        content = self._serialized()
        if content and content != self._saved:
            keep_kernels(self._key, content)
            self._saved = content

    def _load(self) -> None:
        """Load what an earlier process kept. TensorRT-RTX checks it against GPU and driver."""
        content = kept_kernels(self._key)
        if content is None:
            return
        if self._cache.deserialize(content):
            self._saved = content
        else:
            logger.info("the kept kernels do not fit, and are compiled again: %s", self._log.words())

    def _serialized(self) -> bytes:
        content = None if self._cache is None else self._cache.serialize()
        return b"" if content is None else bytes(content)
