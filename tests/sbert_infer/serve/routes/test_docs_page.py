"""The page of the routes, in a real browser."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import httpx

from tests.sbert_infer.serve.conftest import Running
from tests.sbert_infer.serve.routes.conftest import Watched


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


def test_the_docs_can_send_a_request(server: Running, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"{server.url}/docs")
    route = watched.page.locator("article[id='post/embed']")
    route.locator("summary").click()
    route.locator("textarea").fill(json.dumps({"inputs": "a cat sat"}))
    route.locator("form button").click()
    watched.wait(lambda: route.locator("form p").inner_text().startswith("200 OK"))
    assert json.loads(route.locator("form pre").inner_text()) == server.post("/embed", {"inputs": "a cat sat"}).json()
    route.locator("textarea").fill("<b>no JSON</b>")
    route.locator("form button").click()
    watched.wait(lambda: route.locator("form p").inner_text().startswith("400"))
    assert "JSON" in route.locator("form pre").inner_text()
    model = watched.page.locator("article[id='get/v1/models/{name}']")
    model.locator("summary").click()
    assert model.locator("input").input_value() == "v1/models/small"
    model.locator("form button").click()
    watched.wait(lambda: '"id":"small"' in model.locator("form pre").inner_text())
    assert watched.page.locator("article[id='post/admin/reload'] form").count() == 0
