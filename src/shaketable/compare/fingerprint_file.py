"""Fingerprints on disk: written whole or not at all, read only when every byte is as it was written.

A file is refused, in one line, when it is no safetensors file (a pickle is named and never opened), when another program or
another schema wrote it, when a tensor is missing, and when its sha256 is not that of its contents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor, nn

from shaketable.capture.model_identity import describe
from shaketable.capture.reference import check_model
from shaketable.compare.fingerprint import FORMAT, SCHEMA, Fingerprint, FingerprintError, Metadata, op_name
from shaketable.io.replacing import replacing
from shaketable.records.weight_hash import digest


def write_fingerprint(fingerprint: Fingerprint, path: Path) -> None:
    """All of the file or nothing: written beside its place, then moved there."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    about = fingerprint.about.model_dump_json(by_alias=True)
    try:
        with replacing(path.resolve()) as draft:
            save_file(fingerprint.tensors, draft, metadata={"shaketable": about, "sha256": digest(about, fingerprint.tensors)})
            os.chmod(draft, 0o666 & ~_umask())
    except (OSError, SafetensorError) as error:
        raise FingerprintError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def _umask() -> int:
    """The rights this process takes from new files; safetensors takes all from others, and a fingerprint is to be shared."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint and check every byte of it.

    Raises:
        FingerprintError: The file is missing, no safetensors, another program's, of another schema, or damaged.
    """
    head, tensors = _open(path)
    about = _metadata(path, head)
    fingerprint = Fingerprint(about, tensors)
    missing = next((n for n in _names(about) if about.aliases.get(n, n) not in tensors), None)
    if missing is not None:
        raise FingerprintError(f"{path} is damaged: the tensor {missing} is missing")
    if digest(head["shaketable"], tensors) != head.get("sha256"):
        raise FingerprintError(f"{path} is damaged: its contents do not have the sha256 that is written in it")
    return fingerprint


def _open(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FingerprintError(f"{path} does not exist or is no file; make one with: shaketable fingerprint MODEL -o {path}")
    try:
        with safe_open(path, framework="pt") as file:
            # A copy, because kernels may round otherwise on memory that is not aligned.
            return file.metadata() or {}, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FingerprintError(f"{path} {_not_safetensors(path)}: {error}") from None


def _not_safetensors(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    pickled = start == b"PK" or (start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05"))
    if pickled:
        return "is a pickle or an archive of torch.save, which is never loaded; a fingerprint is a safetensors file"
    return "is truncated, damaged or no safetensors file"


def _metadata(path: Path, head: dict[str, str]) -> Metadata:
    if "shaketable" not in head:
        raise FingerprintError(f"{path} is a safetensors file, but not one of shaketable fingerprint")
    try:
        data = json.loads(head["shaketable"])
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise FingerprintError(f"{path} is not a file of shaketable fingerprint")
        if data.get("schema") != SCHEMA:
            raise FingerprintError(f"{path} has schema {data.get('schema')}; this version of shaketable reads schema {SCHEMA}")
        return Metadata.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"])
        raise FingerprintError(f"{path} is damaged: its metadata says nothing valid for {where} ({first['msg']})") from None
    except json.JSONDecodeError:
        raise FingerprintError(f"{path} is damaged: its metadata is no JSON") from None


def _names(about: Metadata) -> Iterator[str]:
    """Every name that the metadata promises."""
    yield "ids"
    for layer, labels in [*enumerate(about.layers), (None, [*about.before, *about.after])]:
        places = [op_name(layer, label) for label in labels] + ([] if layer is None else [f"layer.{layer}"])
        for place in places:
            yield from (f"{place}.input", f"{place}.output")


# ---- the same model


def check_same_model(about: Metadata, model: nn.Module, layers: str | None = None) -> None:
    """Refuse, in one line, a model that is not the one of the fingerprint. Weights are compared in the file's dtype only."""
    check_model(model, layers)
    here = describe(model, layers)
    for key, what in (("model_class", "class"), ("num_layers", "number of layers"), ("hidden_size", "hidden size")):
        if getattr(about, key) != here[key]:
            raise FingerprintError(f"the fingerprint is of another model: its {what} is {getattr(about, key)}, not {here[key]}")
    if about.config_sha256 != here["config_sha256"]:
        raise FingerprintError(f"the fingerprint is of another model: the config of {about.model} was not the same")
    if about.dtype == here["dtype"] and about.weights_sha256 != here["weights_sha256"]:
        raise FingerprintError(f"the fingerprint is of another model: the weights of {about.model} were not the same")
