"""An ASGI app on a real port, in a thread, for clients that need sockets."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serve_http(app: Any) -> Iterator[str]:
    """The URL of `app`, which is served until the block is left."""
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, ws="none"))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
    thread.start()
    assert started.wait(20), "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"
