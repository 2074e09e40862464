"""The files that a server sends to browsers."""

import posixpath
import re

from ddlf.peers.browser.assets import assets


def test_every_import_of_the_engine_is_a_file_that_the_server_sends():
    own = {path: content.decode() for path, content in assets().items() if not path.startswith("vendor/")}
    assert {"worker.js", "model.js", "layers/core.js"} <= set(own)
    for path, text in own.items():
        for name in re.findall(r'^(?:import|export) [^;]*?from "([^"]+)";', text, re.MULTILINE):
            assert name.startswith("."), f"{path} imports {name}, which no browser finds"
            assert posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) in assets(), (
                f"{path} imports {name}"
            )


def test_no_file_makes_code_from_texts_or_names_another_host():
    for path, content in assets().items():
        text = content.decode()
        assert not re.search(r"\beval\(|new Function\b|\bFunction\(", text), path
        assert not re.search(r"(?:import|fetch|importScripts)\(\s*[\"'`]https?:", text), path
