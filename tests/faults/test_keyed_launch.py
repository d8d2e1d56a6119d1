"""A launch with a key of its own, with a driver that writes down what it is told: through launching.c and without a compiler."""

import ctypes
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shaketable.faults import native
from shaketable.faults.generator import mix64
from shaketable.faults.gpu import launcher

KINDS = ("pointer", "pointer", "int", "float", "int", "int", "pointer", "pointer", "pointer", "int", "int")
READ = {"pointer": ctypes.c_uint64, "int": ctypes.c_uint32, "float": ctypes.c_float}


@pytest.fixture
def driver():
    """A driver, and the launches it was asked for."""
    told = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p], *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)

    def launch(function, blocks, _y, _z, threads, _1, _2, shared, stream, array, _extra):
        found = (ctypes.c_void_p * len(KINDS)).from_address(array)
        values = [READ[kind].from_address(address).value for kind, address in zip(KINDS, found, strict=True)]
        told.append(((function, blocks, threads, shared, stream or 0), values))
        return 0

    return SimpleNamespace(launch=kind(launch), told=told)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_the_driver_is_told(driver, compiled, monkeypatch):
    if compiled and native.keyed_striker() is None:
        pytest.skip("no compiler here")
    if not compiled:
        monkeypatch.setattr(native, "keyed_striker", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    kernel = SimpleNamespace(function=4711, metadata=SimpleNamespace(num_warps=4, shared=16))
    monkeypatch.setattr(launcher, "driver", lambda: driver.launch)
    one = launcher.KeyedLaunch(launcher.Launcher(kernel, KINDS), 3, torch.zeros(5000), 0.25)
    for key, moment in ((2**64 - 3, 2**63 + 5), (7, (2**64 - 1) + (2 << 32))):
        assert one.go(one.at, 4096, 8192, key, moment, 77) == 0
        mixed = mix64(key ^ mix64(moment))
        expected = [4096, 8192, 5000, 0.25, mixed & 0xFFFFFFFF, mixed >> 32, None, None, None, 0, 0]
        assert driver.told[-1] == ((4711, 3, 128, 16, 77), [v or 0 for v in expected])


def test_threads_share_a_launch(driver, monkeypatch):
    """Forward and backward run in threads of their own: no launch has the key of another."""
    if native.keyed_striker() is None:
        pytest.skip("no compiler here")
    kernel = SimpleNamespace(function=1, metadata=SimpleNamespace(num_warps=4, shared=0))
    monkeypatch.setattr(launcher, "driver", lambda: driver.launch)
    one = launcher.KeyedLaunch(launcher.Launcher(kernel, KINDS), 1, torch.zeros(8), 0.25)

    def many(key):
        for moment in range(300):
            one.go(one.at, key, key, key, moment, 0)

    threads = [threading.Thread(target=many, args=(16 * key,)) for key in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = {(key, mix64(key ^ mix64(moment))) for key in (16, 32) for moment in range(300)}
    assert {(v[0], v[4] | v[5] << 32) for _, v in driver.told} == keys


def test_a_compiler_and_headers_are_enough():
    """Or the quick way would be gone without anybody noticing."""
    if native.compiler() is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no compiler or no headers here")
    assert None not in (native.striker(), native.coder(), native.keyed_striker())


@pytest.mark.parametrize("given", [(4096, 8192, 3), (4096, 8192, "a key", 0, 0), (4096, 8192, 3, 0, None)])
def test_nothing_is_launched_with_wrong_arguments(driver, given, monkeypatch):
    if native.keyed_striker() is None:
        pytest.skip("no compiler here")
    kernel = SimpleNamespace(function=1, metadata=SimpleNamespace(num_warps=4, shared=0))
    monkeypatch.setattr(launcher, "driver", lambda: driver.launch)
    one = launcher.KeyedLaunch(launcher.Launcher(kernel, KINDS), 1, torch.zeros(8), 0.25)
    with pytest.raises(TypeError):
        one.go(one.at, *given)
    assert not driver.told
