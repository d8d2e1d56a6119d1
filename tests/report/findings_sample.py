"""Believable findings of studies: a finished one, one that stopped half-way, one run, a very large one, and a bare one."""

import math
import random
from itertools import pairwise

NOISE = "dead_zone:0.05,scope=token@layer.3"
RECIPES = {
    "clean": (0.96, 0.41, None, None, None, "trained without any fault"),
    "fault only": (0.93, 0.71, NOISE, None, None, "the fault in rollouts and loss"),
    "global AQN": (0.92, 0.73, NOISE, "global_decay:0.05-0.0005,stages=10", "all", "and noise on every RMSNorm of the sampler"),
    "targeted AQN": (0.93, 0.748, NOISE, "global_decay:0.05-0.0005,stages=10", "fault", "noise on the diagnosed layer only"),
    "healthy AQN": (
        0.92,
        0.722,
        NOISE,
        "global_decay:0.05-0.0005,stages=10",
        "healthy",
        "noise on every other layer (control)",
    ),
}
CURVES = {
    "reward": (0.45, 0.9),
    "entropy": (0.7, 0.2),
    "KL(sampler‖trainer)": (0.0004, 0.09),
    "gradient norm": (1.3, 0.5),
    "accuracy, clean": (0.54, 0.93),
    "accuracy, faulty": (0.31, 0.74),
}


def study(arms=None, seeds=5, steps=60, layers=8, conditions=None, name="guided-aqn"):
    """A finished study of the question of the origin: does noise help where the diagnosis points?"""
    chance = random.Random(7)
    recipes = arms or RECIPES
    states = conditions or [("clean", None), ("faulty", NOISE)]
    names = list(recipes)
    a, b = ("targeted AQN", "global AQN") if "targeted AQN" in recipes else (names[-1], names[0])
    pairs = [(a, b), *((x, y) for x, y in pairwise(names) if (x, y) != (a, b))]
    compared = [comparison(chance, x, y, c, seeds, (x, y, c) == (a, b, states[-1][0])) for c, _ in states for x, y in pairs]
    main = next((c for c in compared if c["primary"]), None)
    return {
        "schema": "shaketable.study/1",
        "study": {
            "name": name,
            "question": "Does AQN that follows the diagnosis make a model stand a dead zone better than AQN everywhere?",
            "origin": "Answers question 6.3 of the origin study: targeted against global AQN, with the healthy-layer control.",
            "model": "nano",
            "task": "arithmetic",
            "seeds": list(range(seeds)),
            "key": "1a2b3c4d",
            "steps": steps,
            "n": 500,
            "conditions": [{"name": c, "plan": plan} for c, plan in states],
            "primary": {"a": a, "b": b, "condition": states[-1][0], "endpoint": "accuracy"} if main else None,
            "engine": "local",
            "command": "shaketable study run studies/guided.yaml",
            "named_before": True,
        },
        "kind": "study",
        "complete": True,
        "runs": [run(arm, seed) for arm in recipes for seed in range(seeds)],
        "verdict": {
            "kind": "not shown",
            "headline": f"Not shown: {a} did not beat {b}",
            "sentence": main["sentence"] if main else "no primary comparison",
        },
        "arms": [an_arm(chance, arm, recipe, states, seeds, steps, layers) for arm, recipe in recipes.items()],
        "comparisons": compared,
        "robustness": [robust(arm, recipe) for arm, recipe in recipes.items()],
        "diagnoses": [diagnosis(layers)],
        "environments": [
            {
                "runs": len(recipes) * seeds,
                "facts": {"torch": "2.13.0", "python": "3.12.4", "device": "cpu", "revision": "1f3c9ab", "dirty": False},
            }
        ],
        "notes": ["The dead zone zeroes values below 5 % of a token's largest; it is not a model of any one accelerator."],
    }


