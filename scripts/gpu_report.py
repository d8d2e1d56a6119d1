"""Write results/gpu.md from the JUnit files of the tests on an accelerator, which may have run in several parts.

Of a test that is in several files the last one counts; if it had failed in an earlier one, the page says so.

    pytest -m gpu tests --junitxml gpu.xml
    python scripts/gpu_report.py gpu.xml ... [--device "NVIDIA H200"] [--out results/gpu.md]

To be run where the tests ran: the device and the versions are those of the Python that runs this. The date and the counts are
pytest's; what did not pass is named, with the first line of why. Only the standard library is needed, and torch to ask for the
device.
"""

import argparse
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "numpy")
OUTCOMES = ("passed", "failed", "skipped")
SHOWN = 40
"""Failures that are named; of more, only their number."""


def outcome(case):
    """passed, failed or skipped; an error is a failure."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def file_of(case):
    """tests/gpu/test_x.py from the class name that pytest writes, tests.gpu.test_x."""
    return (case.get("classname") or case.get("name", "")).replace(".", "/") + ".py"


def reason(case):
    """The first line of why a test failed."""
    found = next(child for child in case if child.tag in ("failure", "error"))
    lines = (found.get("message") or found.text or "").strip().splitlines()
    return " ".join(lines[0].split())[:140].replace("|", "\\|") if lines else ""


def device_name():
    """As the accelerator calls itself."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator"


def versions():
    """Of what the tests use, where it is installed."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def page(paths, device):
    """The page, in Markdown, and how many tests failed."""
    suites = [ElementTree.parse(path).getroot().find("testsuite") for path in paths]
    every = [case for suite in suites for case in suite.findall("testcase")]
    cases = list({(file_of(case), case.get("name")): case for case in every}.values())
    date = max(suite.get("timestamp", "")[:10] for suite in suites)
    longest = max(float(suite.get("time", 0)) for suite in suites)
    table = {}
    for case in cases:
        table.setdefault(file_of(case), Counter()).update({outcome(case): 1, "time": float(case.get("time", 0))})
    total = sum(table.values(), Counter())
    lines = ["# Tests on an accelerator", "", f"Last run {date} on {device}: {versions()}.", ""]
    lines += [
        f"`pytest -m gpu tests`: {_counts(total)} in {longest:.0f} s. Written by `scripts/gpu_report.py`.",
        "",
    ]
    lines += ["| file | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for file, row in sorted(table.items()):
        lines.append(f"| `{file}` | {' | '.join(str(row[o]) for o in OUTCOMES)} | {row['time']:.0f} |")
    failed = [case for case in cases if outcome(case) == "failed"]
    if failed:
        lines += ["", "What failed:", ""]
        lines += [f"- `{file_of(case)}::{case.get('name')}`: {reason(case)}" for case in failed[:SHOWN]]
        lines += [f"- and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
    before = [case for case in every if outcome(case) == "failed" and case not in cases]
    if before:
        lines += ["", "What failed at first, and counts above as it came out when it was run again:", ""]
        lines += [f"- `{file_of(case)}::{case.get('name')}`: {reason(case)}" for case in before[:SHOWN]]
    return "\n".join(lines) + "\n", len(failed)


def _counts(total):
    return ", ".join(f"**{total[o]} {o}**" for o in OUTCOMES if total[o]) or "nothing ran"


def main():
    """Read, write, and exit 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xml", type=Path, nargs="+")
    parser.add_argument("--device", help="how to call the device; asked of torch by default")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu.md")
    asked = parser.parse_args()
    missing = [str(path) for path in asked.xml if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    text, failed = page(asked.xml, asked.device or device_name())
    asked.out.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
