"""The table, the JSON file, the page, and the comparison of two runs."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbert_infer.bench import cli
from sbert_infer.bench.errors import ResultsError
from sbert_infer.bench.report.page import render_page
from sbert_infer.bench.report.results import Results, load_results, to_json
from sbert_infer.bench.report.table import render_table
from tests.bench.pages import Page


def test_the_table_shows_who_is_right_wrong_and_absent(results: Results) -> None:
    text = render_table(results)
    lines = text.splitlines()
    place = {
        name: next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("sbert", "liar", "sunk")
    }
    assert place["sbert"] < place["liar"] < place["sunk"]
    assert "2.25x" in lines[place["sbert"]] or "2.26x" in lines[place["sbert"]]
    assert "WRONG" in lines[place["liar"]]
    assert "9.00x" not in text
    assert "FAILED" in lines[place["sunk"]]
    assert "killed by SIGILL" in text
    assert "not installed: absentee" in text
    assert "Some CPU" in text
    assert "Spearman" not in text  # no row has one


def test_quality_is_shown_to_four_digits(results: Results) -> None:
    for row, value in zip(results.rows[:2], (0.82034, 0.8), strict=True):
        row.quality = {"sts <test> Spearman": value, "scifact nDCG@10": 0.6451}
    heading, *lines = [line for line in render_table(results).splitlines() if "0.6451" in line or "nDCG@10" in line]
    assert "sts <test> Spearman  scifact nDCG@10" in heading
    assert [line.split("0.6451")[0].split()[-1] for line in lines] == ["0.8000", "0.8203"]  # by speed
    page = Page(render_page(results))
    assert page.open == []
    assert {"sts <test> Spearman", "0.8203", "0.8000", "0.6451"} <= set(page.texts)


def test_a_busy_machine_is_said_on_top_and_nothing_is_boasted_of(results: Results) -> None:
    quiet = render_page(results)
    assert "was busy" not in quiet
    assert 'class="headline"' in quiet
    results.stamp["load_average"] = 11.0
    busy = render_page(results)
    assert busy.index("The machine was busy when this run began (load 11 on 2 cores)") < busy.index('class="legend"')
    assert 'class="headline"' not in busy


def test_quality_is_not_drawn_where_all_are_exact(results: Results) -> None:
    assert "Speed against quality" in render_page(results)
    for row in results.rows:
        row.min_cosine = None if row.min_cosine is None else 1.0
    assert "Speed against quality" not in render_page(results)


def test_results_of_the_first_format_are_read(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(to_json(results), encoding="utf-8")
    content = json.loads(file.read_text(encoding="utf-8")) | {"format_version": 1}
    for row in content["rows"]:
        del row["quality"], row["max_error"], row["correlation"]
        row["spearman"] = 0.82
    file.write_text(json.dumps(content), encoding="utf-8")
    assert [row.quality for row in load_results(file).rows] == [{"Spearman": 0.82}] * len(results.rows)


def test_markdown_rows_have_equal_columns(results: Results) -> None:
    rows = [line for line in render_table(results, markdown=True).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(results.rows)
    assert len({line.count("|") for line in rows}) == 1


def test_json_holds_everything(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(to_json(results), encoding="utf-8")
    assert load_results(file) == results


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 99}', '{"format_version": 1, "rows": 3}'])
def test_a_file_without_results_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ResultsError, match=r"bad\.json"):
        load_results(file)


def test_the_page_is_well_formed_and_self_contained(results: Results) -> None:
    content = render_page(results)
    page = Page(content)
    assert page.open == []
    assert sum(tag == "svg" for tag, _ in page.tags) == 4  # the hatch and three plots
    assert not any(key in ("src", "href") for _, attributes in page.tags for key in attributes)
    assert not re.search(r"https?://|@import|url\((?!#)", content)
    assert "prefers-color-scheme:dark" in content


def test_the_page_shows_the_figures_of_the_json(results: Results) -> None:
    page = Page(render_page(results))
    data = json.loads(page.script)
    assert [row["contestant"] for row in data["rows"]] == [row.contestant for row in results.rows]
    shown = " ".join(page.texts)
    for row in data["rows"]:
        assert row["contestant"] in shown
        if row["texts_per_s"] is not None:
            assert f"{row['texts_per_s']:,.0f}" in shown
        if row["speed_up"] is not None:
            assert f"{row['speed_up']:.2f}x" in shown
    assert "rival <b>" in shown  # escaped in the source, not a tag


def test_a_browser_shows_the_page(results: Results, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium installed")
    file = tmp_path / "report.html"
    file.write_text(render_page(results), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, encoding="utf-8", timeout=60, check=True
    )
    assert done.stdout.count("<svg") == 4
    assert "rival &lt;b&gt;" in done.stdout


# Comparing ----------------------------------------------------------------------------------------


def compare(before: Results, after: Results, folder: Path, *options: str) -> tuple[int, str]:
    for name, one in (("a.json", before), ("b.json", after)):
        (folder / name).write_text(to_json(one), encoding="utf-8")
    done = CliRunner().invoke(cli.compare, [str(folder / "a.json"), str(folder / "b.json"), *options])
    return done.exit_code, done.output


def faster(results: Results, contestant: str, factor: float) -> Results:
    changed = copy.deepcopy(results)
    row = next(row for row in changed.rows if row.contestant == contestant)
    assert row.texts_per_s is not None
    row.texts_per_s *= factor
    return changed


def test_the_same_run_has_no_change(results: Results, tmp_path: Path) -> None:
    code, output = compare(results, results, tmp_path)
    assert code == 0
    assert "SLOWER" not in output
    assert "+0.0%" in output


@pytest.mark.parametrize(
    ("contestant", "factor", "code"),
    [("sbert-infer fp32", 0.85, 1), ("sbert-infer fp32", 0.95, 0), ("rival <b>", 0.5, 0), ("sbert-infer fp32", 2, 0)],
)
def test_only_a_loss_of_ours_beyond_the_tolerance_fails(
    results: Results, tmp_path: Path, contestant: str, factor: float, code: int
) -> None:
    found, output = compare(results, faster(results, contestant, factor), tmp_path)
    assert found == code
    assert ("SLOWER" in output) == (factor < 0.9)
    assert f"{factor - 1:+.1%}" in output


def test_the_tolerance_can_be_set(results: Results, tmp_path: Path) -> None:
    slower = faster(results, "sbert-infer fp32", 0.95)
    assert compare(results, slower, tmp_path, "--tolerance", "0.02")[0] == 1


def test_ours_turning_wrong_is_a_loss(results: Results, tmp_path: Path) -> None:
    broken = copy.deepcopy(results)
    next(row for row in broken.rows if row.ours).status = "wrong"
    code, output = compare(results, broken, tmp_path)
    assert code == 1
    assert "was ok, is wrong" in output


def test_another_machine_is_pointed_out(results: Results, tmp_path: Path) -> None:
    other = copy.deepcopy(results)
    other.stamp["cpu"] = "Another CPU"
    assert "differ in CPU" in compare(results, other, tmp_path)[1]


# The command --------------------------------------------------------------------------------------


def test_help_shows_examples_and_loads_nothing_heavy() -> None:
    code = "import sys; from sbert_infer.bench import cli; sys.exit(bool({'torch', 'onnxruntime'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
    output = CliRunner().invoke(cli.run, ["--help"]).output
    assert "sbert-bench compare before.json after.json" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.onnx"], "missing.onnx does not exist"),
        (["x.onnx", "--rivals-python", "no-such-python"], "not a program"),
        (["x.onnx", "--only-quality"], "needs data: add --sts, --pairs or --beir"),
        (["x.onnx", "--only-quality", "--sts", __file__, "--latency"], "measures no speed"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.run, arguments)
    assert done.exit_code == 1
    assert done.output.startswith("error: ")
    assert message in done.output
    assert done.output.count("\n") == 1
