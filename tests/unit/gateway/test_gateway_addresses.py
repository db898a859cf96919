"""An address with many unserved connections is crowded while another address asks."""

from services.gateway.frontend.http.transport.addresses import ASKS_FOR_S, CROWD, Addresses


def many_wait(addresses: Addresses, address: str) -> None:
    for _ in range(CROWD):
        addresses.waits(address)


def test_an_address_is_crowded_from_a_number_of_unserved_connections_on() -> None:
    addresses = Addresses(lambda: 0.0)
    addresses.asks("a")
    for _ in range(CROWD - 1):
        addresses.waits("b")
    assert not addresses.is_crowded("b")
    addresses.waits("b")
    assert addresses.is_crowded("b")
    assert not addresses.is_crowded("a")
    addresses.served("b")
    assert not addresses.is_crowded("b")


def test_an_address_that_is_alone_is_not_crowded() -> None:
    """Its own requests do not make it so, and connections without requests are no company."""
    addresses = Addresses(lambda: 0.0)
    many_wait(addresses, "a")
    many_wait(addresses, "b")
    addresses.asks("a")
    assert not addresses.is_crowded("a")
    assert addresses.is_crowded("b")


def test_a_client_asks_for_a_while_after_its_last_request() -> None:
    """So a client that sends one request after another counts between them too."""
    now = 0.0
    addresses = Addresses(lambda: now)
    many_wait(addresses, "b")
    for _ in range(2):
        addresses.asks("a")
    addresses.answered("a")
    now += ASKS_FOR_S + 1
    assert addresses.is_crowded("b")
    addresses.answered("a")
    now += ASKS_FOR_S
    assert addresses.is_crowded("b")
    now += 0.01
    assert not addresses.is_crowded("b")


def test_addresses_that_asked_are_forgotten() -> None:
    """Also if no address is crowded, and each request comes from another one."""
    now = 0.0
    addresses = Addresses(lambda: now)
    for number in range(100):
        addresses.asks(str(number))
        addresses.answered(str(number))
        now += ASKS_FOR_S / 10
    assert len(addresses._asked) <= 11
