"""When a step is called, captured and replayed, told apart with a stand-in for CUDA: here a replay is the captured call again."""

from contextlib import nullcontext

import pytest
import torch

from shaketable.errors import PlanError
from shaketable.evaluate.decoding.cuda_graph import WARM, Captured

DEVICE = torch.device("cuda", 0)


class Cuda:
    """What `decoding/cuda_graph.py` asks of torch.cuda; notes what happens."""

    def __init__(self, monkeypatch, refuses=None):
        self.happened, self.refuses, self.capturing = [], refuses, False
        outer = self

        class Graph:
            def replay(self):
                outer.happened.append("replay")

        class Capture:
            def __init__(self, graph, capture_error_mode):
                assert capture_error_mode == "thread_local"

            def __enter__(self):
                outer.happened.append("capture")
                outer.capturing = True

            def __exit__(self, *_):
                outer.capturing = False
                if outer.refuses:
                    raise RuntimeError(outer.refuses)

        class Stream:
            def __init__(self, device=None):
                pass

            def wait_stream(self, other):
                pass

        class Generator:
            def clone_state(self):
                return "fresh"

            def graphsafe_set_state(self, state):
                outer.happened.append(f"{state} generator")

        for name, value in {
            "CUDAGraph": Graph,
            "graph": Capture,
            "Stream": Stream,
            "stream": lambda stream: nullcontext(),
            "current_stream": Stream,
            "set_stream": lambda stream: outer.happened.append("stream back"),
            "synchronize": lambda device: None,
            "default_generators": (Generator(),),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "clear_autocast_cache", lambda: outer.happened.append("casts dropped"))

    def step(self):
        self.happened.append("call in capture" if self.capturing else "call")


def test_real_calls_then_one_capture_then_replays(monkeypatch):
    cuda = Cuda(monkeypatch)
    step = Captured(cuda.step, DEVICE)
    for n in range(WARM + 3):
        assert step.is_captured == (n > WARM)
        step()
    captured = ["casts dropped", "capture", "call in capture", "casts dropped"]
    assert cuda.happened == [*["call"] * WARM, *captured, *["replay"] * 3]
    assert step.replays == 3 and step.why_not is None


def test_what_cannot_be_captured_is_called_and_says_why(monkeypatch):
    cuda = Cuda(monkeypatch, refuses="operation not permitted\nwhen stream is capturing")
    step = Captured(cuda.step, DEVICE)
    for _ in range(WARM + 3):
        step()
    assert cuda.happened.count("capture") == 1 and "replay" not in cuda.happened
    assert cuda.happened.count("call") == WARM + 3, "no call is lost, none is done twice"
    assert {"stream back", "fresh generator"} <= set(cuda.happened)
    assert step.why_not == "operation not permitted" and not step.is_captured


def test_a_plan_that_refuses_to_be_captured_is_called_too(monkeypatch):
    cuda = Cuda(monkeypatch)

    def refusing():
        if cuda.capturing:
            raise PlanError("its replays would repeat one noise")
        cuda.step()

    step = Captured(refusing, DEVICE)
    for _ in range(WARM + 2):
        step()
    assert cuda.happened.count("call") == WARM + 2 and step.why_not == "its replays would repeat one noise"


def test_errors_of_the_step_itself_go_through(monkeypatch):
    Cuda(monkeypatch)

    def wrong():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Captured(wrong, DEVICE)()
