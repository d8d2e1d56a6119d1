"""What a run was done with, fact by fact; its revision is in test_record.py."""

import platform
import sys

import torch

import shaketable
from shaketable.faults.cpu import native
from shaketable.records.environment import PACKAGES, gather


def test_every_fact_is_what_it_is_called():
    facts = gather()
    assert list(facts) == [
        "shaketable", "python", "system", "revision", "dirty", "shaketable revision", "device", "threads", "noise kernels",
        "compiler", *PACKAGES,
    ]  # fmt: skip
    assert facts["shaketable"] == shaketable.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["system"] == f"{platform.system()} {platform.machine()}"
    assert (facts["threads"], facts["noise kernels"]) == (torch.get_num_threads(), native.name())
    assert facts["device"] == ("cpu" if not torch.accelerator.is_available() else str(torch.accelerator.current_accelerator()))
    assert str(native.compiler() or "none").endswith(facts["compiler"]) and "/" not in facts["compiler"]
