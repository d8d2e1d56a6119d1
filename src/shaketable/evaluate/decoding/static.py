"""Sampling whose every step is the same kernels on the same memory, so that a GPU can replay it (`cuda_graph.py`).

`generation.Decoder` lets rows leave when they have ended and grows its cache: the right thing on a CPU. On a GPU a step of a
small model is then 1,500 launches from Python at 20 to 30 ms, for 1 ms of work. Here nothing changes its shape or its place:

- the prompts are read once, eagerly, by the model's own cache; keys and values are copied to all samples of each prompt;
- slots: prompts end at slot W (their longest, rounded up, so that one graph serves many lengths), answers follow;
- rows that have ended stay, write padding, and are seen by nobody;
- tokens are drawn from uniform numbers that were taken from the generator before the first step (`sampling.py`), so the tokens
  are the same with graphs and without, on the same device;
- the host looks every few tokens whether all rows have ended, and whether logits are still finite, and reads results once.

A captured step knows the weights by address and nothing of Python. So it belongs to the addresses of all parameters, to the
hooks that are set, to the arithmetic, and to `fingerprint` of the injections, and is captured anew when one of them changes.
Hooks run while the prompts are read, at every rollout: noise that is held for a rollout is made there.

Greedy tokens are those of `Decoder`; sampled ones are other draws from the same distribution. A model that this cannot serve (a
sliding window, an attention that takes no mask) is decoded by `Decoder`, and `word` says so.

Rejected: transformers' StaticCache. It reads the prompt of every sample, and builds a mask at each step from Python numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from shaketable.errors import ShaketableError
from shaketable.evaluate.decoding.cuda_graph import Captured
from shaketable.evaluate.decoding.dynamic import (
    DESTROYED,
    Completion,
    Decoder,
    check_prompts,
    completions_of,
    padded,
    positions,
)
from shaketable.evaluate.decoding.sampling import draw
from shaketable.evaluate.decoding.static_cache import Slots
from shaketable.inject.cuda_graphs import fingerprint

BUCKET = 32
"""Prompts are rounded up to this many slots."""
LOOK = 4
"""Tokens between two looks of the host."""
KEPT = 4
"""Shapes whose memory and graphs are kept."""


class StaticDecoding:
    """A `Decoder` in memory that stays where it is."""

    def __init__(self, decoder: Decoder, *, graphs: bool = True) -> None:
        """`graphs=False` does every step by itself; the tokens are the same."""
        self.decoder, self.graphs = decoder, graphs
        self.word = "not used yet"
        """How the last rollout was done, and why not otherwise."""
        self._kept: OrderedDict[Hashable, _StaticRows] = OrderedDict()

    @torch.no_grad()
    def decode(
        self, model: Any, prompts: Sequence[Sequence[int]], *, samples: int = 1, generator: torch.Generator | None = None
    ) -> list[Completion]:
        """Complete every prompt `samples` times, as `Decoder.decode` does."""
        check_prompts(prompts)
        if (reason := unfit(model)) is not None:
            self.word = f"dynamic: {reason}"
            return self.decoder.decode(model, prompts, samples=samples, generator=generator)
        ids, mask = padded(prompts, self.decoder.pad, model.get_input_embeddings().weight.device)
        cache = DynamicCache(config=model.config)
        logits = _read(model, ids, mask, cache)
        rows = self._rows(model, cache, len(prompts) * samples, ids.shape[1])
        rows.begin(model, cache, mask, ids.shape[1], samples, generator)
        rows.take(logits.repeat_interleave(samples, 0))
        self._write(rows)
        return rows.completions()

    def _write(self, rows: _StaticRows) -> None:
        step = self._stepper(rows)
        for n in range(1, self.decoder.limit):
            if n % LOOK == 0 and not rows.goes_on():
                break
            step()
        rows.goes_on()
        if isinstance(step, Captured):
            refused = f"static, not captured: {step.why_not}" if step.why_not else "static"
            self.word = "static, captured" if step.is_captured else refused

    def _stepper(self, rows: _StaticRows) -> Callable[[], None]:
        if not self.graphs or rows.device.type != "cuda":
            self.word = "static"
            return rows.step
        if rows.captured is None:
            rows.captured = Captured(rows.step, rows.device)
        return rows.captured

    def _rows(self, model: Any, cache: DynamicCache, count: int, width: int) -> _StaticRows:
        """The memory for so many rows and so wide prompts: that of an earlier call where nothing has moved since."""
        slots = -(-width // BUCKET) * BUCKET
        now = (_addresses(model), _hooks_and_classes(model), _arithmetic(model), fingerprint(model))
        key = (count, slots, self.decoder, *now)
        found = self._kept.pop(key, None) or _StaticRows(self.decoder, cache, count, slots)
        self._kept[key] = found
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found


class _StaticRows:
    """Everything a step reads and writes."""

    def __init__(self, decoder: Decoder, like: DynamicCache, count: int, slots: int) -> None:
        first = like.layers[0].keys
        self.decoder, self.device, self.count, self.slots = decoder, first.device, count, slots
        length = -(-(slots + decoder.limit - 1) // 8) * 8
        self.slot, self.at = self._new(1), self._new(1)
        self.layers = [Slots(layer, count, length, self.slot) for layer in like.layers]
        self.cache = Cache(layers=self.layers)
        self.numbers = torch.arange(length, device=self.device)
        self.counts = self._new(count, 1, 1, length, dtype=torch.bool)
        self.place, self.ids = self._new(count, 1), self._new(count, 1)
        self.tokens = self._new(count, decoder.limit)
        self.logprobs = self._new(count, decoder.limit, dtype=torch.float32)
        self.uniforms = self._new(decoder.limit, count, dtype=torch.float32)
        self.lengths = self._new(count)
        self.alive = self._new(count, dtype=torch.bool)
        self.broken = self._new(dtype=torch.bool)
        self.ends = torch.tensor(decoder.ends, dtype=torch.long, device=self.device)
        self.model: Any = None
        self.captured: Captured | None = None

    def _new(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def begin(
        self, model: Any, read: DynamicCache, mask: Tensor | None, width: int, samples: int, generator: torch.Generator | None
    ) -> None:
        """Take over what was read, once for each sample; what an earlier rollout left is wiped, for 0 · nan is nan."""
        self.model = model
        torch._foreach_zero_([x for layer in self.layers for x in (layer.keys, layer.values)])
        here = slice(self.slots - width, self.slots)
        for layer, own in zip(self.layers, read.layers, strict=True):
            _groups(layer.keys, samples)[:, :, :, here].copy_(own.keys.unsqueeze(1))
            _groups(layer.values, samples)[:, :, :, here].copy_(own.values.unsqueeze(1))
        self.counts.fill_(True)[..., : self.slots - width] = False
        if mask is not None:
            self.counts[:, 0, 0, here] = mask.bool().repeat_interleave(samples, 0)
            self.place.copy_(mask.sum(1, keepdim=True).repeat_interleave(samples, 0))
        else:
            self.place.fill_(width)
        if self.decoder.temperature:
            self.uniforms.copy_(torch.rand(self.uniforms.shape, generator=generator, device=self.device))
        self.slot.fill_(self.slots)
        self.tokens.fill_(self.decoder.pad)
        self.alive.fill_(True)
        torch._foreach_zero_([self.at, self.lengths])
        self.logprobs.zero_()
        self.broken.fill_(False)

    def step(self) -> None:
        """One forward, one token for every row that has not ended."""
        seen = self.counts & (self.numbers <= self.slot)
        out = self.model(
            input_ids=self.ids,
            attention_mask=_as_attention_takes_it(seen, self.model),
            position_ids=self.place,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.slot.add_(1)
        self.place.add_(1)
        self.take(out.logits[:, -1])

    def take(self, logits: Tensor) -> None:
        """Choose a token for every row and note it; all on the device."""
        tokens, logprobs, finite = self._choose(logits.float())
        self.broken.logical_or_((self.alive & ~finite).any())
        tokens = tokens.masked_fill(~self.alive, self.decoder.pad)
        self.tokens.index_copy_(1, self.at, tokens.unsqueeze(1))
        self.logprobs.index_copy_(1, self.at, logprobs.masked_fill(~self.alive, 0.0).unsqueeze(1))
        self.lengths.add_(self.alive)
        self.alive.logical_and_((tokens.unsqueeze(1) != self.ends).all(1))
        self.ids.copy_(tokens.unsqueeze(1))
        self.at.add_(1)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `Decoder.choose`, with the numbers of this step; and whether each row could be chosen from."""
        decoder = self.decoder
        if decoder.temperature == 0:
            tokens, total = logits.argmax(-1), logits.logsumexp(-1)
            return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - total, torch.ones_like(self.alive)
        if decoder.temperature != 1:
            logits = logits / decoder.temperature
        if decoder.top_k:
            logits = logits.masked_fill(logits < logits.topk(decoder.top_k).values[:, -1:], -torch.inf)
        total = logits.logsumexp(-1)
        tokens = draw((logits - total.unsqueeze(1)).exp(), self.uniforms.index_select(0, self.at).squeeze(0))
        return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - total, total.isfinite()

    def goes_on(self) -> bool:
        """Whether a row is still being written; raises when one cannot be. The host waits here, and only here."""
        alive, broken = torch.stack([self.alive.any(), self.broken]).tolist()
        if broken:
            raise ShaketableError(DESTROYED)
        return bool(alive)

    def completions(self) -> list[Completion]:
        """What was written, per row."""
        return completions_of(self.tokens, self.logprobs, self.lengths)


