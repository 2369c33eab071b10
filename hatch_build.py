"""Build hook of the wheel: compiles the CPU kernels where a compiler is at hand, and goes without where none is."""

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        from mxprobe_kernels.build_cpu import LIBRARY, compile_library, find_compiler, is_fresh

        if not is_fresh():
            LIBRARY.unlink(missing_ok=True)
            compiler = find_compiler()
            if compiler is None:
                self.app.display_warning("no C++ compiler found: the CPU kernels are left out, torch serves instead")
                return
            try:
                compile_library(compiler)
            except (subprocess.CalledProcessError, OSError) as error:
                words = getattr(error, "stderr", None) or error
                self.app.display_warning(f"the CPU kernels are left out, torch serves instead: {words}")
                return
        # any Python, one platform: the library is loaded with ctypes
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
