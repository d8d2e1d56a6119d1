"""Which process of a program this one is: its name, the task it is busy with, and its rank where it has no process group.

Children of `multiprocessing` have no rank; the order in which they were started tells them apart, in every run alike.

A framework of actors and tasks (Ray) puts its own functions here. An **actor** has a rank made from its parent, its class and
its number: `Sampler#2` is the second Sampler that the driver made, in every run and in every life of the actor. It travels in
the environment, so that the actor's children have it too. A **task** runs in whichever worker is free, so it is part of what
keys the noise: in a new task passes and models are counted from zero (`CallsByTask`).

Standard library only.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass

PLACE = "SHAKETABLE_PLACE"
"""`RANK:LABEL` of the actor that this process is, or is a child of."""


@dataclass(frozen=True)
class ProcessName:
    """The name of a process in tables and warnings."""

    label: str = ""
    actor: str = ""
    """The framework's id of the actor; the same in each of its lives."""

    def child(self) -> ProcessName:
        """The name of a process that this one started."""
        return ProcessName(f"child of {self.label}" if self.label else "")


def number(text: str, size: int = 4) -> int:
    """A hash of `text` with as many bytes; never 0, which is the driver."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest()) or 1


def rank_here() -> int:
    """The rank of the actor that this process is or is a child of, else 0."""
    return int(os.environ.get(PLACE, "0").partition(":")[0])


def child_rank(rank: int) -> int:
    """The rank of a child of `multiprocessing`, given that of the program; `rank` itself for other processes."""
    child = tuple(getattr(multiprocessing.current_process(), "_identity", ()))  # which child of which child it is
    return number(f"{rank} child {child} []") if child else rank


def label_here() -> str:
    """The label of the actor that this process is or is a child of, else nothing."""
    return os.environ.get(PLACE, "").partition(":")[2]


def _inherited() -> ProcessName:
    return ProcessName(label_here()).child()


current_task: Callable[[], int] = int
"""Returns the task that this process works on; 0 where there are no tasks. Frameworks replace it."""
current_name: Callable[[], ProcessName] = _inherited
"""Names this process. A framework puts its own here."""
before_an_answer: Callable[[], object] = int
"""A framework calls this before anything leaves the process. The ledger, once there is one, puts its `catch_up` here."""
