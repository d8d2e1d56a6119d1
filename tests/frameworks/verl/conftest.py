"""These tests need an environment with verl (`make test-verl`); in any other they do not exist."""

from importlib.metadata import PackageNotFoundError, version

try:
    version("verl")
except PackageNotFoundError:
    collect_ignore_glob = ["*"]
