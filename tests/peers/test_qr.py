"""Tests of QR codes of links: they have the size of the standard, and the error without segno names it."""

import re
import sys

import pytest

from ddlf.cli.main import main
from ddlf.errors import ConfigError
from ddlf.peers.qr import qr_code


def test_a_link_becomes_a_code_that_fits_a_terminal():
    link = "http://127.0.0.1:8930/#" + "a" * 43
    lines = re.sub(r"\x1b\[[0-9;]*m", "", qr_code(link)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 79
    side = len(lines[0]) - 2 * 4  # a code has a quiet zone of 4
    assert (side - 17) % 4 == 0  # versions have 21, 25, 29, ... modules
    assert len(lines) in (len(lines[0]) // 2, len(lines[0]) // 2 + 1)  # a line has two rows


def test_without_segno_the_option_is_refused_before_a_server_starts(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "segno", None)
    with pytest.raises(ConfigError, match="--qr needs segno"):
        qr_code("http://127.0.0.1/#a")
    with pytest.raises(SystemExit):
        main(["peers", "serve", "no.nnm", "--qr"])
    assert "ddlf[qr]" in capsys.readouterr().err
