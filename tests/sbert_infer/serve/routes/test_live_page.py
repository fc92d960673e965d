"""The live page, in a real browser."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from tests.sbert_infer.serve.conftest import Running
from tests.sbert_infer.serve.routes.conftest import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SENTENCES = ["a cat sat", "one <b>bold</b> & <i>odd</i> line", "rain", "the storm left the town under water"]


def test_traffic_moves_the_plots(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(server.url)
    watched.wait(lambda: watched.value("texts/s") == "0")
    assert watched.value("p50") == "–"  # noqa: RUF001  a dash

    seen = set()
    numbers = itertools.count(1)

    def busy() -> bool:
        texts = [f"text {n}" for n in range(20 * next(numbers) % 97 + 1)]
        assert server.post("/v1/embeddings", {"input": texts, "model": "small"}).status_code == 200
        seen.add(watched.value("texts/s"))
        return len(seen - {"0", "–"}) >= 2  # noqa: RUF001

    watched.wait(busy)
    assert watched.value("tokens/s") != "0"
    assert watched.value("p50").endswith((" ms", " s"))
    assert "L" in (watched.page.locator(".strip path.c0:not(.area)").first.get_attribute("d") or "")
    texts = sum_of(server, "sbert_texts_total")
    watched.wait(lambda: watched.value("Texts") == (f"{texts:.0f}" if texts < 1000 else f"{texts / 1000:.1f} k"))
    assert watched.text("#status") == "ready"
    assert watched.complaints == []
    assert all(url.startswith((server.url, "data:")) for url in watched.asked)


def sum_of(server: Running, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


# Two responses of /metrics that stand in for the server's: exact values need known counts.
BEFORE, AFTER = (
    f"""# HELP sbert_ready one "model" with an odd name
