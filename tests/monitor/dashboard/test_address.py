"""Tests of the address of the page, and of the host names that a browser may use for it."""

import socket

import pytest

from ddlf.errors import ConfigError, ListenError
from ddlf.monitor.dashboard.address import PORTS, is_ours, listen, page_url, tunnel

HERE = "http://127.0.0.1:8900/#t"
HUB = "https://hub.example/user/ann/proxy/8900/#t"


@pytest.mark.parametrize("host", ["127.0.0.1:8900", "localhost:8900", "LOCALHOST", "[::1]:8900", "localhost:9999"])
def test_names_of_loopback_are_ours_with_any_port_because_of_tunnels(host):
    assert is_ours(host, None, HERE)
    assert is_ours(host, f"http://{host}", HERE)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8900", "127.0.0.1.evil.example", "localhost.evil:8900"]
)
def test_a_foreign_host_is_not_ours(host):
    assert not is_ours(host, None, HERE)


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://localhost:1", "file://", "http://127.0.0.1"])
def test_the_page_of_another_site_is_not_ours(origin):
    assert not is_ours("localhost:8900", origin, HERE)


def test_the_proxy_that_the_template_names_is_ours():
    assert is_ours("hub.example", "https://hub.example", HUB)
    assert not is_ours("hub.example", "https://hub.example", HERE)


def test_the_url_has_the_token_in_its_fragment():
    assert page_url(8901, "t", {}) == "http://127.0.0.1:8901/#t"


def test_a_template_has_the_port_and_variables_of_the_environment():
    environment = {"DDLF_DASHBOARD_URL": "https://hub.example{PREFIX}proxy/{port}/", "PREFIX": "/user/ann/"}
    assert page_url(8900, "t", environment) == HUB


@pytest.mark.parametrize(
    "template", ["https://hub.example/{USER_NAME}/{port}", "/proxy/{port}", "{", "https://{port.x}/"]
)
def test_an_unusable_template_is_named(template):
    with pytest.raises(ConfigError, match="DDLF_DASHBOARD_URL"):
        page_url(8900, "t", {"DDLF_DASHBOARD_URL": template})


def test_a_user_of_ssh_gets_the_command_of_the_tunnel(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    assert tunnel(8900, {}) == ""
    assert tunnel(8900, {"SSH_CONNECTION": "10.1.1.1 5000 10.0.0.9 22"}) == "ssh -N -L 8900:127.0.0.1:8900 ann@10.0.0.9"
    assert "-p 2222 ann@" in tunnel(8900, {"SSH_CONNECTION": "10.1.1.1 5000 10.0.0.9 2222"})
    assert tunnel(8900, {"SSH_CONNECTION": "a 1 b 22", "DDLF_DASHBOARD_URL": "https://hub.example/{port}"}) == ""


def test_a_given_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} .* is in use"):
            listen(port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_is_refused(port):
    with pytest.raises(ConfigError, match="must be 1-65535"):
        listen(port)


def test_the_next_free_port_is_used_with_a_note():
    listener, _ = listen(None)
    with listener:
        sock, note = listen(None)
        with sock:
            first, second = listener.getsockname()[1], sock.getsockname()[1]
            assert first < second
            assert {first, second} <= set(PORTS)
            assert note == f"port {PORTS.start} is in use"
