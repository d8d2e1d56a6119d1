"""The measured differences as a plan file: one clause for each family of operators, for `harden`, `sweep` and `train`."""

from __future__ import annotations

from typing import Any

import yaml

from shaketable.plan import Plan


def plan_text(facts: dict[str, Any]) -> str | None:
    """A plan file; None when there is nothing to inject.

    Args:
        facts: The result of `run_stages`.
    """
    shares = facts["shares"]
    if shares is None or not shares["plan"]:
        return None
    trainer, engine = facts["trainer"], facts["engine"]
    head = ["# Differences measured by shaketable mismatch, one clause for each family of operators."]
    head.append(
        f"# trainer: {trainer['model']}, {trainer['dtype']}; engine: {engine['engine']} {engine['version']}, {engine['dtype']}"
    )
    for row in shares["families"]:
        head.append(f"# {row['family']}: {row['share']:.0%} of the KL, relative error {row['relative_error']:.2e}")
    text = "\n".join([*head, "seed: 0", "plan:", *(f'  - "{clause}"' for clause in shares["plan"]), ""])
    Plan.from_data(yaml.safe_load(text), name="the measured plan")
    return text
