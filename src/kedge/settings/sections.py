"""The sections of the settings, and the base of all: frozen, without unknown keys, and with bad values named."""

import math
import re
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
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import PydanticCustomError

from kedge.checks import brief, parse_host
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.types import ReuseMode

Bytes = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(gt=0)]
"""A size in bytes, as a number or as text such as `512MiB`."""


def read_size(value: object) -> int | str:
    """Return a size as it is kept: `64 blocks` as that text, any other in bytes. Raises `ValueError`."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18} blocks", value):
        return value
    return TypeAdapter(Annotated[ByteSize, Field(ge=0, lt=2**63)]).validate_python(value)


Size = Annotated[int | str, BeforeValidator(read_size)]
"""Room for KV: in bytes, as a number or as text such as `512MiB`, or as text such as `64 blocks`."""


def blocks_in(size: int | str, block_bytes: int) -> int:
    """Return how many blocks of `block_bytes` bytes have room in a `Size`."""
    return int(size.removesuffix(" blocks")) if isinstance(size, str) else size // block_bytes


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
_WHY = {"extra_forbidden": "there is no such setting", "byte_size": "must be a size such as 2GiB"}


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
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation not in (bool, bool | None):
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
    why = _WHY.get(first["type"].removesuffix("_unit"), first["msg"])
    also = f" (also wrong: {', '.join(_key(section, other['loc']) for other in others)})" if others else ""
    return ConfigError(_key(section, first["loc"]), brief(first["input"]), why + also)


def _key(section: str, location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in (section, *location) if part != "") or "settings"


EstimatorName = Literal["token", "interpolate"]


class AnchorSettings(SettingsSection):
    """How anchors are kept, matched and judged."""

    section = "engine.anchors"

    estimator: EstimatorName = "token"
    """How offsets are estimated, and what makes a value shareable: `token` looks up single tokens, and goes by the
    predicted relative error of a value's offsets; `interpolate` blends whole anchors and goes by their entropy, as
    published (KVCOMM, Eq. 5 to 7)."""
    capacity: PositiveInt = 20
    """Anchors per pool (the paper's V)."""
    max_error: NonNegativeFloat | None = None
    """What a shareable value has at most. With `token`, its mean predicted relative error: over all its tokens until
    twice `min_anchors` values were observed, then over those that are translated; None is 0.35. With `interpolate`,
    its entropy as a share of the log of the number of anchors (Eq. 5); None is the paper's 0.3."""
    weak_error: PositiveFloat = 0.1
    """Predicted relative error above which a single token of a shareable value, or of the template behind it, is
    computed: where on the frontier of quality and cost to be, from 0.1, about as near to dense prefill as KV in fp8,
    to 1 and more, with none computed. Where a budget of fidelity is in force, its rungs replace it."""
    min_anchors: PositiveInt = 4
    """Anchors with the agent's offsets below which `token` shares nothing."""
    max_bytes: Bytes = 2 << 30
    """Bytes of all pools together."""
    max_base_bytes: Bytes = 1 << 30
    """Bytes of all base KV."""


class PlannerSettings(SettingsSection):
    """What of a prompt is translated and what is computed."""

    section = "engine.planner"

    move: Literal["always", "unlearned", "never"] = "always"
    """When to move a value by rotation alone, without anchors, where its KV was computed in an agent's prompt (agents'
    answers, and what an agent reads right behind the beginning of its prompt); the template behind it is computed, or
    moved from the prompt of the run that computed it first. `always`: anchors serve other values, and templates longer
    than that is worth. `unlearned`: until its anchors are learned; those of prompts in which it was moved have offsets
    of the template alone. `never`: before that the whole prompt is computed, as in the paper."""

    by_cost: bool = True
    """Translate only what costs at least twice as much to compute, as measured on this machine; else always."""


class PlannerConstants(PlannerSettings):
    """The planner's settings with its constants, which no file sets: baselines and tests do."""

    recompute_head: NonNegativeInt = 0
    """First tokens of every translated segment that are computed again, where no budget of fidelity says which."""
    recompute_short: NonNegativeInt = 4
    """Values of at most this many tokens are computed and never translated."""
    min_translated: Share = 0.2
    """Share of the tokens without exact KV that must be translatable; below it the prompt is prefilled densely."""


FIDELITIES = {"strict": 0.0003, "fp8": 0.002, "fast": 0.01, "any": math.inf}
"""Names of budgets, in nats a token"""


BUDGETS = f"must be one of {', '.join(FIDELITIES)}, or nats a token above 0"


def read_fidelity(value: Any) -> float:
    """Return the budget that a name, or a number, stands for. Raises `ValueError` for anything else."""
    try:
        found = FIDELITIES[value] if value in FIDELITIES else float(value)
    except (TypeError, ValueError, OverflowError):
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
    from dense prefill; 1: any, and no sentinel token refutes."""
    share: Share = 0.05
    """Share of translated calls that are also computed densely, once an agent's first ones have been; up to four times
    as many near the limit."""
    budget: Share = 0.25
    """Tokens of such checks, and of proofs, while requests run, as a share of the tokens that these compute; a fifth of
    it where nothing else waits than checks of settled agents. In idle time they are free."""


VIRTUAL_STEP = 8.0
"""The step at which traffic without a forecast competes under the policy `steps`: behind most agents of a workflow"""


class TierSettings(SettingsSection):
    """The host tier, and the eviction policy of both tiers."""

    section = "engine.tiers"

    host_memory: Size = 0
    """Size of the host tier, such as `8GiB` or `4096 blocks`; with 0 there is none, and what the device evicts is
    computed again."""
    policy: Literal["sessions", "steps", "lru"] = "sessions"
    """What is evicted first: `lru` is the least recently used, `steps` the KV of the agent that runs last by the
    forecast (and without a forecast the same as `lru`), `sessions` what returns last, by the forecast or else by when
    such sessions tend to return."""
    backup_hits: NonNegativeInt | None = 1
    """Hits after which KV outside fixed prompts is backed up: 0 at once, None never. Fixed prompts always are."""

    @property
    def unlabelled_step(self) -> float:
        """Steps until KV is needed of which nothing is expected: under `sessions` it goes first."""
        return math.inf if self.policy == "sessions" else VIRTUAL_STEP

    def host_pool_size(self, block_bytes: int) -> int:
        """Return the number of blocks in the host tier, with blocks of `block_bytes` bytes.

        Raises `ConfigError` where `host_memory` does not hold a single one.
        """
        blocks = blocks_in(self.host_memory, block_bytes)
        if self.host_memory not in (0, "0 blocks") and not blocks:
            why = f"too small: a block has {block_bytes} bytes"
            raise ConfigError(f"{self.section}.host_memory", self.host_memory, why)
        return blocks


class ThrottledTiers(TierSettings):
    """Tiers with slow copies: for benchmarks, it gives a CPU the copy costs of a GPU."""

    throttle: Seconds = 0.0
    """Least seconds per copied block"""


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


class VllmSettings(SettingsSection):
    """vLLM as the engine. Every key that is not listed here is an engine argument of vLLM, by its name in Python."""

    model_config = ConfigDict(extra="allow")
    section = "engine.vllm"

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
    """Folder as Transformers saves it, GGUF file, or name (nano, smollm2); None is nano."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """`auto` is the GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is that of a server's `state`, else of the weights on a GPU. On a CPU it is float32, but bfloat16 for
    weights in 16 bits or a GGUF file where that is clearly faster.
    """
    block_size: PositiveInt = 16
    """Tokens per block of the device tier."""
    kv_memory: Size = 1 << 30
    """Size of the device tier, such as `2GiB` or `4096 blocks`."""
    max_batch_tokens: PositiveInt | None = None
    """Tokens of one step, prefill and decode together; a longer prompt is prefilled in chunks. None is 2048 on a GPU,
    on a CPU 512, and fewer where contexts are long.
    """
    max_running: PositiveInt = 16
    """Requests that run at once; the others wait."""
    cuda_graphs: bool = True
    """Launch passes of up to 256 tokens on a GPU as one CUDA graph, where the model can be captured."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerSettings = PlannerSettings()
    guard: GuardSettings = GuardSettings()
    tiers: TierSettings = TierSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    vllm: VllmSettings = VllmSettings()


def _checked_host(host: str) -> str:
    if host != "*" and not re.fullmatch("[A-Za-z0-9_.-]+", host) and isinstance(parse_host(host), str):
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
    """Calls with hints alone, and agents in the forecasts of all calls. A minute's worth may be used at once."""


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
    """Reuse mode where neither request, agent nor workflow sets one, also of `kedge run`; None is `exact` for plain
    requests and `translate` for agents of workflows."""
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
    """Folder for what the engine has learned, saved every minute; None keeps nothing."""
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
