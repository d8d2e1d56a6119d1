"""The worker extension of vLLM in a verl run that is measured: verl's own, with the calls of `Observer`.

verl's calls into its samplers bring no answer back, so an answer is a file that the caller names.
"""

from __future__ import annotations

import json
from pathlib import Path

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from shaketable.integrations.vllm.observe import Observer
from shaketable.io.replacing import replacing


class ObservedSampler(Observer, vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Calls that a sampler answers over `collective_rpc`."""

    def shaketable_answer(self, file: str, method: str, arguments: str) -> None:
        """Call a method with arguments that are JSON, and write what it returns, as JSON."""
        answer = getattr(self, method)(*json.loads(arguments))
        with replacing(Path(file)) as draft:
            draft.write_text(json.dumps(answer), encoding="utf-8")
