"""A step on a GPU that is captured once and replayed: one launch in place of some thousand.

The step is a function without arguments whose whole state lies in tensors that stay where they are. Its first calls are real
calls, on a stream of their own as torch asks for it; they warm up what is made lazily. Then it is captured, which runs its
Python once and none of its kernels, and from there on replayed. So no step is done twice, and nothing is done for warm-up
alone: whoever counts calls counts those that happened.

Autocast keeps copies of weights that it has cast. A graph that was captured over such a copy would never see another weight.
The copies are dropped before and after, so a graph casts the weights as they are at each replay: under a millisecond for 135
million, and nothing to keep up to date.

What cannot be captured (a value read on the host, a fault that cannot be replayed) is done call by call as before, with the
same results; `why_not` says so. When a capture fails torch stays on the stream of the capture, with a generator that believes
in it and refuses to work: both are put right.

Other threads (the loader's, which pins memory) may talk to the driver meanwhile: the capture is of this thread only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from shaketable.errors import PlanError

WARM = 2
"""Calls before the capture."""


class Captured:
    """A step, as a graph as soon as it can be."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.why_not: str | None = None
        self.replays = 0
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def is_captured(self) -> bool:
        """Whether calls are replays by now."""
        return self._graph is not None

    def __call__(self) -> None:
        """Do the step."""
        if self._graph is None and self.why_not is None and self._calls >= WARM:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
            self.replays += 1
        elif self.why_not is not None:
            self.step()
        else:
            self._aside()
        self._calls += 1

    def _aside(self) -> None:
        here, aside = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self.step()
        here.wait_stream(aside)

    def _capture(self) -> None:
        gc.collect()  # another graph that is freed by chance during a capture would spoil it
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        torch.clear_autocast_cache()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
        except (RuntimeError, PlanError) as error:
            self.why_not = (str(error).strip().splitlines() or [type(error).__name__])[0]
            torch.cuda.set_stream(here)
            generator = torch.cuda.default_generators[self.device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
        else:
            self._graph = graph
        torch.clear_autocast_cache()
