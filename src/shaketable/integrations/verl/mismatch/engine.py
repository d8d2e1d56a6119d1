"""A sampler of verl as an engine that is compared with the trainer: vLLM behind a server that only Ray reaches."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import vllm

from shaketable.integrations.vllm.engine import EngineAnswer, VLLMEngine
from shaketable.mismatch.engine import EngineError

PATIENCE = 60.0
"""Seconds that an answer may take to be seen: a folder that machines share shows it late."""


class VerlEngine(VLLMEngine):
    """One vLLM server of a verl run.

    Args:
        server: Ray's handle of it.
        folder: Where answers are left; the server and this process both see it.
    """

    def __init__(self, server: Any, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.arguments = {}
        self.version = vllm.__version__
        self.facts = self._call("shaketable_facts")
        self.dtype = getattr(torch, self.facts["dtype"].removeprefix("torch."))

    def digests(self) -> dict[str, tuple[str, str]]:
        """The dtype and the digest of every weight, under the trainer's name."""
        self._one_worker("its weights")
        return {name: (dtype, digest) for name, (dtype, digest) in self._call("shaketable_digests").items()}

    def close(self) -> None:
        """verl ends it."""

    def _generate(self, prompts: Sequence[list[int]], asked: Sequence[Mapping[str, Any]]) -> list[EngineAnswer]:
        requests = [
            self.server.generate.remote(list(prompt), _request(one), f"shaketable-{uuid.uuid4().hex}")
            for prompt, one in zip(prompts, asked, strict=True)
        ]
        return [_answer(output) for output in self._asked(lambda: ray.get(requests))]

    def _call(self, name: str, *args: Any) -> Any:
        file = self.folder / f"answer-{uuid.uuid4().hex}.json"
        given = (str(file), name, json.dumps(args))
        self._asked(lambda: ray.get(self.server.collective_rpc.remote("shaketable_answer", args=given)))
        end = time.monotonic() + PATIENCE
        while not file.exists():
            if time.monotonic() > end:
                raise EngineError(f"a sampler was asked for {name} and left no answer in {self.folder}")
            time.sleep(0.1)
        answer = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        return answer

    def _asked(self, ask: Any) -> Any:
        try:
            return super()._asked(ask)
        except ray.exceptions.RayError as error:
            raise EngineError(f"a sampler of verl failed: {str(error).strip().splitlines()[-1]}") from error

    def _reset_prefix_cache(self) -> bool:
        self._asked(lambda: ray.get(self.server.clear_kv_cache.remote()))
        return True

    @contextmanager
    def _folder(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            yield folder


def _request(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A request as verl's server takes it: it knows log-probabilities of the tokens themselves, or none."""
    return {**asked, "logprobs": "logprobs" in asked, "detokenize": False}


def _answer(output: Any) -> EngineAnswer:
    """verl pads the log-probabilities of a prompt behind the last token, and has none for the first."""
    prompt = output.extra_fields.get("prompt_logprobs")
    return EngineAnswer(
        tokens=list(output.token_ids),
        logprobs=[float(x) for x in output.log_probs or ()],
        prompt_logprobs=[] if prompt is None else [float("nan"), *(float(row[0]) for row in prompt[:-1])],
        finish=str(output.stop_reason),
        cached=int(output.extra_fields.get("num_cached_tokens") or 0),
    )
