"""Write the numbers of docs/tour.md from the benchmarks' files, between two markers.

    python scripts/readme_numbers.py [--check]

Standard library only. A number that no file of benchmarks/ has does not stand there.
"""

import json
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tour.md"
BEGIN, END = "<!-- numbers: scripts/readme_numbers.py -->", "<!-- end of numbers -->"
SPEED = {
    "a plan that is off": "identity plan",
    "relative noise on all 210 linears": "relative_gaussian, 210 linears",
    "the same by a plain hook": "naive: gaussian, 210 linears",
    "the same by pytorchfi": "pytorchfi: gaussian, 210 linears",
    "the same by aihwkit-lightning": "aihwkit_lightning: gaussian, 210 linears",
    "the same by MRFI": "mrfi: gaussian, 210 linears",
    "5 % noise on every matrix product, forward and backward": "relative_gaussian, op.matmul, forward + backward",
    "MXFP4 on weights and inputs": "mxfp4 W4A4, 210 linears",
    "the same through torchao": "torchao: mxfp4 W4A4, 210 linears",
}
SOURCES = """Made from [speed](../benchmarks/speed.md), [training](../benchmarks/train.md) and
    [locating](../benchmarks/locate.md), where machines, dates, quartiles and what was not scored stand."""


def numbers() -> str:
    """The section, in Markdown."""
    speed, train, locate = (_read(name) for name in ("speed", "train", "locate"))
    lines = ["| SmolLM2-135M on two cores: time, with over without | |", "|---|---|"]
    lines += [f"| {label} | {speed['results'][key]['ratio']:.2f} |" for label, key in SPEED.items()]
    rows = train["rows"]
    on, off = rows["ours, operator plan and AQN"]["ratio"], rows["ours, plan and AQN off"]["ratio"]
    exact, short = _located(locate["float32"]), _located(locate["bfloat16"])
    training = f"""A GRPO step of `nano` on two cores with plan and AQN on takes {on:.2f} times plain TRL's, {off:.2f} with
        both off."""
    locating = f"""Of {exact[1]:,} planted faults that can be told from rounding, `locate` names layer and operator of
        {exact[0]:,} in float32, and of {short[0]:,} of {short[1]:,} in bfloat16."""
    return "\n".join([*lines, "", _filled(f"{training} {locating}"), "", _filled(SOURCES)])


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 128, break_long_words=False, break_on_hyphens=False)


def _read(name: str) -> dict[str, object]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def _located(body: dict[str, object]) -> tuple[int, int]:
    row = next(row for row in body["table"] if row["test"] == "host mode: layer and op")
    return row["located"], row["of"]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN, 1)
    fresh = f"{head}{BEGIN}\n{numbers()}\n{END}{rest.split(END, 1)[1]}"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == text else f"{PAGE.name} is not what benchmarks/ says; run scripts/readme_numbers.py")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
