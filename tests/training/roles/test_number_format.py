"""Tests of the type of weights: every node makes layers of the same type, whatever earlier apps have set. Needs Keras."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ddlf.training.slot.build import NumberFormat, fresh_names, number_format, set_precision


@pytest.fixture
def run():
    """Run functions on one new thread, as a worker does, since Keras has one dtype policy for each thread."""
    import keras

    floatx = keras.config.floatx()
    with ThreadPoolExecutor(1) as thread:
        yield lambda work, *arguments: thread.submit(work, *arguments).result()
    keras.config.set_floatx(floatx)


def dtypes_of_layer(floatx=None, policy=None):
    """The type of the weights and of the computation of a layer that ``create_model`` makes after these settings."""
    import keras

    with fresh_names():
        if floatx:
            keras.config.set_floatx(floatx)
        if policy:
            keras.config.set_dtype_policy(policy)
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
    return str(layer.kernel.dtype), layer.compute_dtype


def test_floatx_alone_decides_the_type_and_does_not_reach_the_next_app(run):
    run(set_precision, "auto")
    assert run(dtypes_of_layer) == ("float32", "float32")
    assert run(dtypes_of_layer, "float64") == ("float64", "float64"), (
        "a layer that this thread made before must have no effect"
    )
    assert run(dtypes_of_layer, "float32") == ("float32", "float32"), (
        "like on the master, where no precision is set between two apps"
    )
    run(dtypes_of_layer, "float64")
    run(set_precision, "auto")
    assert run(dtypes_of_layer) == ("float32", "float32")


def test_policy_of_an_app_does_not_reach_the_next_app(run):
    run(set_precision, "auto")
    assert run(dtypes_of_layer, None, "mixed_bfloat16") == ("float32", "bfloat16")
    run(set_precision, "float32")
    assert run(dtypes_of_layer) == ("float32", "float32")
    run(set_precision, "mixed_bfloat16")
    assert run(dtypes_of_layer) == ("float32", "bfloat16")


@pytest.mark.parametrize("format", [NumberFormat("float64"), NumberFormat("float32", "mixed_bfloat16")])
def test_workers_begin_with_the_format_that_the_program_of_the_master_has_set(run, format):
    def program():
        import keras

        keras.config.set_floatx(format.floatx)
        if format.policy:
            keras.config.set_dtype_policy(format.policy)
        return number_format(), dtypes_of_layer()

    sent, master_dtypes = run(program)
    assert sent == format
    with ThreadPoolExecutor(1) as worker:
        worker.submit(set_precision, "auto", sent).result()
        assert worker.submit(dtypes_of_layer).result() == master_dtypes


def test_layers_that_were_made_before_do_not_count_as_a_chosen_format(run):
    run(set_precision, "auto")
    run(dtypes_of_layer)
    assert run(number_format) == NumberFormat("float32")
