"""The command `sbert-doctor`."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import click

from sbert_infer import __version__
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.doctor.machine import look_at_machine
from sbert_infer.doctor.packages import look_at_packages
from sbert_infer.doctor.render import render
from sbert_infer.doctor.report import make_report
from sbert_infer.doctor.requirements import gpu_requirements
from sbert_infer.doctor.trial import try_in_process
from sbert_infer.errors import EngineError

EXAMPLES = """\b
Examples:
  sbert-doctor                            the machine, its packages, and what is wrong with them
  sbert-doctor model.plan                 also what Engine would run it with, and why with nothing better
  sbert-doctor --run model.onnx           also run it: are the vectors right, and how fast is it?
  sbert-doctor --run model.plan --json    the same for a report; names neither you nor your machine
  pip install $(sbert-doctor --requirements)    what this machine's GPU needs

The exit code is 0 if nothing is wrong, 1 if there are problems, and 2 for a wrong option.
"""
_FILE = click.Path(exists=True, path_type=Path)


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("artifact", type=_FILE, required=False)
@click.option("--run", is_flag=True, help="Encode some texts with ARTIFACT, check the vectors, and measure the speed.")
@click.option("--device", metavar="NAME", help="Where to run ARTIFACT: cpu, cuda or cuda:1. [the best there is]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--requirements", is_flag=True, help="Print only the packages that this machine's GPU needs, for pip.")
@click.version_option(__version__)
def main(artifact: Path | None, run: bool, device: str | None, as_json: bool, requirements: bool) -> None:
    """Say what this machine has, what is wrong with it, and what to do.

    With ARTIFACT, also say what `Engine` would run it with here, and why with nothing better.
    """
    if requirements:
        return _print_requirements()
    if artifact is None and (run or device):
        raise click.UsageError("--run and --device need an ARTIFACT")
    try:
        machine, packages = look_at_machine(), look_at_packages()
        report = make_report(machine, packages, None if artifact is None else try_in_process(artifact, device, run))
    except KeyboardInterrupt:
        sys.exit(130)
    click.echo(json.dumps(report, indent=2) if as_json else render(report))
    sys.exit(1 if report["problems"] else 0)


def _print_requirements() -> None:
    try:
        if problem := cuda.driver_problem():
            raise EngineError(f"no GPU: {problem}")
        found = gpu_requirements(
            cuda.driver_cuda() or (0, 0),
            cuda.compute_capability(0),
            platform.system(),
            platform.machine(),
            sys.version_info[:2],
        )
    except EngineError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    click.echo("\n".join(found))
