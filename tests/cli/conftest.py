"""One command behind the real entry point, in this process."""

import pytest


@pytest.fixture
def command_of(tmp_path, monkeypatch, capsys):
    """Gives, for a verb's function, what runs it in an empty folder: words in; exit code, stdout and stderr out."""
    import typer

    from shaketable import cli

    def command(verb):
        app = typer.Typer()
        app.command()(verb)
        monkeypatch.setattr(cli, "app", app)
        monkeypatch.chdir(tmp_path)

        def go(*words):
            monkeypatch.setattr("sys.argv", [verb.__name__, *words])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            told = capsys.readouterr()
            return ended.value.code, told.out, told.err

        return go

    return command
