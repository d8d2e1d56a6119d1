"""`shaketable inspect`: the parts of a model, and what a plan would hit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.cli.outputs import OutputFiles
from shaketable.cli.terminal import console, print_table, say, table_of
from shaketable.cli.verb import ForceOption, JsonOption
from shaketable.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

    from shaketable.sites.structure import Anatomy

TARGETS = {
    "rmsnorm": ("rmsnorm",),
    "rmsnorm + down_proj": ("rmsnorm", "down_proj"),
    "linear + lm_head": ("linear", "lm_head"),
    "rmsnorm + linear + lm_head": ("rmsnorm", "linear", "lm_head"),
}


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a config.json, a Hugging Face id, nano or smollm2-135m.")
    ],
    plan: Annotated[str | None, typer.Option(help="List the sites that this plan would hit.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Context length for the FLOPs of attention.")] = 1024,
    json_file: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Show the parts of a model, their shares of FLOPs and parameters, and what a plan would hit. Loads no weights.

    shaketable inspect smollm2-135m --plan mxfp4@module.linear,layers=0-3
    """
    outputs = OutputFiles(json_file, force=force)
    resolved = Plan.load(plan) if plan is not None else None

    from shaketable.models import load_skeleton
    from shaketable.sites.structure import Anatomy

    facts = describe(Anatomy.of(load_skeleton(model)), model, tokens, resolved)
    outputs.save(lambda: facts)
    _print(facts)


def describe(anatomy: Anatomy, name: str, tokens: int, plan: Plan | None) -> dict[str, Any]:
    """Everything `inspect` shows, as data."""
    from shaketable.cli.flops import costs

    table = costs(anatomy, tokens)
    flops = sum(c.flops for c in table.values()) or 1.0
    parameters = sum(c.parameters for c in table.values()) or 1
    roles = {
        role: {
            "count": c.count,
            "parameters": c.parameters,
            "parameter_share": c.parameters / parameters,
            "flops_per_token": c.flops,
            "flops_share": c.flops / flops,
        }
        for role, c in table.items()
    }
    facts: dict[str, Any] = {
        "model": name,
        "class": type(anatomy.model).__name__,
        "layers": len(anatomy.layers),
        "moe": anatomy.is_moe,
        "parameters": parameters,
        "flops_per_token": flops,
        "tokens": tokens,
        "roles": roles,
        "targets": {label: _target(anatomy, names, flops) for label, names in TARGETS.items()},
    }
    if plan is not None:
        facts["plan"] = plan.text()
        facts["sites"] = [_hits(anatomy, plan, i, flops) for i in range(len(plan.clauses))]
    return facts


def _target(anatomy: Anatomy, names: tuple[str, ...], flops: float) -> dict[str, Any]:
    from shaketable.cli.flops import part_flops

    parts = [p for p in anatomy.parts if p.role in names or p.name.rsplit(".", 1)[-1] in names]
    return {"count": len(parts), "flops_share": sum(part_flops(p, anatomy) for p in parts) / flops}


def _hits(anatomy: Anatomy, plan: Plan, index: int, flops: float) -> dict[str, Any]:
    """What one clause would hit. Operators are known only at run time, so their families are named."""
    from shaketable.cli.flops import part_flops
    from shaketable.inject.operators import families, hidden_by_attention
    from shaketable.sites.match import check_layers, targets

    clause = plan.clauses[index]
    head = {"fault": clause.fault.text(), "site": clause.site.text(), "directions": clause.site.directions}
    if clause.site.level == "op":
        check_layers(clause.site, anatomy)
        layers = len(clause.site.layers) if clause.site.layers is not None else len(anatomy.layers)
        hidden = hidden_by_attention(anatomy.model, clause.site)
        named = {"families": families(clause.site.names), "layers": layers, "hidden": hidden}
        return head | named | {"matched": None, "modules": []}
    found = targets(clause, anatomy)
    parts = {id(t.part.module): t.part for t in found}
    return head | {
        "points": clause.points,
        "matched": len(found),
        "flops_share": sum(part_flops(p, anatomy) for p in parts.values()) / flops,
        "modules": [f"{t.part.name}:{t.point}" for t in found],
    }


def _print(facts: dict[str, Any]) -> None:
    out = console()
    kind = "mixture of experts" if facts["moe"] else "dense"
    size = f"{facts['parameters'] / 1e6:,.1f} M parameters"
    say(out, f"{facts['model']}  {facts['class']}, {facts['layers']} layers, {kind}, {size}", style="bold")
    print_table(out, _roles(facts))
    print_table(out, _targets(facts))
    for site in facts.get("sites", []):
        say(out, _site(site))
        say(out, *(f"  ! {line}" for line in site.get("hidden", [])), style="yellow")
        say(out, *(f"    {name}" for name in _shortened(site["modules"])))


def _roles(facts: dict[str, Any]) -> Table:
    title = f"Roles (FLOPs of a token at context {facts['tokens']})"
    table = table_of("role", ("modules", "parameters", "share", "FLOPs share"), title)
    for role, c in facts["roles"].items():
        shares = [f"{c['parameter_share']:.1%}", f"{c['flops_share']:.1%}"]
        table.add_row(role, str(c["count"] or ""), f"{c['parameters']:,}", *shares)
    return table


def _targets(facts: dict[str, Any]) -> Table:
    table = table_of("usual targets", ("modules", "FLOPs share"), "What usual targets cover")
    for label, c in facts["targets"].items():
        table.add_row(label, str(c["count"]), f"{c['flops_share']:.1%}")
    return table


def _site(site: dict[str, Any]) -> str:
    way = " and ".join(site["directions"])
    if site["matched"] is None:
        return f"{site['fault']}@{site['site']}: operators {', '.join(site['families'])} of {site['layers']} layers, {way}"
    return f"{site['fault']}@{site['site']}: {site['matched']} sites, {site['flops_share']:.1%} of FLOPs, {way}"


def _shortened(names: list[str], shown: int = 12) -> list[str]:
    if len(names) <= shown:
        return names
    half = shown // 2
    return [*names[:half], f"… {len(names) - 2 * half} more …", *names[-half:]]
