"""docs/origin-documents.md from the list of what the origin's documents print (`--check` says whether it is up to date).

The list is `documents.yaml` beside the code that answers the origin's commands, so the page, the answers and the tests cannot
say different things.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from shaketable.integrations.origin_configs.command_line import DOCUMENTS, instead

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "origin-documents.md"
HEAD = """\
# The origin's documents, command by command

Five documents describe the origin study. This page lists every command, key, variable and numbered experiment in them with
its counterpart in Shaketable. *As it stands* means that verl's command line or config accepts it unchanged once Shaketable is
installed beside verl: it is read as the plan and the AQN shown here, and the job prints them.

- **Scripts.** They need the origin's patched verl. `shaketable run -- bash scripts/test_noisy_ops_a100.sh 1e-4 8` runs
  nothing and prints the commands to use instead; `MODEL_PATH` and `TRAIN_DATA` in front of it are carried over. The recipes
  of `examples/verl/` ship with the package, and are those of the documents: Qwen2.5-1.5B-Instruct, GSM8K, 8 GPUs, 128 prompts
  a step with 5 answers each, learning rate 5e-7, 2 epochs of 58 steps. Each experiment and each SEED has a folder.
- **Keys without `+`.** verl's config does not have the origin's keys, and Hydra refuses
  `trainer.hw_error_injection.enabled=True`. The driver puts `++` in front of such keys before Hydra reads them, and says so.
- **vLLM.** A sampler that captures CUDA graphs replays them without faults, so a job with faults in activations must
  have `actor_rollout_ref.rollout.enforce_eager=True`; the recipes have it.
- **VERL_NOISY_OPS_\\*** are read in jobs of verl, by every worker. `train`, `sweep`, `harden` and `study` refuse to start
  while they ask for noise, and name the plan to use instead.
- **Sizes.** bfloat16 rounds relative errors of 1e-5 and 1e-4 away. A job of verl that asks for them in bfloat16 is refused
  before Ray starts; recipes compute in float32 with `DTYPE=float32`, in sampler and trainer.
- **Metrics** keep verl's names, `val-core/openai/gsm8k/acc/mean@1` and `critic/rewards/mean`; injected faults are logged
  beside them, under `shaketable/`. `VLLM_ASCEND_ENABLE_NZ=0` and other variables of vLLM are passed through.
- **E7a to E7c** have "4 epochs, 232 steps, batch 64". These contradict each other: 7473 problems in batches of 64 are 116 steps
  an epoch, in batches of 128 they are 58, and 4 times that is 232. The documents have boundaries for two epochs only, so
  E7c's four are geometric.
- **The study** column names the arms that ask the same question with seeds and statistics ([studies](studies.md)); each file
  has a command for a large model.

[Configs of the origin study](origin-configs.md) has the translation of every key. `scripts/origin_documents.py` writes this
page.
"""


def page() -> str:
    """The page as the list says."""
    data = yaml.safe_load(DOCUMENTS.read_text(encoding="utf-8"))
    parts = [HEAD]
    for key, title in data["documents"].items():
        rows = [row for row in data["rows"] if row["document"] == key]
        lines = [f"| {row['section']} | {_theirs(row)} | {_here(row)} | {_study(row)} |" for row in rows]
        head = [f"## {title}\n", "| section | theirs | here | study: arms |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *lines]) + "\n")
    return "\n".join(parts)


def _theirs(row: dict[str, Any]) -> str:
    if "theirs" in row:
        return _code(row["theirs"]) if any(c in row["theirs"] for c in "([=") else row["theirs"]
    if "config" in row:
        return "<br>".join(_code(f"{key}: {_flow(value)}") for key, value in row["config"].items())
    return _code(next(row[key] for key in ("script", "verl", "environ") if key in row))


def _here(row: dict[str, Any]) -> str:
    if "script" in row:
        words = shlex.split(row["script"])
        return "<br>".join(map(_code, instead(words[1:], {})))
    if "here" in row or "python" in row:
        several = row.get("here", row.get("python"))
        return "<br>".join(_code(text) for text in ([several] if isinstance(several, str) else several))
    if "answer" in row:
        return f"answered: {_code(row['answer'])}"
    became = [_code(row[key]) for key in ("plan", "aqn") if key in row]
    return f"as it stands: {' and '.join(became)}"


def _study(row: dict[str, Any]) -> str:
    if "study" not in row:
        return ""
    link = f"[{row['study']}](../studies/{row['study']}.yaml)"
    return f"{link}: {', '.join(row['arms'])}" if "arms" in row else link


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip().removesuffix("...").strip()


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    made = page()
    if "--check" in sys.argv and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made):
        sys.exit("docs/origin-documents.md is not what documents.yaml says; run: python scripts/origin_documents.py")
    PAGE.write_text(made, encoding="utf-8")
