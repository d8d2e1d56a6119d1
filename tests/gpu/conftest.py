"""Every test of this folder compares bits: `shaken_device` says how."""

from tests.gpu.shaken_device import deterministic

__all__ = ["deterministic"]
