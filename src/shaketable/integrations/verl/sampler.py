"""The worker extensions of vLLM in a verl run: verl's own, and ours. vLLM imports them in its workers; an error here stops it.

verl makes one vLLM engine per replica and counts the ranks of each from 0. Replicas that drew the same noise would be one
sampler several times over, so a worker's rank is that of its replica.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from shaketable.inject.weights import HeldTap
from shaketable.integrations.vllm import extension
from shaketable.integrations.vllm.observe import Observer
from shaketable.io.replacing import replacing

STRIDE = 4096
"""More than the copies of a model in one replica. vLLM forgets how many there are when the model is dense."""


class SamplerExtension(extension.Extension, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Calls that a sampler answers over `collective_rpc`."""

    def __new__(cls, **kwargs: Any) -> Any:
        """Made by vLLM, with the arguments of its worker."""
        parallel = kwargs["vllm_config"].parallel_config
        replica = int(os.environ.get("VERL_REPLICA_RANK", "0"))
        os.environ["SHAKETABLE_RANK"] = str(replica * STRIDE + (parallel.data_parallel_index or 0))
        return super().__new__(cls, **kwargs)

    def write_report(self, mark: int) -> None:
        """Bring the report on disk up to date; by the mark in it the trainer knows that it reads what is and not what was."""
        file = self._shaketable.file
        if file is not None:
            file.flush(mark)

    def switch_plan(self, on: bool) -> None:
        """For a validation: whether the plan acts at all. What it has written into weights is taken out when it does not.

        A validation may come before the first request, when nothing is on yet: AQN is switched on where it is not due, because
        what it writes is counted once per step and belongs to the first one. What the plan writes into weights is counted for
        every validation, also for two of the same step.
        """
        shaker = self._shaketable
        if not shaker.is_live:
            shaker.set_phase("eval")
            shaker.is_live = True
            if shaker.aqn is not None:
                shaker.aqn.enable()
        if shaker.plan is not None:
            for tap in shaker.plan.taps:
                if isinstance(tap, HeldTap):
                    tap.forget()
            (shaker.plan.enable if on else shaker.plan.disable)()


class ObservedSampler(Observer, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """A sampler that is compared with the actors."""

    def write_digests(self, file: str) -> None:
        """Write dtype and digest of every weight to a file that the caller names, because verl's calls return nothing."""
        answer = {"dtype": self.shaketable_facts()["dtype"], "digests": self.shaketable_digests()}
        with replacing(Path(file)) as draft:
            draft.write_text(json.dumps(answer), encoding="utf-8")
