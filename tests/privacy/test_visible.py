"""Tests of the table of visible data: each choice has one column, docs and screens match it, and each cell has tests."""

import ast
import stat
from pathlib import Path

import pytest

from ddlf.algorithms.merge import MERGE, revealed_by
from ddlf.peers.pages import BrowserModel, seen_by
from ddlf.peers.plan import Plan
from ddlf.privacy import visible
from ddlf.privacy.contradictions import Choice, contradiction_of
from ddlf.privacy.visible import (
    CLIPPED,
    COLUMNS,
    NOBODY,
    PLAIN,
    PRIVATE,
    PRIVATE_MASKED,
    PRIVATE_MASKED_NOISED,
    PRIVATE_NOISED,
    PRIVATE_SAMPLES,
    ROUNDS,
    SECURE,
    SWAPS,
    Party,
)
from tests.peers.test_server import Running, a_set

ROOT = Path(__file__).parents[2]
NOISED = {"clip": 1.0, "noise": 1.0, "quorum": 3}
CHOICES = [
    (Choice(trainers="peers", way="swap"), SWAPS),
    (Choice(trainers="peers"), ROUNDS),
    (Choice(trainers="runs"), ROUNDS),
    (Choice(trainers="peers", **NOISED), CLIPPED),
    (Choice(trainers="peers", **NOISED, trust="server"), CLIPPED),
    (Choice(trainers="peers", **NOISED, trust="nobody"), NOBODY),
    (Choice(trainers="peers", secure=True, quorum=3), SECURE),
    (Choice(trainers="workers", way="sync"), PRIVATE),
    (Choice(trainers="workers", way="async"), PRIVATE),
    (Choice(trainers="workers", **NOISED, way="sync"), PRIVATE_NOISED),
    (Choice(trainers="workers", **NOISED, way="sync", unit="sample"), PRIVATE_SAMPLES),
    (Choice(trainers="workers", secure=True, way="sync"), PRIVATE_MASKED),
    (Choice(trainers="workers", secure=True, way="sync", **NOISED), PRIVATE_MASKED_NOISED),
    (Choice(trainers="workers", way="downpour", private=False), PLAIN),
]
PLANS = [
    (Plan(), SWAPS),
    (Plan(way="rounds", merge="mean"), ROUNDS),
    (Plan(way="rounds", merge="mean", **NOISED), CLIPPED),
    (Plan(way="rounds", merge="mean", **NOISED, trust="nobody"), NOBODY),
    (Plan(way="rounds", merge="mean", secure_aggregation=True, quorum=3), SECURE),
]

SWAP = ["peers/test_server.py::test_peers_swap_their_sets"]
ROUND = ["peers/test_server.py::test_a_round_is_the_mean_of_its_sets_by_samples"]
CLIP = [
    "peers/test_noise.py::test_a_server_that_is_trusted_clips_sums_and_adds_noise",
    "peers/test_noise.py::test_peers_report_no_metrics_with_noise",
]
SHARES = [
    "peers/test_noise.py::test_peers_that_trust_nobody_clip_and_add_noise_before_they_post",
    "peers/browser/test_noise.py::test_a_peer_in_a_browser_that_trusts_nobody_posts_only_hidden_updates",
]
MASKS = [
    "peers/test_secure_rounds.py::test_peers_with_sockets_train_one_model_and_the_journal_has_no_post",
    "privacy/test_secure_sum.py::test_masked_vectors_are_uniform_and_tell_nothing_about_the_update",
    "privacy/test_secure_sum.py::test_server_that_names_two_lists_of_survivors_gets_no_mask",
]
OWN_DATA = [
    "training/test_private.py::test_neither_wire_nor_run_folder_nor_checkpoints_have_a_trace_of_private_data",
    "training/test_private.py::test_weights_and_metrics_are_those_of_federated_averaging_by_samples",
]
OWN_DATA_NOISED = [
    "training/test_private_noise.py::test_weights_are_the_mean_of_clipped_updates_and_records_have_no_metrics",
    "training/test_private_noise.py::test_the_noise_of_a_release_has_the_stated_deviation_and_differs_with_equal_seeds",
]
OWN_DATA_IN_STEPS = [
    "training/slot/test_sample_noise.py::test_step_equals_the_formula_in_numpy",
    "training/test_sample_unit.py::test_digits_are_learned_with_the_epsilon_of_each_worker",
]
OWN_DATA_MASKED = [
    "training/test_masked.py::test_the_wire_and_the_files_of_the_master_have_no_plain_update",
    "training/test_masked.py::test_worker_refuses_a_step_that_could_unmask_its_update",
    "training/test_masked.py::test_weights_are_those_of_federated_averaging_and_no_worker_reports_a_metric",
]
OWN_DATA_MASKED_NOISED = [
    "training/test_masked.py::test_the_wire_and_the_files_of_the_master_have_no_plain_update",
    "training/test_masked.py::test_sum_of_clipped_updates_has_at_least_the_stated_noise",
    "training/test_masked.py::test_clipped_updates_are_averaged_under_masks",
]
SAME_DATA = [
    "training/test_members.py::test_other_data_is_named_by_another_content",
    "training/test_sharded.py::test_shared_state_of_slots_does_not_pass_the_master_in_a_round",
]
NETWORK_OF_PEERS = ["peers/test_security.py::test_a_link_beyond_loopback_pins_the_certificate"]
NETWORK_OF_WORKERS = [
    "end_to_end/test_security.py::test_session_between_machines_shows_neither_token_nor_data",
    "rpc/test_tls.py::test_who_only_listens_learns_neither_the_token_nor_what_is_said",
]
DISK_OF_PEERS = ["privacy/test_visible.py::test_another_user_reads_no_set_that_a_server_of_peers_has_stored"]
DISK_OF_WORKERS = [
    "end_to_end/test_security.py::test_what_a_worker_keeps_can_be_read_by_its_owner_only",
    "training/checkpoints/test_checkpoint.py::test_only_the_owner_may_read_a_checkpoint",
]


