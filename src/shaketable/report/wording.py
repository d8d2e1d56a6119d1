"""What both reports, page and Markdown, say in the same words: badge, what is missing, chances, times, the method.

The badge of a study has three words and no more: shown, not shown, nothing. "Not shown" is not "shown to be equal", so the
word is never shortened to "no difference".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from shaketable.report.locate_html import number
from shaketable.report.svg.scale import finite, known

BADGES = {
    "shown": ("✓", "shown", "pass"),
    "not shown": ("○", "not shown", "inconclusive"),
    "nothing": ("?", "nothing can be concluded", "suspect"),
}
METHOD = (
    "The interval of a score is made by the method named under its table (for one run, Wilson's over the problems); the"
    " interval of a difference between arms treats training seeds and problems as crossed random effects, with Student's t and"
    " Satterthwaite's degrees of freedom, so that it covers both another seed and another set of problems.",
    "Differences are paired: the same seeds, the same problems, and, where a plan is shared, the same noise.",
    "With one seed the test is the exact McNemar test over problems, which speaks of that one run only; over several seeds the"
    " exact McNemar p of each seed and the exact sign-flip p over the seeds stand beside the t as checks that assume no"
    " distribution.",
    "The primary comparison is tested alone; Holm's procedure corrects the p-values of all others for their number, the"
    " corrected p decides what counts as shown, and the intervals are not widened.",
    "The smallest detectable difference is the one this comparison would have found with a power of 80 % at its level, computed"
    " from the measured spread and never from the measured difference.",
)
TEXT_BUDGET = 90_000
LONGEST, SHORTEST = 1500, 160
Findings = dict[str, Any]


def badge(f: Findings) -> dict[str, str]:
    """Mark, words, tone and headline of the verdict; the headline does not repeat the words."""
    kind = f["verdict"]["kind"]
    mark, words, tone = BADGES.get(kind, BADGES["nothing"])
    if f["kind"] == "run":
        mark, words, tone = "·", "one run, no comparison", "inconclusive"
    headline = str(f["verdict"]["headline"]) or f["study"]["name"]
    for prefix in ("Shown: ", "Not shown: ", "Nothing: ", "Nothing can be concluded: "):
        headline = headline.removeprefix(prefix)
    return {"mark": mark, "words": words, "tone": tone, "headline": headline[:1].upper() + headline[1:]}


def missing_runs(runs: Sequence[Findings]) -> list[str]:
    """Runs that are not done, by name and state."""
    return [f"{run['name']} ({run['status']})" for run in runs if run["status"] != "done"]


def proof_summary(arms: Sequence[Findings]) -> Findings:
    """How many places were proven, what is wrong, and which arms have no proof at all."""
    places = [place for arm in arms for place in arm["proof"]]
    verdicts = Counter(place["verdict"] for place in places)
    good = verdicts["agrees"] + verdicts["proven"]
    silent = [arm["name"] for arm in arms if _silent(arm)]
    if not places:
        return {"state": "suspect" if silent else "inconclusive", "words": "no injection was recorded", "silent": silent}
    parts = [f"{good:,} of {len(places):,} places proven"]
    parts += [f"{verdicts[kind]:,} {word}" for kind, word in (("differs", "differ"), ("inert", "inert")) if verdicts[kind]]
    parts += [f"{len(silent)} arm{'s' * (len(silent) > 1)} without proof"] if silent else []
    state = "fail" if verdicts["inert"] else "suspect" if good < len(places) or silent else "pass"
    return {"state": state, "words": ", ".join(parts), "silent": silent}


def _silent(arm: Findings) -> bool:
    """An arm that has finished runs, was to be disturbed in training (or, if not trained, at all), and kept no proof of it."""
    trained = arm["kind"] in ("", "train")
    asked = arm["aqn"] or (arm["plan"] and not (trained and arm["plan_in"] == "eval"))
    proofs = [place for place in arm["proof"] if not trained or not str(place["where"]).startswith("scored")]
    return bool(arm["seeds"] and asked and not proofs)


def counted(many: Any, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{number(many)} {noun}{'' if many == 1 else 's'}"


def fact(value: Any) -> str:
    """A fact about a machine: yes, no, a number or a text; a dash for what is not there."""
    return ("yes" if value else "no") if isinstance(value, bool) else number(value)


def chance(p: Any) -> str:
    """A p-value for reading."""
    if not finite(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.995 else "1"


def share_of(recovered: dict[str, Any]) -> str:
    """The share that came back, with its interval, in whole percent."""
    share, low, high = recovered["share"], recovered["interval"]["low"], recovered["interval"]["high"]
    ends = [f"{round(100 * end)}" if finite(end) else without for end, without in ((low, "-∞"), (high, "∞"))]
    return f"{round(100 * share)} % ({ends[0]} to {ends[1]})".replace("-", "−")


def percent(share: Any) -> str:
    """A share in hundredths, with two digits."""
    if not finite(share):
        return "–"
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.1f} %" if value >= 0.1 else f"{number(value, 2)} %"


def duration(seconds: Any) -> str:
    """3.2 s, 4 min 10 s, 1 h 3 min."""
    if not finite(seconds):
        return "–"
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def named(f: Findings) -> str:
    """When the primary endpoint was named: only what was named before the results decides."""
    return "named before the run" if f["study"]["named_before"] else "not known to be named before the run (see the notes)"


def methods_of(comparisons: Iterable[Findings]) -> list[str]:
    """The methods of comparisons, each once; those that differ only in their degrees of freedom together."""
    found: dict[str, list[float]] = {}
    for method in (str(c["method"]) for c in comparisons if c["method"]):
        name, _, freedom = method.partition(", t with ")
        found.setdefault(name, []).extend(float(x) for x in re.findall(r"^[\d.]+", freedom))
    return [f"{name}, t with {_span(freedom)} degrees of freedom" if freedom else name for name, freedom in found.items()]


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def place(condition: str | None, endpoint: str) -> str:
    """What a comparison is about: an endpoint, under a condition unless it is of the whole run."""
    words = str(endpoint).replace("_", " ")
    return f"{condition}, {words}" if condition else words


def unit_of(curve: str) -> str:
    """Accuracies are fractions that are read in points; other curves are read as they are."""
    return "points" if curve.startswith("accuracy") else ""


def strength_unit(robustness: Sequence[Findings]) -> str:
    """Scores of robustness curves are read in points when all of them are fractions."""
    means = known(p["mean"] for r in robustness for p in r["points"])
    return "points" if all(0 <= mean <= 1 for mean in means) else ""


def excerpt_length(shown: Iterable[int]) -> int:
    """How much of each sample is shown, so that the page stays small whatever the number of samples."""
    return max(SHORTEST, min(LONGEST, TEXT_BUDGET // max(sum(shown), 1)))
