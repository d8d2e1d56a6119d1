"""The reference that a device is compared with: the model's class rebuilt from its config, and the weights of its file.

The rebuilt modules have parameters without values, and give definitions (which module is what, with which eps). The source is
loaded on the host as a second model, and its weights are cast to the device's dtype, as loading does. A model that came without
a source is its own reference: then a wrong weight is not seen, and the diagnosis says so.

`describe` names a model, its device and this installation: the facts that must agree before two devices are compared.
"""

from __future__ import annotations

import copy
import dis
import hashlib
import inspect
import json
import platform
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata as packages
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shaketable.errors import ModelError
from shaketable.numerics.intervals import UNIT, RoundingInterval, device_precision
from shaketable.numerics.operators import Leaf, leaf_of
from shaketable.records.weight_hash import weights_hash
from shaketable.sites.structure import canonical, find_layers

LOCAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "_attn_implementation"}
LOCAL |= {"attn_implementation", "_attn_implementation_internal"}
"""Config keys that say where and how a model was loaded, not which model it is."""


_MISSING = object()
_FUNCTIONS = (FunctionType, BuiltinFunctionType, partial)
_PLAIN = (bool, int, float, str, torch.dtype, *_FUNCTIONS)
_NOT_COMPUTED = {"training", "gradient_checkpointing", "name_or_path", "loss_type", "_is_hf_initialized", *vars(nn.Module())}
"""Attributes of modules that say how a model is used, and not what it computes."""
_USAGE = LOCAL | {"use_cache", "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id"}
"""Config keys of the same kind; so are token ids and dropouts."""


@dataclass(frozen=True)
class ConfigDeviation:
    """An attribute or buffer of a module that is not what the config gives."""

    path: str
    name: str
    text: str
    """In words."""
    status: Literal["wrong", "own", "unchecked"]
    """`own`: a number that may be trained, written by the model's own code when it runs, or rounded otherwise. `unchecked`: a
    switch of that kind."""


