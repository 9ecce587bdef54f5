"""`tokenmill serve --cluster` on a Ray cluster of three nodes on this machine: nodes die and come, streams go on.

Runs where Ray is installed: `pip install 'ray>=2.60,<3'`, then `pytest -m slow tests/serve/test_cluster_ray.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import client, completion, expected, routed
from sim_service import eventually
from test_cluster import SECRET, fixed, open_count, placed, plan_of

pytestmark = pytest.mark.slow
PATIENCE = 180.0


@pytest.fixture
def nodes() -> Iterator[Any]:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # all of it on loopback
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    head = {"num_cpus": 0, "node_ip_address": "127.0.0.1", "_system_config": quick, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()


def test_a_node_that_dies_takes_no_stream_along_and_one_that_comes_is_used(nodes: Any) -> None:
    from tokenmill.serve.cluster.ray_launcher import RayLauncher

    small = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}

    async def main() -> None:
        workers = [nodes.add_node(**small) for _ in range(2)]  # Ray wants the main thread for that
        launcher = RayLauncher(plan_of(), nodes.address, cpus=1, host="127.0.0.1")
        async with (
            routed([], http={"cluster_secret": SECRET}, patience_seconds=PATIENCE) as (app, url),
            placed(app, launcher, fixed(2)) as placement,
            client() as http,
        ):
            await eventually(lambda: open_count(app) == 2, PATIENCE)
            homes = [await one.handle.node() for one in placement.members]
            assert len(set(homes)) == 2 and not await launcher.has_room()  # placed by resources, one each
            prompts = [[number + 3] * 20 for number in range(16)]
            asks = [
                asyncio.create_task(completion(http, url, prompt, seed=number, max_tokens=1200))
                for number, prompt in enumerate(prompts)
            ]
            await eventually(lambda: all(one.bookings for one in app.fleet.replicas))
            nodes.remove_node(workers[0], allow_graceful=False)
            await eventually(lambda: open_count(app) == 1, PATIENCE)
            for number, told in enumerate(await asyncio.gather(*asks)):
                assert told.error is None and told.tokens == expected(prompts[number], 1200, number)
                print(f"{told.gap:.2f}", end=" ")
            assert open_count(app) == 1  # there is no place for another one
            nodes.add_node(**small)
            await eventually(lambda: open_count(app) == 2, PATIENCE)
            again = [await one.handle.node() for one in placement.members]
            assert len(set(again) - set(homes)) == 1
            told = await completion(http, url, [5] * 20, seed=1, max_tokens=10)
            assert told.tokens == expected([5] * 20, 10, 1)

    asyncio.run(asyncio.wait_for(main(), 540))


def test_where_there_is_no_cluster_a_sentence_says_so() -> None:
    pytest.importorskip("ray")
    from tokenmill.errors import ConfigError
    from tokenmill.serve.cluster.ray_launcher import RayLauncher

    with pytest.raises(ConfigError, match="there is no Ray cluster at '127"):
        RayLauncher(plan_of(), "127.0.0.1:1")
