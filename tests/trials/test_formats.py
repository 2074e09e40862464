"""One data set in every format and store, the short form: all formats are made, one is trained on from a web server."""

import pytest

from ddlf.storage.place import Folder
from tests.trials.formats import FORMATS, compare, made

pytestmark = pytest.mark.slow


def test_every_format_gives_the_same_files(tmp_path):
    assert len({Folder(made(kind, tmp_path)).manifest().content for kind in FORMATS}) == 1


async def test_kills_and_joins_change_no_bit_of_what_is_trained_from_a_store(monkeypatch):
    for name in ("DDLF_CACHE", "DDLF_CACHE_SIZE"):
        monkeypatch.setenv(name, "")
    assert await compare(["tar"], ["http"], kills=3, joins=1, seed=1)
