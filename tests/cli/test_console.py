from stochbn.cli.console import say


def test_text_is_printed_as_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    say("Wrote [bold]/a/path/that/is/longer/than/a/line")
    assert capsys.readouterr().out == "Wrote [bold]/a/path/that/is/longer/than/a/line\n"