class Reference:
    """Definitions and weights to judge a model by; without a source, its name or folder, the model itself has to be trusted."""

    def __init__(self, model: nn.Module, source: str | None = None, layers: str | None = None) -> None:
        self.layers, self.paths = find_layers(model, layers)
        self.source = source
        self._file = None if source is None else _load(source, model)
        self.is_rebuilt = False
        self._config: Any = getattr(model, "config", None)
        self.other_config: list[str] = []
        """Keys in which the model's config is not that of its source."""
        self.unexplained = ""
        """A module that the model has and its config does not give, or the other way round."""
        self.expected = self._modules(model)
        """By path: what each module should be."""
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._names = {id(p): name for name, p in self._parameters.items()}
        alone = {
            n: p for n, p in self._parameters.items() if p.device.type != "meta" and p.untyped_storage().nbytes() == p.nbytes
        }
        self._homes = {p.untyped_storage().data_ptr(): name for name, p in alone.items()}
        """By their memory: parameters that have it for themselves, so that whatever lies in there is a part of them."""
        sizes = Counter[torch.dtype]()
        for parameter in self._parameters.values():
            sizes[parameter.dtype] += parameter.numel()
        self.dtype = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
        """The dtype of most values."""
        self._recent: dict[str, Tensor] = {}
        self._near: dict[int, tuple[Tensor, Tensor]] = {}
        self._wrong_at_first: set[tuple[str, str]] | None = None
        self.written: set[int] = set()
        """Memory of buffers that the model's own code writes into."""
        self.leaves = {path: leaf for path, module in self.expected.items() if (leaf := leaf_of(module))}

    def _modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """By path: the modules that the config of the source gives, else the model's. PEFT's adapters stay the model's own."""
        own = dict(model.named_modules(remove_duplicate=False))
        config: Any = getattr(model, "config", None)
        asked = _config_like(config, self._file.config) if self._file is not None and hasattr(config, "to_dict") else None
        has_adapters = hasattr(model, "peft_config")
        base = cast(Any, model).get_base_model() if has_adapters and hasattr(model, "get_base_model") else model
        try:
            plain = rebuilt(base, asked)
        except Exception:  # a constructor that wants more than a config, or reads its weights; `_unchecked` reports it
            plain = None
        if self._file is not None and hasattr(config, "to_dict"):
            held = asked if plain is None else plain.config
            self.other_config = ["its class is another"] if asked is None else list(_unlike_config(config, held))
        if plain is None:
            return own
        given: dict[str, nn.Module] = dict(plain.eval().named_modules(remove_duplicate=False))
        names = {path: canonical(path) if has_adapters else path for path in own}
        unlike = given.keys() - set(names.values()) if has_adapters else given.keys() ^ own.keys()
        if unlike:
            self.unexplained = min(unlike)
            return own
        self.is_rebuilt = True
        adapters = {path for path, module in own.items() if type(module).__module__.startswith("peft.")}
        return own | {path: given[name] for path, name in names.items() if name in given and path not in adapters}

    @property
    def has_file(self) -> bool:
        """Whether weights come from a file rather than from the device."""
        return self._file is not None

    def weight(self, name: str) -> Tensor:
        """A parameter by its full name, in the device's dtype, on the host."""
        if name not in self._parameters:
            raise LookupError(f"it has no parameter {name.rpartition('.')[2]}, which the config gives it")
        own = self._parameters[name]
        if name not in self._recent:
            held = None if self._file is None else self._file.parameters.get(name)
            given = own.detach().cpu() if held is None else held
            if given.shape != own.shape:
                shapes = f"has the shape {tuple(own.shape)} where {self.source} holds {tuple(given.shape)}"
                raise ModelError(f"{name} {shapes}; give the source of this model, or none")
            self._recent[name] = given.to(own.dtype)
        return self._recent[name]

    def is_trusted(self, name: str) -> bool:
        """Whether a parameter is in no file, and so is its own reference."""
        return self._file is None or name not in self._file.parameters

    def lowered(self) -> Iterator[tuple[str, bool]]:
        """Parameters that are held in a lower dtype than the model's, in words; and whether the file holds more of them."""
        for name, p in self._parameters.items():
            if UNIT.get(p.dtype, 0.0) > UNIT[self.dtype]:
                held, main = (str(dtype).removeprefix("torch.") for dtype in (p.dtype, self.dtype))
                file = None if self._file is None else self._file.parameters.get(name)
                is_rounded = file is not None and not torch.equal(file.to(self.dtype), p.detach().cpu().to(self.dtype))
                yield f"{name} is held in {held} in a model of {main}", is_rounded

    def near(self, tensor: Tensor) -> Tensor:
        """A tensor of the model on the host, copied once per layer."""
        if tensor.device.type == "cpu":
            return tensor.detach()
        if id(tensor) not in self._near:
            self._near[id(tensor)] = (tensor, tensor.detach().cpu())
        return self._near[id(tensor)][1]

    def forget(self) -> None:
        """Let go of the weights that were read, before the next layer."""
        self._recent.clear()
        self._near.clear()

    def like(self, tensor: Tensor) -> Tensor | None:
        """Reference values of a parameter, or of a view into one; None for any other tensor."""
        name = self._names.get(id(tensor)) or self._homes.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return None
        own, whole = self._parameters[name], self.weight(name)
        if tensor is own:
            return whole
        if not own.is_contiguous() or tensor.dtype != own.dtype:
            return None
        return whole.contiguous().as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - own.storage_offset())

    def note_deviations(self, model: nn.Module) -> None:
        """Remember what deviates before a forward: deviations that come with one are written by the model's own code."""
        self._wrong_at_first = {(one.path, one.name) for one in self.unlike(model)}

    def unlike(self, module: nn.Module, prefix: str = "", skip: Collection[str] = ()) -> Iterator[ConfigDeviation]:
        """Attributes and buffers of a module's parts that are not what the config gives.

        `prefix` is the module's path in the model; parts below the paths to skip are looked at elsewhere.
        """
        for path, part in module.named_modules() if self.is_rebuilt else ():
            if any(path == s or path.startswith(f"{s}.") for s in skip) or isinstance(part, nn.Dropout):
                continue
            full = ".".join(p for p in (prefix, path) if p)
            for name, text, is_close in self._unlike(part, full):
                if self._wrong_at_first is None or (full, name) in self._wrong_at_first:
                    value, given = (getattr(one, name, None) for one in (part, self.expected[full]))
                    # A tensor in the place of None is a state that a forward keeps.
                    is_number = isinstance(value, float) or (isinstance(value, Tensor) and given is not None)
                    may_be_right = is_close or self._may_be_right(part, name)
                    status = "wrong" if not may_be_right else "own" if is_number else "unchecked"
                    yield ConfigDeviation(path, name, text, status)  # type: ignore[arg-type]

    def _unlike(self, part: nn.Module, full: str) -> Iterator[tuple[str, str, bool]]:
        """The name of each, how it differs in words, and whether it is only less exact than the config's."""
        expected = self.expected[full]
        for name in attributes_of(part) | attributes_of(expected):
            value = vars(part).get(name, getattr(part, name, _MISSING))
            given = vars(expected).get(name, getattr(type(expected), name, _MISSING))
            is_method = isinstance(given, _FUNCTIONS) and name not in vars(expected)
            if _is_plain(given) and not is_method and not (_is_plain(value) and _comparable(value) == _comparable(given)):
                yield name, f"its {name} is {_in_words(value)} where the config says {_in_words(given)}", False
        for text in self._unlike_own_config(vars(part).get("config"), vars(expected).get("config")):
            yield "config", f"its own config is another: {text}", False
        for name in sorted(expected._buffers.keys() - part._buffers.keys()):
            yield name, f"it has no buffer {name}, which the config gives it", False
        for name, buffer in part._buffers.items():
            given = self._given(part, full, name, expected._buffers.get(name))
            if buffer is None or given is None or buffer.layout != torch.strided or _agree(buffer, given):
                continue
            dtypes = set() if self._is_static(expected) else {b.dtype for b in part._buffers.values() if b is not None}
            if not any(_agree(buffer, given.to(dtype)) for dtype in dtypes):  # it may be made of another one that was rounded
                is_close = _agree(buffer, given, UNIT.get(buffer.dtype, 0.0))
                yield name, f"the values of its {name} are not what the config gives", is_close

    def _unlike_own_config(self, own: Any, given: Any) -> Iterator[str]:
        """Keys of the config that a module holds, where it is not the model's own, that are not what they should be."""
        if own is self._config or not hasattr(own, "to_dict") or not hasattr(given, "to_dict"):
            return
        kinds = [getattr(config, "_attn_implementation", None) for config in (own, given)]
        if kinds[0] != kinds[1]:
            yield f"its attention is {kinds[0]!r} where the model's is {kinds[1]!r}"
        yield from (text for text in _unlike_config(own, given) if text not in self.other_config)

    def _given(self, part: nn.Module, full: str, name: str, built: Tensor | None) -> Tensor | None:
        """Reference values of a buffer: from the file if it is saved there, else as the config's class makes it."""
        if name in part._non_persistent_buffers_set or self._file is None:
            return built
        return self._file.buffers.get(canonical(f"{full}.{name}".lstrip(".")), built)

    def _may_be_right(self, part: nn.Module, name: str) -> bool:
        """Whether a number that is not the config's may have been trained and saved, or written by the model's own code."""
        buffer = part._buffers.get(name)
        is_saved = buffer is not None and name not in part._non_persistent_buffers_set and self._file is None
        is_written = buffer is not None and buffer.untyped_storage().data_ptr() in self.written
        is_followed = buffer is not None and not self._is_static(part)
        return is_saved or is_written or is_followed or name[0] == "_" or sets_attribute(type(part), name)

    def _is_static(self, module: nn.Module) -> bool:
        """Whether a module's buffers stay what they were made: rotations that follow the length do not."""
        return str(getattr(module, "rope_type", "default")) not in ("dynamic", "longrope")

    def leaf(self, path: str) -> Leaf | None:
        """The definition of the module at a full path."""
        return self.leaves.get(path)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Numbers, switches, words and functions that a module holds and that may change its results."""
    is_model = hasattr(module, "_from_config")
    return {
        name: value
        for name, value in vars(module).items()
        if _is_plain(value) and name not in _NOT_COMPUTED and "dropout" not in name and not (is_model and name[0] == "_")
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return value is None or isinstance(value, _PLAIN)


def _comparable(value: Any) -> Any:
    """The same for functions of the same code."""
    if isinstance(value, partial):
        return _comparable(value.func), value.args, value.keywords
    return value.__code__ if isinstance(value, FunctionType) else value


def _in_words(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, _FUNCTIONS):
        return str(getattr(value, "__name__", value))
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _config_like(own: Any, given: Any) -> Any:
    """The config of a source, told to attend as the model does; None when it is for another class."""
    config = copy.deepcopy(given)
    if type(config) is not type(own):
        config = config.get_text_config()
    if type(config) is not type(own):
        return None
    for key in ("_attn_implementation", "_experts_implementation", "dtype"):
        if hasattr(own, key):
            setattr(config, key, getattr(own, key))
    return config


def _unlike_config(own: Any, given: Any) -> Iterator[str]:
    """Keys in which two configs differ that may change what a model computes."""
    mine, other = own.to_dict(), given.to_dict()
    for key in sorted({*mine, *other} - _USAGE):
        if key[0] == "_" or key.endswith("_token_id") or "dropout" in key:
            continue
        if json.dumps(mine.get(key), default=str, sort_keys=True) != json.dumps(other.get(key), default=str, sort_keys=True):
            yield f"{key} is {mine.get(key)!r} where the file says {other.get(key)!r}"


def rebuilt(model: nn.Module, config: Any = None) -> nn.Module | None:
    """The model's class rebuilt from its config, or from another; None where it has no config.

    Parameters have no values, but buffers do: frequencies and scales can be compared.
    """
    config, build = config or getattr(model, "config", None), getattr(type(model), "_from_config", None)
    if config is None or build is None:
        return None
    from accelerate import init_empty_weights

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            _disable_current_modes(),
            torch.device("cpu"),
            init_empty_weights(include_buffers=False),
            torch.random.fork_rng(devices=[]),
        ):
            torch.default_generator.manual_seed(0)  # random buffers, and what is said of them, are the same every time
            skeleton: nn.Module = build(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(default)
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


def _agree(buffer: Tensor, given: Tensor, unit: float = 2.0**-24) -> bool:
    """Whether a buffer is the given one up to a few units: frequencies may have been computed on another device."""
    if buffer.shape != given.shape or given.device.type == "meta":
        return given.device.type == "meta"
    got, expected = buffer.detach().cpu(), given.to(torch.promote_types(buffer.dtype, given.dtype))
    if not buffer.is_floating_point():
        return torch.equal(got, expected.to(got.dtype))
    ends = [(expected.double() * (1 + sign * 8 * unit)).to(got.dtype) for sign in (-1, 1)]
    allowed = RoundingInterval(torch.minimum(*ends), torch.maximum(*ends))
    return not bool(allowed.outside(got).any())


@dataclass(frozen=True)
class _Source:
    """The config and the tensors of a model's source."""

    config: Any
    parameters: dict[str, Tensor]
    """By the model's names; those of an adapter are not in the files of its base."""
    buffers: dict[str, Tensor]


