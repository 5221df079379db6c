from __future__ import annotations

import socket

import pytest
from loopback_support import LOOPBACKS

from weightcast.transfer.errors import AddressError, InputError
from weightcast.transfer.transports.addresses import (
    bare,
    host_port,
    is_loopback,
    is_unspecified,
    listen,
    numeric,
    split_host_port,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gateway", "gateway", None),
        ("gateway:8900", "gateway", 8900),
        ("10.0.0.7", "10.0.0.7", None),
        ("10.0.0.7:8900", "10.0.0.7", 8900),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[fd00::7]:8900", "fd00::7", 8900),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_hosts_with_and_without_a_port(text: str, host: str, port: int | None) -> None:
    assert split_host_port(text) == (host, port)
    if port is not None:
        assert host_port(host, port) == text


@pytest.mark.parametrize("text", ["", "::1:x", "[::1", "[gateway]:1", "[1]", "a:0", "a:65536", "a b", "u@h", "h/p"])
def test_texts_that_are_no_host(text: str) -> None:
    with pytest.raises(InputError, match=r"is no host; expected HOST, HOST:PORT, .* as \[::1\]:8900"):
        split_host_port(text)


def test_loopback_and_every_address() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"]))
    assert not any(map(is_loopback, ["", "10.0.0.7", "fd00::7", "::", "localhost"]))
    assert all(map(is_unspecified, ["", "0.0.0.0", "::", "0", "::ffff:0.0.0.0"]))
    assert not any(map(is_unspecified, ["127.0.0.1", "::1", "localhost", "no.such.host.invalid"]))


def test_names_and_addresses_as_numbers() -> None:
    assert is_loopback(numeric("localhost"))
    assert numeric("::ffff:10.0.0.7") == "10.0.0.7"
    assert [numeric(text) for text in ("::1", "10.0.0.7", "no.such.host.invalid")] == [
        "::1",
        "10.0.0.7",
        "no.such.host.invalid",
    ]
    assert [bare(text) for text in ("[::1]", "::1", "gateway")] == ["::1", "::1", "gateway"]


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_listener_is_on_its_address_only(host: str) -> None:
    with listen(host) as listener:
        assert listener.getsockname()[0] == host
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)):
            pass
        with pytest.raises(OSError, match=r"refused|Cannot assign|unreachable"):
            socket.create_connection(("::1" if host == "127.0.0.1" else "127.0.0.1", port))


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_port_in_use_is_named_with_its_address(host: str) -> None:
    with listen(host) as listener:
        port = int(listener.getsockname()[1])
        with pytest.raises(AddressError) as caught:
            listen(host, port)
    place = host_port(host, port)
    assert str(caught.value) == f"cannot listen on {place}: port {port} of {host} is in use; choose another port"


@pytest.mark.parametrize("host", ["192.0.2.1", pytest.param("2001:db8::1", marks=pytest.mark.ipv6)])
def test_an_address_of_another_machine_is_called_that(host: str) -> None:
    with pytest.raises(AddressError, match=f"{host} is no address of this machine; give one that is"):
        listen(host, 8900)


def test_a_name_of_nothing_is_told_in_one_line() -> None:
    with pytest.raises(AddressError, match=r"^cannot listen on no.such.host.invalid:8900: [^\n]+$"):
        listen("no.such.host.invalid", 8900)
