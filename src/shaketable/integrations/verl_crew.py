"""The workers of a verl run, as the trainer sees them: by the reports that they leave in the folder of ledgers.

verl's calls into its samplers bring no answer back, and verl swallows what plugins raise. So the trainer believes nothing that
it cannot read: after each call it compares what every worker *is doing* with what it was told to do. A worker that never
reported, one that acts on other orders, and one that a call did not reach stop the training with one line that names it. In the
study we come from σ was 0 in every sampler for a whole campaign, and all its logs looked well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shaketable.errors import InertError, ShaketableError
from shaketable.inject.ledger import Ledger
from shaketable.integrations.orders import Orders
from shaketable.integrations.reports import merged, read_reports

ORDERS, STEPS, LEDGER = "orders.json", "steps.jsonl", "ledger.json"


class Crew:
    """Samplers and actors, their orders and their reports."""

    def __init__(self, folder: Path, orders: Mapping[str, Orders], size: int) -> None:
        """Args:
        folder: Where all reports are.
        orders: Of each role that has any.
        size: Workers of each role.
        """
        self.folder, self.orders, self.size = folder, orders, size
        self._before = dict.fromkeys(orders, (0, 0))
        folder.mkdir(parents=True, exist_ok=True)
        body = {role: found.model_dump() | {"digest": found.digest()} for role, found in orders.items()}
        (folder / ORDERS).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    def reports(self, role: str) -> list[dict[str, Any]]:
        """What each worker of a role says of itself."""
        return [report for report in read_reports(self.folder) if report["role"] == role]

    # ---- is every worker there, and does it what it was told?

    def check_in(self) -> None:
        """Every worker has reported, and acts on the orders it was given."""
        for role, orders in self.orders.items():
            found = self.reports(role)
            if len(found) != self.size:
                raise ShaketableError(
                    f"{len(found)} of {self.size} {role}s reported in {self.folder}: the others do not have their orders; "
                    "shaketable must be installed for all workers, and all must be able to write to that folder"
                )
            for report in found:
                if report["orders"] != orders.digest():
                    why = f"acts on orders {report['orders']} and was given {orders.digest()}"
                    raise ShaketableError(f"{name(report)} {why}; see {ORDERS} in {self.folder}")

    def check_samplers(self, **told: Any) -> None:
        """Every sampler is where it was told to be: `step=3`, `phase="eval"`."""
        for report in self.reports("sampler"):
            for key, value in told.items():
                if report[key] != value:
                    raise ShaketableError(f"{name(report)} has {key} {report[key]!r} and was told {value!r}: the call got lost")

    def check_fired(self) -> None:
        """After a first step: every actor has struck something, and some sampler (a small batch may leave one idle)."""
        for role, orders in self.orders.items():
            found = self.reports(role)
            idle = [report for report in found if not _fires(report)]
            if orders.plan is not None and (len(idle) == len(found) or (idle and role == "actor")):
                raise InertError(f"{name(idle[0])} has its plan on and struck nothing in a whole step")

    # ---- what they did

    def metrics(self) -> dict[str, float]:
        """What happened since the last time, as numbers for verl's loggers."""
        found: dict[str, float] = {}
        for role, orders in self.orders.items():
            reports = self.reports(role)
            if (ledger := merged(reports, "plan")) is not None:
                forward, backward = self._before[role]
                self._before[role] = ledger.forward, ledger.backward
                found[f"shaketable/{role}/forward"] = float(ledger.forward - forward)
                found[f"shaketable/{role}/backward"] = float(ledger.backward - backward)
                found |= _error(f"shaketable/{role}/measured_error", ledger)
            if orders.aqn is not None and role == "sampler":
                found |= self._sigma(reports)
        return found

    def _sigma(self, reports: list[dict[str, Any]]) -> dict[str, float]:
        """σ as all samplers have it; that they have the same follows from their step and their orders."""
        layers = reports[0]["sigmas"].values()
        spread = {"shaketable/sigma_min": min(layers), "shaketable/sigma_max": max(layers)} if layers else {}
        ledger = merged(reports, "aqn")
        error = _error("shaketable/sampler/aqn_error", ledger) if ledger is not None else {}
        return {"shaketable/sigma": reports[0]["sigma"], **spread, **error}

    def in_validation(self) -> int:
        """Strikes in validations so far, in all samplers."""
        ledgers = [found for what in ("plan", "aqn") if (found := merged(self.reports("sampler"), what)) is not None]
        counts = [site.by("phase").get("eval", {}) for ledger in ledgers for site in ledger.sites]
        return sum(sum(count.values()) for count in counts)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line about a step, with σ per layer."""
        sigmas = {name(report): report["sigmas"] for report in self.reports("sampler")}
        with (self.folder / STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "sigmas": sigmas}) + "\n")

    def finish(self) -> dict[str, Any]:
        """Merge all ledgers into one file; raises when a clause did nothing, or a worker struck nothing."""
        body: dict[str, Any] = {"schema": "shaketable.verl/1", "workers": {}, "merged": {}}
        complaints = []
        for role in self.orders:
            reports = self.reports(role)
            body["workers"][role] = [{"pid": r["pid"], "rank": r["rank"], "fires": _fires(r)} for r in reports]
            complaints += [f"{name(r)} struck nothing" for r in reports if not _fires(r)]
            for what in ("plan", "aqn"):
                if (ledger := merged(reports, what)) is not None:
                    body["merged"][f"{role}.{what}"] = ledger.to_dict()
                    complaints += [f"{role}s: {line}" for line in ledger.inert()]
        (self.folder / LEDGER).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        if complaints:
            raise InertError("; ".join(complaints))
        return body


def name(report: Mapping[str, Any]) -> str:
    """How a worker is called in messages."""
    return f"{report['role']} {report['rank']} (pid {report['pid']})"


def _fires(report: Mapping[str, Any]) -> int:
    """Everything that a worker struck."""
    return sum(report[what]["forward"] + report[what]["backward"] for what in ("plan", "aqn") if report.get(what))


def _error(key: str, ledger: Ledger) -> dict[str, float]:
    errors = [error for site in ledger.sites if (error := site.measured().error) is not None]
    return {key: max(errors)} if errors else {}
