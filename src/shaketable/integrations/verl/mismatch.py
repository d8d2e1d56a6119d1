"""Samplers compared with actors, every so many steps of a verl training: `+shaketable.mismatch.every=50`.

    a step            the samplers' log-probabilities against the actors' own, of every completion: the gap
    after its sync    samplers have the new weights and are awake: weights against weights; floor and share, if there is time

What is found goes to verl's loggers under `shaketable/mismatch/`, and as a line to `mismatch.jsonl` in the run's folder.

FSDP2 keeps a part of every weight on each rank. All ranks put them together, one weight after another; rank 0 compares each
with the digests that samplers gave, and keeps it only where it differs, or where a whole model is asked for to read rollouts
with: the sharded one calls the other ranks in every forward, and its layers cannot be called alone.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue  # type: ignore[import-not-found]
import vllm
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.device import get_device_id
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker

from shaketable.integrations.common.mismatch import (
    ROLLOUTS,
    Budget,
    DigestComparison,
    floor_and_share,
    gap,
    named,
    refuse_stale,
    weight_counts,
)
from shaketable.integrations.names import check
from shaketable.integrations.verl.settings import OBSERVER, ORDERS, Shaking
from shaketable.integrations.verl.trainer import use_worker
from shaketable.integrations.verl.workers import PATIENCE
from shaketable.integrations.vllm.engine import EngineAnswer, VLLMEngine
from shaketable.mismatch.engine import EngineError, Rollout
from shaketable.mismatch.results import Weights, as_json
from shaketable.mismatch.trainer import Trainer

check("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync")
LINES = "mismatch.jsonl"
FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"]
WRAPPER = "_checkpoint_wrapped_module."
"""In the names of modules that are recomputed in backward; samplers do not know it."""
Completion = tuple[list[int], list[int]]


class MeasuringTrainer(PPOTrainerSync):  # type: ignore[misc]
    """A synchronous trainer that checks its samplers."""

    def __init__(self, config: DictConfig, shaking: Shaking) -> None:
        assert shaking.mismatch is not None
        self.shaking, self.asked = shaking, shaking.mismatch
        self.budget = Budget()
        self._rollouts: list[Completion] = []
        super().__init__(config=config)

    def _init_resource_pool_mgr(self) -> None:
        """verl chooses its worker classes here."""
        super()._init_resource_pool_mgr()
        folder = self.shaking.ledger
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ORDERS).write_text(json.dumps({"mismatch": self.asked.model_dump()}, indent=2) + "\n", encoding="utf-8")
        rollout = self.config.actor_rollout_ref.rollout
        with open_dict(rollout):
            kwargs = OmegaConf.to_container(rollout.engine_kwargs).get("vllm") or {}
            rollout.engine_kwargs["vllm"] = kwargs | {"worker_extension_cls": OBSERVER}
            rollout.calculate_log_probs = True
        use_worker(self.role_worker_mapping, MeasuredWorker, "shaketable.mismatch needs")

    def on_train_begin(self) -> None:
        """Start to count the time of the training."""
        super().on_train_begin()
        self.budget = Budget()

    @property
    def _is_due(self) -> bool:
        return bool((self.global_steps - 1) % self.asked.every == 0)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """Rollouts and updates, and how far the two sides' log-probabilities were apart."""
        batch = super().step(metrics, timing_raw)
        self._spent_before, self._has_time = self.budget.spent, self.budget.is_left
        if self._is_due:
            with self.budget.spending():
                metrics |= named(self._gap(batch))
        return batch

    def _gap(self, batch: Any) -> dict[str, float]:
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS)
        rows = list(zip(*(data[name].unbind() for name in FIELDS), strict=True))
        whole = [row for row in rows if bool(row[2].bool().all()) and len(row[1])]
        self._rollouts = [(row[0].tolist(), row[1].tolist()) for row in whole[:ROLLOUTS]]
        masks = [row[2].bool() for row in rows]
        sides = [[row[at][mask].tolist() for row, mask in zip(rows, masks, strict=True)] for at in (3, 4)]
        return gap(*sides)

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """verl asks for metrics when the step is done, and the samplers have its weights and are awake."""
        found: dict[str, Any] = super()._consume_sync_metrics()
        if not self._is_due:
            return found
        rollouts = self._rollouts if self._has_time else []
        with self.budget.spending():
            compared = self._compare(rollouts)
        numbers = (
            weight_counts(compared["weights"])
            | compared.get("numbers", {})
            | {"seconds": self.budget.spent - self._spent_before}
        )
        with (self.shaking.ledger / LINES).open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"step": self.global_steps, **numbers, "differing": as_json(compared["weights"].differing)}) + "\n"
            )
        if self.asked.stop:
            refuse_stale(compared["weights"], self.global_steps)
        return {**found, **named(numbers)}

    def _compare(self, rollouts: list[Completion]) -> dict[str, Any]:
        servers, folder = self.llm_server_manager.server_handles, str(self.shaking.ledger)
        answers = self.actor_rollout_wg.compare_with_samplers(servers, folder, rollouts)
        found: dict[str, Any] = next(answer for answer in answers if answer is not None)
        return found

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and say at the end what the checks took."""
        super().fit(agent_loop_manager)
        print(f"shaketable: checks of the samplers took {self.budget.spent:.1f} s; {self.shaking.ledger / LINES}", flush=True)


# ---- actors: their weights, and a whole model that reads rollouts


class MeasuredWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, which can be compared with samplers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def compare_with_samplers(
        self, servers: Sequence[Any], folder: str, rollouts: Sequence[tuple[list[int], list[int]]]
    ) -> dict[str, Any] | None:
        """Compare the weights with those of all samplers and, where there are rollouts, measure floor and share with the first.

        Returns:
            On rank 0 what was found; every other rank helps to put weights together, and has nothing to say.
        """
        model, is_first = self.actor.engine.module, self.rank == 0
        engines = [VerlEngine(server, Path(folder)) for server in servers] if is_first else []
        compared = [DigestComparison(engine.digests(), engine.dtype) for engine in engines]
        whole: dict[str, Tensor] = {}
        for name, value in _whole_weights(model):
            if is_first and rollouts:
                whole[name] = value
            for one in compared:
                one.add(name, value)
        if not is_first:
            return None
        found: dict[str, Any] = {"weights": _together([c.result(e.parameters) for c, e in zip(compared, engines, strict=True)])}
        if rollouts:
            read = [Rollout(prompt, completion, []) for prompt, completion in rollouts]
            side = Trainer(whole_copy(model, whole, self._dtype()), None, "trainer")
            found |= {"numbers": floor_and_share(side, engines[0], read)}
        return found

    def _dtype(self) -> torch.dtype:
        """The dtype that FSDP2 casts weights to, by verl's own rule."""
        precision = self.actor.engine.engine_config.mixed_precision
        found: torch.dtype = PrecisionType.to_dtype("bf16" if precision is None else precision.get("param_dtype", "bf16"))
        return found


