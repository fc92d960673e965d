"""The folder in which this package keeps what it need not make twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "SBERT_INFER_CACHE"


def cache_folder() -> Path:
    """Return $SBERT_INFER_CACHE, or `sbert-infer` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "sbert-infer" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbert-infer"
