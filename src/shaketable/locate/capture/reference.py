"""What the device should compute: the model's class built anew from its config, and the weights of its file.

The skeleton has parameters without values and gives definitions (which module is what, with which eps). Weights are read
from the file when they are asked for, one layer at a time, and cast on the host to the device's dtype, as loading does.
A model that came without a file is its own reference: then a wrong weight is not seen, and the diagnosis says so.
"""

from __future__ import annotations

import dis
import inspect
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaketable.errors import ModelError
from shaketable.locate.capture.leaf_modules import Leaf, leaf_of
from shaketable.locate.probes.rounding import UNIT
from shaketable.sites.structure import find_layers


class Reference:
    """Definitions and weights to judge a model by.

    Args:
        model: The model under test.
        source: Its name or folder, when its weights can be read again; None when the model itself has to be believed.
    """

    def __init__(self, model: nn.Module, source: str | None = None) -> None:
        self.source = source
        self.is_rebuilt = False
        self.skeleton = self._build(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._homes = {p.untyped_storage().data_ptr(): name for name, p in self._parameters.items() if _fills(p)}
        self._files = None if source is None else _open(source, self._parameters)
        self._recent: dict[str, Tensor] = {}
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}
        self._wrong_at_first: set[tuple[str, str]] | None = None
        self.written: set[int] = set()
        """Memory of buffers that the model's own code writes into."""
        self.leaves = {path: leaf for path, module in self.skeleton.named_modules() if (leaf := leaf_of(module))}

    def _build(self, model: nn.Module) -> nn.Module:
        """The class built from its config on the meta device; the model itself where that cannot be done."""
        try:
            skeleton = rebuilt(model)
        except Exception:  # somebody's constructor, which wants more than a config, or looks at its weights
            return model
        if skeleton is None:
            return model
        if {n for n, _ in skeleton.named_modules()} != {n for n, _ in model.named_modules()}:
            return model
        self.is_rebuilt = True
        return skeleton.eval()

    @property
    def has_file(self) -> bool:
        """Whether weights come from a file rather than from the device."""
        return self._files is not None

    def weight(self, name: str) -> Tensor:
        """A parameter by its full name, in the device's dtype, on the host."""
        own = self._parameters[name]
        if name not in self._recent:
            self._recent[name] = own.detach().cpu() if self._files is None else self._files.read(name).to(own.dtype)
        return self._recent[name]

    def wide(self, tensor: Tensor) -> Tensor:
        """A host tensor in float64, made once per layer."""
        if id(tensor) not in self._wide:
            self._wide[id(tensor)] = (tensor, tensor.detach().double())
        return self._wide[id(tensor)][1]

    def forget(self) -> None:
        """Let go of the weights that were read, before the next layer."""
        self._recent.clear()
        self._wide.clear()

    def like(self, tensor: Tensor) -> Tensor | None:
        """What a parameter, or a view into one, should hold; None for any other tensor."""
        name = self._names.get(id(tensor)) or self._homes.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return None
        own, whole = self._parameters[name], self.weight(name)
        if tensor is own:
            return whole
        if not own.is_contiguous() or tensor.dtype != own.dtype:
            return None
        return whole.contiguous().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - own.storage_offset())

    def note_numbers(self, model: nn.Module) -> None:
        """Remember which numbers are wrong before a forward: what is wrong only after one, the model's own code has written."""
        self._wrong_at_first = {(path, name) for path, name, _, _ in self._unlike_numbers(model, "", ())}

    def other_numbers(self, module: nn.Module, prefix: str, skip: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """Numbers and buffers of a module's parts that are not what the config gives: the path, and what is wrong.

        Args:
            module: A layer, or the model.
            prefix: Its path in the model.
            skip: Paths whose parts are looked at elsewhere.
        """
        return ((path, text) for path, _, text, is_own in self._unlike_numbers(module, prefix, skip) if not is_own)

    def own_numbers(self, module: nn.Module, prefix: str, skip: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """The same, of numbers that the model's own code writes when it runs, or that are saved in a file that is not given."""
        return ((path, text) for path, _, text, is_own in self._unlike_numbers(module, prefix, skip) if is_own)

    def _unlike_numbers(self, module: nn.Module, prefix: str, skip: Collection[str]) -> Iterator[tuple[str, str, str, bool]]:
        """Path, name, what is wrong, and whether nobody can say that it is."""
        if not self.is_rebuilt:
            return
        for path, part in module.named_modules():
            if any(path == s or path.startswith(f"{s}.") for s in skip) or isinstance(part, nn.Dropout):
                continue
            full = ".".join(p for p in (prefix, path) if p)
            for name, text in self._unlike_numbers_of(part, full):
                if self._wrong_at_first is None or (full, name) in self._wrong_at_first:
                    yield path, name, text, self._may_be_right(part, name)

    def _unlike_numbers_of(self, part: nn.Module, full: str) -> Iterator[tuple[str, str]]:
        expected = self.skeleton.get_submodule(full)
        for name, value in vars(part).items():
            given = vars(expected).get(name)
            if isinstance(value, float) and isinstance(given, float) and value != given and "dropout" not in name:
                yield name, f"its {name} is {value:g} where the config says {given:g}"
        for name, buffer in part._buffers.items():
            given = self._given(part, full, name, expected._buffers.get(name))
            if buffer is not None and given is not None and self._is_static(part) and not _agree(buffer, given):
                yield name, _unlike(name, buffer, given)

    def _given(self, part: nn.Module, full: str, name: str, built: Tensor | None) -> Tensor | None:
        """What a buffer should hold: one that is saved with the weights is the file's to say, not the config's."""
        if name in part._non_persistent_buffers_set:
            return built
        return built if self._files is None else self._files.buffer(f"{full}.{name}".lstrip("."), built)

    def _may_be_right(self, part: nn.Module, name: str) -> bool:
        """Whether a number that is not the config's may have been trained and saved, or written by the model's own code."""
        buffer = part._buffers.get(name)
        is_saved = buffer is not None and name not in part._non_persistent_buffers_set and self._files is None
        is_written = buffer is not None and buffer.untyped_storage().data_ptr() in self.written
        return is_saved or is_written or sets_attribute(type(part), name)

    def _is_static(self, module: nn.Module) -> bool:
        """Whether a module's buffers stay what they were made: rotations that follow the length do not."""
        return str(getattr(module, "rope_type", "default")) not in ("dynamic", "longrope")

    def leaf(self, path: str) -> Leaf | None:
        """The definition of the module at a full path."""
        return self.leaves.get(path)


def rebuilt(model: nn.Module, config: Any = None) -> nn.Module | None:
    """The model's class built anew from its config, or from another; parameters have no values. None where it has no config."""
    config, build = config or getattr(model, "config", None), getattr(type(model), "_from_config", None)
    if config is None or build is None:
        return None
    with torch.device("cpu"), _parameters_on_meta():
        skeleton: nn.Module = build(config)
    return skeleton


def sets_attribute(kind: type, name: str) -> bool:
    """Whether a class's own code sets an attribute elsewhere than in its constructor."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for base in own for key, f in vars(base).items() if key != "__init__"]
    return any(
        name in code.co_consts or any(i.opname == "STORE_ATTR" and i.argval == name for i in dis.get_instructions(code))
        for code in codes
        if code is not None
    )


def _agree(buffer: Tensor, given: Tensor) -> bool:
    """The same up to a few units in the last place: frequencies may have been computed on another device."""
    if buffer.shape != given.shape or given.device.type == "meta":
        return given.device.type == "meta"
    expected, got = given.to(buffer.dtype), buffer.detach().cpu()
    if not buffer.is_floating_point():
        return torch.equal(got, expected)
    return torch.allclose(got.double(), expected.double(), rtol=8 * UNIT.get(buffer.dtype, 2.0**-24), atol=0.0, equal_nan=True)


def _unlike(name: str, buffer: Tensor, given: Tensor) -> str:
    """In words: how a buffer differs from the one that the config gives."""
    if buffer.shape != given.shape:
        return f"its {name} has the shape {tuple(buffer.shape)} where the config gives {tuple(given.shape)}"
    got, expected = buffer.detach().cpu(), given.to(buffer.dtype)
    at = tuple(int(i) for i in (got != expected).nonzero()[0])
    count = f"{int((got != expected).sum()):,} of {got.numel():,} values of its {name} are not what the config gives"
    return f"{count}, the first is {float(got[at]):g} and should be {float(expected[at]):g}"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built here have parameters without values, but real buffers: frequencies and scales can be compared."""
    register = nn.Module.register_parameter

    def without_values(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None:
            self._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = without_values  # type: ignore[method-assign,assignment]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fills(parameter: Tensor) -> bool:
    """Whether a parameter has its memory for itself, so that whatever lies in there is a part of it."""
    return parameter.device.type != "meta" and parameter.untyped_storage().nbytes() == parameter.nbytes


class _Folder:
    """Safetensors files, read tensor by tensor."""

    def __init__(self, files: dict[str, Path], keys: dict[str, str]) -> None:
        self.files = files
        self.keys = keys

    def read(self, name: str) -> Tensor:
        return self._read(self.keys[name])

    def buffer(self, name: str, built: Tensor | None) -> Tensor | None:
        """A saved buffer; the built one where the file has none."""
        return self._read(name) if name in self.files else built

    def _read(self, key: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.files[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor


class _Loaded:
    """A second copy of the model, for files whose names are not those of the model's parameters."""

    def __init__(self, source: str) -> None:
        from shaketable.models import load_model

        model, _ = load_model(source)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.parameters[name].detach()
        return tensor

    def buffer(self, name: str, built: Tensor | None) -> Tensor | None:
        """A buffer as it was loaded."""
        return self.buffers.get(name, built)


def _open(source: str, parameters: dict[str, Any]) -> _Folder | _Loaded:
    from shaketable.models import BUILT_IN, built_in_path

    folder = built_in_path(source) if source in BUILT_IN else Path(source).expanduser()
    if not folder.is_dir():
        return _Loaded(source)
    files = _index(folder)
    tied = {id(p): name for name, p in parameters.items() if name in files}
    keys = {name: name if name in files else tied.get(id(p), "") for name, p in parameters.items()}
    return _Folder(files, keys) if all(keys.values()) else _Loaded(source)


def _index(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {key: folder / file for key, file in table.items()}
        found: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights in {folder} cannot be read again: {error}") from error
    return found


def check_model(model: nn.Module) -> None:
    """Refuse, in one line, what cannot be judged: no layers, no values, values that are no numbers, packed weights."""
    layers, _ = find_layers(model)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers to look into")
    packed = getattr(getattr(model, "config", None), "quantization_config", None)
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
        raise ModelError(f"the checkpoint is quantized ({method or 'unknown method'}); locate has no host definition for that")
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"{name} is on the meta device and has no values; load the model's weights first")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"{name} is {parameter.dtype}; locate judges float32, bfloat16 and float16")
        finite = torch.isfinite(parameter.detach())
        if not bool(finite.all()):
            bad = int((~finite).sum())
            raise ModelError(f"{name} holds {bad} of {parameter.numel()} values that are NaN or infinite")
