"""Two ends in one process behave as two ends of a network."""

from tests.sockets import socket_pair


async def test_what_one_end_sends_the_other_receives_and_neither_blocks():
    left, right = socket_pair()
    with left, right:
        assert (left.getblocking(), right.getblocking()) == (False, False)
        left.send(b"to the right")
        right.send(b"to the left")
        assert (left.recv(100), right.recv(100)) == (b"to the left", b"to the right")


async def test_the_end_of_one_end_is_seen_at_the_other():
    left, right = socket_pair()
    with right:
        left.close()
        assert right.recv(1) == b""
