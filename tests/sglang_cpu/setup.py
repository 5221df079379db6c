"""Puts a .pth file beside the packages, for which setuptools has no key: it starts the torchvision hook everywhere."""

import os

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "sglang_cpu_shims.pth"


class BuildWithPth(build_py):
    def run(self):
        super().run()
        self.copy_file(PTH, os.path.join(self.build_lib, PTH))


setup(cmdclass={"build_py": BuildWithPth})
