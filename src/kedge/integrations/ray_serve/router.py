"""Ray Serve's request router with Kedge's policy: `Affinity` chooses, Ray Serve sends, queues and retries.

RequestRouterConfig(request_router_class="kedge.integrations.ray_serve.router.RunRouter",
                    request_router_kwargs={"spill": 4})
"""

from collections.abc import Sequence
from typing import Any

from kedge.errors import ConfigError
from kedge.integrations.ray_serve.affinity import Affinity, read_caller
from kedge.types import GenerateRequest

try:
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    why = "is not installed: pip install 'kedge[ray]'"
    raise ConfigError("kedge.integrations.ray_serve", error.name, why) from error


class RunRouter(RequestRouter):
    """A router that keeps a run on the replica with its KV. A call without hints goes to the least busy replica."""

    def initialize_state(self, **settings: Any) -> None:
        """Set up the policy. Ray Serve passes `request_router_kwargs`, which are those of `Affinity`."""
        self._affinity = Affinity(**settings)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each, best first; Ray Serve takes the first with room for another request."""
        if pending_request is None or (caller := caller_of(pending_request)) is None:
            return [candidate_replicas]
        # Without this Ray Serve would ask again at once, and again, while all replicas are full.
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = self._affinity.order(caller, self._loads(candidate_replicas))
        if order:
            self._affinity.expect(caller, order[0])
        return [[replicas[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has accepted a request."""
        super().on_request_routed(pending_request, replica_id, result)
        if (caller := caller_of(pending_request)) is not None:
            self._affinity.routed(caller, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note that replicas have started or ended."""
        super().update_replicas(replicas)
        self._affinity.retain({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Note that a request found its replica dead, before the controller reports it."""
        super().on_replica_actor_died(replica_id)
        self._affinity.retain({alive.unique_id for alive in self.curr_replicas})

    def _loads(self, replicas: Sequence[RunningReplica]) -> dict[str, int]:
        """Return the queue length of each replica, 0 where it is unknown.

        Lengths expire after seconds without news; Ray Serve asks such a replica before it sends a request there.
        """
        lengths = self.replica_queue_len_cache
        return {replica.replica_id.unique_id: lengths.get(replica.replica_id) or 0 for replica in replicas}


def caller_of(request: PendingRequest) -> GenerateRequest | None:
    """Return the caller of a request, whose first argument is vLLM's request body or has no hints.

    Its session is the header's or, without one, OpenAI's `prompt_cache_key`, which asks for affinity and nothing else.
    """
    body = request.args[0] if request.args else None
    params, salt = getattr(body, "kv_transfer_params", None), getattr(body, "cache_salt", None)
    session = request.metadata.session_id or getattr(body, "prompt_cache_key", None) or ""
    return read_caller(params, salt, session)
