"""The same noise with other tools: what does it cost them?

The job: relative Gaussian noise, ``y + randn * |y| * scale``, on the outputs of all 210 ``nn.Linear``
inside the decoder layers of SmolLM2-135M (``lm_head`` stays clean), a forward of 4x128 tokens on the
CPU under ``no_grad``. Every function here is a context manager that yields a noisy copy of the model
it is given and leaves the original clean, so that clean and noisy runs can alternate in one process.
Each tool is imported inside its own function and is driven through its own public interface; where a
tool cannot do exactly this job, its docstring says what it does instead.

`make bench` installs the tools and runs them beside ours.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

PINS = {
    "mrfi": "MRFI==2.1.0 scipy==1.17.1",
    "pytorchfi": "pytorchfi==0.6.0",
    "aihwkit_lightning": "aihwkit-lightning==2.1.0",
}


def decoder_linears(model: Any) -> dict[str, nn.Linear]:
    """Return the Linear modules inside the decoder layers, by full name; lm_head is not one."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name}


def relative_gaussian(y: torch.Tensor, scale: float) -> torch.Tensor:
    """The noise itself, for the tools that let their user supply it."""
    return y + torch.randn_like(y) * y.abs() * scale


@contextmanager
def naive(model: Any, scale: float) -> Iterator[Any]:
    """What everybody writes first: a plain forward hook. Exactly the job."""
    noisy = copy.deepcopy(model)
    for linear in decoder_linears(noisy).values():
        linear.register_forward_hook(lambda module, inputs, y: relative_gaussian(y, scale))
    yield noisy


@contextmanager
def mrfi(model: Any, scale: float) -> Iterator[Any]:
    """MRFI: exactly the job, with the noise registered as an error mode of its own.

    Its built-in ``NormalDisturb`` knows only one absolute standard deviation for all values, so the
    relative noise enters through ``mrfi.add_function``, MRFI's documented way to add an error mode.
    MRFI hooks every module, not only the chosen ones, and has no way to remove its hooks.
    """
    with pip_line("mrfi"):
        from mrfi import MRFI, EasyConfig, add_function
    add_function("RelativeGaussian", relative_gaussian)
    noisy = copy.deepcopy(model)
    injection = {
        "type": "activation_out",
        "error_mode": {"method": "RelativeGaussian", "scale": scale},
        "module_fullname": list(decoder_linears(noisy)),
    }
    yield MRFI(noisy, EasyConfig({"faultinject": [injection]}))


@contextmanager
def pytorchfi(model: Any, scale: float) -> Iterator[Any]:
    """PyTorchFI: exactly the job, with the noise as a custom injection function.

    PyTorchFI first profiles the model with a random *float* tensor, which a language model cannot
    take as token ids, and it hooks every layer of a type, so ``lm_head`` could not be left out.
    Both are met by giving it the decoder alone, entered through ``inputs_embeds``; the decoder with
    PyTorchFI's hooks then takes its place in the full model.
    """
    with pip_line("pytorchfi"):
        from pytorchfi.core import fault_injection
    noisy = copy.deepcopy(model)
    shape = [128, model.config.hidden_size]
    with torch.no_grad():
        injector = fault_injection(FromEmbeddings(noisy.model), 4, input_shape=shape, layer_types=[nn.Linear])
    noisy.model = injector.declare_neuron_fi(function=lambda module, inputs, y: relative_gaussian(y, scale)).decoder
    yield noisy


