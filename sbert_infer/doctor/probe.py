"""What runs in a process of its own to learn about one package: `probe.py PATHS MODULE`.

Importing a broken package may raise anything, or crash. This file imports nothing of ours. It
prints a line with what it found, as JSON; libraries may print lines of their own before it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def onnxruntime(module: Any) -> dict[str, Any]:
    """Return the providers of onnxruntime, and which of its two packages the files are from."""
    build = importlib.import_module("onnxruntime.capi.build_and_package_info")
    return {"providers": module.get_available_providers(), "package": getattr(build, "package_name", None)}


def torch(module: Any) -> dict[str, Any]:
    """Return the CUDA that torch is made for, and whether it can use a GPU."""
    return {"cuda": module.version.cuda, "gpu": bool(module.cuda.is_available())}


FACTS = {"onnxruntime": onnxruntime, "torch": torch}


def main() -> None:
    """Import a module and print its version and facts."""
    sys.path[:], name = json.loads(sys.argv[1]), sys.argv[2]
    module = importlib.import_module(name)
    version = str(getattr(module, "__version__", "")) or None
    print("\n" + json.dumps({"version": version, "facts": FACTS.get(name, lambda module: {})(module)}))


if __name__ == "__main__":
    main()
