"""The sections of the settings, and the base of all: frozen, without unknown keys, and with bad values named."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kedge.checks import is_host
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.types import ReuseMode

Bytes = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(gt=0)]
"""A size in bytes, as a number or as text such as `512MiB`."""
BytesOrNone = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(ge=0)]
"""The same, where 0 is allowed."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def split_names(value: object) -> object:
    """Return the names in a text with commas or spaces between them; any other value as it is."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


class SettingsSection(BaseModel):
    """Base of the sections. Building one with a bad value raises `ConfigError`, wherever it is built."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str]
    """Where the section stands in the file: `engine.anchors`."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switches_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` and `false` where a number belongs: Python would take them for 1 and 0."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("true and false are accepted for switches only")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _name_bad_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise config_error(error, cls.section) from None


def config_error(error: ValidationError, section: str = "") -> ConfigError:
    """Convert a validation error: the first complaint is the error, the keys of any others are named in its text."""
    first, *others = error.errors(include_url=False)
    why = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
    if others:
        why += f" (also wrong: {', '.join(_key(section, other['loc']) for other in others)})"
    return ConfigError(_key(section, first["loc"]), first["input"], why)


def _key(section: str, location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in (section, *location) if part != "") or "settings"


EstimatorName = Literal["token", "interpolate"]
CriterionName = Literal["error", "entropy"]


class AnchorSettings(SettingsSection):
    """How anchors are kept, matched and judged."""

    section = "engine.anchors"

    estimator: EstimatorName = "token"
    """How offsets are estimated: `token` looks up single tokens, `interpolate` blends whole anchors (KVCOMM, Eq. 6
    and 7)."""
    criterion: CriterionName = "error"
    """What makes a value shareable: `error` is the predicted relative error of its offsets, `entropy` is KVCOMM's
    Eq. 5."""
    capacity: PositiveInt = 20
    """Anchors per pool (the paper's V)."""
    gamma: NonNegativeFloat = 0.3
    """Highest entropy of a shareable value, as a share of the log of the number of anchors (Eq. 5)."""
    temperature: PositiveFloat = 10.0
    """Sharpness of an anchor's weight: softmax(-temperature · d / mean d)."""
    noise: PositiveFloat = 0.1
    """Share of the variance of an offset that key vectors do not explain: with more of it, weights are more equal."""
    top_k: PositiveInt = 8
    """Anchor tokens that a token's offset is blended from."""
    match_layer: NonNegativeInt | None = None
    """Layer whose base KV is compared; None is at two thirds of the depth."""
    match_dim: PositiveInt = 32
    """Dimensions that base KV is projected to before it is compared."""
    max_error: PositiveFloat = 0.35
    """Highest mean predicted relative error of a shareable value: over all its tokens until twice `min_anchors`
    values were observed, then over those that are translated."""
    weak_error: PositiveFloat = 0.1
    """Predicted relative error above which a single token of a shareable value, or of the template behind it, is
    computed: where on the frontier of quality and cost to be, from 0.1, about as near to dense prefill as KV in fp8,
    to 1 and more, with none computed. Where a budget of fidelity is in force, its rungs replace it."""
    min_anchors: PositiveInt = 4
    """Anchors with the agent's offsets below which `error` shares nothing."""
    max_bytes: Bytes = 2 << 30
    """Bytes of all pools together."""
    max_pools: PositiveInt = 256
    """Pools at once; the least recently used goes first."""
    max_sites: PositiveInt = 64
    """Slots per pool; the least recently used goes first."""
    max_base_bytes: Bytes = 1 << 30
    """Bytes of all base KV."""

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that saved anchors depend on: how values are compared."""
        return self.model_dump(include={"estimator", "match_layer", "match_dim", "top_k", "noise", "temperature"})

    @property
    def computes_weak_tokens(self) -> bool:
        """Whether tokens with bad offsets are computed. An error of 1 is that of no offset at all."""
        return self.criterion == "error" and self.weak_error < 1


def estimator_settings(name: str) -> dict[str, Any]:
    """Return the settings of the estimator `name` with its criterion: Eq. 5 for the paper's, else the predicted
    error.
    """
    if name == "interpolate":
        return {"estimator": name, "criterion": "entropy", "temperature": 100.0}
    return {"estimator": name, "criterion": "error"}


class PlannerSettings(SettingsSection):
    """What of a prompt is translated and what is computed."""

    section = "engine.planner"

    recompute_head: NonNegativeInt = 0
    """First tokens of every translated segment that are computed again."""
    recompute_short: NonNegativeInt = 4
    """Values of at most this many tokens are computed and never translated."""
    trail: NonNegativeInt = 2
    """Template tokens right behind a value that are kept and translated with it, because the model sums the value up
    in them. Behind an agent's answer this takes one more pass, so there it needs an `anchors.weak_error` of 1 or more
    or a criterion other than `error`."""
    min_translated: Share = 0.2
    """Share of the tokens without exact KV that must be translatable; below it the prompt is prefilled densely."""

    move: Literal["always", "unlearned", "never"] = "always"
    """When to move a value by rotation alone, without anchors, where its KV was computed in an agent's prompt (agents'
    answers, and what an agent reads right behind the beginning of its prompt); the template behind it is computed, or
    moved from the prompt of the run that computed it first. `always`: anchors serve other values, and templates longer
    than that is worth. `unlearned`: until its anchors are learned. `never`: before that the whole prompt is computed,
    as in the paper."""

    by_cost: bool = True
    """Compute what costs less to compute than to translate, as measured on this machine; else always translate."""


class LearningSettings(SettingsSection):
    """How much the engine learns while it is busy."""

    section = "engine.learning"

    budget: Share = 0.5
    """Share of each pass that base prefills and learning may take while requests wait for their first token."""
    max_pending: PositiveInt = 64
    """Finished requests whose KV may be kept until it is learned from; beyond it the oldest is dropped."""
    max_base_prefills: PositiveInt = 64
    """Base prefills that may be queued; beyond it the oldest is dropped."""


OpenShare = Annotated[float, Field(gt=0, lt=1)]
FIDELITIES = {"strict": 0.0003, "fp8": 0.002, "fast": 0.01, "any": math.inf}
"""Names of budgets, in nats a token"""


BUDGETS = f"must be one of {', '.join(FIDELITIES)}, or nats a token above 0"


def read_fidelity(value: Any) -> float:
    """Return the budget that a name, or a number, stands for. Raises `ValueError` for anything else."""
    try:
        found = FIDELITIES[value] if value in FIDELITIES else float(value)
    except (TypeError, ValueError):
        raise ValueError(BUDGETS) from None
    if isinstance(value, bool) or not found > 0:
        raise ValueError(BUDGETS)
    return found


def shown_fidelity(budget: float | None) -> float | str | None:
    """Return a budget as JSON has it, which knows no infinity."""
    return "any" if budget == math.inf else budget


Fidelity = Annotated[float, BeforeValidator(read_fidelity)]
"""A budget of fidelity in nats a token, by name or number."""


class GuardSettings(SettingsSection):
    """How the quality of translation is watched while it serves, and when it is switched off."""

    section = "engine.guard"

    mode: GuardMode = GuardMode.ON
    """`on` stops translating what changes too many answers; `shadow` translates nothing and measures what would have
    changed; `off` does nothing. A workflow and an agent may say otherwise."""
    fidelity: Fidelity = FIDELITIES["fp8"]
    """Highest mean divergence (KL, nats a token) of an agent's answers from dense prefill: `strict` (0.0003), `fp8`
    (0.002: what KV in fp8 has), `fast` (0.01), a number, or `any`, by which translation serves without proof, as the
    settings of anchors and planner say. Until a way of translating is proved to be within it, prompts are computed."""
    max_changed: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Highest share of an agent's translated calls that may decide something else (another call or pick), or be far
    from dense prefill; 1: any."""
    alpha: OpenShare = 0.05
    """Probability with which an agent below that share is switched off all the same, over any number of looks."""
    share: Share = 0.05
    """Share of translated calls that are also computed densely, once an agent's first ones have been; up to four times
    as many near the limit."""
    budget: Share = 0.25
    """Tokens of such checks, and of proofs, while requests run, as a share of the tokens that these compute. In idle
    time they are free."""
    tokens: PositiveInt = 32
    """First tokens of an answer that are compared."""
    sentinels: NonNegativeInt = 2
    """Translated tokens of every value that the model computes as well in an agent's first calls and in a random share
    of the others. Where they differ from what translation wrote by more than `max_sentinel_error` in the mean, the
    prompt is computed before its first token. In other calls of an agent whose values are translated whole, one token
    each of two values, which both have to be off. With 0, tokens that are computed anyway are not compared either."""
    max_sentinel_error: PositiveFloat = 0.5
    """Highest mean relative error of a call's such tokens: the norm of the difference over that of the computed keys or
    values. Of one token each of two values: the highest error of each, and half of their highest mean."""
    trials: PositiveInt = 8
    """Checks in a row without a change by which a suspect agent is translated again; four times as many after it was
    switched off, and twice as many every further time."""
    max_pending: PositiveInt = 16
    """Checks that may wait; beyond it the oldest is dropped."""
    max_agents: PositiveInt = 4096
    """Placeholders of agents that are watched at once; the one used longest ago starts anew."""


