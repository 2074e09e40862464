"""Run the short form of the JAX trial: each operator once, and each stabiliser once, alone or around another one."""

from tests.trials import on_jax


def test_stabilisers_do_on_jax_what_they_do_on_tensorflow():
    assert on_jax.stabilisers(
        "not run and not asynchronous and not downpour and (golden or formula or all_together or scaled or (unfreezing and saved))"
    )


def test_operators_give_on_jax_what_numpy_gives():
    assert on_jax.operators(every=10)
