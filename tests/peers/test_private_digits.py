"""The app and the texts that the docs begin with, as ``ddlf peers serve`` reads them."""

import re
from pathlib import Path

from ddlf.cli.target import find_target
from ddlf.peers.serving import read_model

ROOT = Path(__file__).parents[2]
APP = ROOT / "apps/private_digits.py"


def test_the_app_of_private_digits_can_be_served():
    served = read_model(APP, "digits", find_target, 0)
    assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
    assert served.can_test


def test_the_text_that_the_docs_begin_with_needs_no_data_and_trains_in_browsers(tmp_path):
    [text] = re.findall(r"```text\n(digits:.*?)```", (ROOT / "docs/howto/peers.md").read_text(), re.DOTALL)
    (tmp_path / "digits.nnm").write_text(text)
    for path in (tmp_path / "digits.nnm", ROOT / "apps/models/private_digits.nnm"):
        served = read_model(path, None, find_target, 0)
        assert served.model.browser.refusal == ""
        assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