class TierSettings(SettingsSection):
    """The host tier, the eviction policy of both tiers, and how long a request waits for KV from the host."""

    section = "engine.tiers"

    host_memory: BytesOrNone = 0
    """Bytes of the host tier; with 0 there is none, and what the device evicts is computed again."""
    host_blocks: NonNegativeInt | None = None
    """Blocks of the host tier; None takes as many as `host_memory` holds."""
    policy: Literal["sessions", "steps", "lru"] = "sessions"
    """What is evicted first: `lru` is the least recently used, `steps` the KV of the agent that runs last by the
    forecast (and without a forecast the same as `lru`), `sessions` what returns last, by the forecast or else by when
    such sessions tend to return."""
    prefetch_window: Annotated[float, Field(allow_inf_nan=False)] = 2.0
    """Fixed prompts and histories of sessions needed within this many steps are prefetched; below 0 none are."""
    prefetch_jobs: NonNegativeInt = 4
    """Prefetches that may be queued or under way."""
    copy_jobs: PositiveInt = 2
    """Copies that may be under way in each direction."""
    copy_bytes: Bytes = 256 << 20
    """Bytes that may be under way in each direction; a single copy may always be."""
    backup_hits: NonNegativeInt | None = 1
    """Hits after which KV outside fixed prompts is backed up: 0 at once, None never. Fixed prompts always are."""
    decode_reserve: NonNegativeInt = 0
    """Device blocks that a prefetch leaves free or evictable for running requests."""
    virtual_step: Seconds = 8.0
    """The step at which traffic without a forecast competes under the policy `steps`."""
    status_aware: bool = True
    """Whether a request that waits for KV from the host lets those behind it go first."""
    max_skips: NonNegativeInt = 32
    """Requests that may go before one that waits for KV from the host; then it computes what it lacks."""
    max_wait: Seconds = 10.0
    """Seconds that a request waits for KV from the host; then it computes what it lacks."""
    throttle: Seconds = 0.0
    """Least seconds per copied block. For benchmarks: it gives a CPU the copy costs of a GPU."""

    @property
    def unlabelled_step(self) -> float:
        """Steps until KV is needed of which nothing is expected: under `sessions` it goes first."""
        return math.inf if self.policy == "sessions" else self.virtual_step

    def host_pool_size(self, block_bytes: int) -> int:
        """Return the number of blocks in the host tier, with blocks of `block_bytes` bytes.

        Raises `ConfigError` where `host_memory` does not hold a single one.
        """
        if self.host_blocks is not None:
            return self.host_blocks
        blocks = self.host_memory // block_bytes
        if self.host_memory and not blocks:
            why = f"too small: a block has {block_bytes} bytes"
            raise ConfigError(f"{self.section}.host_memory", self.host_memory, why)
        return blocks


