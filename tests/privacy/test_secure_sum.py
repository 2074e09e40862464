"""Tests of secure sums: published vectors, exact sums, lost members, random masks, and servers that lie."""

import hmac
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ddlf.errors import BadUpdate, ProtocolError
from ddlf.privacy import secure_sum
from ddlf.privacy.secure_sum import LEVELS, MOST, FixedPoint, Identity, Share, add_mask, code_of, pair_secret, unmasked
from tests.later import Later
from tests.privacy.vectors import AES_KEY, AES_OF_ZERO, ALICE, BOB_PUBLIC, ED25519, KNOWN_SECRETS, SHARED

stats = Later("scipy.stats")

RUN, ATTEMPT = "run", "0123456789abcdef"


def hkdf(secret, info, length, salt=bytes(32)):
    """A second implementation of HKDF of RFC 5869."""
    key, block, result = hmac.digest(salt, secret, "sha256"), b"", b""
    while len(result) < length:
        block = hmac.digest(key, block + info + bytes([1 + len(result) // 32]), "sha256")
        result += block
    return result[:length]


def shares_of(count, least=3, identities=None):
    """Return members that have exchanged their keys."""
    identities = identities or [Identity() for _ in range(count)]
    shares = [Share(RUN, ATTEMPT, number + 1, identity, least) for number, identity in enumerate(identities)]
    codes = {share.meet([member.offer for member in shares]) for share in shares}
    assert len(codes) == 1
    return shares


def numbers(seed, size=1000):
    return np.random.default_rng(seed).integers(0, 2**32, size, np.uint32)


def test_hkdf_of_these_tests_gives_the_first_case_of_rfc_5869():
    salt, info = bytes.fromhex("000102030405060708090a0b0c"), bytes.fromhex("f0f1f2f3f4f5f6f7f8f9")
    assert hkdf(b"\x0b" * 22, info, 42, salt).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_pair_secret_is_hkdf_of_the_secret_in_rfc_7748():
    alice = X25519PrivateKey.from_private_bytes(ALICE)
    assert pair_secret(alice, BOB_PUBLIC, "a context") == hkdf(SHARED, b"a context", 32)


def test_identity_signs_as_in_rfc_8032():
    identity = Identity()
    identity._key = Ed25519PrivateKey.from_private_bytes(ED25519["private"])
    assert identity.sign("r") == ED25519["signature of 72"]


def test_mask_is_aes_256_in_counter_mode_across_its_blocks():
    total = np.zeros(2**19 + 3, np.uint32)  # two whole blocks and a part
    add_mask(total, AES_KEY, 1)
    block = Cipher(algorithms.AES(AES_KEY), modes.ECB()).encryptor()
    assert total[:4].tobytes() == AES_OF_ZERO
    for at in (1, 2**17 // 2, 2**17 - 1):
        assert total[4 * at : 4 * at + 4].tobytes() == block.update(at.to_bytes(16, "big"))
    add_mask(total, AES_KEY, -1)
    assert not total.any()


@pytest.mark.parametrize("lost", [(), (3,), (1, 8)])
def test_sum_of_eight_members_is_exact_mod_2_to_the_32(lost):
    shares = shares_of(8)
    numbers_of_members = {number: numbers(number) for number in range(1, 9)}
    vectors = {share.offer.member: share.masked(numbers_of_members[share.offer.member]).tobytes() for share in shares}
    named = [number for number in numbers_of_members if number not in lost]
    survivors = [share for share in shares if share.offer.member in named]
    signatures = {share.offer.member: share.sign(named) for share in survivors}
    answers = {share.offer.member: share.answer(signatures) for share in survivors}
    total = unmasked({number: vectors[number] for number in named}, answers)
    np.testing.assert_array_equal(
        total, np.sum([numbers_of_members[number] for number in named], axis=0, dtype=np.uint32)
    )
    for number, answer in answers.items():  # a member's seed and all its pair secrets are never revealed together
        assert set(answer.secrets) == set(lost)
        assert number not in answer.secrets


def test_masked_vectors_are_uniform_and_tell_nothing_about_the_update(monkeypatch):
    """Fixed keys give the same figures each time."""
    random = np.random.default_rng(0)
    generate = X25519PrivateKey.from_private_bytes
    fixed = type("Fixed", (), {"generate": lambda: generate(random.bytes(32))})
    monkeypatch.setattr(secure_sum, "X25519PrivateKey", fixed)
    monkeypatch.setattr(secure_sum.secrets, "token_bytes", random.bytes)
    size = 1_000_000
    update = np.random.default_rng(1).normal(0, 0.01, size)
    vector = FixedPoint(8.0).numbers(update)
    for share in shares_of(3):
        masked = share.masked(vector)
        for shift in (0, 24):  # the lowest and the highest byte
            counts = np.bincount((masked >> np.uint32(shift)) & np.uint32(255), minlength=256)
            assert stats.chisquare(counts).pvalue > 0.001
        assert abs(np.corrcoef(masked.astype(np.float64), update)[0, 1]) < 0.005


def test_member_gets_fresh_keys_for_each_sum():
    identity = Identity()
    first, second = (Share(RUN, attempt, 1, identity, 3) for attempt in ("a", "b"))
    assert first.offer.key != second.offer.key
    assert first.offer.identity == second.offer.identity


def test_vector_is_masked_once_only():
    [share, *_] = shares_of(3)
    share.masked(numbers(0))
    with pytest.raises(ProtocolError, match="used once"):
        share.masked(numbers(1))


# -- servers that lie ----------------------------------------------------------------------------------------------------


def test_server_that_names_two_lists_of_survivors_gets_no_mask():
    shares = shares_of(5)
    for share in shares:
        share.masked(numbers(0))
    first, second = [1, 2, 3, 4], [1, 2, 3, 5]
    signatures = {number: shares[number - 1].sign(first) for number in (1, 4)}
    signatures |= {number: shares[number - 1].sign(second) for number in (2, 3, 5)}
    for share in shares:
        with pytest.raises(ProtocolError, match="has not signed the list"):
            share.answer(signatures)
    with pytest.raises(ProtocolError, match="names two lists of survivors"):
        shares[0].sign(second)


def test_signature_of_a_list_holds_for_its_keys_only():
    """If the server shows each member other keys, signatures of other members do not match."""
    identities = [Identity() for _ in range(3)]
    first, second = shares_of(3, identities=identities), shares_of(3, identities=identities)
    for share in (*first, *second):
        share.masked(numbers(0))
    signatures = {share.offer.member: share.sign([1, 2, 3]) for share in second}
    signatures[1] = first[0].sign([1, 2, 3])
    with pytest.raises(ProtocolError, match="peer 2 has not signed"):
        first[0].answer(signatures)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([1, 2], "needs 3 survivors"),
        ([1, 2, 3, 9], "peer 9 as a survivor, and the sum has no"),
        ([1, 2, 2, 3], "a survivor of a sum twice"),
        ([2, 3, 4], "that it counts as lost"),
        ([], "counts as lost"),
    ],
)
def test_member_refuses_a_list_of_survivors(named, message):
    share = shares_of(4)[0]
    share.masked(numbers(0))
    with pytest.raises(ProtocolError, match=message):
        share.sign(named)
    with pytest.raises(ProtocolError, match="no survivors"):
        share.answer({})


def offers_of(count):
    shares = [Share(RUN, ATTEMPT, number + 1, Identity(), 3) for number in range(count)]
    return shares[0], [share.offer for share in shares]


@pytest.mark.parametrize("secret", KNOWN_SECRETS)
def test_member_refuses_a_key_whose_secret_is_known(secret):
    own_share, offers = offers_of(3)
    identity = Identity()
    bad = Share(RUN, ATTEMPT, 3, identity, 3)
    offers[2] = replace(bad.offer, key=secret, signature=identity.sign(secure_sum.key_text(RUN, ATTEMPT, 3, secret)))
    with pytest.raises(ProtocolError, match="on no curve"):
        own_share.meet(offers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda all: [*all[:2], replace(all[1], member=3)], "the same key"),
        (lambda all: [*all, all[2]], "names a member of a sum twice"),
        (lambda all: [replace(all[1], member=1), *all[1:]], "another key than this peer's own"),
        (lambda all: all[1:], "another key than this peer's own"),
        (lambda all: [*all[:2], replace(all[0], member=3)], "the same key"),
        (lambda all: [*all[:2], replace(all[2], key=bytes(range(32)))], "peer 3 is not signed"),
        (lambda all: [*all[:2], replace(all[2], identity=bytes(31))], "peer 3 is not signed"),
        (lambda all: [*all[:2], replace(all[2], signature=b"")], "peer 3 is not signed"),
        (lambda all: all[:2], "has 3 to 50 members"),
        (lambda all: [replace(all[0], member=number) for number in range(MOST + 1)], "has 3 to 50 members"),
    ],
)
def test_member_refuses_keys(changed, message):
    own_share, offers = offers_of(4 if "another" in message and changed is not None else 3)
    with pytest.raises(ProtocolError, match=message):
        own_share.meet(changed(offers))
    assert not own_share.offers
    with pytest.raises(ProtocolError, match="used once, and after"):
        own_share.masked(numbers(0))


