"""The coordinator's own port: bound and told before anything is loaded, and never a traceback."""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable

import httpx
import pytest

from outrider.cluster.config import parse_settings
from outrider.cluster.errors import ConfigError
from outrider.deploy.app import ServedCoordinator
from outrider.deploy.metrics import serve_metrics

from .snapshots import make_settings, snapshot

NOBODYS_HOST = "192.0.2.1"  # RFC 5737

Load = Callable[[str], Awaitable[None]]  # takes the address that was told last


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[str, Load], Awaitable[None]]:
    """Starts a coordinator as Serve does, but for what it loads; and ends it."""
    monkeypatch.setattr("outrider.actors.coordinator.log_to_terminal", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    caplog.set_level(logging.INFO, "outrider.progress")

    async def start(host: str, load: Load) -> None:
        class Loading(ServedCoordinator):
            async def start(self) -> None:
                (line,) = caplog.messages
                told = re.fullmatch(
                    r"coordinator: metrics at (http://127\.0\.0\.1:\d+/metrics)", line
                )
                assert told
                await load(told[1])

        metrics = {"host": host, "port": 0, "ray": False}
        settings = parse_settings({"target": {"model": "org/big"}, "metrics": metrics})
        coordinator = Loading.__new__(Loading)
        try:
            await coordinator.__init__(settings)  # type: ignore[misc]
        finally:
            coordinator.__del__()

    return start


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_is_none_is_one_sentence(host: str) -> None:
    settings = make_settings()
    metrics = settings.metrics.model_copy(update={"host": host})
    with pytest.raises(ConfigError, match="metrics: cannot serve on"):
        serve_metrics(settings.model_copy(update={"metrics": metrics}), snapshot)


async def test_while_it_loads_a_scrape_gets_a_sentence(serve) -> None:
    responses = []

    async def load(url: str) -> None:
        responses.append(await asyncio.to_thread(httpx.get, url, trust_env=False))

    await serve("127.0.0.1", load)
    (response,) = responses
    assert (response.status_code, response.text) == (503, "the coordinator has not started\n")


async def test_a_busy_coordinator_gets_a_sentence(serve, capfd) -> None:
    responses = []

    async def load(url: str) -> None:
        responses.append(httpx.get(url, trust_env=False, timeout=60))  # noqa: ASYNC210  # the point

    await serve("127.0.0.1", load)
    (response,) = responses
    sentence = "the coordinator is busy: no answer within 5 s\n"
    assert (response.status_code, response.text) == (503, sentence)
    assert capfd.readouterr() == ("", "")


async def test_a_port_that_cannot_be_had_fails_before_anything_is_loaded(serve) -> None:
    async def load(url: str) -> None:
        raise AssertionError("loaded")

    with pytest.raises(ConfigError, match=f"metrics: cannot serve on {NOBODYS_HOST}:0: "):
        await serve(NOBODYS_HOST, load)
