"""The memory of a plan is kept for the next."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import resource, sys, threading
    import numpy as np
    from weightcast.gateway.server.run import keep_freed_memory

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        columns = [np.ones(4 << 20) for _ in range(6)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    if sys.argv[1] == "kept" and not keep_freed_memory():
        sys.exit(77)
    found = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(faults()))
        thread.start()
        thread.join()
    print(found[-1])
"""


def page_faults(how: str) -> int:
    program = textwrap.dedent(PROGRAM)
    done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_thread_finds_the_memory_that_another_one_freed() -> None:
    assert page_faults("kept") < 100 < page_faults("as it was")
