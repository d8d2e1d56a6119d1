"""What a run was done with, fact by fact."""

import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import shaketable
from shaketable.faults.cpu import native
from shaketable.records import environment
from shaketable.records.environment import PACKAGES, gather


def test_every_fact_is_what_it_is_called(monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "_git", lambda folder, *words: asked.append((folder, words[0])) or f"{folder is None}")
    facts = gather()
    assert list(facts) == [
        "shaketable", "python", "system", "revision", "dirty", "shaketable revision", "device", "threads", "noise kernels",
        "compiler", *PACKAGES,
    ]  # fmt: skip
    assert facts["shaketable"] == shaketable.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["system"] == f"{platform.system()} {platform.machine()}"
    assert (facts["revision"], facts["dirty"], facts["shaketable revision"]) == ("True", True, "False")
    assert (facts["threads"], facts["noise kernels"]) == (torch.get_num_threads(), native.name())
    assert facts["device"] == ("cpu" if not torch.accelerator.is_available() else str(torch.accelerator.current_accelerator()))
    assert str(native.compiler() or "none").endswith(facts["compiler"]) and "/" not in facts["compiler"]
    assert {folder for folder, _ in asked} == {None, Path(shaketable.__file__).parent}


def test_packages_that_are_not_installed_have_no_version(monkeypatch):
    def version(name):
        if name == "trl":
            raise metadata.PackageNotFoundError(name)
        return f"of {name}"

    monkeypatch.setattr(environment.metadata, "version", version)
    facts = gather()
    assert {name: facts[name] for name in PACKAGES} == {name: f"of {name}" for name in PACKAGES} | {"trl": None}
    assert {"torch", "transformers", "trl", "peft", "accelerate", "vllm", "verl", "ray", "triton", "numpy"} == set(PACKAGES)


@pytest.mark.parametrize(
    ("revision", "changed", "found"),
    [
        (None, "x", {"revision": None, "dirty": None}),
        ("", "x", {"revision": None, "dirty": None}),
        ("abc", "", {"revision": "abc", "dirty": False}),
        ("abc", " M file", {"revision": "abc", "dirty": True}),
        ("abc", None, {"revision": "abc", "dirty": None}),
    ],
)
def test_a_tree_is_dirty_where_git_can_tell(monkeypatch, revision, changed, found):
    said = {"rev-parse": revision, "--no-optional-locks": changed}
    monkeypatch.setattr(environment, "_git", lambda folder, *words: said[words[0]])
    assert environment._revision(None) == found


def test_git_is_asked_in_the_folder_and_an_error_is_no_answer(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / ".git").write_text("gitdir: nowhere")
    assert environment._git(tmp_path / "here", "rev-parse", "HEAD") is None
    assert environment._git(tmp_path / "none", "--version") is None
    assert environment._git(None, "--version").startswith("git version") and environment._git(None, "no such word") is None
    assert environment._git(tmp_path / "here", "-c", "alias.here=!pwd", "--git-dir=.", "here") == str(tmp_path / "here")
