"""Run the short form of the JAX trial: each operator and each stabiliser once."""

from tests.trials import on_jax


def test_stabilisers_work_on_jax_like_on_tensorflow():
    assert on_jax.stabilisers(
        "not run and not asynchronous and not downpour and (golden or formula or all_together or scaled or (unfreezing and saved))"
    )


def test_operators_on_jax_match_numpy():
    assert on_jax.operators(every=10)
