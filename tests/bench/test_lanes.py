"""`python -m sbert_infer.bench.lanes` against a double of a server."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from sbert_infer.bench.lanes import main
from tests.doubles.openai import OpenAIDouble, running

QUICK = ["--rounds", "1", "--duration", "0.3", "--rate", "50", "--clients", "2", "--texts", "8"]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, *QUICK])


def test_both_are_compared_with_each_alone() -> None:
    with running(OpenAIDouble(service_s=0.002)) as server:
        result = command(server.url)
    assert result.exit_code == 0, result.output
    p50, p99, bulk, counts = result.output.splitlines()
    for line, rank in ((p50, "p50"), (p99, "p99")):
        assert re.fullmatch(rf"queries {rank}: [\d.]+ ms alone, [\d.]+ ms beside bulk, [\d.]+ times", line)
    texts = re.fullmatch(r"bulk: (\d+) texts/s alone, (\d+) beside queries, \d+% \(median of the rounds\)", bulk)
    assert texts is not None
    assert int(texts[2]) < int(texts[1]) <= 8 / 0.002  # one request at a time, and queries are requests
    asked = re.fullmatch(r"(\d+) and (\d+) queries, 0 requests failed", counts)
    assert asked is not None
    assert asked[1] == asked[2] != "0"


@pytest.mark.parametrize(
    ("url", "said"), [("http://127.0.0.1:1", "can't be reached"), ("nonsense", "is not a URL such as")]
)
def test_a_server_that_is_not_there(url: str, said: str) -> None:
    result = command(url)
    assert result.exit_code == 1
    assert said in result.output


def test_a_server_that_refuses_everything() -> None:
    with running(OpenAIDouble(fail_every=1)) as server:
        result = command(server.url)
    assert result.exit_code == 1
    assert "responded with errors only" in result.output