class DiscoveryMode(StrEnum):
    """How far what was found out about plain requests is used."""

    OFF = "off"
    OBSERVE = "observe"
    EXACT = "exact"
    TRANSLATE = "translate"


class DiscoverySettings(SettingsSection):
    """What Kedge finds out by itself about requests whose clients say nothing."""

    section = "engine.discovery"

    mode: DiscoveryMode = DiscoveryMode.OBSERVE
    """`observe` changes nothing and reports what would be saved; `exact` uses what was found for caching; `translate`
    also translates the text that agents share. With `off` nothing is looked for."""


DEFAULT_CAPTURES = 8


class VllmSettings(SettingsSection):
    """vLLM as the engine. Every key that is not listed here is an engine argument of vLLM, by its name in Python."""

    model_config = ConfigDict(extra="allow")
    section = "engine.vllm"

    max_captures: PositiveInt = DEFAULT_CAPTURES
    """Prompts whose KV may be kept on the device, beside vLLM's own, until the base KV of their values is there. One
    per agent of a workflow is enough."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments of vLLM that were set."""
        return dict(self.model_extra or {})


class EngineSettings(SettingsSection):
    """The model, where it runs and how much memory and work it may take."""

    section = "engine"

    backend: Literal["local", "vllm"] = "local"
    """What runs the model: `local` is the embedded engine, `vllm` is vLLM with Kedge's plug-in."""
    model: Path | None = None
    """Folder as Transformers saves it, GGUF file, or name (nano, nano-both, smollm2); None is nano."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto` is the GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is that of the weights on a GPU. On a CPU it is float32, but bfloat16 for weights in 16 bits or a GGUF
    file where that is clearly faster.
    """
    block_size: PositiveInt = 16
    """Tokens per block of the device tier."""
    num_blocks: PositiveInt | None = None
    """Blocks of the device tier; None takes as many as `kv_memory` holds."""
    kv_memory: Bytes = 1 << 30
    """Bytes of the device tier, unless `num_blocks` is set."""
    max_batch_tokens: PositiveInt | None = None
    """Tokens of one step, prefill and decode together; a longer prompt is prefilled in chunks. None is 2048 on a GPU
    and 512 on a CPU, where other requests would wait for seconds.
    """
    max_running: PositiveInt = 16
    """Requests that run at once; the others wait."""
    max_waiting: PositiveInt = 4096
    """Requests in flight, running or waiting, beyond which another one is refused."""
    cuda_graphs: bool = True
    """Launch passes of up to 256 tokens on a GPU as one CUDA graph, where the model can be captured."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerSettings = PlannerSettings()
    learning: LearningSettings = LearningSettings()
    guard: GuardSettings = GuardSettings()
    tiers: TierSettings = TierSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    vllm: VllmSettings = VllmSettings()


def _checked_host(host: str) -> str:
    if host != "*" and not is_host(host):
        raise PydanticCustomError("host", "must be a host name or an address without a port, or *")
    return host


HostName = Annotated[str, AfterValidator(_checked_host)]
"""A host name or an address without a port, or `*`."""
HostNames = Annotated[tuple[HostName, ...], BeforeValidator(split_names)]
"""Several host names, as a list or as text with commas or spaces between them."""
ToolCallFormat = Literal["hermes", "llama3_json"]


class QuotaSettings(SettingsSection):
    """What a tenant may hold in the engine's memory. None is no limit."""

    section = "server.limits"

    anchors: PositiveInt | None = None
    """Anchors in all pools of the tenant."""
    anchor_bytes: Bytes | None = None
    """Bytes of the tenant's anchors."""
    host_memory: Bytes | None = None
    """Bytes of the host tier."""


