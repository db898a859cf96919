"""Imports the toys' `services` instead of the installed ones: an editable install finds its
packages by its own hook, which ignores the path. A service of the toys' supervisor has started
successfully after 2 s."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


class _Toys:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "services":
            return PathFinder.find_spec(name, [str(Path(__file__).parent)])
        if name.startswith("services."):
            return PathFinder.find_spec(name, path)
        return None


sys.meta_path.insert(0, _Toys)
if "quire.cli" in sys.orig_argv:
    from quire.supervisor import child, restart

    child.STEADY_S = restart.STEADY_S = 2.0
