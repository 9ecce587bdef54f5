"""Builds the native CPU library into the package; without a C++ compiler the package works, only slower."""

import importlib.util
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout builds it at first use, and again whenever its sources change
            return
        native = _native_build()
        target = Path(self.build_lib) / "tokenmill" / "ops" / "native" / "lib" / native.LIBRARY
        try:
            native.compile_library(target)
        except (native.BuildError, OSError) as error:
            print(f"tokenmill: the native CPU library is left out, and CPUs will be slower: {error}", file=sys.stderr)


class PlatformDistribution(Distribution):
    """What holds a compiled library is made for one platform."""

    def has_ext_modules(self) -> bool:
        return True


def _native_build():
    """tokenmill/ops/native/build.py by itself: the package cannot be imported before it is installed."""
    path = Path(__file__).parent / "tokenmill" / "ops" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("tokenmill_native_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


setup(cmdclass={"build_py": BuildWithLibrary}, distclass=PlatformDistribution)
