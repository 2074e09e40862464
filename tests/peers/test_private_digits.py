"""The app and the texts that the docs begin with, as ``ddlf peers serve`` reads them."""

import re
from pathlib import Path

import numpy as np

import ddlf
from ddlf.cli.target import find_target
from ddlf.peers.model import arrays_of
from ddlf.peers.serving import read_model

ROOT = Path(__file__).parents[2]
APP = ROOT / "apps/private_digits.py"


def test_the_app_of_private_digits_can_be_served():
    served = read_model(APP, "digits", find_target, 0)
    assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
    assert served.can_test
    assert not served.other_scale


def test_test_pictures_of_another_scale_than_those_of_browsers_are_named(tmp_path):
    (x, y), _ = ddlf.load_digits()
    np.savez(tmp_path / "test.npz", x=x, y=y.argmax(1))
    served = read_model(ROOT / "apps/models/private_digits.nnm", str(tmp_path / "test.npz"), find_target, 0)
    assert served.other_scale == "the test data go from -0.5 to 0.5; browsers make pictures 0 to 1"


async def test_the_app_and_built_in_pictures_have_values_from_0_to_1_as_pictures_in_a_browser():
    app = find_target(APP)()
    await app.load_dataset()
    for x in (app.x_train, app.x_test, arrays_of("digits")["x_train"], arrays_of("digits")["x_test"]):
        assert (x.min(), x.max(), x.dtype) == (0, 1, np.float32)


def test_the_text_that_the_docs_begin_with_needs_no_data_and_trains_in_browsers(tmp_path):
    [text] = re.findall(r"```text\n(digits:.*?)```", (ROOT / "docs/howto/peers.md").read_text(), re.DOTALL)
    (tmp_path / "digits.nnm").write_text(text)
    for path in (tmp_path / "digits.nnm", ROOT / "apps/models/private_digits.nnm"):
        served = read_model(path, None, find_target, 0)
        assert served.model.browser.refusal == ""
        assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
