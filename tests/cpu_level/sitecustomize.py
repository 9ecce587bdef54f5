"""Takes the upper CPU levels from the native library, in every Python that starts with this folder on its path."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys

NAME = "tokenmill.ops.native.library"


class HeldDown(importlib.abc.MetaPathFinder):
    """Finds the module as everybody does, and has it changed as soon as it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != NAME or path is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                hold_down(module)

            spec.loader.exec_module = exec_module
        return spec


def hold_down(module) -> None:
    top = module.LEVEL_NAMES.index(os.environ["HELD_DOWN_TO"])
    library = module.Library
    start, has_level = library.__init__, library.has_level

    def __init__(self, path):
        start(self, path)
        self.level = top

    library.__init__ = __init__
    library.has_level = lambda self, level: level <= top and has_level(self, level)
    library.best_level = property(lambda self: max(level for level in range(top + 1) if has_level(self, level)))


if os.environ.get("HELD_DOWN_TO"):
    sys.meta_path.insert(0, HeldDown())
