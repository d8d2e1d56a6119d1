"""What the trainer makes of the inputs that an engine recorded for an operator: teacher forcing, operator by operator."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from shaketable.mismatch.engines.engine import NotToldError, OperatorCall
from shaketable.mismatch.operators.attention import visible
from shaketable.mismatch.operators.observe import DecoderParts
from shaketable.mismatch.teacher_forcing import chosen


class Recompute:
    """The trainer's operators, one at a time, in its own dtype and with its own kernels."""

    def __init__(self, model: Any) -> None:
        self.model, self.decoder = model, DecoderParts.of(model)
        weight = next(model.parameters())
        self.dtype, self.device = weight.dtype, weight.device

    @torch.no_grad()
    def made(self, call: OperatorCall) -> Tensor:
        """What the trainer makes of a call's inputs, on the CPU, with the channels of all heads in the last dimension."""
        if call.kind == "log_softmax":
            return torch.tensor(chosen(call.inputs["x"], call.inputs["ids"].tolist()), dtype=torch.float64).unsqueeze(1)
        x = {k: (t.to(self.device, self.dtype) if t.is_floating_point() else t.to(self.device)) for k, t in call.inputs.items()}
        return self._compute(call, x).reshape(call.output.shape[0], -1).cpu()

    def _compute(self, call: OperatorCall, x: dict[str, Tensor]) -> Tensor:
        if call.kind == "router":
            made = self.model.get_submodule(call.name)(x["x"])
            return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]
        if call.kind in ("linear", "lm_head", "embedding", "rms_norm", "experts"):
            given = x["ids"] if call.kind == "embedding" else x["x"] + x["residual"] if "residual" in x else x["x"]
            made = self.model.get_submodule(call.name)(given.unsqueeze(0))
            return made[0][0] if isinstance(made, tuple) else made[0]  # type: ignore[no-any-return]
        if call.kind == "residual":
            return x["residual"] + x["x"]
        if call.kind == "activation":
            return self.model.get_submodule(call.name)(x["x"]) * x["up"]  # type: ignore[no-any-return]
        if call.kind == "rotary":
            return self._rotary(call, x)
        if call.kind == "attention":
            return self._attention(call, x)
        raise NotToldError(f"the trainer cannot compute {call.kind} by itself")

    def _rotary(self, call: OperatorCall, x: dict[str, Tensor]) -> Tensor:
        module = self.model.get_submodule(call.name.rpartition(".")[0])
        rotate = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
        heads = x["x"].transpose(0, 1).unsqueeze(0)
        cos, sin = self.model.get_submodule(self.decoder.rotary)(heads, x["positions"].unsqueeze(0))
        return rotate(heads, heads, cos, sin)[0][0].transpose(0, 1)  # type: ignore[no-any-return]

    def _attention(self, call: OperatorCall, x: dict[str, Tensor]) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module, name = self.model.get_submodule(call.name), self.model.config._attn_implementation
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        q, k, v = (x[n].transpose(0, 1).unsqueeze(0) for n in ("q", "k", "v"))
        seen = visible(module, call.inputs["positions"], k.shape[2])
        whole = bool((seen == torch.ones_like(seen).tril()).all()) and seen.shape[0] == seen.shape[1]
        mask = None
        if name != "sdpa" or not whole:
            mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill(~seen, torch.finfo(self.dtype).min)
            mask = mask[None, None].to(self.device)
        return attend(module, q, k, v, mask, dropout=0.0, scaling=module.scaling)[0][0]  # type: ignore[no-any-return]
