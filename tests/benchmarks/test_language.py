"""The short form of the benchmark on text: what must hold of bytes, whatever the model has learned."""

import asyncio

import pytest

from benchmarks import language

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


def test_fragments_of_four_bits_are_a_small_part_of_an_exchange_of_all_weights():
    name = "streaming, int4"
    options = language.arguments().parse_args(
        ["--epochs", "2", "--sequences", "256", "--width", "32", "--blocks", "1", "--steps", "8", "--only", name]
    )
    found = asyncio.run(language.main(options))
    whole, few = found["averaged in each step"], found[name]
    assert few.peak < whole.peak / 15
    assert few.bytes < whole.bytes / 8
    assert few.loss < 4.86  # that of any byte being as likely as any other
