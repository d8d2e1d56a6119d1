"""From probes to a verdict, and to the sentence that says it.

A verdict is FAULT only on exact evidence: results that change when nothing changed, a broken link, weights that are not
the file's, a twin with other bits, a token that changes with a later one, a value outside of its rounding interval. Tests
with a tolerance only raise a suspicion, which makes the verdict INCONCLUSIVE. HEALTHY needs the deciding probe of the
mode to have judged every layer: replay on the host, the exact twin on the device. Whatever it did not look at, or not as
closely, stands in the sentence.
"""

from __future__ import annotations

from shaketable.locate.diagnosis import Diagnosis

STRENGTH = ("weights", "replay", "links", "repeat", "twin", "causal", "batch", "decode")
"""Kinds of evidence, the strongest first."""
ASSUMPTIONS = {
    "device": "the device is deterministic, and exact where IEEE arithmetic is",
    "host": "the host's arithmetic, the weights in the file and the model's code are right",
    "own": "the host's arithmetic, the weights as they are in memory and the model's code are right",
}
NOT_SEEN_BY_TWINS = (
    "gain, truncation or a stuck mantissa bit of an operator, on all channels or few",
    "a dead zone or saturation relative to a maximum, on all channels of what is added to the residual stream",
    "any deterministic fault on all channels of the MLP's gate or activation, which have no symmetry",
    "an operator that computes another function with the same symmetries: another eps, a fast activation, another scale",
    "a wrong weight",
    "a fault of whole tokens that is the same for all channels: a residual row that is left out, another rotation of a token, "
    "a mask that hides what it should show",
    "anything outside of the layers that is wrong at every call: embeddings, rotation, last norm, head",
)
NOT_SEEN_IN_FEW_BITS = (
    "in this dtype: a fault on few channels that commutes with signs and powers of two, and is as small as what another "
    "order of summation changes"
)
NOT_SEEN_BY_REPLAY = (
    "an error smaller than the rounding interval of its operator",
    "an error that needs other tokens, lengths or batch sizes than these to show",
    "an error that occurred in none of the calls",
)


def decide(diagnosis: Diagnosis, has_file: bool) -> None:
    """Reach the verdict from the probes; `has_file` says whether the weights were compared with a file."""
    d = diagnosis
    d.assumption = ASSUMPTIONS["device" if d.mode == "device" else "host" if has_file else "own"]
    d.not_covered = list(NOT_SEEN_BY_TWINS if d.mode == "device" else NOT_SEEN_BY_REPLAY)
    if d.mode == "device" and d.dtype != "float32":
        d.not_covered.append(NOT_SEEN_IN_FEW_BITS)
    operators = [counts for probe in d.probes for counts in probe.coverage.values()]
    names = dict.fromkeys(name for counts in operators for name in counts)
    d.coverage = {"operators": len(operators)} | {name: sum(c.get(name, 0) for c in operators) for name in names}
    d.suspicions = [
        {"layer": p.layer, "probe": name, "text": r.reason}
        for p in d.probes
        for name, r in p.results.items()
        if r.status == "suspect"
    ]
    gaps = _gaps(d)
    if d.evidence:
        _blame(d)
    else:
        d.verdict = "INCONCLUSIVE" if d.suspicions or gaps else "HEALTHY"
    d.sentence = _sentence(d, gaps)


def _blame(d: Diagnosis) -> None:
    """The first layer in the order of computation; there, the strongest kind of evidence."""
    d.evidence.sort(key=lambda e: (e.place, STRENGTH.index(e.probe)))
    first = d.evidence[0]
    d.verdict = "FAULT"
    d.layer, d.op, d.function, d.after = first.layer, first.op, first.function, first.after
    d.lanes, d.lanes_of, d.fault_class = first.lanes, first.lanes_of, first.fault_class
    unstable = next((e for e in d.evidence if e.place == first.place and e.probe == "repeat"), None)
    if unstable is not None:
        d.fault_class = unstable.fault_class


def _gaps(d: Diagnosis) -> list[str]:
    """Why the model cannot be called healthy: layers that the deciding probe could not judge, doubts, foreign code."""
    deciding = "twin" if d.mode == "device" else "replay"
    gaps = list(d.doubts)
    for p in d.probes:
        for name in (deciding, "repeat", "weights"):
            result = p.results.get(name)
            if result is None and name == deciding and p.layer is not None:
                gaps.append(f"{_place(p.layer)} was not judged by {name}")
            if result is not None and result.status == "inconclusive":
                gaps.append(f"{_place(p.layer)}, {name}: {result.reason}")
    gaps += [f"{code} is not the model's code" for code in d.foreign] if d.strict else []
    return gaps if d.probes else ["nothing was probed"]


# ---- wording


def _sentence(d: Diagnosis, gaps: list[str]) -> str:
    """The verdict in words, with what was trusted and what was not looked at."""
    trusted = f" Code that is not the model's was trusted: {_first(d.foreign)}." if d.foreign else ""
    if d.verdict == "FAULT":
        function = " ".join(part for part in (d.function, f"after {d.after}" if d.after else "") if part)
        where = (d.op or ("output" if d.layer is not None else "the model")) + (f" ({function})" if function else "")
        channels = ""
        if d.lanes and d.lanes_of:
            some = f"{len(d.lanes):,} of {d.lanes_of:,}" if len(d.lanes) < d.lanes_of else f"all {d.lanes_of:,}"
            channels = f"{some} channels are wrong; "
        text = f"FAULT: {_place(d.layer)}, {where}: {channels}{d.evidence[0].text} ({d.fault_class})."
        others = list(dict.fromkeys(_place(e.layer) for e in d.evidence if e.layer != d.layer))
        more = f" and {len(others) - 4} more places" if len(others) > 4 else ""
        return text + (f" Also faulty: {', '.join(others[:4])}{more}." if others else "") + trusted
    if d.suspicions:
        first = d.suspicions[0]
        text = f"INCONCLUSIVE: {_place(first['layer'])} is suspect ({first['probe']}: {first['text']})."
        return text + (" Host mode decides." if d.mode == "device" else "") + trusted
    if d.verdict == "INCONCLUSIVE":
        return f"INCONCLUSIVE: {_first(gaps)}; nothing that was judged is wrong."
    if d.mode == "device":
        limit = "twins on the device can see; embeddings, rotation, last norm and head were only repeated"
    else:
        limit = "a replay on the host can see"
    operators = [(op, counts) for probe in d.probes for op, counts in probe.coverage.items()]
    if agreed := sorted({op.rpartition(":")[2] for op, counts in operators if counts.get("agreed")}):
        limit += f"; of {', '.join(agreed)} only that the host makes the same bits is known"
    text = f"HEALTHY: all {d.num_layers} layers compute what they should, as far as {limit}."
    text += f" Not run: {', '.join(d.not_run)}." if d.not_run else ""
    return text + (f" Not checked: {'; '.join(d.believed)}." if d.believed else "") + trusted


def _place(layer: int | None) -> str:
    return "outside of the layers" if layer is None else f"layer {layer}"


def _first(items: list[str]) -> str:
    """The first, and how many more."""
    return items[0] + (f" and {len(items) - 1} more" if len(items) > 1 else "")