def _load(source: str, model: nn.Module) -> _Source:
    from shaketable.models import load_model

    loaded, _ = load_model(source, tokenizer=False)
    given = dict(loaded.named_parameters(remove_duplicate=False))
    given |= {canonical(name): p for name, p in given.items()}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = {name: p.detach() for name in names if (p := given.get(name, given.get(canonical(name)))) is not None}
    lacking = [name for name in names if name not in found]
    if lacking and not hasattr(model, "peft_config"):
        raise ModelError(f"{source} is not the source of this model: it holds no {lacking[0]} ({len(lacking)} missing)")
    return _Source(loaded.config, found, dict(loaded.named_buffers()))


def _containers(model: nn.Module) -> str:
    """Modules that could hold the layers, in words."""
    found = {
        path: list(m.children()) for path, m in model.named_modules() if path and any(any(c.children()) for c in m.children())
    }
    words = [f"{path} ({len(inner)} × {type(inner[0]).__name__})" for path, inner in found.items()]
    return f"name one as layers=: {', '.join(words[:8])}" if words else "no module in it holds others that have parts"


def check_model(model: nn.Module, stack: str | None = None) -> None:
    """Refuse, in one line, what cannot be judged: no layers, no values, NaNs, packed weights."""
    layers, _ = find_layers(model, stack)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no list of decoder layers to look into; {_containers(model)}")
    packed = getattr(getattr(model, "config", None), "quantization_config", None)
    if packed is not None:
        method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
        raise ModelError(f"the checkpoint is quantized ({method or 'unknown method'}); locate has no host definition for that")
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"{name} is on the meta device and has no values; load the model's weights first")
        if type(parameter.data) is not Tensor or parameter.layout != torch.strided:
            kind = type(parameter.data).__name__ if parameter.layout == torch.strided else parameter.layout
            raise ModelError(f"{name} is a {kind}; locate has no host definition for weights that are packed or sparse")
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"{name} is {parameter.dtype}; locate judges float32, bfloat16 and float16")
        finite = torch.isfinite(parameter.detach())
        if not bool(finite.all()):
            bad = int((~finite).sum())
            raise ModelError(f"{name} holds {bad} of {parameter.numel()} values that are NaN or infinite")