def test_keys_of_another_sum_are_refused():
    own_share, offers = offers_of(3)
    offers[2] = Share(RUN, "another", 3, Identity(), 3).offer
    with pytest.raises(ProtocolError, match="peer 3 is not signed"):
        own_share.meet(offers)


def test_code_shows_a_server_that_puts_itself_in_between():
    identities = [Identity().public for _ in range(3)]
    code = code_of(identities)
    assert code == code_of(identities[::-1])
    assert [len(group) for group in code.split()] == [5] * 8
    assert code.replace(" ", "").isdecimal()
    assert code != code_of([*identities[:2], Identity().public])


# -- fixed point ---------------------------------------------------------------------------------------------------------


def test_fixed_point_sum_differs_by_half_a_step_for_each_member():
    point, random = FixedPoint(2.0), np.random.default_rng(3)
    values = random.uniform(-2, 2, (MOST, 10_000))
    total = np.sum([point.numbers(row) for row in values], axis=0, dtype=np.uint32)
    error = np.abs(point.values(total, MOST) - values.sum(0))
    assert error.max() <= MOST * 2.0 / LEVELS / 2
    ends = np.full(7, -2.0)
    all_of_them = np.sum([point.numbers(ends)] * MOST, axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(point.values(all_of_them, MOST), MOST * ends)  # the largest sum must not wrap


def test_fixed_point_rounds_to_even_and_weighs():
    step = 8.0 / LEVELS
    rounded = FixedPoint(8.0).numbers(np.array([0.5, 1.5, 2.5, -0.5, -1.5]) * step)
    assert rounded.view(np.int32).tolist() == [0, 2, 2, 0, -2]
    assert FixedPoint(8.0).numbers(np.array([4.0]), 0.5).tolist() == [LEVELS // 4]


@pytest.mark.parametrize("value", [8.1, -8.1, np.nan, np.inf, 1e308])
def test_fixed_point_refuses_a_value_beyond_its_limit_instead_of_wrapping(value):
    with pytest.raises(BadUpdate, match="1 of 2 values of the update are beyond the limit of 8"):
        FixedPoint(8.0).numbers(np.array([8.0, value]))


def test_sum_with_a_wrong_mask_is_detected():
    total = numbers(5, 10_000)
    with pytest.raises(ProtocolError, match="larger than 3 members can make it"):
        FixedPoint(8.0).values(total, 3)