def _together(found: Sequence[Weights]) -> Weights:
    """The comparisons with all samplers as one."""
    differing = [replace(row, name=f"{row.name} (replica {i})") for i, one in enumerate(found) for row in one.differing]
    unknown = [name for one in found for name in one.unknown]
    compared, cast = sum(one.compared for one in found), sum(one.cast for one in found)
    return Weights(compared, cast, differing, found[0].engine_dtype if found else "", [], unknown)


def _whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its own name. All ranks must ask for all of them, in this order."""
    for name, value in model.named_parameters(remove_duplicate=False):
        here: Any = value.detach().to(get_device_id()) if isinstance(value, DTensor) else value.detach()
        yield name.replace(WRAPPER, ""), here.full_tensor() if isinstance(here, DTensor) else here


def whole_copy(model: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """The model that FSDP2 has sharded, with these weights, and whole."""
    kind: Any = next(found for found in type(model).__mro__ if not issubclass(found, FSDPModule))
    with torch.device("meta"):
        made: Any = kind(copy.deepcopy(model.config))
    made.load_state_dict({name: value.to(dtype) for name, value in values.items()}, strict=False, assign=True)
    for name, value in model.named_buffers():
        path, _, last = name.replace(WRAPPER, "").rpartition(".")
        made.get_submodule(path)._buffers[last] = value.clone()
    made.tie_weights()
    found: nn.Module = made.eval()
    return found


# ---- samplers, as an actor sees them through Ray


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
        cached=int(output.extra_fields.get("num_cached_tokens") or 0),
    )