def evidence(member, tests):
    """Return the tests behind each cell of a column."""
    workers = member is Party.WORKER
    return {
        **dict.fromkeys((Party.SERVER, member, Party.HOLDER), tests),
        Party.NETWORK: NETWORK_OF_WORKERS if workers else NETWORK_OF_PEERS,
        Party.USER: DISK_OF_WORKERS if workers else DISK_OF_PEERS,
    }


EVIDENCE = [
    (SWAPS, evidence(Party.PEER, SWAP)),
    (ROUNDS, evidence(Party.PEER, ROUND)),
    (CLIPPED, evidence(Party.PEER, CLIP)),
    (NOBODY, evidence(Party.PEER, SHARES)),
    (SECURE, evidence(Party.PEER, MASKS)),
    (PRIVATE, evidence(Party.WORKER, OWN_DATA)),
    (PRIVATE_NOISED, evidence(Party.WORKER, OWN_DATA_NOISED)),
    (PRIVATE_SAMPLES, evidence(Party.WORKER, OWN_DATA_IN_STEPS)),
    (PRIVATE_MASKED, evidence(Party.WORKER, OWN_DATA_MASKED)),
    (PRIVATE_MASKED_NOISED, evidence(Party.WORKER, OWN_DATA_MASKED_NOISED)),
    (PLAIN, evidence(Party.WORKER, SAME_DATA)),
]


@pytest.mark.parametrize(("choice", "column"), CHOICES)
def test_each_choice_without_a_contradiction_has_one_column(choice, column):
    assert contradiction_of(choice) is None
    assert visible.column_for(choice) is column


def test_each_cell_of_each_column_names_tests_that_exist():
    assert tuple(column for column, _ in EVIDENCE) == COLUMNS
    for column, tests_by_cell in EVIDENCE:
        assert set(tests_by_cell) == set(column.cells)
        for name in {test_name for tests in tests_by_cell.values() for test_name in tests}:
            file, _, test = name.partition("::")
            body = ast.parse((ROOT / "tests" / file).read_text()).body
            assert test in {getattr(node, "name", "") for node in body}, name


@pytest.mark.parametrize("member", [Party.PEER, Party.WORKER])
def test_the_tables_in_the_docs_have_each_cell(member):
    columns = [column for column in COLUMNS if member in column.cells]
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| party | {columns[0].name} "))
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[start : start + 7]]
    assert head == ["party", *(column.name for column in columns)]
    for party, row in zip(columns[0].cells, rows, strict=True):
        cells = [column.cells[party] for column in columns]
        assert row == [
            columns[0].name_of(party),
            *(f"{entry.updates.value} / {entry.samples.value}" for entry in cells),
        ]


@pytest.mark.parametrize(("plan", "column"), PLANS)
def test_the_page_of_a_peer_shows_the_column_of_its_plan(plan, column):
    page = BrowserModel(graph={"name": "digits"}).for_page(plan, "a run", 1).visible
    assert [row[1] for row in page.rows] == [cell.updates.phrase for cell in column.cells.values()]
    assert page.samples == "nobody else sees them"
    assert page.rows[0][0] == "the server"
    assert (page.before, page.metrics, page.remains) == (
        column.before,
        column.metrics,
        " ".join(column.remains),
    )


@pytest.mark.parametrize(
    ("merge", "has"), [("mean", ""), ("trimmed:0.2", ""), ("krum:1", "merge krum"), ("median", "merge median")]
)
def test_screens_warn_of_a_merge_rule_only_where_it_is_used(merge, has):
    """Earlier, all rounds warned of krum and median."""
    reveals = revealed_by(MERGE.read(merge))
    sentences = [
        visible.column_for(choice).remaining(choice)
        for choice in (
            Choice(trainers="peers", merge=merge, reveals=reveals),
            Choice(trainers="workers", merge=merge, reveals=reveals),
        )
    ]
    sentences.append(seen_by(Plan(way="rounds", merge=merge, quorum=5)).remains.split(". "))
    for risks in sentences:
        assert [text for text in risks if "The merge" in text] == [text for text in risks if has and has in text]
        assert any("The merge" in text for text in risks) == bool(has)


def test_the_page_says_that_lent_samples_are_the_servers():
    assert seen_by(Plan(shards=3)).samples == "the server sees all, a peer that trains with you sees some"


async def test_another_user_reads_no_set_that_a_server_of_peers_has_stored(tmp_path):
    async with Running(tmp_path) as running:
        peer = await running.peer()
        await peer.post(a_set(1.0))
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in stored} == {0}
