"""Decoding in batches: greedy for scores, sampled for rollouts, with the log-probability of every chosen token.

One loop over `model.forward` with the model's own cache. Each prompt is read once for all its samples, rows that have ended
leave the batch, and nothing runs per step for features that are not used.

Rows are padded on the left and masked; results keep the order of the prompts. In float32 they do not depend on how prompts were
batched. Noise is keyed by the call and not by the row, so under a random fault another batch size draws other noise of the same
law: the batch size is part of a condition and is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shaketable.errors import ModelError, ShaketableError

Progress = Callable[[int, int], None]
LARGEST_BATCH = 512
DESTROYED = "the sampler's logits are no longer finite: the noise, or the training, has destroyed the model"


@dataclass(frozen=True)
class Completion:
    """What a model wrote: its tokens, the end token included, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Decoder:
    """How tokens are chosen and when a row ends."""

    limit: int
    """The most tokens of a completion."""
    ends: tuple[int, ...]
    pad: int
    temperature: float = 0.0
    """0 is greedy."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any, limit: int, temperature: float = 0.0) -> Decoder:
        """The end and padding tokens of a model and its tokenizer."""
        config = getattr(model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        found = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        known = tuple(dict.fromkeys(int(e) for e in found if e is not None))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else known[0] if known else 0
        return cls(limit, known, int(pad), temperature)

    @torch.no_grad()
    def decode(
        self, model: Any, prompts: Sequence[Sequence[int]], *, samples: int = 1, generator: torch.Generator | None = None
    ) -> list[Completion]:
        """Complete every prompt `samples` times; the samples of a prompt are neighbours in the result.

        Args:
            model: A causal language model in eval mode.
            prompts: Token ids, not padded.
            samples: Completions of each prompt.
            generator: Draws the tokens when the temperature is not 0, on the device of the model.
        """
        if not all(prompts):
            raise ShaketableError("a prompt has no tokens: there is nothing to continue")
        device = model.get_input_embeddings().weight.device
        ids, mask = padded(prompts, self.pad, device)
        count, ends = len(prompts) * samples, torch.tensor(self.ends, dtype=torch.long, device=device)
        tokens = torch.full((count, self.limit), self.pad, device=device)
        logprobs = torch.zeros(count, self.limit, device=device)
        lengths = torch.zeros(count, dtype=torch.long, device=device)
        alive = torch.arange(count, device=device)
        places = torch.full((len(prompts),), ids.shape[1], device=device) if mask is None else mask.sum(1)
        at = {} if mask is None else {"position_ids": positions(mask)}
        cache: Any = None
        with _unplanned_attention():
            for step in range(self.limit):
                masked = {} if mask is None else {"attention_mask": mask}
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **at, **masked)
                cache, logits = out.past_key_values, out.logits[:, -1]
                if step == 0 and samples > 1:  # the prompts are read: one row per sample
                    cache.batch_repeat_interleave(samples)
                    logits, places = (x.repeat_interleave(samples, 0) for x in (logits, places))
                    mask = None if mask is None else mask.repeat_interleave(samples, 0)
                chosen, logprob = self.choose(logits, generator)
                tokens[alive, step], logprobs[alive, step], lengths[alive] = chosen, logprob, step + 1
                going_on = ~torch.isin(chosen, ends)
                if not bool(going_on.all()):  # rows that have ended leave the batch
                    keep = going_on.nonzero().squeeze(1)
                    if not len(keep):
                        break
                    cache.batch_select_indices(keep)
                    alive, chosen, places = alive[keep], chosen[keep], places[keep]
                    mask = None if mask is None else mask[keep]
                ids, at = chosen.unsqueeze(1), {"position_ids": (places + step).unsqueeze(1)}
                mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        rows = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), strict=True)
        return [Completion(t[:n], p[:n]) for t, p, n in rows]

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """One token per row, and its log-probability under the distribution it was drawn from."""
        logits = logits.float()
        if self.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            logits = logits / self.temperature
            if bool(logits.isnan().any() | logits.isposinf().any()):
                raise ShaketableError(DESTROYED)
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return tokens, chosen - logits.logsumexp(-1)


@contextmanager
def _unplanned_attention() -> Iterator[None]:
    """Attention without cuDNN's, which plans again for every shape: 30 ms on an H200, and here every token is a new shape."""
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def chat_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of one user turn and the beginning of the answer. A template is a program and may raise anything."""
    messages = [{"role": "user", "content": text}]
    try:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ModelError(f"the model's chat template cannot be used: {what}") from error
    return list(rendered["input_ids"])


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """A prompt as the model is given it: a chat turn if its tokenizer has a template, else plain text."""
    if tokenizer.chat_template is None:
        found: list[int] = tokenizer(text)["input_ids"]
        return found
    return chat_tokens(tokenizer, text)


def padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts in one tensor, padded on the left, and the mask of what is not padding; None when nothing is."""
    width = max(len(p) for p in prompts)
    rows = [[pad] * (width - len(p)) + list(p) for p in prompts]
    if all(len(p) == width for p in prompts):
        return torch.tensor(rows, device=device), None
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def positions(mask: Tensor) -> Tensor:
    """The place of each token in its own row."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Indices of the prompts in batches of similar length, longest first: what does not fit fails at once."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def decode_all(
    decoder: Decoder, model: Any, prompts: Sequence[Sequence[int]], *, batch_size: int, progress: Progress | None = None
) -> list[Completion]:
    """Complete every prompt once, in batches; results in the order of the prompts."""
    done: dict[int, Completion] = {}
    for indices in batches(prompts, batch_size):
        found = decoder.decode(model, [prompts[i] for i in indices])
        done.update(zip(indices, found, strict=True))
        if progress is not None:
            progress(len(done), len(prompts))
    return [done[i] for i in range(len(prompts))]


def probe_batch_size(decoder: Decoder, model: Any, prompts: Sequence[Sequence[int]], largest: int = LARGEST_BATCH) -> int:
    """The largest power of two that fits into memory: the longest prompts are read with it, halved until they fit.

    On a CPU the operating system kills what does not fit instead of telling, so there the size is bounded by the memory
    that is free: logits and cache of one row, times the rows, in half of it.
    """
    size = min(largest, 1 << max(0, len(prompts) - 1).bit_length())
    longest = max(prompts, key=len)
    device = model.get_input_embeddings().weight.device
    if device.type == "cpu":
        return max(1, min(size, _rows_that_fit(model, len(longest) + decoder.limit)))
    while size > 1:
        try:
            Decoder(min(2, decoder.limit), decoder.ends, decoder.pad).decode(model, [longest] * size)
            return max(1, size // 2) if decoder.limit > 64 else size
        except torch.OutOfMemoryError:
            torch.get_device_module(device).empty_cache()
            size //= 2
    return 1


def _rows_that_fit(model: Any, width: int) -> int:
    import psutil

    config = model.config.get_text_config()
    per_token = 2 * config.num_hidden_layers * config.hidden_size + 8 * config.hidden_size
    row = 4 * (width * per_token + config.vocab_size * 4)
    fit = int(psutil.virtual_memory().available // 2 // row)
    return 1 << max(0, fit.bit_length() - 1)
