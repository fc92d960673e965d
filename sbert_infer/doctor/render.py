"""The report as text for people. Colours are for terminals: `click.echo` removes them elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from sbert_infer.encode.self_check import Verdict

_WIDTH = 14  # of the first column


def render(report: dict[str, Any]) -> str:
    """Return the report as sections of lines."""
    sections = [_machine(report["machine"]), _packages(report["packages"], report["onnxruntimes"])]
    if report["artifact"] is not None:
        sections.append(_artifact(report["artifact"]))
    sections += [_problems("Notes", report["notes"], "yellow"), _problems("Problems", report["problems"], "red")]
    text = "\n\n".join("\n".join(lines) for section in sections if (lines := list(section)))
    return text if report["problems"] else f"{text}\n\n{click.style('No problems found.', fg='green')}"


def _title(text: str) -> str:
    return click.style(text, bold=True)


def _line(name: str, value: str) -> str:
    return f"  {name:<{_WIDTH}} {value}"


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    yield _title("Machine")
    yield _line("Python", machine["python"])
    yield _line("system", machine["os"])
    yield _line("CPU", machine["cpu"])
    yield _line("instructions", ", ".join(machine["instructions"]) or "unknown")
    quota = "no quota" if machine["cpu_quota"] is None else f"quota {machine['cpu_quota']:g}"
    yield _line("cores", f"{machine['usable_cores']} usable of {machine['cores'] or '?'}, {quota}")
    limit = machine["memory_limit_gb"]
    size = "unknown" if machine["memory_gb"] is None else f"{machine['memory_gb']:g} GB"
    yield _line("memory", size + (f", limited to {limit:g} GB" if limit is not None else ""))
    yield _line("NVIDIA driver", _driver(machine))
    for number, gpu in enumerate(machine["gpus"]):
        yield _line(f"cuda:{number}", f"{gpu['name']}, {gpu['target']}, {gpu['memory_gb']:g} GB")


def _driver(machine: dict[str, Any]) -> str:
    cuda = machine["driver_cuda"]
    if cuda is None:
        return str(machine["driver_problem"] or "unknown")
    found = f"{machine['driver_release'] or 'release unknown'}, runs CUDA {cuda[0]}.{cuda[1]} and older"
    return f"{found}; {machine['driver_problem']}" if machine["driver_problem"] else found


def _packages(packages: dict[str, Any], onnxruntimes: list[str]) -> Iterator[str]:
    yield _title("Packages")
    for name, package in packages.items():
        if package["version"] is None:
            yield _line(name, "-")
            continue
        which = f" ({' and '.join(onnxruntimes)})" if name == "onnxruntime" and onnxruntimes != [name] else ""
        version, *more = _package(package)
        yield _line(name, ", ".join([version + which, *more]))


def _package(package: dict[str, Any]) -> Iterator[str]:
    yield package["version"]
    if package["error"]:
        yield click.style(f"broken: {package['error']}", fg="red")
    if package["cuda"]:
        yield f"made for CUDA {package['cuda']}"
    if providers := package["facts"].get("providers"):
        yield " ".join(name.removesuffix("ExecutionProvider") for name in providers)
    if "bf16" in package["facts"]:
        yield "BF16 on this CPU" if package["facts"]["bf16"] else "no BF16 on this CPU"
    if package["name"] == "torch" and not package["error"] and not package["cuda"]:
        yield "for CPUs"


def _artifact(artifact: dict[str, Any]) -> Iterator[str]:
    yield _title(artifact["file"])
    if artifact["model"]:
        inside = f", TensorRT engines: {', '.join(artifact['engines']) or 'none'}" if artifact["engines"] else ""
        yield _line("model", f"{artifact['model']}, {artifact['kind']}, {artifact['precision']}{inside}")
    yield _line("runs with", artifact["uses"] or click.style("nothing", fg="red"))
    for each in artifact["passed_over"] or []:
        yield _line("and not with", f"{each['choice']}: {each['why']}")
    if artifact["verified"] is not None:
        yield _line("vectors", f"{Verdict(**artifact['verified'])}, against the eager model")
    if artifact["tuned"] is not None:
        yield _line("compute=auto", artifact["tuned"])
    for check in (artifact["run"] or {}).get("checks", []):
        verdict = click.style("yes", fg="green") if check["passed"] else click.style("NO", fg="red")
        yield _line("check", f"{check['name']}: {verdict}")
    if run := artifact["run"]:
        yield _line("speed", f"{run['texts_per_s']:,.0f} texts/s ({run['texts']} texts, {run['mean_tokens']} tokens)")


def _problems(title: str, problems: list[dict[str, str]], colour: str) -> Iterator[str]:
    if not problems:
        return
    yield _title(title)
    for problem in problems:
        yield f"  {click.style(problem['what'], fg=colour)}"
        yield f"    so    {problem['consequence']}"
        yield f"    cure  {problem['cure']}"
