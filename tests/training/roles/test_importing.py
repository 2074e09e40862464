"""Tests of the import of Keras: it switches the garbage collector off, and restores its state afterwards."""

import gc
import sys

import pytest

from ddlf.training.roles import import_keras


@pytest.fixture
def imported(monkeypatch):
    """For each import, whether the collector was on."""
    collector_states = []

    def import_module(name):
        collector_states.append(gc.isenabled())
        raise ImportError(name)

    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setattr("ddlf.training.roles.importlib.import_module", import_module)
    yield collector_states
    gc.enable()


def test_the_collector_is_off_during_the_import_and_then_on_again(imported):
    gc.unfreeze()  # objects that other tests have frozen
    import_keras()
    assert imported == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_next_collection_skips_imported_objects(imported):
    gc.unfreeze()
    young = [[] for _ in range(10)]
    import_keras()
    assert not any(object_ is young for object_ in gc.get_objects(generation=0))
    assert any(object_ is young for object_ in gc.get_objects(generation=2)), "but it can still be collected"


def test_disabled_collector_and_frozen_objects_stay_so(imported):
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        import_keras()
        assert (
            gc.get_freeze_count() > frozen // 2
        )  # some objects are freed in the meantime; after gc.unfreeze() the count would be 0
    finally:
        gc.unfreeze()
    gc.disable()
    import_keras()
    assert not gc.isenabled()
