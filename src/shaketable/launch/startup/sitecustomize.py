"""Python runs this file at start-up, because `shaketable run` has put its folder in front of PYTHONPATH.

It runs the sitecustomize that would have run without us, and then asks to be called when torch is imported.
Without `shaketable run` this folder is on no path: a normal Python start costs nothing.
"""

import importlib
import os
import sys


def _run_the_other() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = list(sys.path)
    sys.path[:] = [p for p in path if os.path.abspath(p or os.curdir) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = path


def _watch_imports() -> None:
    try:
        from shaketable.launch import import_hooks
    except ImportError as error:
        sys.stderr.write(f"shaketable: cannot inject into {sys.executable}: {error}. Install shaketable there.\n")
        sys.stderr.flush()
        os._exit(2)  # an exception here is a fatal error of Python's own, with a traceback
    if os.environ.get("SHAKETABLE_PLAN"):
        import_hooks.install()


_run_the_other()
if os.environ.get("SHAKETABLE_PLAN") or os.environ.get("SHAKETABLE_KEYS_READ"):
    _watch_imports()
