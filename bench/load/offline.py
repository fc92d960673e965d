"""The same model without a server: the expected vectors, and the speed that a server can reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.contest.process import RemoteWorker
from sbert_infer.bench.errors import BenchError, WorkerError


class Offline:
    """An artifact's `Engine` or a checkpoint's eager model, stopped while servers run."""

    def __init__(self, source: str, folder: Path, *, trust_remote_code: bool = False) -> None:
        if not Path(source).exists() and source.endswith((".onnx", ".plan")):
            raise BenchError(f"{source} does not exist")
        self.source = source
        self.texts_per_s: list[float] = []  # one per round
        self._folder = folder
        self._out = folder / "load-vectors.npy"
        self._count = 0
        artifact = Path(source).is_file()
        spec = {"kind": "engine", "artifact": source} if artifact else {"kind": "eager", "checkpoint": source}
        self._worker = RemoteWorker()
        try:
            self._worker.ask("load", spec={**spec, "trust_remote_code": trust_remote_code})
        except WorkerError as error:
            self.close()
            raise BenchError(str(error)) from error

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Encode `texts`, which are also those that `turn` encodes."""
        file = self._folder / "load-texts.json"
        file.write_text(json.dumps(list(texts)), encoding="utf-8")
        self._count = int(self._worker.ask("texts", file=str(file))["count"])
        self._encode()
        vectors: npt.NDArray[np.float32] = np.load(self._out)
        return vectors

    def turn(self) -> None:
        """Encode all texts once more, timed."""
        self.texts_per_s.append(self._count / self._encode())

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _encode(self) -> float:
        try:
            reply = self._worker.ask("encode", batch_size=None, by_length=False, out=str(self._out))
        except WorkerError as error:
            raise BenchError(f"{self.source}: {error}") from error
        return float(reply["seconds"])
