from __future__ import annotations

import pytest

from weightcast.gateway.addresses import Place, advertised, check_reachable, check_url, http_url
from weightcast.transfer.errors import AddressError, InputError


@pytest.mark.parametrize(
    ("text", "scheme", "url"),
    [
        ("", "http", "http://[fd00::7]:8900"),
        ("", "https", "https://[fd00::7]:8900"),
        ("gateway", "http", "http://gateway:8900"),
        ("gateway:80", "https", "https://gateway:80"),
        ("::1", "http", "http://[::1]:8900"),
        ("[::1]", "http", "http://[::1]:8900"),
        ("[::1]:80", "http", "http://[::1]:80"),
        ("http://gateway", "https", "http://gateway:80"),
        ("https://[::1]/", "http", "https://[::1]:443"),
        ("https://10.0.0.7:8443", "http", "https://10.0.0.7:8443"),
    ],
)
def test_engines_are_told_the_url_that_is_advertised(text: str, scheme: str, url: str) -> None:
    """The gateway sends host and port, the plugin makes the URL of them; a plugin of before takes hosts as they are."""
    host, port = advertised(text, "fd00::7", 8900, scheme)
    assert http_url(host, port) == url
    assert ("://" in host) == url.startswith("https:")
    assert "[" not in host
    check_url("", url, "the gateway")


def test_an_ipv6_address_without_brackets_is_told_how_it_is_written() -> None:
    with pytest.raises(InputError, match=r"'http://::1:8900', expected .* IPv6 as http://\[::1\]:port"):
        check_url("", "http://::1:8900", "the gateway")


HERE = Place("a", "10.0.0.7", "boot:1")
LOOPBACK = Place("b", "::1", "boot:2")


def test_loopback_is_refused_with_a_member_on_another_host() -> None:
    members = {"trainer rank 0": HERE, "rollout-0 rank 0": LOOPBACK, "rollout-0 rank 1": LOOPBACK}
    with pytest.raises(AddressError) as caught:
        check_reachable("rollout-0", members)
    assert str(caught.value) == (
        "instance rollout-0: rollout-0 rank 0 is on host b (::1), and loopback reaches nobody on another host, such as "
        "trainer rank 0 on host a (10.0.0.7); give rollout-0 rank 0 the gateway's URL by an address that is not "
        "loopback, or its own address: address= of its worker, WEIGHTCAST_ADDRESS for SGLang"
    )


@pytest.mark.parametrize(
    "peer",
    [
        Place("c", "127.0.0.1", "boot:2"),  # another name, the same loopback device
        Place("b", "10.0.0.7", "boot:2"),
        Place("c"),  # an older rank, of which only the host's name is known
    ],
)
def test_loopback_is_right_where_all_share_it(peer: Place) -> None:
    check_reachable("rollout-0", {"trainer rank 0": LOOPBACK, "rollout-0 rank 0": peer})
    check_reachable("rollout-0", {"trainer rank 0": HERE, "rollout-0 rank 0": Place("c", "10.0.0.9", "boot:3")})
