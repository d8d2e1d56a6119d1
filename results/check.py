"""Recompute every difference of docs/findings.md from the packed records, without Shaketable: python results/check.py"""

import json
import re
import sys
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
from scipy.stats import t

RESULTS = Path(__file__).parent
STATED = re.compile(r"`([\w./-]+): ([^`]+), scored ([^`]+?)( loss)?` ([+−]?[\d.]+) \(([+−]?[\d.]+) to ([+−]?[\d.]+)\)")


@cache
def scores(study, key):
    """By arm and condition: what the answers of the last evaluation scored, a table of seeds × problems."""
    rows = {}
    with tarfile.open(next((RESULTS / study).glob("records.tar.*"))) as packed:
        for member in packed:
            path = Path(member.name)
            if path.name == "record.jsonl" and path.parent.name != "definition" and "level-2" not in member.name:
                events = [json.loads(line) for line in packed.extractfile(member)]
                about = events[0]["about"]
                for condition in next((e["conditions"] for e in events[::-1] if e["event"] == "evaluation"), []):
                    answers = {a["id"]: a.get(key, np.nan) for a in condition["answers"]}
                    rows.setdefault((about["arm"], condition["name"]), {})[about["seed"]] = [
                        answers[i] for i in sorted(answers)
                    ]
    return {place: np.array([found[seed] for seed in sorted(found)], float) for place, found in rows.items()}


def interval(d):
    """The mean of a table of differences and its 95 % interval: seeds and problems are crossed random effects."""
    (s, n), by_seed, by_problem = d.shape, d.mean(1, keepdims=True), d.mean(0, keepdims=True)
    rest = ((d - by_seed - by_problem + d.mean()) ** 2).sum() / ((s - 1) * (n - 1))
    a, b = max(n * by_seed.var(ddof=1), rest), max(s * by_problem.var(ddof=1), rest)
    variance, freedom = (a + b - rest) / (s * n), n + 1
    if variance:
        freedom = max((a + b - rest) ** 2 / (a**2 / (s - 1) + b**2 / (n - 1) + rest**2 / ((s - 1) * (n - 1))), min(s, n) - 1)
    else:  # nothing differs: as if each side had won one problem more
        variance = 2 / (n + 1) / (n + 2)
    return d.mean() + np.sqrt(variance) * t.ppf([0.5, 0.025, 0.975], freedom)


wrong, found = 0, STATED.findall((RESULTS.parent / "docs" / "findings.md").read_text())
for study, arms, conditions, loss, *stated in found:
    table, (a, b), (c, d) = (
        scores(study, "loss" if loss else "correct"),
        *((x.split(" − ") * 2)[:2] for x in (arms, conditions)),
    )
    computed = interval(table[a, c] - table[b, d]) * (1 if loss else 100)
    digits = len(stated[0].partition(".")[2])
    agrees = np.allclose(computed, [float(x.replace("−", "-")) for x in stated], rtol=0, atol=0.501 * 10**-digits)
    wrong += not agrees
    print("✓" if agrees else "✗", f"{study}: {arms}, {conditions}{loss}", np.round(computed, digits))
print(f"{len(found)} differences, {wrong} not as stated")
sys.exit(wrong > 0 or not found)
