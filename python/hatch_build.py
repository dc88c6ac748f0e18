"""Puts the program into the wheel, where `make wheel` has built it."""

import os
import platform

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAM = "build/kvtier"


class ProgramHook(BuildHookInterface):
    """Adds build/kvtier as the command `kvtier`. It needs no library, so any Linux will do."""

    def initialize(self, version, build_data):
        if version == "editable" or not os.path.exists(os.path.join(self.root, PROGRAM)):
            return
        arch = platform.machine()
        build_data["shared_scripts"][PROGRAM] = "kvtier"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_17_{arch}.manylinux2014_{arch}"
