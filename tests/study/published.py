"""The findings of the published studies, from the records in results/."""

import functools
import json
import tarfile
import tempfile
from pathlib import Path

from shaketable.study.analysis.findings import findings
from shaketable.study.file import load_study
from shaketable.study.store import last_defined
from tests import ROOT

RESULTS = ROOT / "results"


def findings_of(name):
    """Typed, made anew from the records."""
    (archive,) = (RESULTS / name).glob("records.tar.*")
    with tempfile.TemporaryDirectory() as place, tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
        (folder,) = Path(place).iterdir()
        own = archive.parent / "study.yaml"
        return findings(load_study(own) if own.exists() else last_defined(folder), folder)


@functools.cache
def _text(name):
    return findings_of(name).to_json()


def published(name):
    """As JSON, a copy to change."""
    return json.loads(_text(name))
