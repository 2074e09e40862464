"""Tests that a socket pair in one process behaves like a network connection."""

from tests.sockets import socket_pair


async def test_each_end_receives_the_bytes_of_the_other_and_neither_blocks():
    left, right = socket_pair()
    with left, right:
        assert (left.getblocking(), right.getblocking()) == (False, False)
        left.send(b"to the right")
        right.send(b"to the left")
        assert (left.recv(100), right.recv(100)) == (b"to the left", b"to the right")


async def test_closing_one_end_is_noticed_at_the_other():
    left, right = socket_pair()
    with right:
        left.close()
        assert right.recv(1) == b""
