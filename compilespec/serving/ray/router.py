"""Chooses the replica that knows most of a prompt; among equals, the least busy one."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from compilespec.serving.ray.prefixes import PrefixMemory

logger = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):
    """Every handle has its own router, which knows the requests of this handle."""

    def initialize_state(self, max_lead: int = 8) -> None:
        """Args: max_lead: how many more requests a preferred replica may have than the least busy
        one.
        """
        self._max_lead, self._memory = max_lead, PrefixMemory()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first."""
        try:
            return [[one] for one in self._ranked(candidate_replicas, keys_of(pending_request))]
        except Exception:  # Ray would let the request hang without an error
            logger.exception("replicas could not be ranked; any of them may serve")
            return [list(candidate_replicas)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._memory.note(keys_of(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._memory.forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self.curr_replicas)
        super().update_replicas(replicas)
        for gone in before - {replica.replica_id for replica in replicas}:
            self._memory.forget(gone)

    def _ranked(
        self, replicas: Sequence[RunningReplica], keys: Sequence[bytes]
    ) -> list[RunningReplica]:
        loads = [self.replica_queue_len_cache.get(one.replica_id) or 0 for one in replicas]
        depths = [self._memory.depth(keys, one.replica_id) for one in replicas]
        return [replicas[at] for at in rank(depths, loads, self._max_lead)]


def rank(depths: Sequence[int], loads: Sequence[int], max_lead: int) -> list[int]:
    """Places of replicas, best first: the most known chunks, then the fewest requests; equals in
    any order.

    Args:
        depths: the number of chunks of the prompt that each knows.
        loads: requests that each has.
        max_lead: a replica with more requests than these above the least busy one counts as
            knowing no chunk.
    """
    least = min(loads, default=0)

    def order(at: int) -> tuple[int, int, float]:
        known = depths[at] if loads[at] <= least + max_lead else 0
        return -known, loads[at], random.random()

    return sorted(range(len(loads)), key=order)


def keys_of(pending: PendingRequest | None) -> tuple[bytes, ...]:
    """The keys of a forwarded request; none for other calls."""
    if pending is None or not pending.args:
        return ()
    return tuple(getattr(pending.args[0], "keys", ()))
