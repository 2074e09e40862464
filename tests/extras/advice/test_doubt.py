"""Tests of the search for wrong labels: folds, probabilities, and reasons for a skipped search."""

import importlib.util
from dataclasses import replace

import numpy as np

from ddlf.cluster.cluster import Cluster
from ddlf.extras.advice.processes import _compared, _shares, folds_of, numbers_of, wrong_labels
from tests.extras.advice.cases import FACTS, HEAD, REAL, head


def test_each_fold_has_its_share_of_each_class():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    folds = folds_of(labels)
    assert [np.bincount(folds[labels == number]).tolist() for number in range(3)] == [[10] * 5, [6] * 5, [4] * 5]
    assert numbers_of(np.eye(3)[labels]).tolist() == numbers_of(labels[:, None]).tolist() == labels.tolist()


def test_outputs_become_probabilities_in_the_same_way_as_in_the_loss():
    single = _shares(np.array([[0.0]]), replace(HEAD, loss="bce", logits=True, shape=(1,)))
    assert single.tolist() == [[0.5, 0.5]]
    assert np.allclose(_shares(np.array([[0.2]]), replace(HEAD, loss="bce", shape=(1,))), [[0.8, 0.2]])
    assert np.allclose(_shares(np.log([[1.0, 3.0]]), replace(HEAD, logits=True)), [[0.25, 0.75]])
    assert np.allclose(_shares(np.array([[0.25, 0.75]]), HEAD), [[0.25, 0.75]])


def test_labels_that_a_model_clearly_contradicts_are_found():
    labels = np.repeat([0, 1], 50)
    shares = np.where(np.eye(2)[labels] == 1, 0.95, 0.05)
    labels[[3, 60]] = 1, 0
    doubted = _compared(labels, shares)
    assert (doubted["count"], doubted["of"], sorted(doubted["samples"])) == (2, 100, [3, 60])
    assert sorted(doubted["pairs"]) == [(3, 1, 0), (60, 0, 1)]


async def test_unsuitable_models_are_skipped_and_a_missing_package_is_named(monkeypatch):
    cluster = Cluster(["127.0.0.1"])
    assert await wrong_labels(cluster, b"", head(REAL, loss="mse", activation="linear")) == {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    left = (await wrong_labels(cluster, b"", FACTS))["skipped"]
    assert left == ("wrong labels are found by cleanlab, which is not installed: pip install 'ddlf[advise]'",)
