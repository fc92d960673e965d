"""The live page and the page of the routes, in a real browser."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from tests.sbert_infer.serve.conftest import Running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

SENTENCES = ["a cat sat", "one <b>bold</b> & <i>odd</i> line", "rain", "the storm left the town under water"]
WAIT_MS = 10_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Watched:
    """A page, with all its requests and errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def value(self, label: str) -> str:
        """The large value with this label beside a plot, or in the list of totals."""
        return self.page.locator(f"dt:text-is('{label}')").locator("xpath=following-sibling::dd[1]").inner_text()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds."""
        for _ in range(WAIT_MS // 50):
            if condition():
                return
            self.page.wait_for_timeout(50)
        pytest.fail(f"the page never showed it; it shows:\n{self.text('body')}")

    def wait_for_status(self, status: str) -> None:
        self.wait(lambda: self.text("#status") == status)

    def compare(self, sentences: list[str]) -> None:
        self.page.fill("#sentences", "\n".join(sentences))
        self.page.click("text=Compare")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """`open_page(url, **options of the browser's context)`."""
    contexts = []

    def make(url: str, route: Callable[[Route], None] | None = None, **options: Any) -> Watched:
        contexts.append(browser.new_context(**options))
        watched = Watched(contexts[-1].new_page())
        if route:
            watched.page.route("**/metrics", route)
        watched.page.goto(url)
        return watched

    yield make
    for context in contexts:
        context.close()


# The live page ------------------------------------------------------------------------------------


def test_traffic_moves_the_plots(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(server.url)
    watched.wait(lambda: watched.value("texts/s") == "0")
    assert "no traffic" in watched.text("#panels")
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
sbert_batch_size_tokens_count{{model="m"}} {batches}
sbert_batch_size_tokens_sum{{model="m"}} {tokens}
sbert_batch_tokens_total{{model="m"}} {tokens}
sbert_padded_tokens_total{{model="m"}} {padded}
sbert_max_batch_tokens{{model="m"}} 512.0
sbert_queue_tokens{{model="m"}} 1234.0
sbert_queue_oldest_seconds{{model="m"}} 0.0345
sbert_tokens_total{{model="m"}} 2.5e+06
sbert_errors_total{{kind="too_long",model="m"}} 3.0
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
    assert watched.value("padding") == "20 %"
    assert watched.value("tokens waiting") == "1.2 k"
    assert watched.value("oldest text") == "35 ms"
    assert watched.value("Tokens") == "2.5 M"
    assert watched.value("too long") == "0"
    assert watched.text("#status") == "not ready"
    assert "at most 512" in watched.text("#panels")
    assert watched.complaints == []


def test_a_hidden_page_asks_for_nothing(server: Running, browser: Browser) -> None:
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(document, 'hidden', {get: () => !window.seen})")
    watched = Watched(context.new_page())
    watched.page.goto(server.url)
    watched.page.wait_for_timeout(1200)
    assert f"{server.url}/metrics" not in watched.asked
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
    assert f"{server.url}/v1/embeddings" not in watched.asked
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
    watched.wait(lambda: watched.value("Texts") == str(len(SENTENCES)))
    watched.page.select_option("#filter select", "one")
    watched.wait(lambda: watched.value("Texts") == "0")


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
    for path in ("/", "/docs", "/metrics"):
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


# The page of the routes ---------------------------------------------------------------------------


def test_the_docs_show_every_route(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"{server.url}/docs")
    watched.page.wait_for_selector("article")
    shown = watched.page.locator("article h3:has(.method)").all_inner_texts()
    paths = server.client.get("/openapi.json").json()["paths"]
    assert sorted(shown) == sorted(f"{method.upper()}{path}" for path, item in paths.items() for method in item)
    links = watched.page.locator("a[href^='#']").evaluate_all("all => all.map(a => a.getAttribute('href').slice(1))")
    assert all(watched.page.evaluate("id => document.getElementById(id) !== null", link) for link in set(links))
    assert watched.complaints == []
    assert all(url.startswith((server.url, "data:")) for url in watched.asked)


def test_the_commands_in_the_docs_work(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"{server.url}/docs")
    watched.page.wait_for_selector("article")
    commands = [shlex.split(text) for text in watched.page.locator("pre").all_inner_texts()]
    posts = [words for words in commands if "-d" in words]
    assert f"{server.url}/v1/embeddings" in [words[1] for words in posts]
    for words in posts:
        header = dict([words[words.index("-H") + 1].split(": ")])
        answer = httpx.post(words[1], headers=header, content=words[words.index("-d") + 1].encode())
        assert answer.status_code == 200 or words[1].endswith("/embed_all"), f"{words}: {answer.text}"
