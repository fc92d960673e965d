"""constraints.txt pins everything that `make setup` installs."""

from __future__ import annotations

import re
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository.sources import ROOT, requirements

EVERYTHING = (
    "cpu",
    "export",
    "serve",
    "sparse",
    "embed",
    "ray",
    "ray-serve",
    "examples",
    "dev",
)  # what `make setup` installs


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned_here() -> dict[str, str]:
    """Name -> version of the pins that apply to this Python."""
    here = [pin for pin in pins() if pin.marker is None or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}


def test_each_pin_is_one_exact_version() -> None:
    assert [str(pin) for pin in pins() if not re.fullmatch(r"==[\w.]+", str(pin.specifier))] == []
    here = [canonicalize_name(pin.name) for pin in pins() if pin.marker is None or pin.marker.evaluate()]
    assert sorted(here) == sorted(set(here))


@pytest.mark.parametrize("requirement", requirements(*EVERYTHING), ids=lambda requirement: requirement.name)
def test_each_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    version = pinned_here().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} has no pin in constraints.txt"
    assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_what_dependencies_bring_is_pinned() -> None:
    """Except under torch, which pins its own CUDA libraries, and differently per build."""
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = requirements(*EVERYTHING)
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name == "torch":
            continue
        seen.add((name, extras))
        for child in map(Requirement, distribution(name).requires or ()):
            environments = [{"extra": extra} for extra in ("", *extras)]
            if child.marker is None or any(map(child.marker.evaluate, environments)):
                queue.append(child)
    assert len(seen) > len(requirements(*EVERYTHING))
    assert {name for name, _ in seen} - set(pinned_here()) == set()