def run(arm, seed, status="done", error=None):
    name = f"{arm.replace(' ', '-')}-{seed}"
    done = status == "done"
    return {
        "name": name,
        "arm": arm,
        "seed": seed,
        "status": status,
        "id": f"20261115-12{seed:02d}-{1000 + 7 * seed}",
        "folder": f"runs/{name}",
        "attempts": 1,
        "resumed": 1 if seed == 2 and arm == "global AQN" else 0,
        "seconds": 92.4 + 3 * seed if done else None,
        "error": error,
        "warnings": ["reward did not rise in the last 20 steps"] if seed == 1 and arm == "healthy AQN" else [],
    }


def an_arm(chance, name, recipe, states, seeds, steps, layers):
    clean, faulty, plan, aqn, guided, text = recipe
    values = {c: [min(1.0, (clean if p is None else faulty) + chance.gauss(0, 0.017)) for _ in range(seeds)] for c, p in states}
    return {
        "name": name,
        "description": text,
        "kind": "train",
        "model": "nano",
        "task": "arithmetic",
        "plan": plan,
        "plan_in": "both" if plan else None,
        "aqn": aqn,
        "guided": guided,
        "seeds": list(range(seeds)),
        "scores": [score(c, values[c], 0.54 if p is None else 0.31) for c, p in states],
        "curves": [curve(chance, n, (a, b * (0.6 + 0.55 * faulty)), steps) for n, (a, b) in CURVES.items()],
        "sigma": sigma(guided, layers, steps),
        "proof": proof(plan, aqn, states),
        "mechanism": [mechanism(chance, c, p, layers) for c, p in states[:2]],
        "cost": {
            "seconds_per_step": 1.31 + (0.2 if plan else 0) + (0.05 if aqn else 0),
            "sampling_share": 0.62,
            "injection_share": 0.09 if plan else 0.0,
            "aqn_share": 0.013 if aqn else 0.0,
            "evaluation_seconds": 14.2,
        },
        "samples": [sample(c, n, (n + len(name)) % 3 > 0) for c, _ in states for n in range(3)],
    }


def score(condition, values, first):
    mean = sum(values) / len(values)
    return {
        "condition": condition,
        "endpoint": "accuracy",
        "unit": "points",
        "mean": mean,
        "ci_low": mean - 0.031,
        "ci_high": min(mean + 0.031, 1.0),
        "method": "t over seeds × problems",
        "n": 500,
        "per_seed": [{"seed": i, "value": v} for i, v in enumerate(values)],
        "first": first,
    }