class FromEmbeddings(nn.Module):
    """A decoder that takes one float tensor, the only input PyTorchFI can profile with."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, embeddings: torch.Tensor) -> Any:
        return self.decoder(inputs_embeds=embeddings)


@contextmanager
def aihwkit_lightning(model: Any, scale: float) -> Iterator[Any]:
    """aihwkit-lightning: *not* exactly the job; additive Gaussian noise of the same strength.

    Its output noise has one standard deviation per token and layer: ``out_noise`` times the largest
    weight times the largest input. It has no noise relative to each output. ``out_noise`` is set for
    every layer from one clean forward, so that noise RMS over output RMS is ``scale`` there too.
    Dynamic input ranges are used because they clip nothing. Its output noise works in training mode
    only, so the analog layers (and nothing else) are in training mode.
    """
    with pip_line("aihwkit_lightning"):
        from aihwkit_lightning.nn import AnalogLinear
        from aihwkit_lightning.nn.conversion import convert_to_analog
        from aihwkit_lightning.simulator.configs import TorchInferenceRPUConfig
    config = TorchInferenceRPUConfig()
    config.pre_post.input_range.enable = config.pre_post.input_range.dynamic = True
    unit = unit_noise(model)

    def per_layer(name: str, module: nn.Module, own: Any) -> Any:
        own.forward.out_noise = scale * unit[name]
        return own

    noisy = convert_to_analog(
        model,
        config,
        specific_rpu_config_fun=per_layer,
        exclude_modules=["lm_head"],
        ensure_analog_root=False,
    )
    for layer in noisy.modules():
        if isinstance(layer, AnalogLinear):
            layer.train()
    yield noisy


def unit_noise(model: Any) -> dict[str, float]:
    """Return, by layer, the aihwkit ``out_noise`` that makes noise as strong as the output."""
    unit = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(linear: nn.Linear, inputs: tuple[torch.Tensor], y: torch.Tensor) -> None:
            largest_input = inputs[0].abs().amax(-1).square().mean().sqrt()
            unit[name] = (y.square().mean().sqrt() / largest_input / linear.weight.abs().max()).item()

        return hook

    linears = decoder_linears(model)
    handles = [linear.register_forward_hook(watch(name)) for name, linear in linears.items()]
    with torch.no_grad():
        model(tokens(model))
    for handle in handles:
        handle.remove()
    return unit


@contextmanager
def pip_line(tool: str) -> Iterator[None]:
    """Say how to install a tool that is not there."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}; pip install --no-deps {PINS[tool]}") from error


def tokens(model: Any) -> torch.Tensor:
    """The input of every run: 4x128 random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (4, 128), generator=generator)


def relative_errors(noisy: Any, batch: torch.Tensor) -> list[float]:
    """Return noise RMS over clean RMS at each Linear, given the inputs it got in a noisy run."""
    errors = []

    def compare(linear: nn.Linear, inputs: tuple[torch.Tensor], y: torch.Tensor) -> None:
        clean = nn.functional.linear(inputs[0], linear.weight, linear.bias)
        errors.append(((y - clean).norm() / clean.norm()).item())

    handles = [x.register_forward_hook(compare) for x in decoder_linears(noisy).values()]
    noisy(batch)
    for handle in handles:
        handle.remove()
    return errors


def seconds(model: Any, batch: torch.Tensor) -> float:
    """Time one forward."""
    start = time.perf_counter()
    model(batch)
    return time.perf_counter() - start


def ratios(clean: Any, noisy: Any, batch: torch.Tensor, pairs: int) -> list[float]:
    """Return noisy over clean time for each pair; the order within a pair alternates."""
    found = []
    for pair in range(-1, pairs):  # pair -1 warms up
        first, second = (noisy, clean) if pair % 2 else (clean, noisy)
        times = {id(model): seconds(model, batch) for model in (first, second)}
        if pair >= 0:
            found.append(times[id(noisy)] / times[id(clean)])
    return found


RIVALS: dict[str, Callable[[Any, float], AbstractContextManager[Any]]] = {
    "naive": naive,
    "mrfi": mrfi,
    "pytorchfi": pytorchfi,
    "aihwkit_lightning": aihwkit_lightning,
}


def main() -> None:
    """Print one line per tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", nargs="*", default=list(RIVALS), help=f"of {list(RIVALS)}")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--scale", type=float, default=0.05)
    asked = parser.parse_args()

    from shaketable.models import load_model

    model, _ = load_model("smollm2-135m")
    batch = tokens(model)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {asked.pairs} pairs")
    print(f"{'tool':<18} {'ratio':>6} {'min':>6} {'max':>6} {'rel. RMS error':>15} {'sites':>6}")
    for tool in asked.tools:
        with RIVALS[tool](model, asked.scale) as noisy, torch.no_grad():
            errors = relative_errors(noisy, batch)
            cost = ratios(model, noisy, batch, asked.pairs)
        middle, error = statistics.median(cost), statistics.median(errors)
        sites = sum(value > 1e-3 for value in errors)
        line = f"{tool:<18} {middle:6.2f} {min(cost):6.2f} {max(cost):6.2f} {error:15.4f} {sites:6d}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
