"""Every test of this folder compares bits: `shaken_device` says how."""

from shaken_device import deterministic

__all__ = ["deterministic"]
