"""Run the short form of the formats trial: it creates all formats, and trains on one of them from a web server."""

import pytest

from ddlf.data.location import Folder
from tests.templates import Standing
from tests.trials.formats import FORMATS, compare, prepared
from tests.trials.workers import Workers

pytestmark = pytest.mark.slow


def test_every_format_gives_the_same_files(tmp_path):
    assert len({Folder(prepared(kind, tmp_path)).manifest().content for kind in FORMATS}) == 1


async def test_kills_and_joins_change_no_bit_of_a_training_from_a_store(monkeypatch):
    """The first workers, which have no cache, share an import of Keras."""
    for name, value in (("DDLF_CACHE", ""), ("DDLF_CACHE_SIZE", "0")):
        monkeypatch.setenv(name, value)
    standing = Standing.of_keras()
    monkeypatch.setattr(Workers, "template", standing)
    try:
        assert await compare(["tar"], ["http"], kills=3, joins=1, seed=1)
    finally:
        standing.end()