# ---- naming a model and its device


def describe(model: nn.Module, layers: str | None = None) -> dict[str, Any]:
    """The fields of the metadata that a model, its device and this installation give."""
    import shaketable

    weight = next(model.parameters())
    config: Any = getattr(model, "config", None)
    precision = device_precision(weight.device, weight.dtype)
    return {
        "model_class": type(model).__name__,
        "num_layers": len(find_layers(model, layers)[0]),
        "hidden_size": _width(model, config),
        "config_sha256": config_hash(config) if hasattr(config, "to_diff_dict") else _sha256(repr(model)),
        "weights_sha256": weights_hash(model),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": device_name(weight.device),
        "attention": str(getattr(config, "_attn_implementation", None) or "unknown"),
        "versions": {
            "shaketable": shaketable.__version__,
            "torch": str(torch.__version__),
            "transformers": packages.version("transformers"),
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "switches": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cuda_tf32": torch.backends.cuda.matmul.allow_tf32,
        },
        "product_input": precision.product_input,
    }


def _width(model: nn.Module, config: Any) -> int:
    """Size of the hidden states, from the config; without one, the width of the first embedding."""
    if hasattr(config, "get_text_config"):
        return int(config.get_text_config().hidden_size)
    return input_embedding(model).embedding_dim


def input_embedding(model: nn.Module) -> nn.Embedding:
    """The embedding of tokens, as the model names it; else the first one there is."""
    if callable(ask := getattr(model, "get_input_embeddings", None)):
        named: nn.Embedding = ask()
        return named
    found = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if found is None:
        raise ModelError(f"{type(model).__name__} has no embedding of tokens to take a fingerprint of")
    return found


def device_name(device: torch.device) -> str:
    """The device as a person knows it."""
    name = product_name(device)
    return device.type if name is None else f"{device.type} ({name})"


def product_name(device: torch.device) -> str | None:
    """Product name of an accelerator; None for a CPU, and where torch cannot tell."""
    ask = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return None if ask is None else str(ask(device))


def config_hash(config: Any) -> str:
    """sha256 of what a config says of the model, wherever and however it was loaded."""
    return _sha256(json.dumps(_without_local(config.to_diff_dict()), sort_keys=True, default=str))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_local(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_local(v) for k, v in value.items() if k not in LOCAL}
    return value