def unfit(model: Any) -> str | None:
    """Why a model cannot be decoded with slots and a mask of our own; None when it can."""
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"the attention {attention} takes no mask of single slots"
    other = next((layer for layer in DynamicCache(config=model.config).layers if type(layer) is not DynamicLayer), None)
    return None if other is None else f"the model's cache has layers of the kind {type(other).__name__}"


def _read(model: Any, ids: Tensor, mask: Tensor | None, cache: DynamicCache) -> Tensor:
    masked = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **masked).logits
    return logits[:, -1]


def _groups(x: Tensor, samples: int) -> Tensor:
    """The rows of each prompt together."""
    return x.view(-1, samples, *x.shape[1:])


def _as_attention_takes_it(seen: Tensor, model: Any) -> Tensor:
    if model.config._attn_implementation == "sdpa":
        return seen
    dtype = model.get_input_embeddings().weight.dtype
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _addresses(model: Any) -> int:
    """Another number when a weight or buffer was put elsewhere; a graph would read what is no longer there."""
    return hash((id(model), *(x.data_ptr() for x in model.parameters()), *(x.data_ptr() for x in model.buffers())))


def _arithmetic(model: Any) -> tuple[object, ...]:
    kind = model.get_input_embeddings().weight.device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), model.dtype, model.training


def _hooks_and_classes(model: Any) -> int:
    """Another number when a hook was set or taken off, or a module was given another class: a graph keeps those it met."""
    return hash(tuple((id(type(m)), *m._forward_pre_hooks, -1, *m._forward_hooks) for m in model.modules()))
