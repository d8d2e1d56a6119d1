"""Numbers and phrases of the reports: the same words on pages, in Markdown and in the terminal.

The badge of a study has three words and no more: shown, not shown, nothing. "Not shown" is not "shown to be equal", so the
word is never shortened to "no difference".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from shaketable.study.analysis.results import ArmResult, ComparisonResult, Findings, RunFacts

PROBES = ("weights", "repeat", "links", "twin", "causal", "replay", "batch", "decode")
MARKS = {"pass": "✓", "fail": "✕", "suspect": "▲", "inconclusive": "?", "skipped": "–", "absent": "·"}
STATUS_OF = {"FAULT": "fail", "HEALTHY": "pass", "INCONCLUSIVE": "inconclusive"}
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
    "With one seed the test is the exact McNemar test over problems, which is about that one run only.",
    "The primary comparison is tested alone; Holm's procedure corrects the p-values of all others for their number, the"
    " corrected p decides what counts as shown, and the intervals are not widened.",
    "The smallest detectable difference is the one this comparison would have found with a power of 80 % at its level, computed"
    " from the measured spread and never from the measured difference.",
)
ROUGHNESS = "Roughness: how far a point lies, on average, from the straight line between its two neighbours, by run."


# ---- numbers


def finite(value: Any) -> TypeGuard[float]:
    """Whether it can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def known(values: Iterable[Any]) -> list[float]:
    """Those that can be drawn."""
    return [float(v) for v in values if finite(v)]


def signed(value: Any, scale: float = 1.0, unit: str = "points") -> str:
    """A difference for reading: +1.8, −0.4; points have one decimal."""
    if not finite(value):
        return number(value)
    scaled = value * scale
    if unit == "points":
        text = f"{scaled:+.1f}"
        return "0.0" if float(text) == 0 else text.replace("-", "−")
    return ("+" if scaled > 0 else "") + number(scaled)


def amount(value: Any, unit: str) -> str:
    """A score for reading; a score in points is kept as a fraction and read in hundredths."""
    return f"{100 * value:.1f}" if unit == "points" and finite(value) else number(value)


def number(value: Any, digits: int = 3) -> str:
    """A number for reading: 36,864, 0.0123, 3.1e4; a dash for null."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{int(value):,}".replace("-", "−")
    if 1000 <= abs(value) < 1e6 and digits <= 4:
        return f"{value:,.0f}".replace("-", "−")
    small = abs(value) < 1e-3 and digits <= 4
    mantissa, _, exponent = (f"{value:.{digits - 1}e}" if small else f"{value:.{digits}g}").partition("e")
    return (mantissa.rstrip("0").rstrip(".") + f"e{int(exponent)}" if exponent else mantissa).replace("-", "−")


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of neighbours, as (first, last)."""
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    return [(members[0][1], members[-1][1]) for members in (list(group) for _, group in runs)]


def ranges(numbers: Iterable[int], shown: int = 24) -> str:
    """`3, 77, 128–159`, cut after `shown` runs with the count of what is left out."""
    runs = spans(numbers)
    words = [str(a) if a == b else f"{a}–{b}" for a, b in runs[:shown]]
    left = sum(b - a + 1 for a, b in runs[shown:])
    return ", ".join(words) + (f", … and {left:,} more" if left else "")


# ---- phrases


class Badge(NamedTuple):
    """The verdict at the top."""

    mark: str
    words: str
    tone: str
    headline: str


def badge(f: Findings) -> Badge:
    """Mark, words, tone and headline of the verdict; the headline does not repeat the words."""
    mark, words, tone = BADGES[f.verdict.kind]
    headline = (f.verdict.headline or f.study.name).removeprefix(f"{words.capitalize()}: ")
    return Badge(mark, words, tone, headline[:1].upper() + headline[1:])


def missing_runs(runs: Sequence[RunFacts]) -> list[str]:
    return [f"{run.name} ({run.status})" for run in runs if run.status != "done"]


class ProofSummary(NamedTuple):
    """Whether the proof of all arms holds."""

    state: str
    words: str
    silent: list[str]


def proof_summary(arms: Sequence[ArmResult]) -> ProofSummary:
    """How many places were proven, what is wrong, and which arms have no proof at all."""
    verdicts = Counter(place.verdict for arm in arms for place in arm.proof)
    places, good = verdicts.total(), verdicts["agrees"] + verdicts["proven"]
    silent = [arm.name for arm in arms if _silent(arm)]
    if not places:
        return ProofSummary("suspect" if silent else "inconclusive", "no injection was recorded", silent)
    parts = [f"{good:,} of {places:,} places proven"]
    parts += [f"{verdicts[kind]:,} {word}" for kind, word in (("differs", "differ"), ("inert", "inert")) if verdicts[kind]]
    parts += [f"{len(silent)} arm{'s' * (len(silent) > 1)} without proof"] if silent else []
    state = "fail" if verdicts["inert"] else "suspect" if good < places or silent else "pass"
    return ProofSummary(state, ", ".join(parts), silent)


def _silent(arm: ArmResult) -> bool:
    """An arm that has finished runs, was to be disturbed in training (or, if not trained, at all), and kept no proof of it."""
    trained = arm.kind in ("", "train")
    proofs = [place for place in arm.proof if not trained or not place.where.startswith("scored")]
    return bool(arm.seeds and (arm.aqn or arm.plan) and not proofs)


def counted(many: Any, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{number(many)} {noun}{'' if many == 1 else 's'}"


def fact(value: Any) -> str:
    """A fact about a machine: yes, no, a number or a text; a dash for what is not there."""
    return ("yes" if value else "no") if isinstance(value, bool) else number(value)


def chance(p: Any) -> str:
    if not finite(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.2g}" if p < 0.995 else "1"


def share_of(share: float, low: float | None, high: float | None) -> str:
    """A recovered share with its interval, in whole percent."""
    ends = [f"{round(100 * end)}" if finite(end) else without for end, without in ((low, "-∞"), (high, "∞"))]
    return f"{round(100 * share)} % ({ends[0]} to {ends[1]})".replace("-", "−")


def with_interval(value: Any, low: Any, high: Any, scale: float, unit: str) -> str:
    """+1.8 (−0.4 to +4.1): a difference with its interval, where there is one."""
    ends = f" ({signed(low, scale, unit)} to {signed(high, scale, unit)})" if finite(low) else ""
    return signed(value, scale, unit) + ends


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
    return "named before the run" if f.study.named_before else "not known to be named before the run (see the notes)"


def methods_of(comparisons: Iterable[ComparisonResult]) -> list[str]:
    """The methods of comparisons, each once and without its degrees of freedom."""
    return list(dict.fromkeys(c.method.partition(", t with ")[0] for c in comparisons if c.method))


def place(condition: str | None, endpoint: str) -> str:
    """What a comparison is about: an endpoint, under a condition unless it is of the whole run."""
    words = str(endpoint).replace("_", " ")
    return f"{condition}, {words}" if condition else words


def unit_of(curve: str) -> str:
    """Accuracies are fractions that are read in points; other curves are read as they are."""
    return "points" if curve.startswith("accuracy") else ""