def curve(chance, name, ends, steps):
    rare = name.startswith("accuracy")
    at = sorted({0, steps // 3, 2 * steps // 3, steps}) if rare else range(1, steps + 1)
    points = []
    for step in at:
        x = 1 - math.exp(-3 * step / steps)
        mean = ends[0] * (ends[1] / ends[0]) ** x * (1 + (0 if rare else 0.02) * chance.gauss(0, 1))
        points.append({"step": step, "mean": mean, "low": mean * 0.93, "high": mean * 1.06})
    return {"name": name, "points": points, "band": "min–max over seeds"}


def sigma(guided, layers, steps):
    if guided is None:
        return []
    own = {"fault": lambda n: n == 3, "healthy": lambda n: n != 3, "all": lambda n: True}[guided]
    level = [0.05 * (0.01 ** (min(step * 10 // steps, 9) / 9)) for step in range(steps)]
    return [{"label": f"layer {n}", "points": [[s, v] for s, v in enumerate(level)]} for n in range(layers) if own(n)]


def place(where, fault, site, asked, measured, verdict="agrees", remark=None):
    return {
        "where": where,
        "fault": fault,
        "site": site,
        "asked": asked,
        "measured": measured,
        "error": 0.118,
        "changed": 0.293,
        "forward": 123456,
        "backward": 7680,
        "verdict": verdict,
        "remark": remark,
    }


def proof(plan, aqn, states):
    found = [place("training: plan", "dead_zone:0.05", "layer.3", 0.05, 0.05)] if plan else []
    if aqn:
        found += [place("training: AQN", "relative_gaussian", f"layer.{n}", 0.0132, 0.0131 + 0.0001 * n) for n in range(4)]
    return found + [place(f"scored: {c}", "dead_zone:0.05", "layer.3", 0.05, 0.0502) for c, p in states if p]


def mechanism(chance, condition, plan, layers):
    rows = []
    for n in range(layers):
        dead = 0.293 if plan and n == 3 else 0.0
        rows.append(
            {
                "layer": n,
                "rms": 0.8 + 0.21 * n + 0.02 * chance.gauss(0, 1),
                "kurtosis": 3.1 * 1.9 ** (n % 9) * (1 + 0.05 * chance.gauss(0, 1)),
                "zeros": dead,
                "survival": 1 - dead,
                "grad_norm": None
                if n == layers - 1 and layers > 20
                else 0.9 / (1 + abs(n - 3)) + 0.03 * abs(chance.gauss(0, 1)),
            }
        )
    return {"condition": condition, "loss": 0.41 if plan is None else 0.93, "layers": rows}


def sample(condition, n, correct):
    a, b = 316 + 57 * n, 287 + n
    return {
        "condition": condition,
        "id": n,
        "question": f"{a}+{b}=",
        "answer": str(a + b),
        "text": str(a + b if correct else a + b - 10),
        "correct": correct,
    }


def comparison(chance, a, b, condition, seeds, primary):
    d, half = (0.018, 0.0225) if primary else (chance.gauss(0.0, 0.02), 0.02)
    if "clean" in (a, b) and condition != "clean":
        d, half = 0.29, 0.04
    shown = abs(d) > half
    low, high = d - half, d + half
    text = (
        f"{a} − {b}, {condition} accuracy: {100 * d:+.1f} points, 95 % CI {100 * low:+.1f} … {100 * high:+.1f}, {seeds} seeds: "
    )
    text += "shown" if shown else "not shown; 3.0 points could have been seen"
    return {
        "a": a,
        "b": b,
        "condition": condition,
        "endpoint": "accuracy",
        "unit": "points",
        "scale": 100,
        "difference": d,
        "ci_low": low,
        "ci_high": high,
        "p": 0.0004 if shown else 0.089,
        "p_holm": 0.0031 if shown else 0.71,
        "detectable": 0.03,
        "seeds": seeds,
        "problems": 500,
        "per_seed": [{"seed": s, "value": d + chance.gauss(0, half / 2)} for s in range(seeds)],
        "mcnemar": [0.21 + 0.1 * (s % 5) for s in range(seeds)],
        "p_seeds": 0.125,
        "primary": primary,
        "verdict": "shown" if shown else "not shown",
        "sentence": text.replace("-", "−"),
        "method": "crossed random effects of seeds and problems, t with 4.4 degrees of freedom",
    }


def robust(arm, recipe):
    clean, faulty = recipe[:2]
    drop = clean - faulty
    strengths = [(0.0, "0 %"), (0.025, "2.5 %"), (0.05, "5 %"), (0.1, "10 %"), (0.2, "20 %")]
    means = [(x, label, max(0.04, clean - drop * (x / 0.05) ** 0.8)) for x, label in strengths]
    points = [{"label": t, "x": x, "condition": t, "mean": m, "low": m - 0.03, "high": m + 0.03} for x, t, m in means]
    return {"arm": arm, "points": points}


def diagnosis(layers):
    rows = []
    for n in range(layers):
        results = dict.fromkeys(("repeat", "links", "twin", "checksum", "replay"), "pass") | {"permutation": "pass"}
        if n == 3:
            results |= {"replay": "fail", "twin": "pass", "checksum": "suspect"}
        gain = 0.71 if n == 3 else 1.02 + 0.03 * math.sin(n)
        rows.append(
            {
                "layer": n,
                "results": results,
                "statistics": {"gain": gain, "kurtosis": 4.0 * 1.7 ** (n % 7), "pile_up": 0.29 if n == 3 else 0.001},
            }
        )
    labels = {3: (0.075, "HIGH", ["replay failed", "gain fell to 0.71"])}
    sigmas = [(n, *labels.get(n, (0.005, "LOW", ["no probe fired"]))) for n in range(layers)]
    return {
        "plan": NOISE,
        "model": "nano",
        "verdict": "FAULT",
        "sentence": "FAULT: layer 3: values of a token below a threshold are zero (dead_zone).",
        "layer": 3,
        "layers": rows,
        "sigmas": [{"layer": n, "sigma": s, "label": label, "why": why} for n, s, label, why in sigmas],
        "folder": "runs/diagnosis-faulty",
    }


def partial():
    """Stopped half-way: a failed run, a damaged one, one that runs, an inert place, an arm without proof."""
    made = study(seeds=2)
    made["complete"] = False
    made["runs"][1] |= {
        "status": "failed",
        "error": "OutOfMemoryError: tried to allocate 2.0 GiB",
        "attempts": 3,
        "seconds": None,
    }
    made["runs"][3] |= {"status": "running", "seconds": None}
    made["runs"][5] |= {"status": "damaged", "seconds": None, "error": "record.jsonl: line 41 is not JSON", "folder": ""}
    made["verdict"] = {
        "kind": "nothing",
        "headline": "Nothing can be concluded: 3 of 10 runs are missing",
        "sentence": "targeted AQN − global AQN has one seed in common: an interval needs two.",
    }
    for c in made["comparisons"]:
        c |= dict.fromkeys(("difference", "ci_low", "ci_high", "p", "p_holm", "detectable", "p_seeds"))
        c |= {"verdict": "nothing", "sentence": "no seed in common", "per_seed": [], "mcnemar": []}
    made["arms"][2]["proof"][0] |= {"verdict": "inert", "measured": 0.0, "changed": 0.0, "remark": "the site never fired"}
    made["arms"][3]["proof"][0] |= {"verdict": "differs", "measured": 0.131, "remark": "clipped by the format: 0.131 of 0.05"}
    made["arms"][4]["proof"] = []
    return made


def one_run():
    """A single training run on the same page."""
    made = study(arms={"targeted AQN": RECIPES["targeted AQN"]}, seeds=1, name="train-20261115")
    made |= {"kind": "run", "comparisons": [], "robustness": [], "diagnoses": []}
    made["study"] |= {"question": "", "origin": "", "primary": None, "command": "shaketable train nano --task arithmetic"}
    made["verdict"] = {"kind": "nothing", "headline": "nano on arithmetic: 31.0 → 74.1 points, faulty", "sentence": ""}
    return made


def large():
    """Twelve arms, twenty conditions, eighty layers, ten seeds, four hundred steps."""
    arms = {
        f"arm {n} with a rather long name": (0.9, 0.6 + 0.01 * n, NOISE, "epoch_aware:0.05-0.01", "all", "") for n in range(12)
    }
    conditions = [("clean", None), *((f"dead zone {n} %", f"dead_zone:{n / 100}@layer.{n}") for n in range(1, 20))]
    made = study(arms=arms, seeds=10, steps=400, layers=80, conditions=conditions)
    for arm in made["arms"]:
        arm["mechanism"] = [mechanism(random.Random(n), c, p, 80) for n, (c, p) in enumerate(conditions[:4])]
        arm["proof"] += [
            place(f"scored: {c}", "dead_zone:0.05", f"layer.{n}", 0.05, 0.05) for c, p in conditions if p for n in range(80)
        ]
        arm["samples"] = [x | {"text": "thinking … " * 300} for x in arm["samples"]]
        for n, series in enumerate(arm["sigma"]):
            series["points"] = [[s, v * (1 + 0.01 * n)] for s, v in series["points"]]
    return made


def bare():
    """All that must be there."""
    return {"schema": "shaketable.study/1", "study": {"name": "empty"}, "kind": "study", "complete": False}


SAMPLES = {"study": study, "partial": partial, "run": one_run, "large": large, "bare": bare}
