"""Tests of the greeting between a worker and a gate: the token is required, and no bit can be altered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import AuthError, ConnectError, LeaseError, ProtocolError, VersionError
from ddlf.rpc.handshake import PREAMBLE, ClientHandshake, Role, WorkerHandshake, auth_key, key_id, short_answer
from ddlf.rpc.join import ANSWER, ANY_PLACE, OFFER, OPENING, GateVerdict, Greeting, Offer, Offering
from tests.rpc.test_handshake import flip

TOKEN, OTHER = b"t" * 43, b"o" * 43
MINE = Offer(3, 1234567890123456789)


def meet(worker=TOKEN, gate=(TOKEN,), verdict=GateVerdict.WELCOME, *, altered=-1, bit=0) -> Offer:
    """Run a whole greeting, in which an attacker may flip one bit of one message. Return the offer that the gate reads."""

    def carried(number: int, data: bytes) -> bytes:
        return flip(data, bit) if number == altered else data

    offering, greeting = Offering(worker, MINE), Greeting(gate)
    reply = carried(1, greeting.reply(carried(0, offering.opening)))
    offer = greeting.read(carried(2, offering.answer(reply)))
    offering.check(carried(3, greeting.answer(verdict)))
    return offer


def test_gate_reads_the_place_and_the_incarnation_of_a_worker_with_its_token():
    assert meet() == MINE


def test_gate_accepts_each_of_its_tokens():
    assert meet(OTHER, (TOKEN, OTHER)) == MINE


def test_gate_refuses_a_worker_with_another_token():
    with pytest.raises(AuthError, match="token mismatch"):
        meet(OTHER)


def test_worker_refuses_a_gate_that_does_not_prove_the_token():
    offering = Offering(TOKEN, MINE)
    offering.answer(Greeting((OTHER,)).reply(offering.opening))
    with pytest.raises(AuthError, match="has not proven"):
        offering.check(ANSWER.pack(GateVerdict.WELCOME, bytes(32)))


@pytest.mark.parametrize(
    ("message", "size"), list(enumerate((OPENING.size, OPENING.size, OFFER.size + 32, ANSWER.size)))
)
def test_no_bit_of_the_greeting_can_be_altered(message, size):
    for bit in range(8 * size):
        with pytest.raises((AuthError, ProtocolError, VersionError)):
            meet(altered=message, bit=bit)


def test_offer_of_one_greeting_is_refused_in_another():
    offering, greeting = Offering(TOKEN, MINE), Greeting((TOKEN,))
    answer_of_worker = offering.answer(greeting.reply(offering.opening))
    assert greeting.read(answer_of_worker) == MINE
    second_greeting = Greeting((TOKEN,))
    second_greeting.reply(offering.opening)
    with pytest.raises(AuthError):
        second_greeting.read(answer_of_worker)


def test_proof_of_a_worker_is_not_a_proof_of_a_gate():
    offering, greeting = Offering(TOKEN, MINE), Greeting((TOKEN,))
    answer_of_worker = offering.answer(greeting.reply(offering.opening))
    with pytest.raises(AuthError):
        offering.check(bytes([GateVerdict.WELCOME]) + answer_of_worker[OFFER.size :])


def test_greeting_gives_no_proof_that_the_handshake_accepts():
    client = ClientHandshake(Role.CONTROL, TOKEN, 1000)
    offering = Offering(TOKEN, MINE)
    answer_of_worker = offering.answer(Greeting((TOKEN,)).reply(offering.opening))
    _, answer = WorkerHandshake((TOKEN,), 1000).answer(client.hello)
    with pytest.raises(AuthError):
        client.read_hello(answer[:64] + answer_of_worker[OFFER.size :])


@pytest.mark.parametrize(
    ("verdict", "error", "text"),
    [
        (GateVerdict.NO_SUCH_PLACE, ConnectError, "no place 3"),
        (GateVerdict.REPLACED, LeaseError, "a later worker has place 3"),
        (GateVerdict.FULL, ConnectError, "has all its workers"),
    ],
)
def test_worker_says_why_it_is_not_welcome(verdict, error, text):
    with pytest.raises(error, match=text):
        meet(verdict=verdict)


def test_worker_names_the_program_that_listens_instead_of_a_gate():
    with pytest.raises(ProtocolError, match="worker listens there"):
        Offering(TOKEN, MINE).answer(short_answer())
    with pytest.raises(ProtocolError, match="looks like HTTP"):
        Offering(TOKEN, MINE).answer(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(40))


@given(st.binary(min_size=OFFER.size + 32, max_size=OFFER.size + 32))
def test_gate_refuses_all_other_bytes(data):
    greeting = Greeting((TOKEN,))
    greeting.reply(Offering(TOKEN, MINE).opening)
    with pytest.raises(AuthError):
        greeting.read(data)


def test_key_id_of_the_offer_equals_that_of_the_handshake():
    answer_of_worker = Offering(TOKEN, Offer(ANY_PLACE, 0)).answer(
        Greeting((TOKEN,)).reply(Offering(TOKEN, MINE).opening)
    )
    assert OFFER.unpack(answer_of_worker[: OFFER.size])[2] == key_id(auth_key(TOKEN))
    assert PREAMBLE.size + 32 == OPENING.size
