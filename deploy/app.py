"""The Serve application: an ingress that speaks OpenAI's API, and the coordinator behind it.

Both ask Ray for no CPU: the workers, which the coordinator makes, need them. The target's ranks go
into the placement group of the coordinator's replica, so that Serve owns and frees it.
"""

import asyncio
from typing import Any

from ray import serve
from ray.serve import Application

from outrider.actors.coordinator import Coordinator
from outrider.actors.stats import Snapshot
from outrider.cluster.config import Settings
from outrider.cluster.errors import UnavailableError
from outrider.cluster.logs import reporter
from outrider.cluster.placement import target_bundles
from outrider.deploy.ingress import make_ingress
from outrider.deploy.metrics import MetricsServer, serve_metrics
from outrider.deploy.ray_metrics import make_sinks

_ALL = 100_000  # admission is the scheduler's: Serve must not hold requests back before it
_SCRAPE_S = 5.0  # a loop that is busy for longer fails the scrape
_STOP_S = 10  # for open streams, when the coordinator is to end
_PORT_S = 20.0  # for the coordinator that this one replaces to end, and to leave the port


class ServedCoordinator(Coordinator):
    """A coordinator whose replica counts as started when every worker has loaded."""

    _metrics: MetricsServer | None = None

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(settings, make_sinks=make_sinks)
        loop = asyncio.get_running_loop()

        def read() -> Snapshot:
            # On the loop no count is half done.
            measured = asyncio.run_coroutine_threadsafe(self.measure(), loop)
            try:
                return measured.result(_SCRAPE_S)
            except TimeoutError:
                measured.cancel()
                raise UnavailableError(
                    f"the coordinator is busy: no answer within {_SCRAPE_S:g} s"
                ) from None

        # Before anything is loaded: a port that is taken must not cost a load first.
        self._metrics = await asyncio.to_thread(serve_metrics, settings, read, _PORT_S)
        if self._metrics is not None:
            reporter("coordinator")(f"metrics at {self._metrics.url}")
        await self.start()

    def __del__(self) -> None:
        """End the workers when Serve stops the replica in good order."""
        if self._metrics is not None:
            self._metrics.close()
        self.shutdown()


def coordinator_options(settings: Settings) -> dict[str, Any]:
    """Serve's options of the coordinator's deployment."""
    options: dict[str, Any] = {
        "name": "Coordinator",
        "num_replicas": 1,
        "max_ongoing_requests": _ALL,
        "ray_actor_options": {"num_cpus": 0},
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "graceful_shutdown_wait_loop_s": 1,
        "graceful_shutdown_timeout_s": _STOP_S,
        "max_constructor_retry_count": 1,
    }
    bundles, selectors = target_bundles(settings)
    if bundles:
        options["placement_group_bundles"] = bundles
        options["placement_group_strategy"] = "PACK"
        if any(selectors):
            options["placement_group_bundle_label_selector"] = selectors
    return options


def _beside_the_target(settings: Settings) -> dict[str, Any]:
    """Ray's options of the ingress: a draft's node may go, and would take open streams with it."""
    labels = settings.target.labels
    return {"num_cpus": 0} | ({"label_selector": labels} if labels else {})


def build(args: Settings) -> Application:
    """The application that a Serve configuration's `import_path` names; `args` are its `args`."""
    coordinator = serve.deployment(**coordinator_options(args))(ServedCoordinator).bind(args)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=_ALL,
        ray_actor_options=_beside_the_target(args),
    )(make_ingress())
    return ingress.bind(args, coordinator)
