"""What the tab key offers for models, tasks, plans, studies and modes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    """Folders, and files of these endings, that begin so."""
    head, slash, start = incomplete.rpartition("/")
    try:
        found = sorted(Path(head + slash or ".").iterdir())
    except OSError:
        return []
    names = [f"{p.name}/" if p.is_dir() else p.name for p in found if p.is_dir() or p.suffix in endings]
    return [f"{head}{slash}{name}" for name in names if name.startswith(start) and (start or not name.startswith("."))]


def models(incomplete: str) -> list[str]:
    """Built-in models, and folders."""
    from shaketable.models import BUILT_IN

    return [*_starting(BUILT_IN, incomplete), *_paths(incomplete, (".json", ".gguf", ".py"))]


def tasks(incomplete: str) -> list[str]:
    """Built-in tasks, and files of problems."""
    from shaketable.evaluate.tasks import BUILT_IN

    return [*_starting(BUILT_IN, incomplete), *_paths(incomplete, (".jsonl", ".parquet"))]


def studies(incomplete: str) -> list[str]:
    """The studies that ship, and YAML files."""
    from shaketable.study.file import shipped

    return [*_starting(shipped(), incomplete), *_paths(incomplete, (".yaml", ".yml"))]


def plans(incomplete: str) -> list[str]:
    """The last clause of a plan: faults before the @, levels and operators after it."""
    from shaketable.faults import KINDS
    from shaketable.plan import OPS

    done, semicolon, clause = incomplete.rpartition(";")
    fault, at, _ = clause.partition("@")
    words = [f"{fault}@{place}" for place in ("module.linear", "layer.0", *(f"op.{o}" for o in OPS))] if at else [*KINDS]
    return [f"{done}{semicolon}{word}" for word in _starting(words, clause)] + _paths(incomplete, (".yaml", ".yml"))


def modes(incomplete: str) -> list[str]:
    """Of `locate --mode`."""
    return _starting(("all", "device", "host"), incomplete)


def devices(incomplete: str) -> list[str]:
    """Kinds of devices that torch knows."""
    return _starting(("auto", "cpu", "cuda", "mps", "npu", "xpu"), incomplete)


COMPLETIONS: dict[str, Callable[[str], list[str]]] = {
    "model": models,
    "models": models,
    "task": tasks,
    "plan": plans,
    "plans": plans,
    "eval_plans": plans,
    "mode": modes,
    "device": devices,
    "file": studies,
    "what": studies,
}
