"""Tests of the TCP options that make the kernel end a silent connection."""

import socket
import sys

from ddlf.rpc.heartbeats import end_when_silent


def test_a_tcp_socket_is_watched_for_the_given_time():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        end_when_silent(sock, 4.0)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            options = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            values = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
            assert values == [4000, 2, 1, 2]


def test_sockets_other_than_tcp_are_not_changed():
    first, second = socket.socketpair()
    with first, second:
        end_when_silent(first, 4.0)
        first.send(b"x")
        assert second.recv(1) == b"x"
