"""What is built holds the whole package, each file once, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.repository.sources import PACKAGE, PYPROJECT, ROOT, modules

# Built by setuptools' own functions, which need no network, in the folder of the project.
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
PAGES = {file.relative_to(ROOT).as_posix() for file in (ROOT / "sbert_infer/serve/routes/pages").glob("*/*")}


def package_files() -> set[str]:
    """Everything of the package that is installed."""
    paths = {module.path for module in modules(*PACKAGE)}
    return (
        {path if path.startswith("sbert_infer/") else f"sbert_infer/{path}" for path in paths}
        | PAGES
        | {"sbert_infer/py.typed"}
    )


def build(project: Path, kind: str, target: Path) -> Path:
    """Build a `wheel`, an `sdist` or an `editable` wheel of `project`, without a warning."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True, env=environment())
    assert "Warning" not in done.stdout + done.stderr
    (file,) = target.iterdir()
    return file


def environment(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds `folders` first, and not the checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, or would track, with the symlinks as they are."""
    folder = tmp_path_factory.mktemp("checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):  # it may be about to be removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return sorted(name for name in file.namelist() if ".dist-info/" not in name)


def test_a_wheel_holds_the_package(wheel: Path) -> None:
    assert wheel_files(wheel) == sorted(package_files())


def test_a_source_distribution_holds_the_package_and_what_it_is_built_from(sdist: Path) -> None:
    with tarfile.open(sdist) as file:
        names = [member.name.partition("/")[2] for member in file.getmembers() if not member.isdir()]
        assert not any(member.issym() or member.islnk() for member in file.getmembers())
    others = ["CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"]
    expected = [*package_files(), *others, "sbert_infer/bench/rivals.txt"]
    assert sorted(name for name in names if ".egg-info/" not in name) == sorted(expected)


def test_a_source_distribution_gives_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert wheel_files(build(folder, "wheel", tmp_path / "wheel")) == wheel_files(wheel)


def test_an_installed_wheel_has_its_commands(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel)]
    subprocess.run(command, capture_output=True, check=True)
    (metadata,) = tmp_path.glob("*.dist-info")
    entries = ConfigParser()
    entries.read(metadata / "entry_points.txt")
    scripts = dict(entries["console_scripts"])
    assert scripts == PYPROJECT["project"]["scripts"]
    names = [target.partition(":")[0] for target in scripts.values()]
    assert "sbert_infer.export.cli" in names
    code = f"import {', '.join(names)}\nprint(*[{', '.join(f'{name}.__file__' for name in names)}], sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / f"{name.replace('.', '/')}.py") for name in names]


def test_an_editable_install_follows_the_checkout(checkout: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(build(checkout, "editable", tmp_path / "wheel"), tmp_path / "site", "zip")
    # Without `site`, other editable installs are not found; libraries are, by their folder.
    code = f"""
import sys, site
site.addsitedir({str(tmp_path / "site")!r})
sys.path.append({sysconfig.get_paths()["purelib"]!r})
import sbert_infer.export.cli, sbert_infer.bench.stats
print(sbert_infer.__file__, sbert_infer.export.cli.__file__, sbert_infer.bench.stats.__file__)
"""
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    files = ["__init__.py", "export/cli.py", "bench/stats.py"]
    assert done.stdout.split() == [str(checkout / "sbert_infer" / file) for file in files]
