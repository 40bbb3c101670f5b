"""Router settings that a recipe may change in its `[router]` table.

Defaults suit one replica per 8-GPU node. Names and units are those of sglang-router.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ABSOLUTE_DIFFERENCE, RELATIVE_DIFFERENCE = 16, 1.5  # of running requests, beyond which load decides; with a cache


class RouterSettings(BaseModel):
    """Distribution of requests over replicas, and limits at which a replica counts as unhealthy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["cache_aware", "round_robin", "power_of_two", "random"] = "cache_aware"
    cache_threshold: float = Field(default=0.3, ge=0, le=1, description="prefix share above which the cache decides")
    # If running requests differ by more than this, load decides, whatever prefix a replica has cached.
    balance_abs_threshold: int | None = Field(default=None, ge=0, description="16, or 1 without a prefix cache")
    balance_rel_threshold: float | None = Field(default=None, ge=1, description="1.5, or 1.01 without a prefix cache")
    max_payload_size: int = Field(default=32 << 20, gt=0, description="bytes of a request's body")
    max_concurrent_requests: int = Field(default=-1, ge=-1, description="over all replicas; -1: the doors decide")
    queue_size: int = Field(default=100, ge=0)
    queue_timeout_secs: int = Field(default=60, gt=0)
    request_timeout_secs: int = Field(default=1800, gt=0)
    # Together about 5 s, longer than a dead replica stays in the router's list. Until it is removed, the cache-aware
    # policy sends every attempt to it again.
    retry_max_retries: int = Field(default=6, ge=1, description="attempts of a request that has not begun to answer")
    retry_initial_backoff_ms: int = Field(default=200, gt=0, description="before the second attempt; doubled each time")
    retry_max_backoff_ms: int = Field(default=2000, gt=0)
    # SGLang's /health generates a token and gives up after 20 s, and a long prefill can delay it that long.
    health_check_interval_secs: int = Field(default=10, gt=0)
    health_check_timeout_secs: int = Field(default=25, gt=0)
    health_failure_threshold: int = Field(default=2, ge=1)
    health_success_threshold: int = Field(default=1, ge=1)
    cors_allowed_origins: list[str] = []
    log_level: Literal["debug", "info", "warn", "error"] = "warn"

    def resolved(self, prefix_cache: bool) -> RouterSettings:
        """Return a copy with its balance thresholds set: the differences in running requests beyond which load decides.

        A node runs 40 requests well, so with a prefix cache 16 more may go to the replica with their prefix. Without
        one, affinity only crowds one replica (measured: nearly all of 8 clients on one of two), so load alone decides.
        """
        names = "balance_abs_threshold", "balance_rel_threshold"
        defaults = (ABSOLUTE_DIFFERENCE, RELATIVE_DIFFERENCE) if prefix_cache else (1, 1.01)
        unset = [(name, value) for name, value in zip(names, defaults, strict=True) if getattr(self, name) is None]
        return self.model_copy(update=dict(unset))

    def router_arguments(self) -> dict[str, Any]:
        """Return the fields of `sglang_router.router_args.RouterArgs` (0.3.2)."""
        return self.model_dump(exclude_none=True) | {
            "retry_backoff_multiplier": 2.0,
            # The router's circuit breaker counts 4xx answers as failures of the replica (measured, 0.3.2), so one
            # client with a wrong key would close the service to all. The registrar removes unhealthy replicas.
            "disable_circuit_breaker": True,
            "worker_startup_check_interval": 1,  # only replicas that answer are registered
            "history_backend": "none",  # otherwise the router keeps conversations in memory without limit
        }