sbert_ready{{model="a\\\\b \\"<i>\\""}} {ready}
sbert_stage_seconds_bucket{{le="0.01",model="m",stage="total"}} {fast}
sbert_stage_seconds_bucket{{le="0.1",model="m",stage="total"}} {slow}
sbert_stage_seconds_bucket{{le="+Inf",model="m",stage="total"}} {slow}
sbert_stage_seconds_bucket{{le="0.01",model="m",stage="queue"}} {slow}
sbert_class_seconds_bucket{{le="0.01",model="m",class="interactive"}} {fast}
sbert_class_seconds_bucket{{le="+Inf",model="m",class="interactive"}} {fast}
sbert_class_seconds_bucket{{le="1",model="m",class="bulk"}} 3
sbert_class_seconds_bucket{{le="2",model="m",class="bulk"}} {slow}
sbert_class_seconds_bucket{{le="+Inf",model="m",class="bulk"}} {slow}
sbert_batch_size_tokens_count{{model="m"}} {batches}
sbert_batch_size_tokens_sum{{model="m"}} {tokens}
sbert_batch_tokens_total{{model="m"}} {tokens}
sbert_padded_tokens_total{{model="m"}} {padded}
sbert_max_batch_tokens{{model="m"}} 512.0
sbert_queue_tokens{{model="m",class="interactive"}} 34.0
sbert_queue_tokens{{model="m",class="bulk"}} 1200.0
sbert_queue_oldest_seconds{{model="m"}} 0.0345
sbert_tokens_total{{model="m"}} 2.5e+06
sbert_errors_total{{kind="too_long",model="m"}} 3.0
sbert_cache_hits_total{{model="m"}} {fast}
sbert_cache_misses_total{{model="m"}} {batches}
sbert_cache_bytes{{model="m"}} 4.2e+07
sbert_http_requests_total{{route="/embed",status="200"}} {tokens}
sbert_http_requests_total{{route="/embed",status="422"}} {slow}
sbert_http_requests_total{{route="/embed",status="429"}} 1234
sbert_http_requests_total{{route="/metrics",status="200"}} {padded}
sbert_http_connections 17.0
process_resident_memory_bytes 2.5e+09
process_start_time_seconds 1.0
"""
    for ready, fast, slow, batches, tokens, padded in [("1.0", 7, 9, 5, 100, 120), ("0.0", 57, 109, 15, 4100, 5120)]
)


def test_figures_are_taken_between_two_scrapes(server: Running, open_page: Callable[..., Watched]) -> None:
    answers = itertools.chain([BEFORE], itertools.repeat(AFTER))
    watched = open_page(server.url, route=lambda route: route.fulfill(body=next(answers), content_type="text/plain"))
    watched.wait(lambda: watched.value("tokens per batch") == "400")
    # Of 100 calls half took up to 10 ms, half 10 to 100 ms.
    assert [watched.value(p) for p in ("p50", "p95", "p99")] == ["10 ms", "91 ms", "98 ms"]
    assert [watched.value(f"interactive {p}") for p in ("p50", "p99")] == ["5.0 ms", "9.9 ms"]
    assert [watched.value(f"bulk {p}") for p in ("p50", "p99")] == ["1.5 s", "2.0 s"]
    assert watched.value("padding") == "20 %"
    assert watched.value("tokens waiting") == "1.2 k"
    assert watched.value("oldest text") == "35 ms"
    assert [watched.value(name) for name in ("interactive", "bulk")] == ["34", "1.2 k"]
    assert [watched.value(name) for name in ("found there", "size")] == ["83 %", "42.0 MB"]
    assert [watched.value(name) for name in ("open", "memory")] == ["17", "2.5 GB"]
    assert watched.value("429 busy") == "0"
    assert watched.value("4xx") not in ("0", "–")  # noqa: RUF001
    rows = watched.text("#routes").replace("\N{MULTIPLICATION SIGN}", "x").split("\n")
    assert rows == ["/embed", "200 x 4.1 k", "422 x 109", "429 x 1.2 k", "/metrics", "200 x 5.1 k"]
    assert watched.value("Tokens") == "2.5 M"
    assert watched.value("too long") == "0"
    assert watched.text("#status") == "not ready"
    assert "at most 512" in watched.text("#panels")
    assert watched.complaints == []


def test_refusals_are_shown(start_server: Callable[..., Running], open_page: Callable[..., Watched]) -> None:
    server = start_server()
    watched = open_page(server.url)
    watched.wait(lambda: "/v1/embeddings" in watched.text("#routes"))  # the page's own comparison
    assert server.post("/v1/embeddings", {"input": "a", "nonsense": 1}).status_code == 400
    watched.wait(lambda: "400 × 1" in watched.text("#routes"))  # noqa: RUF001
    assert watched.value("4xx") != "0"
    assert "no failed calls" in watched.text("#panels")  # of a model, which this was not
    assert not watched.page.is_visible("text=Vector cache")  # this server has none


def test_a_page_that_is_opened_shows_the_past(
    start_server: Callable[..., Running], open_page: Callable[..., Watched]
) -> None:
    server = start_server()
    for texts in (1, 2, 3):
        server.post("/embed", {"inputs": ["a"] * texts})
        server.server.metrics.history.take()
    # Without /metrics, all that it can show is what the server has kept.
    watched = open_page(server.url, route=lambda route: route.fulfill(status=503, body=""))
    watched.wait_for_status("no metrics: the server responded with 503")
    assert watched.value("texts/s") not in ("0", "–")  # noqa: RUF001
    line = watched.page.locator("#panels path.c0:not(.area)").first.get_attribute("d") or ""
    assert line.count("L") >= 1
    hours = watched.page.locator("#panels .axis").first.inner_text().split()
    assert len(hours) == 3
    assert all(re.fullmatch(r"[0-2]\d:[0-5]\d", hour) for hour in hours)
    watched.page.select_option("#span", "900")
    assert watched.page.locator("#panels path.c0:not(.area)").first.get_attribute("d") not in ("", line)


@pytest.mark.parametrize("width", [390, 320])
def test_all_fits_on_a_phone(server: Running, open_page: Callable[..., Watched], width: int) -> None:
    watched = open_page(server.url, viewport={"width": width, "height": 844})
    watched.page.wait_for_selector("#heat td")
    assert len(watched.page.locator("#heat thead th").all()) == 7  # the comparison that the page makes by itself
    assert watched.asked.count(f"{server.url}/v1/embeddings") == 1
    for selector in ("html", ".scroll"):
        assert watched.page.locator(selector).evaluate("part => part.scrollWidth <= part.clientWidth")


def test_a_hidden_page_asks_for_nothing(server: Running, browser: Browser) -> None:
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(document, 'hidden', {get: () => !window.seen})")
    watched = Watched(context.new_page())
    watched.page.goto(server.url)
    watched.page.wait_for_timeout(1200)
    assert watched.asked == [f"{server.url}/"]
    watched.page.evaluate("window.seen = true")
    watched.wait_for_status("ready")
    context.close()


def test_the_card_says_what_runs(server: Running, served_onnx: Path, open_page: Callable[..., Watched]) -> None:
    watched = open_page(server.url)
    manifest = open_artifact(served_onnx).manifest
    watched.wait(lambda: "small" in watched.text("#models"))
    card = watched.text("#models")
    parity = manifest.parity
    for fact in (
        *(f"{parity[name]:.6f}" for name in ("min_cosine", "mean_cosine")),
        f"{parity['texts']} texts",
        f"{manifest.dim} numbers",
        f"{manifest.max_length} tokens",
        manifest.precision,
        served_onnx.name,
        *(f"{name} {version}" for name, version in manifest.versions.items()),
        "onnxruntime",
        "cpu",
    ):
        assert fact in card
    assert float(watched.value("Largest difference")) == pytest.approx(parity["max_abs"], rel=0.05)
    # The certificate of a model that is not as exact as this one.
    info = server.client.get("/info").json()
    info["models"][0]["parity"] |= {"min_cosine": 0.9912341, "mean_cosine": 0.9987654, "max_abs": 0.0234, "texts": 357}
    watched.page.route("**/info", lambda route: route.fulfill(json=info))
    watched.page.reload()
    watched.wait(lambda: "357 texts" in watched.text("#models"))
    shown = [watched.value(label) for label in ("Lowest cosine", "Mean cosine", "Largest difference")]
    assert [float(number) for number in shown] == [0.991234, 0.998765, 0.023]


def test_sentences_are_compared_as_the_engine_does(
    server: Running, served_onnx: Path, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(server.url)
    watched.compare(SENTENCES)
    watched.page.wait_for_selector("#heat td")
    shown = [
        row.split()
        for row in watched.page.locator("#heat tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].slice(1).map(cell => cell.textContent).join(' '))"
        )
    ]
    with Engine(served_onnx) as engine:
        vectors = engine.encode(SENTENCES, normalize_embeddings=True).astype(np.float64)
    expected = vectors @ vectors.T
    assert np.abs(np.array(shown, float) - expected).max() <= 0.005 + 1e-6  # two digits
    assert [shown[i][i] for i in range(len(SENTENCES))] == ["1.00"] * len(SENTENCES)
    assert len({number for row in shown for number in row}) > 3
    assert SENTENCES[1] in watched.text("#heat tbody tr:nth-child(2) th")  # not as HTML
    assert watched.page.locator("#heat b, #heat i").count() == 0
    # A model's vectors need not have length 1.
    assert watched.page.evaluate("similarities([[3, 4], [6, 8], [-4, 3]])") == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert watched.complaints == []

    watched.page.focus("#heat td[tabindex='0']")
    watched.page.keyboard.press("ArrowDown")
    reading = watched.text("#reading")
    assert all(part in reading for part in (shown[1][0], SENTENCES[0], SENTENCES[1]))


def test_what_can_not_be_compared_is_said(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(server.url)
    watched.compare([f"text {n}" for n in range(25)])
    assert watched.text("#said") == "This page compares 24 sentences at most; there are 25."
    watched.compare(["alone"])
    assert "at least two" in watched.text("#said")
    assert watched.asked.count(f"{server.url}/v1/embeddings") == 1  # when it was opened
    texts = ["short", "far too long " * 500]
    refused = server.post("/v1/embeddings", {"input": texts, "model": "small"})
    assert refused.status_code == 400
    reason = refused.json()["error"]["message"]
    watched.compare(texts)
    watched.wait(lambda: watched.text("#said") == reason.replace("input 1", "Sentence 2") + ".")


def test_a_busy_server_says_when_to_come_back(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(server.url)
    busy = {"error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "overloaded"}}
    watched.page.route(  # a stand-in: a queue does not stay full for a test
        "**/v1/embeddings", lambda route: route.fulfill(status=429, headers={"retry-after-ms": "1500"}, json=busy)
    )
    watched.compare(SENTENCES)
    watched.wait(lambda: watched.text("#said") == "The queue is full. Try again in 1.5 s.")


def test_several_models_can_be_chosen(
    start_server: Callable[..., Running], served_onnx: Path, open_page: Callable[..., Watched]
) -> None:
    from sbert_infer.serve.settings import ModelFile

    server = start_server(models=(ModelFile(served_onnx, "one"), ModelFile(served_onnx, "two")))
    watched = open_page(server.url)
    watched.page.select_option("#chooser select", "two")
    with watched.page.expect_request("**/v1/embeddings") as request:
        watched.compare(SENTENCES)
    assert json.loads(request.value.post_data or "")["model"] == "two"
    watched.page.select_option("#filter select", "two")
    watched.wait(lambda: watched.value("Texts") == str(len(SENTENCES)))
    watched.page.select_option("#filter select", "one")
    watched.wait(lambda: watched.value("Texts") == "6")  # those that the page has compared when it was opened


def test_a_server_that_goes_away_is_missed(
    start_server: Callable[..., Running], open_page: Callable[..., Watched]
) -> None:
    server = start_server()
    watched = open_page(server.url)
    watched.wait_for_status("ready")
    server.stop()
    watched.wait_for_status("can't reach the server")
    watched.compare(SENTENCES)
    watched.wait(lambda: watched.text("#said") == "Can't reach the server.")


def test_a_key_opens_both_pages(start_server: Callable[..., Running], open_page: Callable[..., Watched]) -> None:
    server = start_server(keys=("secret",))
    for path in ("/", "/docs", "/metrics", "/metrics/history"):
        refused = httpx.get(server.url + path)
        assert refused.status_code == 401
        assert "Basic" in refused.headers["www-authenticate"]
    with_key = server.url.replace("://", "://anyone:secret@")
    for watched in (
        open_page(server.url, http_credentials={"username": "", "password": "secret"}),
        open_page(with_key),
    ):
        watched.wait_for_status("ready")
        watched.compare(SENTENCES)
        watched.page.wait_for_selector("#heat td")
        watched.page.click("text=API")
        watched.page.wait_for_selector("article")
        assert "secret" not in watched.text("body")
        assert watched.complaints == []
