"""`shaketable study verify`, and what `study run` says of digests and signatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shaketable.io.output_files import check_free, write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def verify(
    store: Annotated[Path, typer.Argument(metavar="[STORE]", help="A store, or a study's folder.")] = Path("shaketable-runs"),
    public_key: Annotated[
        Path | None,
        typer.Option("--public-key", metavar="FILE", help="Every finished run must be signed with it: PEM, ed25519."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Read every line of every record, and say which are not what was written. Exits 1 when any is not.

    Without a key a record that was edited and chained anew is accepted: compare the digest with one that was published.

    shaketable study verify shaketable-runs --public-key key.pub
    """
    from shaketable.records import signing
    from shaketable.study.verify import verify as verified

    check_free([f for f in (json_file,) if f is not None], [], force)
    if public_key is not None:
        signing.need_library()
    found = verified(store, None if public_key is None else signing.public_key(public_key))
    if json_file is not None:
        write(json_file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    _show(found)
    raise typer.Exit(1 if found["bad"] else 0)


def _show(found: dict[str, Any]) -> None:
    for record in found["records"]:
        if record["problem"] is not None:
            typer.echo(f"bad: {record['path']}: {record['problem']}")
    for study in found["studies"]:
        typer.echo(f"{study['study']}: records sha256:{study['digest']}")
        if study["asked"] is not None:
            typer.echo(f"{study['study']}: asked   sha256:{study['asked']}")
    many, signed = len(found["records"]), sum(record["signed"] for record in found["records"])
    word = "record" if many == 1 else "records"
    unchecked = "" if found["signatures"] or not signed else f"; {signed} are signed, and --public-key checks that"
    good = "and signed with this key" if found["signatures"] else "as far as their chains can tell"
    if found["bad"]:
        typer.echo(f"{found['bad']} of {many} {word} cannot be trusted{unchecked}")
    else:
        typer.echo(f"{many} {word}, unchanged {good}{unchecked}")


def key_for_signing(path: Path | None) -> Ed25519PrivateKey | None:
    """The key of `--sign`, read before anything is run."""
    if path is None:
        return None
    from shaketable.records import signing

    signing.need_library()
    return signing.private_key(path)


def end_of_study(folder: Path, digest: str, key: Ed25519PrivateKey | None) -> None:
    """Sign what is finished, and say the digest that can be published."""
    from shaketable.study.verify import sign_study

    if key is not None:
        signed, wrong = sign_study(folder, key)
        for line in wrong:
            typer.echo(f"note: {line}")
        typer.echo(f"signed {signed} records")
    typer.echo(f"records sha256:{digest}")
