"""A hook of MkDocs: pages from outside docs/, the API, and links between the pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Files of the repository that are pages of the site, besides those in docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
API = ("Engine", "Reranker", "AsyncEngine", "embed.Embedder", "errors")
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    api = "# API\n\n" + "\n\n".join(f"::: sbert_infer.{name}" for name in API) + "\n"
    files.append(File.generated(config, "api.md", content=api))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between files of the repository links between pages; others become plain text."""
    here = page.file.src_uri
    return _LINK.sub(lambda link: rewrite(link, here), markdown)


def rewrite(link: re.Match[str], page: str) -> str:
    """Return the link, as it stands on `page`, as a link of the site."""
    sources = {page: source for source, page in OUTSIDE.items()}
    folder = posixpath.dirname(sources.get(page, f"docs/{page}"))
    target = posixpath.normpath(posixpath.join(folder, link["target"]))
    found = OUTSIDE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    if found is None or not found.endswith(".md"):
        return link["text"]
    relative = posixpath.relpath(found, posixpath.dirname(page) or ".")
    return f"[{link['text']}]({relative}{link['anchor'] or ''})"
