"""Tests of the writer of the journal, without a server."""

import asyncio

import pytest

from ddlf.errors import CheckpointError
from ddlf.peers.entries import Invited, Joined
from ddlf.peers.journal import history, open_journal
from ddlf.peers.journal_writer import JournalWriter
from ddlf.peers.ledger import Unfit
from ddlf.peers.plan import Plan
from ddlf.peers.swap import SwapLedger

CODE = Invited(at=1.0, code="code", until=9.0)


class Writing:
    """A writer with its journal and ledger, which notes each entry that the ledger takes."""

    def __init__(self, folder):
        self.folder, self.entries, self.refused = folder, [], []
        self.journal, _ = open_journal(folder)
        self.ledger = SwapLedger(Plan(merge="average"))
        self.journal.begin_file(self.ledger.state(), {})
        self.writer = JournalWriter(
            self.journal,
            self.ledger,
            take=self.take,
            needed=dict,
            begin=asyncio.ensure_future,
            refused=lambda kind, error: self.refused.append((kind, error)),
        )

    def take(self, entry, data, travelling):
        self.ledger.apply(entry)
        self.entries.append((entry, entry in self.written()))

    def written(self):
        return list(history(self.folder))


@pytest.fixture
async def writing(tmp_path):
    writing = Writing(tmp_path)
    task = asyncio.ensure_future(writing.writer.write())
    yield writing
    writing.writer.close()
    await task
    writing.journal.close()


async def test_the_ledger_takes_an_entry_when_it_is_on_the_disk_and_before_its_commit_returns(writing):
    await writing.writer.commit(CODE)
    assert writing.entries == [(CODE, True)]


async def test_an_entry_that_another_one_of_its_batch_makes_unfit_fails_alone(writing):
    await writing.writer.commit(CODE)
    joined = [Joined(at=2.0, peer=peer, code="code", key=f"key {peer}") for peer in (1, 2)]
    results = await asyncio.gather(*map(writing.writer.commit, joined), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], Unfit)
    assert list(writing.ledger.members) == [1]
    assert writing.written() == [CODE, *joined]
    assert writing.journal.syncs == 2


async def test_a_disk_that_refuses_fails_a_batch_and_not_the_next_one(writing, monkeypatch):
    full = CheckpointError("no space")

    def refuses(entries, heads):
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(writing.journal, "append", refuses)
        with pytest.raises(CheckpointError, match="no space"):
            await writing.writer.commit(CODE)
    assert (writing.entries, writing.refused) == ([], [("entries", full)])
    await writing.writer.commit(CODE)
    assert writing.entries == [(CODE, True)]


async def test_an_entry_that_waits_is_written_after_the_close_and_a_later_one_is_refused(writing):
    waiting = asyncio.ensure_future(writing.writer.commit(CODE))
    await asyncio.sleep(0)
    writing.writer.close()
    with pytest.raises(CheckpointError, match="the server of peers ends"):
        await writing.writer.commit(CODE)
    await waiting
    assert writing.entries == [(CODE, True)]
