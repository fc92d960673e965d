"""The folders at the top that install under sbert_infer."""

from __future__ import annotations

import pytest

from tests.repository.sources import MAPPED, ROOT


@pytest.mark.parametrize("folder", MAPPED)
def test_mapped_folders_are_namespaces_behind_symlinks(folder: str) -> None:
    link = ROOT / "sbert_infer" / folder
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{folder}"
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()
