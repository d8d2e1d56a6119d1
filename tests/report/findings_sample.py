"""Findings for the pages: a published study, one that stopped half-way, a very large one, and a bare one."""

import copy

from tests.study.published import published

FAULT = "dead_zone:0.6,scope=token@layer.3"


def study():
    """Five arms of five seeds, trained under a dead zone, three of them with guided noise."""
    return published("guided-aqn")


def partial():
    """Stopped half-way: a failed run, a damaged one, one that runs, an inert place, an arm without proof."""
    made = study()
    made["complete"] = False
    failed, running, damaged = made["runs"][1:4]
    failed |= {"status": "failed", "error": "OutOfMemoryError: tried to allocate 2.0 GiB", "attempts": 3, "seconds": None}
    running |= {"status": "running", "seconds": None}
    damaged |= {"status": "damaged", "seconds": None, "error": "record.jsonl: line 41 is not JSON", "folder": ""}
    made["verdict"] = {"kind": "nothing", "headline": "Nothing can be concluded: there is one seed", "sentence": "One seed."}
    for c in made["comparisons"]:
        c |= dict.fromkeys(("difference", "ci_low", "ci_high", "p", "p_holm", "detectable"))
        c |= {"verdict": "nothing", "sentence": "no seed in common", "per_seed": []}
    made["arms"][2]["proof"][0] |= {"verdict": "inert", "measured": 0.0, "changed": 0.0, "remark": "the site never fired"}
    made["arms"][3]["proof"][0] |= {"verdict": "differs", "measured": 0.131, "remark": "clipped by the format"}
    made["arms"][4]["proof"] = []
    return made


def large():
    """Twelve arms, twenty conditions, eighty layers, ten seeds, three hundred steps."""
    made = study()
    conditions = [{"name": f"dead zone {n} %", "plan": f"dead_zone:{n / 100}@layer.{n}"} for n in range(20)]
    made["study"]["conditions"] = conditions
    model = made["arms"][3]
    model["scores"] = [
        model["scores"][1] | {"condition": c["name"], "per_seed": model["scores"][1]["per_seed"] * 2} for c in conditions
    ]
    model["curves"] = model["curves"][:6]
    for curve in model["curves"]:
        curve["points"] = [p | {"step": n * 31 + p["step"]} for n in range(10) for p in curve["points"]]
    read = model["mechanism"][0]
    read["layers"] = [layer | {"layer": 8 * n + layer["layer"]} for n in range(10) for layer in read["layers"]]
    model["mechanism"] = [read | {"condition": c["name"]} for c in conditions]
    scored = model["proof"][-1]
    model["proof"] += [scored | {"where": f"scored: {c['name']}", "site": f"layer.{n}"} for c in conditions for n in range(80)]
    model["samples"] = [
        model["samples"][0] | {"condition": c["name"], "text": "thinking … " * 300} for c in conditions for _ in range(5)
    ]
    made["arms"] = [copy.deepcopy(model) | {"name": f"arm {n} with a rather long name"} for n in range(12)]
    made["comparisons"] = [
        one | {"primary": False, "condition": c["name"]} for c in conditions for one in made["comparisons"][:6] * 2
    ]
    return made


def bare():
    """All that must be there."""
    return {"schema": "shaketable.study/1", "study": {"name": "empty"}, "complete": False}


SAMPLES = {"study": study, "partial": partial, "large": large, "bare": bare}
