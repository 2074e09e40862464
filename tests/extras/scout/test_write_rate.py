"""Tests of writing a learning rate into a file: only its place changes."""

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.scout.write_rate import write_rate

CLASS = """import ddlf

learning_rate = 0.1  # of a module


class Other(ddlf.IApp):
    learning_rate = 0.1


class App(ddlf.IApp):
    näme, learning_rate = "ä", 7
    epochs = 3; learning_rate = 0.1  # 0.1
"""
TEXT = "# train:learning_rate 0.1;\nm:input shape=[4];\ntrain:optimizer SGD(learning_rate=0.1, momentum=0.1);\n"


@pytest.mark.parametrize(
    ("name", "before", "after", "line"),
    [
        ("app.py", CLASS, CLASS.replace("3; learning_rate = 0.1", "3; learning_rate = 0.032"), 12),
        (
            "app.py",
            "\ufeff" + CLASS,
            "\ufeff" + CLASS.replace("3; learning_rate = 0.1", "3; learning_rate = 0.032"),
            12,
        ),
        (
            "app.py",
            CLASS.replace("\n", "\r\n"),
            CLASS.replace("3; learning_rate = 0.1", "3; learning_rate = 0.032").replace("\n", "\r\n"),
            12,
        ),
        (
            "app.py",
            "class App:\n    learning_rate: float = 1e-1\n",
            "class App:\n    learning_rate: float = 0.032\n",
            2,
        ),
        ("m.nnm", TEXT, TEXT.replace("SGD(learning_rate=0.1", "SGD(learning_rate=0.032"), 3),
        ("m.nnm", "train:learning_rate 0.1;", "train:learning_rate 0.032;", 1),
        ("m.nnm", "train:batch 1;", "train:batch 1;\ntrain:learning_rate 0.032;\n", 1),
        ("m.nnm", "train:optimizer adam;\n", "train:optimizer adam;\ntrain:learning_rate 0.032;\n", 2),
    ],
)
def test_only_the_number_changes(tmp_path, name, before, after, line):
    path = tmp_path / name
    path.write_bytes(before.encode())
    assert write_rate(path, "App", 0.1, 0.032) == f"{path}:{line}"
    assert path.read_bytes().decode() == after


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("app.py", "class App:\n    pass\n", "App in .*app.py has no line learning_rate = NUMBER"),
        ("app.py", "class App:\n    learning_rate = rate()\n", "has no line learning_rate = NUMBER"),
        ("app.py", "class App:\n    learning_rate = 0.1\n    learning_rate = 0.2\n", "has no line"),
        ("app.py", "class App:\n    learning_rate = 0.2\n", "says learning_rate 0.2, but the optimizer has 0.1"),
        ("m.nnm", "train:optimizer SGD(learning_rate=CosineDecay(initial_learning_rate=1));", "scale its schedule"),
    ],
)
def test_a_rate_without_a_place_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        write_rate(path, "App", 0.1, 0.032)
    assert path.read_text() == text


def test_a_file_that_cannot_be_replaced_is_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "app.py"
    path.write_text("class App:\n    learning_rate = 0.1\n")

    def full(path, content):
        open(path, "wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_rate(path, "App", 0.1, 0.032)
    assert [file.name for file in tmp_path.iterdir()] == ["app.py"]
    assert path.read_text() == "class App:\n    learning_rate = 0.1\n"


def test_a_whole_rate_stays_a_float(tmp_path):
    """Keras refuses an integer as a learning rate."""
    path = tmp_path / "app.py"
    path.write_text("class App:\n    learning_rate = 0.5\n")
    write_rate(path, "App", 0.5, 1.0)
    assert path.read_text() == "class App:\n    learning_rate = 1.0\n"
