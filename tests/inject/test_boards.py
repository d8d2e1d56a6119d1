"""Who has a board, what is written to it and how often it is asked: a card played by the CPU."""

import pytest
import torch
from torch import nn

from shaketable.errors import PlanError
from shaketable.faults import gpu
from shaketable.harden.aqn import AQN
from shaketable.harden.schedules import GlobalDecay
from shaketable.inject import boards
from shaketable.inject.board import Board
from shaketable.inject.injection import Injection
from shaketable.plan import Plan

pytest.importorskip("triton")
CPU = torch.device("cpu")
HELD, LOUD = "rms_gaussian:0.1@module.rmsnorm,point=weight,phase=rollout", "relative_gaussian:0.05@module.linear"
GRADIENTS = "rms_gaussian:0.1@module.rmsnorm,point=weight,direction=both"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up_proj = nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.up_proj(self.norm(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def card(monkeypatch):
    """A card that is the CPU, for whoever makes boards."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(boards, "_cards", lambda injection: {CPU})
    monkeypatch.setattr(gpu, "name", lambda device: "triton")


def made(plan, hold=True):
    injection = Injection(Plan.parse(plan), hold=hold, allow_inert=True)
    injection.attach(Stack().eval())
    return injection.enable()


@pytest.mark.parametrize(("plan", "points"), [(HELD, []), (f"{HELD};{LOUD}", ["output"]), (GRADIENTS, ["weight"])])
def test_noise_that_is_held_for_rollouts_has_no_board(plan, points, card):
    injection = made(plan)
    assert sorted({tap.point for board in injection.boards.all for tap in board.taps}) == points
    assert sum(len(board.taps) for board in injection.boards.all) == 2 * len(points)
    assert injection.ledger.kernel == "triton", "kernels draw it all the same"
    injection.close()


def test_held_noise_that_a_graph_would_have_to_ask_for_is_refused(card):
    injection = made(HELD)
    with pytest.raises(PlanError, match=r"module\.rmsnorm: noise that is held .* together with gradients"):
        injection.boards.of(injection.taps[0], torch.zeros(1))
    injection.close()


def boarded(plan=LOUD):
    injection = made(plan, hold=False)
    board = Board(injection, CPU, injection.taps)
    injection.boards._add(board)
    return injection, board


def test_a_table_that_is_on_the_card_already_is_not_written_again():
    injection, board = boarded()
    writes, clock = board.live._version, int(board.clock[0])
    injection.step = 3
    injection.set_magnitude(0.05)
    injection.enable()
    assert board.live._version == writes
    assert int(board.clock[0]) != clock, "but the step is"
    for change, scale, on in (
        (lambda: injection.set_magnitude(0.25), 0.25, True),
        (injection.disable, 0.25, False),
        (injection.enable, 0.25, True),
        (lambda: injection.set_magnitude(0), 0.0, False),
    ):
        change()
        assert board.live._version == (writes := writes + 1)
        assert board.live[..., 0].unique().tolist() == [scale]
        assert bool(board.live[..., 1].all()) is bool(board.live[..., 1].any()) is on
    injection.close()


def strike(board, tap, magnitude):
    """What a kernel tells of one fire in the phase `rollout`: a hundred values, all changed."""
    row = [100.0, 100.0, 100.0, 100.0, 100 * magnitude**2, 100.0, 100 * magnitude**2, 1.0, 0.0, 0.0]
    board.proof[board.taps[tap]] += torch.tensor(row, dtype=torch.float64)
    board.is_used = True


def test_what_was_told_before_a_magnitude_changes_is_not_mixed_with_what_comes_after():
    injection, board = boarded()
    tap = injection.taps[0]
    strike(board, tap, 0.1)
    injection.set_magnitude(0.3)
    strike(board, tap, 0.3)
    site = injection.ledger.sites[0]
    assert (site.magnitudes, site.magnitude) == (2, pytest.approx(0.2))
    injection.close()


def test_a_new_step_of_aqn_asks_a_board_once(monkeypatch):
    """On outputs, where kernels do read a board; and `asked` is the mean of what was asked for, step by step."""
    noise = AQN(GlobalDecay(0.4, 0.1, stages=3), form="output").attach(Stack().eval(), 3).enable()
    injection = noise.injection
    board = Board(injection, CPU, injection.taps)
    injection.boards._add(board)
    asked, original, sigmas = [], Board.settle, []
    monkeypatch.setattr(Board, "settle", lambda self: [asked.append(1), original(self)])
    for step in (0, 1, 2):
        sigmas.append(noise.sigma)
        strike(board, injection.taps[0], noise.sigma)
        asked.clear()
        noise.step = step + 1
        assert len(asked) == 1
    site, mean = noise.ledger.sites[0], sum(sigmas) / 3
    assert len(set(sigmas)) > 1
    assert (site.magnitudes, site.magnitude, site.asked) == (3, pytest.approx(mean), pytest.approx(mean))
    noise.close(check=False)
