"""What all verbs share: groups of help, --force, one line for what cannot be parsed."""

import pytest

from tests.cli.command_server import shaketable

VERBS = ["run", "inspect", "locate", "fingerprint", "compare", "guide", "sweep", "train", "harden", "mismatch"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_about_eight_options_before_the_advanced_ones(verb, tmp_path):
    basic, _, advanced = shaketable(tmp_path, verb, "--help").stdout.partition("─ Advanced ─")
    options = [line for line in basic.splitlines() if line.startswith("│ ") and " --" in line[:12]]
    assert 2 <= len(options) <= 11
    assert "--force" in advanced


def test_a_file_that_exists_is_replaced_with_force_alone(tmp_path):
    def inspect(model, *words):
        return shaketable(tmp_path, "inspect", model, "--json", "out.json", *words)

    (tmp_path / "out.json").write_text('{"mine": 1}')
    refused = inspect("nano")
    assert (refused.code, refused.stdout) == (2, "")
    assert "add --force" in refused.stderr
    assert (tmp_path / "out.json").read_text() == '{"mine": 1}'
    assert inspect("nano", "--force").code == 0


def test_what_plans_and_studies_can_name_is_listed(tmp_path):
    from shaketable.faults import KINDS
    from shaketable.study.file import shipped

    listed = shaketable(tmp_path, "faults").stdout
    assert all(kind in listed for kind in KINDS)
    listed = shaketable(tmp_path, "studies").stdout
    assert all(name in listed for name in shipped())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspekt", "nano"], "Did you mean 'inspect'?"),
        (["inspect", "nano", "--tokenz", "3"], "--tokens"),
    ],
)
def test_a_command_that_cannot_be_parsed_is_one_line(tmp_path, words, says):
    done = shaketable(tmp_path, *words)
    (line,) = done.stderr.splitlines()
    assert done.code == 2 and line.startswith("error: ") and says in line and line.endswith("--help")
