"""Tests of the account of releases: it is on the disk before each release, it ends budgets, and it refuses damaged files."""

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from ddlf.errors import BudgetSpent, CheckpointCorrupt, CheckpointError, CheckpointMismatch, ConfigError
from ddlf.privacy.accountant import Cost, Noise
from ddlf.training.checkpoints import releases
from ddlf.training.checkpoints.releases import RELEASES, ReleaseAccount, Terms

TERMS = Terms(unit="peer", clip=1.0)
ONE = Cost(members=("1", "2"), noise=Noise(multiplier=1.0))


def account_with(folder, number, *, terms=TERMS, budget=None):
    account = ReleaseAccount.begin(folder, terms, budget)
    for _ in range(number):
        account.count(ONE)
    return account


def test_account_remembers_releases_after_a_resume(tmp_path):
    account = account_with(tmp_path, 3)
    account.count(Cost(members=("2",), noise=Noise(multiplier=2.0, sampled=0.1), steps=7))
    resumed = ReleaseAccount.resume(tmp_path, TERMS, least=4)
    assert resumed.accountant.releases == 4
    assert resumed.accountant.epsilons() == account.accountant.epsilons()
    resumed.count(ONE)
    assert ReleaseAccount.resume(tmp_path, TERMS).accountant.releases == 5


def test_budget_ends_before_the_release_that_would_exceed_it(tmp_path):
    account = account_with(tmp_path, 10, budget=17.9)
    assert account.accountant.worst() == pytest.approx(17.8566, abs=1e-3)
    before = (tmp_path / RELEASES).read_bytes()
    with pytest.raises(BudgetSpent, match=r"epsilon is 17.86 at delta = 1e-05, .*above the privacy budget of 17.9"):
        account.count(ONE)
    assert (tmp_path / RELEASES).read_bytes() == before
    assert account.accountant.releases == 10
    account.count(replace(ONE, members=("3",)))  # another peer has spent nothing
    account.count(ONE, has_left=True)
    assert account.accountant.worst() > 17.9


def test_resumed_account_has_the_remaining_budget(tmp_path):
    account_with(tmp_path, 2, budget=7.0)
    account = ReleaseAccount.resume(tmp_path, TERMS, 7.0)
    with pytest.raises(BudgetSpent, match="privacy budget of 7"):
        account.check_next()
    ReleaseAccount.resume(tmp_path, TERMS, 9.0).count(ONE)


def test_account_continues_in_another_folder(tmp_path):
    account = account_with(tmp_path, 2)
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    account.copy_to(other_folder)
    account.count(ONE)
    assert ReleaseAccount.resume(other_folder, TERMS).accountant.releases == 3
    assert ReleaseAccount.resume(tmp_path, TERMS).accountant.releases == 2


def test_account_without_a_folder_counts_in_memory(tmp_path):
    account = ReleaseAccount.begin(None, TERMS, 5.0)
    account.copy_to(tmp_path)
    account.count(ONE)
    assert "above the privacy budget of 5" in account.spent(ONE)
    assert account.spent(replace(ONE, members=("3",))) == ""
    assert list(tmp_path.iterdir()) == []


def test_resume_refuses_a_missing_account(tmp_path):
    with pytest.raises(CheckpointMismatch, match=r"releases\.log is missing, so the earlier releases"):
        ReleaseAccount.resume(tmp_path, TERMS)


def test_resume_refuses_an_account_that_is_older_than_the_checkpoint(tmp_path):
    account_with(tmp_path, 3)
    with pytest.raises(CheckpointMismatch, match="counts 3 releases, and at least 4 have left"):
        ReleaseAccount.resume(tmp_path, TERMS, least=4)


@pytest.mark.parametrize("changed", [{"clip": 2.0}, {"delta": 1e-6}, {"unit": "sample"}])
def test_resume_refuses_other_terms(tmp_path, changed):
    account_with(tmp_path, 1)
    with pytest.raises(CheckpointMismatch, match=f"this run has {next(iter(changed))} = "):
        ReleaseAccount.resume(tmp_path, replace(TERMS, **changed))


