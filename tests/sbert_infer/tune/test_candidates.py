"""What `sbert-tune` tries: how the cores are shared, and how many tokens run together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sbert_infer.backends.select import BackendOptions
from sbert_infer.tune import candidates
from sbert_infer.tune.candidates import Candidate, batches, layouts

BEST = Candidate(None)  # type: ignore[arg-type]  # of any artifact


def backend(device: str = "cpu", *, max_batch_tokens: int = 512, workers: int = 2) -> Any:
    return SimpleNamespace(device=device, max_batch_tokens=max_batch_tokens, workers=workers)


@pytest.mark.parametrize(("cores", "expected"), [(1, []), (2, [(1, 1), (1, 2)]), (4, [(2, 1), (2, 2), (1, 4)])])
def test_cores_are_shared_otherwise(cores: int, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "usable_cores", lambda: cores)
    assert [(each.options.workers, each.options.threads) for each in layouts(BEST, backend())] == expected
    assert not [*layouts(BEST, backend("cuda:0"))]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1023, []), (1024, [256]), (4096, [256, 1024]), (8192, [256, 1024, 2048])]
)
def test_batches_of_which_each_worker_has_some(tokens: int, expected: list[int]) -> None:
    assert [each.options.max_batch_tokens for each in batches(BEST, backend(), tokens)] == expected


def test_a_gpu_takes_no_larger_batches_than_its_own() -> None:
    gpu = backend("cuda:0", max_batch_tokens=16384, workers=1)
    assert [each.options.max_batch_tokens for each in batches(BEST, gpu, 10**6)] == [4096, 8192]


def test_other_options_stay() -> None:
    best = Candidate(None, BackendOptions(strict=True, threads=2))  # type: ignore[arg-type]
    (first, *_) = batches(best, backend(), 8192)
    assert (first.options.strict, first.options.threads) == (True, 2)
