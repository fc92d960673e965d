"""The recent past of the metrics."""

from __future__ import annotations

from tests.sbert_infer.serve.conftest import Running


def test_it_is_bounded_and_holds_what_the_page_plots(server: Running) -> None:
    server.post("/embed", {"inputs": ["a", "b"]})
    for _ in range(300):
        server.server.metrics.history.take()
    past = server.client.get("/metrics/history").json()
    ages = [sample["age_s"] for sample in past["samples"]]
    assert len(ages) == 181
    assert ages == sorted(ages, reverse=True)
    last = past["samples"][-1]["values"]
    values = {(each["name"], *each["labels"].values()): last[at] for at, each in enumerate(past["series"])}
    assert values["sbert_texts_total", "small"] == 2
    assert values["sbert_http_requests_total", "/embed", "200"] == 1
    assert values["sbert_stage_seconds_bucket", "small", "total", "+Inf"] == 1
    assert values["process_resident_memory_bytes",] > 0
    # Most of the metrics are buckets that no plot needs.
    assert {each["labels"].get("stage", "total") for each in past["series"]} == {"total"}