def test_begin_refuses_a_folder_with_an_account(tmp_path):
    account_with(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot begin the account of releases"):
        ReleaseAccount.begin(tmp_path, TERMS)


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_resume_removes_an_incomplete_last_line(tmp_path, cut):
    account_with(tmp_path, 2)
    path = tmp_path / RELEASES
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    account = ReleaseAccount.resume(tmp_path, TERMS)
    assert account.accountant.releases == 1
    account.count(ONE)
    assert path.read_bytes() == content


def test_resume_refuses_each_changed_byte(tmp_path):
    account_with(tmp_path, 2)
    path = tmp_path / RELEASES
    content = path.read_bytes()
    for offset in range(0, len(content) - 1, 7):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(CheckpointError):
            ReleaseAccount.resume(tmp_path, TERMS)
    path.write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match="no complete line"):
        ReleaseAccount.resume(tmp_path, TERMS)


def test_release_is_not_counted_when_the_disk_refuses(tmp_path, monkeypatch):
    account = account_with(tmp_path, 1)

    def refuse(file, data, offset):
        os.lseek(file, offset, os.SEEK_SET)
        os.write(file, data[:9])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(releases.os, "pwrite", refuse)
        with pytest.raises(CheckpointError, match="cannot count a release in"):
            account.count(ONE)
    assert account.accountant.releases == 1
    account.count(ONE)
    assert ReleaseAccount.resume(tmp_path, TERMS).accountant.releases == 2


@pytest.mark.parametrize("budget", [0, -1, float("inf"), float("nan")])
def test_account_refuses_an_impossible_budget(tmp_path, budget):
    with pytest.raises(ConfigError, match="privacy_budget must be a finite epsilon above 0"):
        ReleaseAccount.begin(tmp_path, TERMS, budget)


@pytest.mark.parametrize("clip", [0, -1, float("nan"), float("inf")])
def test_terms_refuse_an_impossible_clip(clip):
    with pytest.raises(ConfigError, match="clip must be a finite number above 0"):
        Terms(unit="peer", clip=clip)


KILLED = """
import os, signal, sys
from pathlib import Path
from ddlf.privacy.accountant import Noise, Cost
from ddlf.training.checkpoints.releases import ReleaseAccount, Terms

terms, one = Terms(unit="peer", clip=1.0), Cost(members=("1",), noise=Noise(multiplier=1.0))
for line in sys.stdin:
    folder, most, spins = line.split()
    reading, writing = os.pipe()
    account = ReleaseAccount.begin(Path(folder), terms)
    child = os.fork()
    if not child:
        while True:
            account.count(one)
            os.write(writing, b".")  # the release leaves
    os.close(writing)
    left = 0
    while left < int(most):
        left += len(os.read(reading, 1))
    for _ in range(int(spins)):  # so that the kill meets each phase of a release
        pass
    os.kill(child, signal.SIGKILL)
    while got := os.read(reading, 1 << 16):
        left += len(got)
    os.waitpid(child, 0)
    os.close(reading)
    print(left, flush=True)
"""
"""Forks a child for each line that it reads. The child releases until it is killed. The answer counts its releases."""


def test_account_has_each_completed_release_after_kills_at_20_moments(tmp_path):
    moments = random.Random(5)
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        folder.mkdir()
    plan = "".join(f"{folder} {moments.randrange(20)} {moments.randrange(30_000)}\n" for folder in folders)
    program = subprocess.run([sys.executable, "-c", KILLED], input=plan, capture_output=True, text=True, check=True)
    for folder, completed in zip(folders, map(int, program.stdout.split()), strict=True):
        account = ReleaseAccount.resume(folder, TERMS)
        assert completed <= account.accountant.releases <= completed + 1
