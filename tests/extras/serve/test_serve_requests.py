"""Requests to the server, without one: tests/serve needs packages that these do not."""

import asyncio

import pytest

from kit.base.errors import KitError
from kit.extras.serve.recipe import RequestError, listening, read_body


class Request:
    def __init__(self, data: bytes):
        self.data = data

    async def stream(self):
        yield self.data


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"[" * 60_000, b'{"input": "\\ud83d"}'])
def test_what_is_no_request_is_refused_with_a_status_that_clients_do_not_repeat(data):
    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body(Request(data)))
    assert caught.value.status == 400 and str(caught.value).encode()


def test_a_request_is_read():
    text = "\\ud83d\\ude00 ሰላም"  # both halves of a pair make a character
    data = f'{{"input": "{text}"}}'.encode()
    assert asyncio.run(read_body(Request(data))) == {"input": "😀 ሰላም"}


def test_a_port_that_is_taken_is_refused_before_an_address_is_printed():
    with listening("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        with pytest.raises(KitError, match=rf"Port {port} .*--port {port + 1}"):
            listening("127.0.0.1", port)
