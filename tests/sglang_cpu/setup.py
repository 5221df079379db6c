"""Puts a .pth file beside the packages, which setuptools has no key for: it makes the torchvision hook work in every process."""

import os

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "sglang_cpu_shims.pth"


class BuildWithPth(build_py):
    def run(self):
        super().run()
        self.copy_file(PTH, os.path.join(self.build_lib, PTH))


setup(cmdclass={"build_py": BuildWithPth})
