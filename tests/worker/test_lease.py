"""Tests of the rules of the lease, which gives a worker to one master at a time, without a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import LeaseError
from ddlf.worker.lease import Holder, Lease

ANNA = Holder(b"a" * 16, "anna@pc7 pid 41", "cifar.py", "12:03")
BOB = Holder(b"b" * 16, "bob@pc9 pid 7", "", "12:05")


def test_the_refusal_of_a_second_master_names_the_holder_and_a_remedy():
    lease = Lease()
    assert lease.claim(ANNA) == 1
    with pytest.raises(LeaseError) as caught:
        lease.claim(BOB)
    assert (
        str(caught.value)
        == "leased by anna@pc7 pid 41 (cifar.py) since 12:03; wait for it with --wait, or take it with --takeover"
    )
    assert lease.holder == ANNA


def test_any_master_gets_a_released_worker_with_a_higher_epoch():
    lease = Lease()
    lease.claim(ANNA)
    lease.release()
    assert lease.key == b""
    assert lease.claim(BOB) == 2


@pytest.mark.parametrize("how", [dict(takeover=True), dict(silent=True)])
def test_a_worker_can_be_taken_over_by_option_or_from_a_silent_master(how):
    lease = Lease()
    lease.claim(ANNA)
    assert lease.claim(BOB, **how) == 2
    assert lease.holder == BOB


def test_the_same_master_may_claim_again_before_and_after_its_release():
    lease = Lease()
    assert lease.claim(ANNA) == 1
    assert lease.claim(ANNA, 1) == 2
    lease.release()
    assert lease.claim(ANNA, 2) == 3


@pytest.mark.parametrize("bob_left", [False, True])
@pytest.mark.parametrize("takeover", [False, True])
def test_a_replaced_master_is_refused_also_when_the_worker_is_free_again(bob_left, takeover):
    lease = Lease()
    epoch = lease.claim(ANNA)
    lease.claim(BOB, takeover=True)
    if bob_left:
        lease.release()
    with pytest.raises(LeaseError, match=r"^was taken over by bob@pc9 pid 7 at 12:05, epoch 2 > 1; "):
        lease.claim(ANNA, epoch, takeover=takeover)


def test_the_epoch_does_not_go_back_when_the_daemon_was_restarted():
    assert Lease().claim(ANNA, 7) == 8


def test_keys_differ_between_grants_and_masters():
    lease = Lease()
    keys = set()
    for master in (ANNA, ANNA, BOB, BOB):
        lease.claim(master, takeover=True)
        keys.add(lease.key)
    assert len(keys) == 4
    assert {len(key) for key in keys} == {24}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["claim", "takeover", "silent", "leave"])), max_size=60))
def test_epochs_rise_and_a_replaced_master_never_returns_after_any_actions(steps):
    lease = Lease()
    masters = [Holder(bytes([number]) * 16, f"master {number}") for number in range(4)]
    known_epochs = [0] * 4
    replaced = set()
    highest = 0
    for number, step in steps:
        if step == "leave":
            if lease.holder == masters[number]:
                lease.release()
            continue
        before = lease.holder
        try:
            epoch = lease.claim(
                masters[number], known_epochs[number], takeover=step == "takeover", silent=step == "silent"
            )
        except LeaseError:
            assert number in replaced or before not in (None, masters[number])
            assert lease.holder == before
            continue
        assert number not in replaced
        assert epoch > highest
        assert lease.holder == masters[number]
        highest = known_epochs[number] = epoch
        replaced |= {earlier for earlier in range(4) if earlier != number and known_epochs[earlier]}
