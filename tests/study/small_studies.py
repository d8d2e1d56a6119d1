"""Small studies of nano, as data."""

import json

from shaketable.study.analysis.findings import findings as findings_of
from shaketable.study.file import parse_study

FAULTY = "dead_zone:0.6,scope=token@layer.3"
NOISE = "relative_gaussian:0.2@op.matmul"
AQN = "global_decay:0.05-0.01,stages=3"


def data(**replaced):
    """Two trained arms, one guided, one that is only scored; a few seconds for all."""
    small = {
        "study": "small",
        "question": "Does noise help?",
        "model": "nano",
        "task": "arithmetic",
        "seeds": 2,
        "train": {"steps": 4, "prompts": 2, "samples": 4, "save_every": 2, "lr": 1e-3, "temperature": 1.5},
        "evaluate": {"n": 12, "every": 2, "mechanism": False, "conditions": {"faulty": FAULTY, "noise": NOISE}},
        "arms": {
            "noise": {"plan": "noise"},
            "noise + AQN": {"plan": "noise", "aqn": AQN},
            "targeted": {"plan": "faulty", "aqn": {"guide": "fault"}},
            "as it comes": {"train": False},
        },
        "compare": {"primary": {"a": "noise + AQN", "b": "noise", "condition": "noise"}, "against": "as it comes"},
        "diagnose": {"tokens": 32},
    }
    return small | replaced


def study(**replaced):
    return parse_study(data(**replaced))


def findings(asked, folder):
    """What a study found, as its JSON."""
    return json.loads(findings_of(asked, folder).to_json())


def told(found):
    """What was found as its JSON has it."""
    return [told(part) for part in found] if isinstance(found, list | tuple) else found.model_dump(mode="json")
