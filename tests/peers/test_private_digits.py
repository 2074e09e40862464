"""The app ``apps/private_digits.py``, as ``ddlf peers serve`` reads it."""

from pathlib import Path

from ddlf.cli.target import find_target
from ddlf.peers.serving import read_model

APP = Path(__file__).parents[2] / "apps/private_digits.py"


def test_the_app_of_private_digits_can_be_served():
    served = read_model(APP, "digits", find_target, 0)
    assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
    assert served.can_test
