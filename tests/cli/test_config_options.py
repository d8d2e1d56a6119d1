"""Options that are the fields of a config: written once."""

import pytest
import typer

from shaketable.cli import sweep, train
from shaketable.evaluate.sweep.config import SweepConfig
from shaketable.train.config import TrainConfig


@pytest.mark.parametrize(("command", "config", "least"), [(train, TrainConfig, 20), (sweep, SweepConfig, 10)])
def test_every_option_of_a_command_says_what_its_field_says(command, config, least):
    options = {p.name: p for p in typer.main.get_command(_app(command)).params}
    fields = {name: field for name, field in config.model_fields.items() if name in options}
    assert len(fields) > least
    for name, field in fields.items():
        assert field.description and options[name].help == field.description, name


def _app(command):
    app = typer.Typer()
    app.command()(command)
    return app
