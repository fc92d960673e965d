"""Measure the quality of every contestant's vectors on every task. Nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest
from sbert_infer.bench.contest.rounds import Contest
from sbert_infer.bench.errors import BenchError, DatasetError
from sbert_infer.bench.quality.beir import read_beir
from sbert_infer.bench.quality.labelled_pairs import read_labels, read_scores
from sbert_infer.bench.quality.tasks import AP, SPEARMAN, PairTask, RetrievalTask, Task

Progress = Callable[[str], object]
Found = dict[str, dict[str, float]]  # contestant -> measure -> value

# Prompts that sentence-transformers' encode_query and encode_document look for, in order.
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}


def make_tasks(models: ModelsUnderTest, sts: Sequence[Path], pairs: Sequence[Path], beir: Sequence[Path]) -> list[Task]:
    """Read the datasets and make a task of each."""
    manifest, together = models.artifacts[0].manifest, models.pairs
    if together and manifest.dim > 1 and (sts or pairs):
        raise BenchError(f"--sts and --pairs need a reranker with one label, {models.name} has {manifest.dim}")
    if together and beir:
        raise BenchError("--beir is for models with vectors: a reranker can't search a whole corpus")
    tasks: list[Task] = [
        *(PairTask(read_scores(path), SPEARMAN, together) for path in sts),
        *(PairTask(read_labels(path), AP, together) for path in pairs),
        *(RetrievalTask(read_beir(path), manifest.similarity) for path in beir),
    ]
    names = [task.data.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DatasetError(f"two datasets are called {twice[0]}: rename a file or folder")
    return tasks


def evaluate(contest: Contest, tasks: Sequence[Task], manifest: Manifest, progress: Progress) -> Found:
    """Evaluate every contestant but tuned ones: batching does not change a library's quality."""
    found: Found = {}
    entrants = [entrant for entrant in contest.entrants if not entrant.contestant.tuned]
    for task in tasks:
        scorers = {entrant.contestant.name: task.scorer() for entrant in entrants}
        done = 0
        for block in task.blocks():
            prompts = (manifest.prompts[name] for name in _PROMPTS.get(block.role, ()) if name in manifest.prompts)
            prompt = next(prompts, None)  # None stands for the model's default
            contest.hand_out(block.texts)
            for entrant in entrants:
                name = entrant.contestant.name
                progress(f"{task.data.name}: {name}, from text {done + 1:,} on")
                vectors = contest.vectors(entrant, prompt) if name in scorers else None
                if vectors is not None and np.isfinite(vectors).all():
                    scorers[name].add(block, vectors)
                else:  # it is out of this task
                    scorers.pop(name, None)
            done += len(block.texts)
        for name, scorer in scorers.items():
            found.setdefault(name, {}).update(scorer.measures())
    return _with_mean(found)


def _with_mean(found: Found) -> Found:
    """Add the mean of the rank correlations where there are several, such as STS12 to STS16."""
    tasks = {name for measures in found.values() for name in measures if name.endswith(f" {SPEARMAN}")}
    for measures in found.values():
        values = [measures[name] for name in tasks if name in measures]
        if len(values) == len(tasks) > 1:  # no mean for a contestant that failed in one
            measures[f"mean {SPEARMAN}"] = float(np.mean(values))
    return found
