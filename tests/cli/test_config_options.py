"""Options that are the fields of a config: written once."""

from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from shaketable.cli import sweep, train
from shaketable.cli.verb import options_of
from shaketable.evaluate.sweep.config import SweepConfig
from shaketable.io.config_model import ConfigModel
from shaketable.train.config import TrainConfig


class Bread(ConfigModel):
    """What is baked."""

    flour: Literal["rye", "wheat"] = "rye"
    """Milled today."""
    grams: int
    """Of flour."""
    salt: float | None = None
    seeds: tuple[str, ...] = ()
    """On top; can be repeated."""


@pytest.fixture
def bake():
    """The command; gives what it was called with."""
    app, asked = typer.Typer(), {}

    @app.command()
    @options_of(
        Bread, "flour", "grams", "salt", "seeds", default={"grams": 500}, metavar={"grams": "G"}, flag={"seeds": "--seed"}
    )
    def bake(
        baker: Annotated[str, typer.Argument()] = "me", *, hot: Annotated[bool, typer.Option("--hot")] = False, **fields
    ) -> None:
        asked.update(baker=baker, hot=hot, bread=Bread.checked(**fields))

    def go(*words):
        done = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
        return done, asked

    return go


def test_an_option_has_the_type_the_default_and_the_help_of_its_field(bake):
    _, asked = bake()
    assert asked == {"baker": "me", "hot": False, "bread": Bread(grams=500)}
    _, asked = bake("you", "--flour", "wheat", "--grams", "7", "--salt", "0.5", "--seed", "poppy", "--seed", "flax", "--hot")
    assert asked == {"baker": "you", "hot": True, "bread": Bread(flour="wheat", grams=7, salt=0.5, seeds=("poppy", "flax"))}
    text = bake("--help")[0].output
    assert all(words in text for words in ("Milled today.", "Of flour.", "G ", "[default: 500]", "On top; can be repeated."))
    assert text.index("--flour") < text.index("--grams") < text.index("--seed") < text.index("--hot")


def test_what_a_value_may_be_is_the_config_s_own_affair(bake):
    done, _ = bake("--flour", "sand")
    assert "flour: Input should be 'rye' or 'wheat' (got 'sand')" in str(done.exception)


def test_a_default_that_the_command_leaves_to_the_config_is_shown():
    app = typer.Typer()

    @app.command()
    @options_of(Bread, "flour", "seeds", default={"flour": None, "seeds": None}, text=["seeds"])
    def bake(**fields) -> None:
        assert fields == {"flour": None, "seeds": "poppy"}

    assert CliRunner().invoke(app, ["--seeds", "poppy"]).exit_code == 0
    assert "[default: (rye)]" in CliRunner().invoke(app, ["--help"]).output


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
