"""How `shaketable mismatch` does with vLLM: no defect named in healthy pairs, planted ones named.

    python benchmarks/mismatch.py [--only nano,planted] [--runs 8]    # the python of scripts/framework_env.sh vllm

Every case is a vLLM of its own, in a process of its own, against the same checkpoint in transformers. A healthy run draws
prompts, lets vLLM sample and runs all stages. The planted defects (`tests/frameworks/vllm/planted.py`) are put into the
worker by hand. Writes mismatch.json and mismatch.md beside this file; cases that are not asked for keep what was measured last.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
RECORD, PAGE = HERE / "mismatch.json", HERE / "mismatch.md"
SHAPE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 32, "gpu_memory_utilization": 0.1}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WORDS = ["The river", "was high", "that spring,", "and nobody", "in the village", "could say", "when the bridge", "would open."]


@dataclass(frozen=True)
class Case:
    """One engine and what is done with it."""

    model: str
    dtype: str
    compiled: bool
    runs: int
    planted: bool = False

    @property
    def name(self) -> str:
        """As `--only` finds it."""
        return (
            f"{self.model} {self.dtype} {'compiled' if self.compiled else 'eager'} {'planted' if self.planted else 'healthy'}"
        )


KINDS = [(dtype, compiled) for compiled in (False, True) for dtype in ("float32", "bfloat16")]
CASES = [
    *[Case("nano", dtype, compiled, 8 if compiled else 12) for dtype, compiled in KINDS],
    *[Case("smollm2-135m", dtype, compiled, 3) for dtype, compiled in KINDS],
    *[Case("nano", dtype, False, 0, planted=True) for dtype in ("float32", "bfloat16")],
    *[Case("moe", dtype, False, 2, planted=True) for dtype in ("float32", "bfloat16")],
]


def main() -> None:
    """All cases that are asked for, and the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words between commas; a case has all words of one of them")
    parser.add_argument("--runs", type=int, help="healthy runs of each engine")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="another file than mismatch.json; no page")
    args = parser.parse_args()
    if args.case:
        case = next(c for c in CASES if c.name == args.case)
        runs = case.runs if args.runs is None else args.runs
        args.out.write_text(json.dumps(measured(case, runs)))
        return
    target = args.out or RECORD
    record = json.loads(target.read_text()) if target.is_file() else {}
    for case in [c for c in CASES if asked(c.name, args.only)]:
        record[case.name] = alone(case, args.runs)
        target.write_text(json.dumps(record, indent=1) + "\n")
        if args.out is None:
            PAGE.write_text(page(record))


def asked(name: str, only: str) -> bool:
    """Whether a case is asked for."""
    return not only or any(all(word in name for word in part.split()) for part in only.split(","))


def alone(case: Case, runs: int | None) -> dict[str, Any]:
    """A case in a process of its own: one vLLM a process."""
    file = HERE / f".{case.name.replace(' ', '-')}.json"
    command = [sys.executable, __file__, "--case", case.name, "--out", str(file)]
    command += [] if runs is None else ["--runs", str(runs)]
    env = ENVIRONMENT | os.environ | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if case.planted else {})
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        return {"failed": done.returncode}
    found = json.loads(file.read_text())
    file.unlink()
    return dict(found)


def measured(case: Case, runs: int) -> dict[str, Any]:
    """Healthy runs, then planted defects, with one engine."""
    from shaketable.integrations.vllm.engine import VLLMEngine
    from shaketable.io.strict_json import strict

    folder = checkpoint(case.model)
    longest = 64 if case.model == "moe" else 256
    arguments = {**SHAPE, "dtype": case.dtype, "enforce_eager": not case.compiled, "max_model_len": longest}
    started = time.perf_counter()
    engine = VLLMEngine.open(folder, arguments)
    found: dict[str, Any] = {"started_in_s": round(time.perf_counter() - started, 1), "engine": strict(engine.describe())}
    found["commit"] = commit()
    trainer = trained(folder, case.dtype)
    found["healthy"] = [one(trainer, engine, case.model, seed) for seed in range(runs)]
    if case.planted:
        found["planted"] = planted(trainer, engine, case)
    engine.close()
    return found


def commit() -> str:
    """Of the code that is measured; with a plus where src has changes that are in none."""
    told = [["git", "rev-parse", "--short=7", "HEAD"], ["git", "status", "--porcelain", "--", "src"]]
    head, changed = (subprocess.run(c, cwd=HERE, check=True, capture_output=True, text=True).stdout.strip() for c in told)
    return f"{head}+" if changed else head


def checkpoint(model: str) -> str:
    """A folder with the model."""
    if model != "moe":
        return model
    from tests.frameworks.vllm.small_models import save

    folder = HERE.parent / "build" / "mismatch-moe"
    folder.mkdir(parents=True, exist_ok=True)
    return str(save("qwen3_moe", folder))


def trained(folder: str, dtype: str) -> Any:
    """The trainer's side."""
    import torch

    from shaketable.mismatch.trainer import Trainer
    from shaketable.models import load_model

    model, tokenizer = load_model(folder, dtype=getattr(torch, dtype))
    return Trainer(model, tokenizer, Path(folder).name)


def prompts(tokenizer: Any, model: str, seed: int) -> list[list[int]]:
    """Short ones, and ones that fill a block of the prefix cache."""
    draw = random.Random(seed)
    if model == "smollm2-135m":
        texts = [" ".join(draw.choices(WORDS, k=k)) for k in (3, 6, 18, 22)]
    else:
        sums = [[f"{draw.randrange(100)}+{draw.randrange(100)}=" for _ in range(k)] for k in (1, 1, 8, 9)]
        texts = ["".join(parts) for parts in sums]
    found = [list(tokenizer(text)["input_ids"]) for text in texts]
    return [ids[-44:] for ids in found] if model == "moe" else found


