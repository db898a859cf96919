"""An address is crowded while it has many connections and another one asks for something."""

from services.gateway.frontend.http.transport.addresses import ASKS_FOR_S, CROWD, Addresses


def many_opened(addresses: Addresses, address: str) -> None:
    for _ in range(CROWD):
        addresses.opened(address)


def test_an_address_is_crowded_from_a_number_of_connections_on() -> None:
    addresses = Addresses(lambda: 0.0)
    addresses.asks("a")
    for _ in range(CROWD - 1):
        addresses.opened("b")
    assert not addresses.is_crowded("b")
    addresses.opened("b")
    assert addresses.is_crowded("b")
    assert not addresses.is_crowded("a")
    addresses.closed("b")
    assert not addresses.is_crowded("b")


def test_an_address_that_is_alone_is_not_crowded() -> None:
    """Its own requests do not make it so, and connections without requests are no company."""
    addresses = Addresses(lambda: 0.0)
    many_opened(addresses, "a")
    many_opened(addresses, "b")
    addresses.asks("a")
    assert not addresses.is_crowded("a")
    assert addresses.is_crowded("b")


def test_a_client_asks_for_a_while_after_its_last_request() -> None:
    """So a client that sends one request after another counts between them too."""
    now = 0.0
    addresses = Addresses(lambda: now)
    many_opened(addresses, "b")
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
