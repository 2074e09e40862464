"""Tests of the files that a server sends to browsers."""

import posixpath
import re

from ddlf.peers.browser.assets import assets
from ddlf.peers.pages import files


def test_every_import_of_page_and_engine_is_a_file_that_the_server_sends():
    sent = files()
    scripts = {
        path: file.content.decode() for path, file in sent.items() if path.endswith(".js") and "/vendor/" not in path
    }
    assert {"engine/worker.js", "engine/model.js", "engine/layers/core.js"} <= set(scripts)
    for path, text in scripts.items():
        for name in re.findall(r'^(?:import|export) [^;]*?from "([^"]+)";', text, re.MULTILINE):
            assert name.startswith("."), f"{path} imports {name}, which no browser finds"
            imported = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
            assert imported in sent, f"{path} imports {name}"
            assert not (path.startswith("engine/") and imported.startswith("page/")), (
                f"{path} of the engine knows the page"
            )


def test_no_file_evaluates_texts_or_names_another_host():
    for path, content in assets().items():
        text = content.decode()
        assert not re.search(r"\beval\(|new Function\b|\bFunction\(", text), path
        assert not re.search(r"(?:import|fetch|importScripts)\(\s*[\"'`]https?:", text), path
