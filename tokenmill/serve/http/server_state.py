"""ServerState: what every handler of a server works with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.engine_client.sessions import Sessions
from tokenmill.serve.errors import HttpError
from tokenmill.serve.http.api_keys import ApiKeys
from tokenmill.serve.http.batch_runner import BatchRunner
from tokenmill.serve.http.routed_streams import RoutedStreams
from tokenmill.serve.http.tenants import Tenant
from tokenmill.serve.observe.metrics import ServerMetrics
from tokenmill.serve.settings import HttpSettings
from tokenmill.serve.storage.stored_responses import StoredResponses

if TYPE_CHECKING:  # an extra
    from tokenmill.serve.observe.tracing import Tracing


@dataclass(frozen=True)
class ServerState:
    service: Service
    settings: HttpSettings
    keys: ApiKeys
    metrics: ServerMetrics
    batches: BatchRunner
    responses: StoredResponses
    sessions: Sessions
    tracing: Tracing | None = None
    routed: RoutedStreams = field(default_factory=RoutedStreams)
    started: float = field(default_factory=time.time)

    def tenant_of(self, request: Request) -> Tenant:
        """Who asks. Raises HttpError 401."""
        if (owner := request.scope.get("tokenmill.owner")) is not None:  # a batch asks for whom it belongs to
            return self.keys.named(owner)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")
        tenant = self.keys.tenant_of(given)
        request.scope["tokenmill.key"] = self.keys.id_of(given)  # for the log
        return tenant

    def name_of(self, service: Service) -> str:
        """What clients call the model of this service or of its degrade service."""
        if service is self.service and self.settings.names:
            return self.settings.names[0]
        return service.facts.model if hasattr(service, "facts") else service.config.model

    def names(self) -> list[str]:
        """Every name that the model answers to."""
        known = [*self.settings.names, self.name_of(self.service), self.service.config.model]
        return list(dict.fromkeys(known))

    def adapters_of(self, tenant: Tenant) -> list[str]:
        """LoRA adapters that a tenant may ask for in place of the model."""
        return [name for name in self.service.adapters.known if tenant.may_use(name)]

    def no_model(self, name: str) -> HttpError:
        known = ", ".join(self.names())
        return HttpError(
            404, f"the model {name[:100]!r} is not served here; there is {known}", "model_not_found", "model"
        )


def server_of(request: Request) -> ServerState:
    server = request.app.state.server
    assert isinstance(server, ServerState)
    return server