class LimitSettings(QuotaSettings):
    """Limits of a tenant; those of the settings hold for tenants without limits of their own. None is no limit."""

    requests_in_flight: PositiveInt = 64
    """Generations (each of `n` choices is one) and runs at once."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts and answers together; a minute's worth may be used at once."""
    hints_per_minute: PositiveInt = 12_000
    """Hints without a prompt: one per call, and one more per agent in its forecast. A minute's worth may be used at
    once."""


class ServerSettings(SettingsSection):
    """How the engine is served."""

    section = "server"

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes any that is free."""
    allowed_hosts: HostNames = ()
    """Host names and addresses without a port that calls may name in `Host`, besides `host` and the loopback interface:
    a list, or a text with commas. `*` is any, for a server behind a proxy that checks them."""
    model_name: str | None = None
    """The model's name for clients; None is its folder's name."""
    reuse: ReuseMode | None = None
    """Reuse mode where neither request, agent nor workflow sets one; None is `exact` for plain requests and `translate`
    for agents of registered workflows."""
    default_max_tokens: PositiveInt = 512
    """Longest answer of a chat completion that names no limit."""
    max_in_flight: PositiveInt = 256
    """Generations and runs of all tenants together."""
    max_body_bytes: Bytes = 4 << 20
    limits: LimitSettings = LimitSettings()
    tools: bool = False
    """Whether workflows may run tools, which run code on this machine."""
    tool_call_parser: ToolCallFormat | None = None
    """Format in which the model writes tool calls, `hermes` or `llama3_json`; None refuses requests with tools."""
    api_keys: Path | None = None
    """TOML file with tenants and hashes of their keys."""
    keep_texts: bool = False
    """Whether the dashboard keeps prompts and answers of the last calls, in memory; a tenant may choose otherwise."""
    state: Path | None = None
    """Folder for what the engine has learned; None keeps nothing."""
    snapshot_interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds between two snapshots."""
    grace: Seconds = 10.0
    """Seconds that running answers may go on when the server is asked to end."""
    engine_process: bool = True
    """Whether the embedded engine runs in a process of its own, so that the server's work does not slow it down."""
    log_format: Literal["text", "json"] = "text"
    tracing: bool = False
    """Whether OpenTelemetry spans are sent, as its own variables (`OTEL_…`) say."""

    @field_validator("model_name")
    @classmethod
    def _check_model_name(cls, name: str | None) -> str | None:
        if name is not None and not name.strip():
            raise PydanticCustomError("blank", "must not be blank")
        return name