def one(trainer: Any, engine: Any, model: str, seed: int, earlier: Any = None, **sampling: Any) -> dict[str, Any]:
    """Sample, run the stages, and keep what the table needs."""
    from shaketable.mismatch.engine import Sampling
    from shaketable.mismatch.stages import Question, run_stages

    started = time.perf_counter()
    chosen = Sampling(16, seed=seed, **sampling)
    rollouts = engine.sample(prompts(trainer.tokenizer, model, seed), chosen)
    found = run_stages(Question(trainer, engine, rollouts, chosen, earlier or {}, recorded=2)).to_dict()
    keep = {key: found[key] for key in ("verdict", "stage", "sentence", "at_floor", "not_looked_at")}
    sizes = {"gap": found["gap"]["mean_abs"], "k3": found["gap"]["k3"], "floor": found["floor"]["largest"]["mean_abs"]}
    floors = {f"{row['side']}, {row['variant']}": row["mean_abs"] for row in found["floor"]["rows"]}
    shares = found["shares"] and [[f["family"], f["share"]] for f in found["shares"]["families"]]
    print(f"{model} {seed}: {found['sentence']}", flush=True)
    return {
        "seed": seed,
        **keep,
        **sizes,
        "floors": floors,
        "shares": shares,
        "seconds": round(time.perf_counter() - started, 1),
    }


def planted(trainer: Any, engine: Any, case: Case) -> dict[str, Any]:
    """Every defect of this model, one after another; what was planted is taken out again."""
    from shaketable.mismatch.trainer import Trainer
    from tests.frameworks.vllm.planted import DEFECTS, a_step_on

    found = {}
    own = {name: p.detach() for name, p in trainer.model.named_parameters()}
    for name, defect in DEFECTS.items():
        if defect.model != case.model:
            continue
        side, earlier = trainer, {}
        if defect.trainer == "a step on":
            model = copy.deepcopy(trainer.model)
            model.load_state_dict(a_step_on(own), strict=False)
            side, earlier = Trainer(model, trainer.tokenizer, trainer.name), {"step 0": own}
        with defect.plant(engine):
            got = one(side, engine, case.model, 0, earlier, **defect.sampling)
        said = all(word in got["sentence"] for word in defect.words)
        is_right = got["verdict"] == "DEFECT" and got["stage"] == defect.rung and said
        unseen = defect.unseen if case.dtype == "bfloat16" else ""
        facts = {"says": defect.says, "asked_rung": defect.rung, "named": is_right, "unseen": unseen, "commit": commit()}
        found[name] = facts | got
    return found


def page(record: dict[str, Any]) -> str:
    """The tables."""
    cases = {case.name: record[case.name] for case in CASES if case.name in record and "failed" not in record[case.name]}
    runs = [run for facts in cases.values() for run in facts["healthy"]]
    legal = sum(run["verdict"] == "LEGAL" for run in runs)
    wrong = sum(run["verdict"] == "DEFECT" for run in runs)
    lines = [
        "# Mismatch: vLLM against transformers",
        "",
        "Written by `benchmarks/mismatch.py`. vLLM's CPU build and transformers hold the same checkpoint in the same dtype;",
        "vLLM samples, and `shaketable mismatch` runs its stages on that. Gap and floor are mean |Δ log p| per token.",
        "Commits are those of the code that ran; f36c2c6, ffcb86f and 00bcc52 are those that published the case.",
        "",
        f"**{len(runs)} healthy runs: {legal} LEGAL, {wrong} with a defect named, {len(runs) - legal - wrong} inconclusive.**",
        "",
        "| pair | runs | LEGAL | DEFECT | INCONCLUSIVE | gap, median | floor, median | s a run | commit |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
        *[_healthy(name, facts["healthy"], facts["commit"]) for name, facts in cases.items() if facts["healthy"]],
    ]
    for name, facts in cases.items():
        if facts.get("planted"):
            lines += ["", f"## Planted in the worker: {name.removesuffix(' planted')}", "", *_planted(facts["planted"])]
    return "\n".join(lines) + "\n"


def _healthy(name: str, runs: list[dict[str, Any]], code: str) -> str:
    counts = [sum(run["verdict"] == kind for run in runs) for kind in ("LEGAL", "DEFECT", "INCONCLUSIVE")]
    middle = [sorted(run[key] for run in runs)[len(runs) // 2] for key in ("gap", "floor", "seconds")]
    sizes = f"{middle[0]:.2g} | {middle[1]:.2g} | {middle[2]:.0f}"
    return f"| {name} | {len(runs)} | {' | '.join(map(str, counts))} | {sizes} | {code} |"


def _named(row: dict[str, Any]) -> str:
    return "yes" if row["named"] else f"no: {row['unseen']}" if row["unseen"] else "no"


def _stage(row: dict[str, Any]) -> str:
    """Records of before November 2026 call it a rung."""
    return str(row.get("stage", row.get("rung")))


def _planted(rows: dict[str, Any]) -> list[str]:
    named = sum(row["named"] for row in rows.values())
    head = ["| planted | named | stage | what was said | commit |", "|---|---|---|---|---|"]
    body = [
        f"| {row['says']} | {_named(row)} | {_stage(row)} | {row['sentence'].split('. The gap')[0]} | {row['commit']} |"
        for row in rows.values()
    ]
    return [f"{named} of {len(rows)} named.", "", *head, *body]


if __name__ == "__main__":
    main()
