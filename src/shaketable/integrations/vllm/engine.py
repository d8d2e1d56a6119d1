"""The engine vllm of `shaketable mismatch`: a `vllm.LLM` that is compared with a trainer.

vLLM runs as its user runs it, in a process of its own, compiled or not, with its own kernels and packed weights: nothing is
switched off for the comparison. Its worker (`observe`) gives what a front end cannot see: weights, operators, routing, and
decoding along given tokens.

The variants, all of them ways of vLLM itself to compute the same: requests one at a time instead of all at once, `decode` token
by token instead of as a prompt, `prefix cache` with the front of the sequence taken from the cache, `graphs off` without what
torch.compile made.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from shaketable.capture.decoder import Phase
from shaketable.errors import UnavailableError, first_problem
from shaketable.mismatch.engine import (
    ALONE,
    CACHED,
    DECODE,
    EAGER,
    EngineError,
    OperatorRecord,
    Rollout,
    Routed,
    Sampling,
)
from shaketable.mismatch.results import EngineFacts
from shaketable.numerics.decoder_operators import OperatorCall, log_softmax_call

OBSERVER = "shaketable.integrations.vllm.observe.Observer"
FORCED = "shaketable_forced"
"""The key in `SamplingParams.extra_args` that holds the tokens a request is to decode."""
READ = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
"""A request whose prompt is read and given log-probabilities."""
USUAL = {"disable_log_stats": True, "seed": 0}
"""Arguments of `vllm.LLM` that have other defaults here."""


@dataclass(frozen=True)
class EngineAnswer:
    """The result of one request; log-probabilities only where they were requested."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    """One for every token of the prompt; the first has none."""
    cached: int
    """Tokens of the prompt that were in the prefix cache."""


class VLLMEngine:
    """A `vllm.LLM` and the one worker behind it."""

    name = "vllm"
    together = 1

    def __init__(self, llm: Any, arguments: Mapping[str, Any]) -> None:
        self.llm = llm
        self.arguments = dict(arguments)
        self.version = str(sys.modules["vllm"].__version__)
        config = llm.llm_engine.vllm_config
        self.dtype = config.model_config.dtype
        self.mode = str(config.model_config.logprobs_mode)
        self.facts = self._call("shaketable_facts")

    @classmethod
    def open(cls, model: str, arguments: Mapping[str, Any]) -> VLLMEngine:
        """Start vLLM; `arguments` are those of `vllm.LLM`, and `model`."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
        except ImportError:
            raise EngineError("--engine vllm needs vLLM in this environment: pip install vllm") from None
        from shaketable.models import servable_path

        given = {**USUAL, **arguments}
        path = servable_path(str(given.pop("model", model)))
        try:
            llm = LLM(path, **{**given, "worker_extension_cls": OBSERVER})
        except Exception as error:
            raise EngineError(f"vLLM could not start {path}: {_first_line(error)}") from error
        return cls(llm, arguments)

    def describe(self) -> EngineFacts:
        """For the report."""
        return EngineFacts(self.name, self.version, str(self.dtype).removeprefix("torch."), {**self.facts, **self.arguments})

    # ---- tokens

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[Rollout]:
        """Draw one completion for each prompt, all at once."""
        self._set_mode(f"{sampling.logprobs_mode}_logprobs")
        common = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,
            "logprobs": 0,
        }
        done = self._generate(prompts, [common | {"seed": sampling.seed + i} for i in range(len(prompts))])
        return [Rollout(list(prompt), answer.tokens, answer.logprobs) for prompt, answer in zip(prompts, done, strict=True)]

    def logprobs(self, rollouts: Sequence[Rollout], variant: str | None = None) -> list[list[float]]:
        """Log-probabilities of the completions' tokens."""
        if variant is None:
            return self._read(rollouts)
        if variant == ALONE:
            return [self._read([rollout])[0] for rollout in rollouts]
        if variant == DECODE:
            self._forget()
            return self._decode([(r.prompt, r.completion) for r in rollouts])
        if variant == CACHED:
            return self._from_cache(rollouts)
        if variant == EAGER:
            with self._switched("shaketable_graphs", False):
                return self._read(rollouts)
        raise UnavailableError(f"vLLM has no variant {variant!r}; valid: {', '.join(self.variants())}")

    def variants(self) -> list[str]:
        """Ways in which this vLLM can compute the same."""
        cached, compiled = bool(self.facts["caches_prefixes"]), bool(self.facts["compiled"] and not self.facts["captured"])
        return [ALONE, DECODE, *([CACHED] if cached else []), *([EAGER] if compiled else [])]

    def _read(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Log-probabilities of completions that are read as part of a prompt."""
        done = self._generate([r.tokens for r in rollouts], [READ] * len(rollouts))
        return [answer.prompt_logprobs[len(r.prompt) :] for r, answer in zip(rollouts, done, strict=True)]

    def _decode(self, parts: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probabilities of given tokens that are decoded one by one."""
        with self._switched("shaketable_force", True):
            done = self._generate([prompt for prompt, _ in parts], [_forced(rest) for _, rest in parts])
        return [answer.logprobs for answer in done]

    def _from_cache(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Decode once to fill the prefix cache, then again from it."""
        found = self._decode([(r.prompt, r.completion) for r in rollouts])
        long = [(i, cut) for i, r in enumerate(rollouts) if (cut := self._cut(r)) is not None]
        if not long:
            raise UnavailableError(f"no sequence fills a block of {self.facts['block']} tokens, which is what vLLM caches")
        again = self._decode([(rollouts[i].tokens[:cut], rollouts[i].tokens[cut:]) for i, cut in long])
        for (i, cut), logprobs in zip(long, again, strict=True):
            found[i][cut - len(rollouts[i].prompt) :] = logprobs
        return found

    def _cut(self, rollout: Rollout) -> int | None:
        """The position up to which a sequence is cached: the end of the prompt, or of the first block if that is longer."""
        cut = max(len(rollout.prompt), int(self.facts["block"]) + 1)
        return cut if cut < len(rollout.tokens) else None

    # ---- inside

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the trainer's names."""
        from safetensors import safe_open

        self._one_worker("its weights")
        with tempfile.TemporaryDirectory() as folder:
            for number in range(self._call("shaketable_weights", folder)):
                with safe_open(Path(folder) / f"weights-{number}.safetensors", framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        yield name, file.get_tensor(name)

    def logits(self, rollouts: Sequence[Rollout]) -> Iterator[Tensor]:
        """Logits of the model itself before each token of the completions, decoded along them."""
        for rollout in rollouts:
            yield self.record([rollout], "decode")[0].calls[-1].inputs["x"]

    def record(self, rollouts: Sequence[Rollout], phase: Phase, rows: Sequence[int] | None = None) -> list[OperatorRecord]:
        """Every operator on these rollouts, one at a time: a pass of vLLM mixes tokens of several requests."""
        found = []
        for rollout in rollouts if rows is None else [rollouts[i] for i in rows]:
            calls = self._record(rollout, phase)
            alone = Rollout(rollout.prompt, [], [])
            found.append(
                OperatorRecord(calls, self._record(alone, "prefill") if phase == "decode" and rollout.completion else None)
            )
        return found

    def _record(self, rollout: Rollout, phase: Phase) -> list[OperatorCall]:
        tokens, prompt_length = rollout.tokens, len(rollout.prompt)
        recording, logprobs = self._recorded(tokens, prompt_length, phase)
        calls = recording.calls(0 if phase == "prefill" else prompt_length)
        if not rollout.completion:
            return calls
        logits = recording.logits(prompt_length - 1, len(tokens) - 1)
        return [*calls, log_softmax_call(logits, rollout.completion, torch.tensor(logprobs))]

    def routing(self, tokens: list[int]) -> dict[int, Routed] | None:
        """Chosen experts of every layer that has some."""
        found = self._recorded(tokens, len(tokens), "prefill")[0].routing()
        return None if found is None else {layer: Routed(ids) for layer, ids in found.items()}

    def _recorded(self, tokens: list[int], prompt_length: int, phase: Phase) -> tuple[WorkerRecording, list[float]]:
        """The worker's recording, and the log-probabilities of the completion from the same passes."""
        self._one_worker("its operators")
        if self.facts["captured"]:
            raise UnavailableError(
                "captured CUDA graphs call no module: start vLLM with enforce_eager=true to see its operators"
            )
        if self.facts["logits_scale"] != 1:
            raise UnavailableError("vLLM scales the logits of this model together with its head: neither is seen alone")
        if len(tokens) >= self.facts["longest"]:
            raise UnavailableError(f"{len(tokens)} tokens and one more do not fit into max_model_len={self.facts['longest']}")
        self._forget()
        self._call("shaketable_record")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "recording.pt"
            try:
                spans, logprobs = self._run_once(tokens, prompt_length, phase)
            finally:
                self._call("shaketable_recorded", str(file))
            return WorkerRecording.load(file, tokens, spans), logprobs

    def _run_once(self, tokens: list[int], prompt_length: int, phase: Phase) -> tuple[list[tuple[int, int]], list[float]]:
        """Run the tokens through the model; of each request, the first token that was computed and the one behind the last.

        And the log-probabilities of the tokens behind the prompt.
        """
        if phase == "prefill":
            (done,) = self._generate([tokens], [READ])
            return [(0, len(tokens))], done.prompt_logprobs[prompt_length:]
        first = [(0, prompt_length)] if self.facts["caches_prefixes"] else []
        if first:
            self._generate([tokens[:prompt_length]], [{"max_tokens": 1, "temperature": 0}])
        with self._switched("shaketable_force", True):
            rest = _forced([*tokens[prompt_length:], tokens[-1]])
            (done,) = self._generate([tokens[:prompt_length]], [rest])
        return [*first, (done.cached, len(tokens))], done.logprobs[:-1]

    def close(self) -> None:
        """End the processes of vLLM."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None

    # ---- talking to it

    def _generate(self, prompts: Sequence[list[int]], asked: Sequence[Mapping[str, Any]]) -> list[EngineAnswer]:
        """One request for each prompt; `asked` holds arguments of vLLM's `SamplingParams`."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        chosen = [SamplingParams(**one, detokenize=False) for one in asked]
        return [_answer(r) for r in self._asked(lambda: self.llm.generate(requests, chosen, use_tqdm=False))]

    def _call(self, name: str, *args: Any) -> Any:
        return self._asked(lambda: self.llm.collective_rpc(name, args=args))[0]

    def _asked(self, ask: Callable[[], Any]) -> Any:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return ask()
        except EngineDeadError as error:
            raise EngineError(f"vLLM died: {_first_line(error)}") from error
        except (ValueError, RuntimeError, VLLMValidationError) as error:
            raise EngineError(f"vLLM refused: {_first_line(error)}") from error

    @contextmanager
    def _switched(self, call: str, on: bool) -> Iterator[None]:
        """A switch of the worker set for as long as the context lasts."""
        self._call(call, on)
        try:
            yield
        finally:
            self._call(call, not on)

    def _forget(self) -> None:
        """Empty the prefix cache."""
        if self.facts["caches_prefixes"] and not self.llm.reset_prefix_cache():
            raise EngineError("vLLM would not reset its prefix cache: requests are running")

    def _set_mode(self, mode: str) -> None:
        if mode != self.mode:
            self._call("shaketable_logprobs_mode", mode)
            self.mode = mode

    def _one_worker(self, what: str) -> None:
        if self.facts["workers"] != 1:
            raise UnavailableError(
                f"this vLLM has {self.facts['workers']} workers, and each holds a part: start it with one to see {what}"
            )


def _forced(tokens: list[int]) -> dict[str, Any]:
    extra = {FORCED: list(tokens)}
    return {"max_tokens": len(tokens), "temperature": 0, "ignore_eos": True, "logprobs": 0, "extra_args": extra}


def _answer(request: Any) -> EngineAnswer:
    best = request.outputs[0]
    prompt = [] if request.prompt_logprobs is None else zip(request.prompt_logprobs, request.prompt_token_ids, strict=True)
    written = [] if best.logprobs is None else zip(best.logprobs, best.token_ids, strict=True)
    return EngineAnswer(
        tokens=list(best.token_ids),
        logprobs=[float(row[token].logprob) for row, token in written],
        prompt_logprobs=[float("nan") if row is None else float(row[token].logprob) for row, token in prompt],
        cached=int(request.num_cached_tokens or 0),
    )


def _first_line(error: BaseException) -> str:
    """The first line of an error; of a pydantic error, its first problem."""
    if isinstance(error, ValidationError):
        return first_problem(error)
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- recordings


@dataclass(frozen=True)
class WorkerRecording:
    """The recording of one sequence by a worker, which may span several passes and more than one request, as operators over it.

    The position of each row is counted from the request and never taken from the engine: the positions that it gave its rotary
    embedding may be wrong. The ids that its embedding read prove the count.
    """

    tokens: list[int]
    rows: list[dict[str, Any]]
    """The calls, with their tensors."""
    starts: dict[int, int]
    """The first token of every pass that counts."""
    routed: dict[tuple[int, int], Tensor]
    """Chosen experts by pass and layer."""

    @classmethod
    def load(cls, file: Path, tokens: list[int], spans: Sequence[tuple[int, int]]) -> WorkerRecording:
        """Read what the worker wrote; `spans` are the tokens that each request computed."""
        written = torch.load(file, weights_only=True)
        return cls(tokens, written["calls"], _starts(written["calls"], tokens, spans), written["routed"])

    def calls(self, first: int) -> list[OperatorCall]:
        """Every operator on the tokens from `first` on, in the order of the calls."""
        groups: dict[str, list[dict[str, Any]]] = {}
        last = self._last_request()
        for row in self.rows:
            if row["pass"] in last and self.starts[row["pass"]] >= first:
                groups.setdefault(row["name"], []).append(row)
        return [self._joined(name, rows) for name, rows in groups.items()]

    def routing(self) -> dict[int, Tensor] | None:
        """Chosen experts (T, k) by layer; None without experts."""
        layers = sorted({layer for _, layer in self.routed})
        passes = sorted(self._last_request())
        return {layer: torch.cat([self.routed[number, layer] for number in passes]) for layer in layers} or None

    def _last_request(self) -> set[int]:
        """The passes of the last request: an earlier one only filled the cache."""
        numbers = sorted(self.starts)
        begins = [n for i, n in enumerate(numbers) if i == 0 or self.starts[n] <= self.starts[numbers[i - 1]]]
        return {n for n in numbers if n >= begins[-1]}

    def _joined(self, name: str, rows: list[dict[str, Any]]) -> OperatorCall:
        kind, layer = rows[0]["kind"], rows[0]["layer"]
        if kind == "lm_head":
            return self._head(name, rows)
        inputs = {key: torch.cat([row["inputs"][key] for row in rows]) for key in rows[0]["inputs"]}
        output = torch.cat([row["output"] for row in rows])
        if kind == "attention":
            inputs |= {key: self._made(name, key) for key in ("k", "v")}
        if kind in ("attention", "rotary"):
            inputs["positions"] = torch.cat([torch.arange(len(row["output"])) + self.starts[row["pass"]] for row in rows])
        return OperatorCall(name, kind, layer, inputs, output)

    def logits(self, start: int, end: int) -> Tensor:
        """The head's result for some tokens, from the passes of the last request."""
        last = self._last_request()
        _, made = self._head_rows([r for r in self.rows if r["kind"] == "lm_head" and r["pass"] in last])
        return torch.stack([made[i] for i in range(start, end)])

    def _head(self, name: str, rows: list[dict[str, Any]]) -> OperatorCall:
        read, made = self._head_rows(rows)
        x, output = (torch.stack([part[i] for i in sorted(part)]) for part in (read, made))
        return OperatorCall(name, "lm_head", None, {"x": x}, output)

    def _head_rows(self, rows: list[dict[str, Any]]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The head's inputs and results by token.

        In a pass vLLM asks first for the last row, to sample, and then for the front of a prompt.
        """
        read: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        seen: set[int] = set()
        for row in rows:
            number, count = row["pass"], len(row["output"])
            start = self.starts[number] + (0 if number in seen else self._length(number) - count)
            seen.add(number)
            read |= {start + i: row["inputs"]["x"][i] for i in range(count)}
            made |= {start + i: row["output"][i] for i in range(count)}
        return read, made

    def _length(self, number: int) -> int:
        """Tokens of a pass."""
        return next(len(row["output"]) for row in self.rows if row["pass"] == number)

    def _made(self, name: str, key: str) -> Tensor:
        """Keys or values of the whole sequence, as they were made, in any request."""
        pieces = [
            (self.starts[r["pass"]], r["inputs"][key]) for r in self.rows if r["name"] == name and r["pass"] in self.starts
        ]
        whole: Tensor = pieces[0][1].new_zeros(max(start + len(part) for start, part in pieces), *pieces[0][1].shape[1:])
        for start, part in pieces:
            whole[start : start + len(part)] = part
        return whole


def _starts(rows: list[dict[str, Any]], tokens: list[int], spans: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The first token of every pass.

    Raises:
        EngineError: The engine read other tokens than it was given.
    """
    found: dict[int, int] = {}
    read = _passes(rows)
    for start, end in spans:
        while start < end:
            number, ids = next(read, (0, None))
            if ids is None or ids.tolist() != tokens[start : start + len(ids)]:
                raise EngineError(f"vLLM read other tokens than it was given, from token {start} on")
            found[number] = start
            start += len(ids)
    return found


def _passes(rows: list[dict[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    return ((row["pass"], row["inputs"]["ids"]) for row in rows if row["kind"] == "embedding")
