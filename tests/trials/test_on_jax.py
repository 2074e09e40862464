"""Run the short form of the JAX trial: each operator and each stabiliser once."""

from tests.trials.on_jax import checked

SOME = "not run and not asynchronous and not downpour and (golden or formula or all_together or scaled or (unfreezing and saved))"


def test_operators_match_numpy_and_stabilisers_work_on_jax_like_on_tensorflow():
    assert checked(SOME, every=20)
