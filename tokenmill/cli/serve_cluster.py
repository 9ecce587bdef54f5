"""`tokenmill serve --cluster`: replicas here or on the machines of a Ray cluster, behind a router in this process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenmill.cli.terminal import note
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.plan.simulator.autoscale import Autoscale, autoscale_from
from tokenmill.serve.settings import HttpSettings, ServeSettings

STARTUP = 60.0  # seconds: the simulator asks for it; here a replica that starts counts as present


@dataclass(frozen=True)
class ClusterOptions:
    """What `serve` was told of a cluster."""

    address: str  # local, auto, or that of a Ray cluster
    replicas: int
    autoscale: str | None
    cpus: float
    gpus: int

    def scale(self) -> Autoscale:
        if self.autoscale is not None:
            return autoscale_from(self.autoscale, STARTUP)
        if self.replicas < 1:
            raise ConfigError(f"--replicas is {self.replicas}; it must be 1 or more")
        return Autoscale(self.replicas, self.replicas, 1.0, interval=1.0)


async def serve_cluster(
    options: ClusterOptions, config: EngineConfig, http: HttpSettings, settings: ServeSettings, log_level: str
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, and what the first replicas raise if none of them starts."""
    import secrets

    from tokenmill.serve.cluster.launch import Launcher, LocalLauncher, ReplicaPlan
    from tokenmill.serve.cluster.placement import Placement
    from tokenmill.serve.router.app import RouterApp
    from tokenmill.serve.router.server import route
    from tokenmill.serve.router.settings import RouterSettings

    if http.journal is not None:
        raise ConfigError("--journal is one server's file and a cluster has many; leave one of them out")
    if http.lora_dir is not None:
        raise ConfigError("--lora-dir is for one server, and a cluster has many; name adapters with --lora-modules")
    scale = options.scale()
    http = replace(http, cluster_secret=http.cluster_secret or secrets.token_hex(32))
    plan = ReplicaPlan(asdict(config), _plain(http), asdict(settings), log_level)
    launcher: Launcher
    if options.address == "local":
        launcher = LocalLauncher(plan, options.gpus, _gpus_here() if options.gpus else 0, int(options.cpus) or None)
    else:
        from tokenmill.serve.cluster.ray_launcher import RayLauncher

        launcher = RayLauncher(plan, options.address, options.cpus, options.gpus)

    async def keep(app: RouterApp) -> None:
        app.cluster = placement = Placement(app.fleet, launcher, scale, http.drain_seconds)
        await placement.run()

    count = f"{scale.least}" if scale.least == scale.most else f"{scale.least} to {scale.most}"
    note(f"{count} replicas of {config.model}, placed by {options.address}")
    await route(RouterSettings((), http), lambda url: note(f"tokenmill serves {config.model} at {url}"), keep)


def _plain(http: HttpSettings) -> dict[str, Any]:
    """Settings for replicas, which may be on other machines: files travel as their text."""
    told = asdict(http)
    for name in ("host", "port", "journal", "keys"):
        del told[name]
    if http.keys is not None:
        try:
            told["keys_text"] = http.keys.read_text()
        except OSError as error:
            raise ConfigError(f"the keys cannot be read from {http.keys}: {error}") from None
    return told


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()
