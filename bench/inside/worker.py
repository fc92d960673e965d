"""One contestant in a process of its own: `python worker.py`, JSON lines in, JSON lines out.

Standalone: it runs in the interpreter that has the contestant's library, with or without
sbert_infer, so it imports the standard library, numpy and the modules beside it only. Texts come in
a JSON file, vectors go to .npy files. For rerankers, texts are pairs of texts and vectors are
scores.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[Any]
Request = dict[str, Any]
Reply = dict[str, Any]

_MODULES = ("loaders", "converters")  # imported by their bare names
_WAKE_TEXTS = 8  # encoded before each timing: a stopped process has cold threads and pages
_TUNE_REPEATS = 2
_TUNE_LONG_S = 5.0  # a trial this long is not repeated


class Worker:
    """Carries out requests for one contestant. Each public method is a command."""

    def __init__(self) -> None:
        self._encode: Any = None
        self._texts: list[Any] = []

    def load(self, spec: Request) -> Reply:
        """Load the contestant and encode a first text, timed, imports included."""
        start = time.perf_counter()
        self._encode = importlib.import_module("loaders").LOADERS[spec["kind"]](spec)
        first = "A first text."
        texts = [[first, first] if spec.get("pairs") else first]
        self._encode(texts, None, None)  # some libraries compile, or crash, only now
        return {"seconds": time.perf_counter() - start}

    def texts(self, file: str) -> Reply:
        """Read the texts to encode from now on."""
        self._texts = json.loads(Path(file).read_text(encoding="utf-8"))
        return {"count": len(self._texts)}

    def warm_up(self, batch_size: int | None, by_length: bool, every: int) -> Reply:
        """Encode part of the texts, including the longest and the shortest."""
        order = sorted(range(len(self._texts)), key=lambda row: characters(self._texts[row]))
        rows = sorted({*order[::every], order[-1]})
        self._run([self._texts[row] for row in rows], batch_size, by_length)
        return {}

    def tune(self, sizes: list[int], count: int) -> Reply:
        """Find the batch size that is fastest on `count` of the texts, sorted by length."""
        sample = self._texts[:: max(1, len(self._texts) // count)][:count]
        seconds = {}
        for size in sizes:
            times = []
            for _ in range(_TUNE_REPEATS):
                start = time.perf_counter()
                self._run(sample, size, by_length=True)
                times.append(time.perf_counter() - start)
                if times[0] > _TUNE_LONG_S:
                    break
            seconds[size] = min(times)  # the first may include setting up for this size
        return {"batch_size": min(seconds, key=lambda size: seconds[size]), "seconds": list(seconds.values())}

    def encode(self, batch_size: int | None, by_length: bool, out: str, prompt: str | None = None) -> Reply:
        """Encode all texts, timed from texts to vectors in the order given."""
        self._run(self._texts[:_WAKE_TEXTS], batch_size, by_length)
        cpu, start = cpu_seconds(), time.perf_counter()
        vectors = self._run(self._texts, batch_size, by_length, prompt)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        np.save(out, np.asarray(vectors, np.float32))
        padding = getattr(self._encode, "padding", None)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "peak_mb": peak_memory_mb(),
            "padding": padding() if padding else None,
        }

    def latency(self, rows: list[int], out: str) -> Reply:
        """Encode some of the texts one at a time; milliseconds for each."""
        self._run(self._texts[:1], None, by_length=False)
        times, vectors = [], []
        for row in rows:
            start = time.perf_counter()
            vectors.append(self._encode([self._texts[row]], None, None))
            times.append(1e3 * (time.perf_counter() - start))
        np.save(out, np.concatenate(vectors).astype(np.float32))
        return {"ms": times}

    def convert(self, converter: str, spec: Request, folder: str) -> Reply:
        """Make the files that the library runs from the checkpoint."""
        convert = importlib.import_module("converters").CONVERTERS[converter]
        return {"spec": convert(spec, Path(folder))}

    def fact(self, function: str, **arguments: Any) -> Reply:
        """Call a function of checkpoint_facts.py, which needs sbert_infer and torch."""
        facts = importlib.import_module("sbert_infer.bench.inside.checkpoint_facts")
        return {"value": getattr(facts, function)(**arguments)}

    def peak(self, **arguments: Any) -> Reply:
        """Measure the machine's matrix product with peaks.py, which needs torch and onnxruntime."""
        return {"gflops": importlib.import_module("sbert_infer.bench.inside.peaks").gemm_gflops(**arguments)}

    def versions(self, packages: list[str]) -> Reply:
        """Versions of those `packages` that are installed here."""
        found = {}
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return {"versions": found, "python": sys.version.split()[0]}

    def cuda(self) -> Reply:
        """The GPU that PyTorch uses; none is an empty name."""
        torch: Any = importlib.import_module("torch")
        return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}

    def _run(self, texts: list[Any], batch_size: int | None, by_length: bool, prompt: str | None = None) -> Vectors:
        if not by_length:
            vectors: Vectors = self._encode(texts, batch_size, prompt)
            return vectors
        order = sorted(range(len(texts)), key=lambda row: -characters(texts[row]))
        sorted_vectors = np.asarray(self._encode([texts[row] for row in order], batch_size, prompt))
        vectors = np.empty_like(sorted_vectors)
        vectors[order] = sorted_vectors
        return vectors


def characters(text: Any) -> int:
    """Number of characters in a text or a pair of texts."""
    return len(text) if isinstance(text, str) else sum(map(len, text))


def cpu_seconds() -> float:
    """CPU time of this process, all threads, and of its children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def peak_memory_mb() -> float:
    """Peak memory of this process."""
    try:  # unlike ru_maxrss, this does not include what the parent held when it forked
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    except (OSError, IndexError, ValueError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def die_with_parent() -> None:
    """On Linux, ask to be killed when the benchmark ends, even while stopped."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def take_stdout() -> TextIO:
    """Keep stdout for the protocol; what libraries print there, even from C, goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def handle(worker: Worker, line: str) -> Reply:
    """Carry out one request; an error is replied as its message."""
    request = json.loads(line)
    command: Callable[..., Reply] = getattr(worker, request.pop("command"))
    try:
        return command(**request)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        return {"error": f"{error.name} is not installed"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}


def main() -> None:
    """Handle requests until stdin closes."""
    die_with_parent()
    stream = take_stdout()
    worker = Worker()
    for module in _MODULES:
        importlib.import_module(module)
    sys.path.remove(str(Path(__file__).resolve().parent))  # so that no library imports a module of ours by accident
    for line in sys.stdin:
        stream.write(json.dumps(handle(worker, line)) + "\n")
        stream.flush()
    os._exit(0)  # libraries leave threads behind that would keep the process alive


if __name__ == "__main__":
    main()
