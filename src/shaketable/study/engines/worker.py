"""A worker process: takes runs from its standard input, one line of JSON each, and tells what happens on its standard output.

One process does run after run, because importing torch takes longer than a small run. It is a process and not a thread so
that a crash, or the kernel's out-of-memory killer, ends one run and nothing else. Whatever libraries print goes to the log. A
worker whose parent is gone ends at once, also in the midst of a run: nobody would hear of it, and the next `study run`
would wait for it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shaketable.errors import ShaketableError
from shaketable.study.cells import Cell


def request(cell: Cell, study: str, runs: Path, engine: str) -> dict[str, Any]:
    """What a worker is asked to do."""
    return {"cell": asdict(cell), "study": study, "runs": str(runs), "engine": engine}


def answer(asked: dict[str, Any], tell: Any = None) -> dict[str, Any]:
    """Do what is asked; how it ended."""
    from shaketable.study.run_cell import do

    cell = Cell(**asked["cell"])
    _prepare(cell.threads)
    try:
        return {"kind": "ended", "ending": do(cell, asked["study"], Path(asked["runs"]), asked["engine"], tell)}
    except ShaketableError as error:
        return {"kind": "failed", "error": str(error), "final": True}
    except Exception as error:
        traceback.print_exc()
        return {"kind": "failed", "error": f"{type(error).__name__}: {error}", "final": False}
    finally:
        _clean_up()


def _prepare(threads: int) -> None:
    import torch

    from shaketable.models import quieten

    torch.set_num_threads(threads)
    quieten()


def _clean_up() -> None:
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()

    def say(message: dict[str, Any]) -> None:
        try:
            out.write(json.dumps(message, default=str) + "\n")
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more; the run has not failed, it was left

    for line in sys.stdin:
        say(answer(json.loads(line), lambda what, facts: say({"kind": "told", "what": what, "facts": facts})))


if __name__ == "__main__":
    main()
