"""Metrics for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.sbert_infer.serve.conftest import Running

ROOT = Path(__file__).parents[3]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(server: Running) -> Samples:
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_every_request_and_text_is_counted(start_server: Callable[..., Running]) -> None:
    server = start_server(auto_truncate=True)
    fresh = scrape(server)
    assert of(fresh, "sbert_requests_total", model="small") == 0  # the warm-up is no client's request
    assert of(fresh, "sbert_stage_seconds_count", model="small", stage="run") == 0
    texts = ["A cat sat.", "word " * 500, "A feline."]
    tokens = server.post("/v1/embeddings", {"input": texts}).json()["usage"]["prompt_tokens"]
    assert server.post("/embed", {"inputs": "word " * 500, "truncate": False}).status_code == 413
    assert server.post("/embed", {"nonsense": 1}).status_code == 422
    assert server.client.get("/somewhere/else").status_code == 404
    assert server.post("/openai/deployments/gone/embeddings", {"input": "A cat."}).status_code == 404
    assert server.client.get("/v1/models/small").status_code == 200
    found = scrape(server)
    assert of(found, "sbert_http_requests_total", route="/v1/embeddings", status="200") == 1
    assert of(found, "sbert_http_requests_total", route="/embed", status="413") == 1
    assert of(found, "sbert_http_requests_total", route="/embed", status="422") == 1
    assert of(found, "sbert_http_requests_total", route="other", status="404") == 1
    assert of(found, "sbert_http_requests_total", route="/openai/deployments/{name}/embeddings", status="404") == 1
    assert of(found, "sbert_http_requests_total", route="/v1/models/{name}", status="200") == 1
    assert of(found, "sbert_http_request_seconds_count", route="/embed") == 2
    assert of(found, "sbert_http_requests_in_progress") == 1
    assert of(found, "sbert_requests_total", model="small") == 2
    assert of(found, "sbert_texts_total", model="small") == 4
    assert of(found, "sbert_tokens_total", model="small") == tokens  # those of the text that was refused don't count
    assert of(found, "sbert_truncated_texts_total", model="small") == 2
    assert of(found, "sbert_errors_total", model="small", kind="too_long") == 1
    assert of(found, "sbert_batch_size_tokens_sum", model="small") == tokens
    assert of(found, "sbert_padded_tokens_total", model="small") >= tokens
    for stage in ("tokenize", "queue", "run", "total"):
        assert of(found, "sbert_stage_seconds_count", model="small", stage=stage) >= 1
    assert of(found, "sbert_ready", model="small") == 1
    for priority, calls in {"interactive": 0, "bulk": 1}.items():  # the other call was refused
        labels = {"model": "small", "class": priority}
        assert of(found, "sbert_queue_tokens", **labels) == 0
        assert of(found, "sbert_class_seconds_count", **labels) == calls


def test_the_names_are_those_in_the_documentation(server: Running) -> None:
    server.post("/embed", {"inputs": "a"})
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in scrape(server) if name.startswith("sbert_")}
    table = re.findall(
        r"^\| `(sbert_\w+)` \|", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    only_later = {"sbert_speed_tokens_per_second", "sbert_reloads_total"}
    only_later |= {name for name in table if name.startswith("sbert_cache_")}
    assert shown - only_later == set(table) - only_later
    assert only_later <= set(table)
