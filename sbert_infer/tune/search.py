"""The search: first files and devices, then how the best of them shares cores, then its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from sbert_infer.artifact.canaries import canaries_of
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.backends.choice import Choice, conditions
from sbert_infer.errors import EngineError
from sbert_infer.tune.candidates import Candidate, batches, layouts, ways
from sbert_infer.tune.trial import Bench, Notify, Trial
from sbert_infer.tune.workload import Workload


@dataclass(frozen=True)
class Found:
    """All that was tried, and which is the fastest of those that are near enough, if any."""

    trials: Sequence[Trial]
    best: Trial | None
    texts: int  # of a round


def search(
    artifacts: Sequence[Artifact],
    workload: Workload,
    min_cosine: float,
    trying: Callable[[Candidate], object],
    notify: Notify,
) -> Found:
    """Try everything. `trying` is called with each candidate before it is opened."""
    canaries = canaries_of(artifacts[0])
    assert canaries is not None  # noqa: S101  # as `open_artifacts` has seen
    with closing(Bench(canaries, workload, min_cosine, notify)) as bench:

        def challenge(candidates: Iterable[Candidate]) -> None:
            for candidate in candidates:
                trying(candidate)
                bench.challenge(candidate)

        first, *others = ways(artifacts)
        trying(first)
        bench.start(first)
        challenge(others)
        if bench.best is not None:
            trial, backend = bench.best
            challenge(layouts(trial.candidate, backend))
        if bench.best is not None:
            trial, backend = bench.best
            challenge(batches(trial.candidate, backend, bench.tokens))
        return Found(bench.trials, None if bench.best is None else bench.best[0], bench.timed)


def choice_of(found: Found, min_cosine: float, command: str) -> Choice:
    """Return the choice to remember; raise if nothing is near enough."""
    best = found.best
    if best is None:
        near = max((trial.cosine or 0.0 for trial in found.trials), default=0.0)
        cure = "add the artifact in FP32, or ask for less with --min-cosine"
        raise EngineError(f"nothing has a cosine of at least {min_cosine:g}, the nearest {near:.6f}: {cure}")
    artifact, options = best.candidate.artifact, best.candidate.options
    return Choice(
        path=str(artifact.path.absolute()),
        seal=artifact.sha256,
        model=fingerprint(artifact).model,
        device=None if options.device is None else str(options.device),
        workers=options.workers,
        threads=options.threads,
        max_batch_tokens=options.max_batch_tokens,
        backend=best.backend,
        ratio=best.ratio,
        cosine=best.cosine or 0.0,
        min_cosine=min_cosine,
        command=command,
        conditions=conditions(),
    )
