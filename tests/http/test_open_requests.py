"""Open requests as others see them."""

from __future__ import annotations

import trio

from trioserve.http.open_requests import OpenRequests


async def test_requests_are_found_by_id_the_oldest_first(autojump_clock: object) -> None:
    requests = OpenRequests()
    with requests.opened("a") as first:
        await trio.sleep(1)
        with requests.opened("b") as other, requests.opened("a") as second:
            assert requests.find("a") == [first, second]
            assert requests.find("b") == [other]
            assert requests.find("c") == []
        assert requests.find("a") == [first]
    assert requests.find("a") == []
