"""`calque serve`: what is wrong is one line, before models are loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from calque.cli import run
from calque.server.serve import open_listener


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "no token is set"),
        (["--token", "short"], "the token is shorter"),
        (["--results", "nowhere"], "nowhere: this folder does not exist"),
        (["--runs", "nowhere"], "nowhere: this folder does not exist"),
        (["--vectors", "nowhere"], "nowhere: this folder does not exist"),
        (["--sentences", "nowhere.tsv"], "nowhere.tsv"),
        (["--sentences", "bad.tsv"], "bad.tsv, line 2: the line has no tab"),
    ],
)
def test_mistakes(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CALQUE_TOKEN", raising=False)
    Path("bad.tsv").write_text("de\tDas Haus\nno language\n", "utf-8")
    monkeypatch.setattr("calque.api.load", None)
    assert run(["serve", "--port", "0", *options]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calque.api.load", None)
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == 2
    assert f"port {port}: address already in use" in capsys.readouterr().err


def test_without_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("calque.server.")]:
        if name != "calque.server.serve":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve"]) == 2
    assert "calque[serve]" in capsys.readouterr().err
