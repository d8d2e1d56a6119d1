"""Waiting for another process or thread: the only loop in the tests that asks a clock."""

import time

LIMIT = 300.0
"""Seconds. Long enough for any machine; a test that waits for nothing ends all the same."""


def wait_until(condition, process=None):
    """Return what `condition` returns as soon as that is true.

    Args:
        condition: Asked a hundred times a second.
        process: A `subprocess.Popen` that has to be running for the condition to become true.
    """
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        assert process is None or process.poll() is None, f"the program ended too early, with exit code {process.returncode}"
        assert time.monotonic() < end, f"nothing happened for {LIMIT:.0f} s"
        time.sleep(0.01)
    return found
