"""mteb, with small tasks defined here, takes an `Engine` as it takes a `SentenceTransformer`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import Engine
from tests.models.families import TEXTS

mteb: Any = pytest.importorskip("mteb")

PROMPTS = {"query": "find this: ", "document": "text: ", "STS": "compare: "}


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("bert", prompts=PROMPTS)


def metadata(kind: str, name: str, main_score: str) -> Any:
    return importlib.import_module("mteb.abstasks.task_metadata").TaskMetadata(
        name=name,
        description="Made here.",
        dataset={"path": "none", "revision": "none"},
        type=kind,
        eval_langs=["eng-Latn"],
        main_score=main_score,
        bibtex_citation="",
    )


def sts_task() -> Any:
    rows = list(pairwise(TEXTS))
    scores = [(7 * place) % 5 for place in range(len(rows))]
    columns = {"sentence1": [a for a, _ in rows], "sentence2": [b for _, b in rows], "score": scores}

    class LocalSTS(importlib.import_module("mteb.abstasks.sts").AbsTaskSTS):  # type: ignore[misc]
        metadata = metadata("STS", "LocalSTS", "cosine_spearman")
        min_score, max_score = 0, 4

        def load_data(self, **_: Any) -> None:
            self.dataset = {"test": importlib.import_module("datasets").Dataset.from_dict(columns)}
            self.data_loaded = True

    return LocalSTS()


def retrieval_task() -> Any:
    class LocalRetrieval(importlib.import_module("mteb.abstasks.retrieval").AbsTaskRetrieval):  # type: ignore[misc]
        metadata = metadata("Retrieval", "LocalRetrieval", "ndcg_at_10")

        def load_data(self, **_: Any) -> None:
            from_list = importlib.import_module("datasets").Dataset.from_list
            corpus = [{"id": f"d{place}", "title": text[:5], "text": text} for place, text in enumerate(TEXTS)]
            queries = [{"id": f"q{place}", "text": text[:20]} for place, text in enumerate(TEXTS[:8])]
            grades = {f"q{place}": {f"d{place}": 2, f"d{place + 1}": 1} for place in range(8)}
            split = {"corpus": from_list(corpus), "queries": from_list(queries), "relevant_docs": grades}
            self.dataset = {"default": {"test": {**split, "top_ranked": None}}}
            self.data_loaded = True

    return LocalRetrieval()


@pytest.mark.parametrize("make_task", [sts_task, retrieval_task])
def test_scores_are_those_of_sentence_transformers(
    make_task: Callable[[], Any], checkpoint: Path, export_checkpoint: Callable[..., Path]
) -> None:
    from sentence_transformers import SentenceTransformer

    def scores(model: Any) -> dict[str, Any]:
        [found] = mteb.evaluate(model, make_task(), cache=None, show_progress_bar=False).task_results
        [only] = found.scores["test"]
        return {name: value for name, value in only.items() if isinstance(value, float)}

    with Engine(export_checkpoint("bert", prompts=PROMPTS), on_truncate="ignore") as engine:
        ours = scores(engine)
    theirs = scores(SentenceTransformer(str(checkpoint), device="cpu"))
    assert ours == pytest.approx(theirs, abs=5e-5, nan_ok=True)
    assert ours["main_score"] not in (0, 1)


def test_the_card_tells_precisions_apart(export_checkpoint: Callable[..., Path]) -> None:
    with Engine(export_checkpoint("bert")) as exact, Engine(export_checkpoint("bert", int8=True)) as rounded:
        cards = exact.mteb_model_meta, rounded.mteb_model_meta
        assert exact.fingerprint.exact in cards[0].revision
        assert exact.fingerprint.exact in exact.model_card_data.base_model
        with exact.truncate_embeddings(8):
            assert exact.mteb_model_meta.revision != cards[0].revision
        assert exact.mteb_model_meta.revision == cards[0].revision
    assert cards[0].name == cards[1].name
    assert cards[0].revision != cards[1].revision
