"""The settings: one class, filled from a TOML file, then `KEDGE_*` variables, then flags; the later wins.

    # kedge.toml                            # the same as a variable
    reuse = "translate"                     # KEDGE_REUSE=translate
    [engine]
    model = "models/llama"                  # KEDGE_ENGINE__MODEL=models/llama
    kv_memory = "2GiB"                      # KEDGE_ENGINE__KV_MEMORY=2GiB
    [engine.anchors]
    capacity = 20                           # KEDGE_ENGINE__ANCHORS__CAPACITY=20
    [engine.tiers]
    host_memory = "8GiB"                    # KEDGE_ENGINE__TIERS__HOST_MEMORY=8GiB
    [engine.vllm]
    max_model_len = 8192                    # KEDGE_ENGINE__VLLM__MAX_MODEL_LEN=8192
    [server]
    port = 8000                             # KEDGE_SERVER__PORT=8000
    [server.limits]
    anchor_bytes = "256MiB"                 # KEDGE_SERVER__LIMITS__ANCHOR_BYTES=256MiB

Every bad value raises a `ConfigError` that names its key and the value.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
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
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kedge.errors import ConfigError
from kedge.types import ReuseMode

DEFAULT_FILE = Path("kedge.toml")
ENV_PREFIX = "KEDGE_"

Bytes = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(gt=0)]
"""A size in bytes; a text such as `512MiB` is understood."""
BytesOrNone = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(ge=0)]
"""The same, where 0 is a size too."""
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: _split(value) if isinstance(value, str) else value)]
"""Several names; a text has them with commas or spaces between."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _split(text: str) -> list[str]:
    return text.replace(",", " ").split()


class _Section(BaseModel):
    """A part of the settings. Building one with a bad value raises `ConfigError`, wherever it is built."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str]

    @model_validator(mode="wrap")
    @classmethod
    def _name_bad_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise _config_error(error, cls.section) from None


class AnchorSettings(_Section):
    """How anchors are kept, matched and judged; the engine builds its `AnchorConfig` from these (same names)."""

    section = "engine.anchors"

    estimator: str = "token"
    """How offsets are estimated: `token` looks up single tokens, `interpolate` blends whole anchors (Eq. 6, 7);
    `nearest`, `cosine`, `mean`, `linear` and `linear+token` are there to compare with."""
    criterion: str = "error"
    """What makes a value shareable: `error` is the predicted relative error of its offsets, `entropy` is Eq. 5,
    `length` only asks for long anchors, `leverage` for tokens that lie among those of the anchors."""
    capacity: PositiveInt = 20
    """Anchors per pool (the paper's V)."""
    gamma: NonNegativeFloat = 0.3
    """Entropy over log of the number of anchors, above which a value is not shareable (Eq. 5)."""
    temperature: PositiveFloat = 10.0
    """Sharpness of an anchor's weight."""
    tau: PositiveFloat = 0.05
    """Softness of a token's weight."""
    top_k: PositiveInt = 4
    """Anchor tokens that a token's offset is blended from."""
    match_layer: NonNegativeInt | None = None
    """Layer whose base KV is compared; None is a third of the way up."""
    match_dim: PositiveInt = 32
    """Dimensions that base KV is projected to before it is compared."""
    offset_bits: Literal[8, 16] = 16
    """Of every number of an offset that is kept: 16, or 8 with a scale for each head (not those of `linear`)."""
    ridge: PositiveFloat = 0.005
    """How much `linear` holds its weights down, in units of the mean square of base KV."""
    max_error: PositiveFloat = 0.35
    """Mean predicted relative error of a value's offsets, up to which it is shareable: of all its tokens until twice
    `min_anchors` values were observed, then of those that are not computed."""
    weak_error: PositiveFloat = 0.15
    """Predicted relative error above which a single token is computed, of a shareable value or of the template behind
    it."""
    max_leverage: PositiveFloat = 2.0
    """Mean leverage of a value's tokens, in units of the anchors' own mean, up to which `leverage` shares it."""
    weak_leverage: PositiveFloat = 6.0
    """Leverage in the same units above which a single token of a shareable value is computed."""
    min_anchors: PositiveInt = 4
    """Anchors with the agent's offsets, below which `error` and `leverage` share nothing."""
    max_bytes: Bytes = 2 << 30
    """Bytes of all pools together, on the device."""
    max_pools: PositiveInt = 256
    """Pools at once; the one that was used longest ago goes first."""
    max_slots: PositiveInt = 64
    """Slots per pool; the one that was used longest ago goes first."""
    max_base_bytes: Bytes = 1 << 30
    """Bytes of all base KV on the device."""
    host_bytes: BytesOrNone = 0
    """Bytes of host memory for offsets that do not fit `max_bytes`; 0: what does not fit is forgotten."""
    host_base_bytes: BytesOrNone = 0
    """Bytes of host memory for base KV that does not fit `max_base_bytes`; 0: what does not fit is forgotten."""

    @property
    def computes_weak_tokens(self) -> bool:
        """Whether tokens are computed that offsets are no good for; an error of 1 is that of no offset at all."""
        return self.criterion == "error" and self.weak_error < 1

    def stored(self) -> dict[str, Any]:
        """The fields that an `AnchorConfig` has as well: not those of base KV and of the host."""
        return self.model_dump(exclude={"max_base_bytes", "host_bytes", "host_base_bytes"})


def estimator_settings(name: str) -> dict[str, Any]:
    """The estimator `name` with the criterion that belongs to it: Eq. 5 for those that weigh whole anchors, as the
    paper compares them (Table A.4), else the predicted error."""
    if name in {"interpolate", "nearest", "cosine", "mean"}:
        return {"estimator": name, "criterion": "entropy", "temperature": 100.0}
    return {"estimator": name, "criterion": "error"}


class PlannerSettings(_Section):
    """How the planner decides, and what belongs to a value."""

    section = "engine.planner"

    recompute_head: NonNegativeInt = 0
    """First tokens of every translated segment that are computed again."""
    recompute_short: NonNegativeInt = 4
    """Values of at most so many tokens are computed and never translated."""
    trail: NonNegativeInt = 2
    """Tokens of the template right behind a value that are kept and translated with it, where all agents have the same
    there: the model sums the value up in them. Behind an agent's answer only where they would not be computed again
    anyway (`anchors.weak_error` of 1 and more, and other criteria): they take the agent one more pass."""
    recompute_tail: bool = False
    """Compute the whole last segment instead of only the last token."""
    min_translated: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of what is not exact that must be translatable; below it the prompt is prefilled densely."""

    by_cost: bool = True
    """Compute what costs less to compute than to translate, as measured on this machine; else always translate."""

    def policy(self) -> dict[str, Any]:
        """The fields that a `ReusePolicy` has as well."""
        return self.model_dump(exclude={"trail", "by_cost"})


class LearningSettings(_Section):
    """How much the engine learns while it is busy."""

    section = "engine.learning"

    budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of each pass that base prefills and learning may take while requests wait for their first token."""
    max_pending: PositiveInt = 64
    """Finished requests whose KV may be kept until they are learned from; the oldest is given up first."""
    max_base_prefills: PositiveInt = 64
    """Base prefills that may be queued; the oldest is given up first."""


class TierConfig(_Section):
    """The host tier, who is evicted from both tiers, and how long a request waits for KV to come from the host."""

    section = "engine.tiers"

    host_memory: BytesOrNone = 0
    """Bytes of the host tier; 0 is none: what is evicted from the device is computed again."""
    host_blocks: NonNegativeInt | None = None
    """Blocks of the host tier; None takes as many as `host_memory` holds."""
    policy: Literal["steps", "lru"] = "steps"
    """Who is evicted first: `steps` is whoever runs last by the forecast, and without one the same as `lru`."""
    prefetch_window: Annotated[float, Field(allow_inf_nan=False)] = 2.0
    """Fixed prompts that are needed within so many steps are prefetched. Below 0: none."""
    prefetch_jobs: NonNegativeInt = 4
    """Prefetches that may be queued or under way."""
    copy_jobs: PositiveInt = 2
    """Copies that may be under way in each direction."""
    copy_bytes: Bytes = 256 << 20
    """Bytes that may be under way in each direction; a single copy may always be."""
    backup_hits: NonNegativeInt | None = 1
    """Hits after which KV that is in no fixed prompt is backed up: 0 at once, None never. Fixed prompts always are."""
    decode_reserve: NonNegativeInt = 0
    """Device blocks that a prefetch leaves free or evictable for running requests."""
    virtual_step: Seconds = 8.0
    """The step at which traffic without a forecast competes."""
    status_aware: bool = True
    """Whether a request that waits for KV from the host lets others go before it; else those behind it wait too."""
    max_skips: NonNegativeInt = 32
    """Requests that may go before one that waits for KV from the host; then it computes what it lacks."""
    max_wait: Seconds = 10.0
    """Seconds that a request waits for KV from the host; then it computes what it lacks."""
    throttle: Seconds = 0.0
    """Seconds that copying one block takes at least. For benchmarks: it gives a CPU the copy costs of a GPU."""


class VLLMConfig(_Section):
    """vLLM, where it is the engine. Whatever is not below is vLLM's own: an engine argument by its name in Python."""

    model_config = ConfigDict(extra="allow")
    section = "engine.vllm"

    max_captures: PositiveInt = 8
    """Prompts whose KV may be kept, beside vLLM's own and on the same device, until the base KV is there that their
    offsets are measured against: as many as a workflow has agents."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What was set of vLLM's own."""
        return dict(self.model_extra or {})


class EngineConfig(_Section):
    """What an engine runs on and how much of it it may take."""

    section = "engine"

    backend: Literal["local", "vllm"] = "local"
    """Who runs the model: `local` is the embedded engine, `vllm` is vLLM with Kedge's plug-in."""
    model: Path | None = None
    """Folder of a model as Transformers saves it; None is the bundled one."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto` is the GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on the CPU and the dtype of the weights on a GPU."""
    block_size: PositiveInt = 16
    """Tokens per block of the device tier."""
    num_blocks: PositiveInt | None = None
    """Blocks of the device tier; None takes as many as `kv_memory` holds."""
    kv_memory: Bytes = 1 << 30
    """Bytes of the device tier, where `num_blocks` does not say."""
    max_batch_tokens: PositiveInt = 2048
    """Tokens of one step, prefill and decode together; a longer prompt is prefilled in chunks."""
    max_running: PositiveInt = 16
    """Requests that run at once; the others wait."""
    max_waiting: PositiveInt = 4096
    """Requests in flight, running or waiting, beyond which another one is refused."""
    cuda_graphs: bool = True
    """On a GPU, passes of up to 64 tokens are launched as a whole. A model that cannot be captured goes without."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerSettings = PlannerSettings()
    learning: LearningSettings = LearningSettings()
    tiers: TierConfig = TierConfig()
    vllm: VLLMConfig = VLLMConfig()


class LimitSettings(_Section):
    """What a tenant may have that has no limits of its own; the server builds its `Limits` from these (same names)."""

    section = "server.limits"

    requests_in_flight: PositiveInt = 64
    """Generations (each of `n` choices is one) and runs at once."""
    tokens_per_minute: PositiveInt | None = None
    """Prompt and answer together; a minute's worth may be used at once."""
    hints_per_minute: PositiveInt = 12_000
    """Hints without a prompt: a call counts one, and one more for each agent that its forecast speaks of."""
    anchors: PositiveInt | None = None
    """Anchors in all its pools."""
    anchor_bytes: Bytes | None = None
    """Bytes of its anchors."""
    host_memory: Bytes | None = None
    """Bytes of the host tier."""


class ServerSettings(_Section):
    """How the engine is served; the server builds its `ServerConfig` from these."""

    section = "server"

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes any that is free."""
    allowed_hosts: Names = ()
    """Names and addresses, besides `host` and those of the loopback interface, that calls may have in `Host`: a list,
    or a text with commas. `*` is any, for a server behind a proxy that checks them."""
    model_name: str | None = None
    """What clients call the model; None is its folder's name."""
    reuse: ReuseMode | None = None
    """Where neither request, agent nor workflow says; None: `exact` for plain requests, `translate` for agents."""
    default_max_tokens: PositiveInt = 512
    """Longest answer of a chat completion that names no limit."""
    max_in_flight: PositiveInt = 256
    """Generations and runs of all tenants together."""
    max_body_bytes: Bytes = 4 << 20
    limits: LimitSettings = LimitSettings()
    tools: bool = False
    """Whether workflows may run tools, which run code on this machine."""
    tool_call_parser: str | None = None
    """The format in which the model writes tool calls, `hermes` or `llama3_json`; None: it is not told of any tools."""
    api_keys: Path | None = None
    """TOML file with tenants and hashes of their keys."""
    state: Path | None = None
    """Folder for what the engine has learned; None: it ends with the server."""
    snapshot_interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds between two snapshots."""
    grace: Seconds = 10.0
    """Seconds that running answers may go on when the server is told to end."""
    engine_process: bool = True
    """Whether the embedded engine runs in a process of its own, so that the server's work does not slow it down."""
    log_format: Literal["text", "json"] = "text"
    tracing: bool = False
    """Whether OpenTelemetry spans are sent, to where its own variables (`OTEL_…`) say."""


class Settings(BaseSettings):
    """Everything that can be set. `Settings()` reads the environment only; `Settings.load` the file as well."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        # A section is set field by field; one given whole, as JSON text, is then a bad value like any other.
        enable_decoding=False,
    )

    reuse: ReuseMode = ReuseMode.TRANSLATE
    """How far a request leans on KV that others computed, where it does not say itself."""
    engine: EngineConfig = EngineConfig()
    server: ServerSettings = ServerSettings()

    @classmethod
    def load(cls, file: Path | None = None, **flags: object) -> Self:
        """Settings from `file` (`kedge.toml` of the working folder if None, where there is one), the environment and
        `flags` (top-level names; a section is a mapping, and None is a flag that was not given).

        Raises `ConfigError` for a bad value, an unknown key, or a file that is missing or no TOML.
        """
        _check_environment(cls)
        return cls(**_merged(_read(file), EnvSettingsSource(cls)(), flags))

    @model_validator(mode="wrap")
    @classmethod
    def _name_bad_values(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise _config_error(error) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


def _config_error(error: ValidationError, section: str = "") -> ConfigError:
    """The first complaint as the error; the keys of any others are named in its text."""
    first, *others = error.errors(include_url=False)
    why = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
    if others:
        why += f" (also wrong: {', '.join(_key(section, other['loc']) for other in others)})"
    return ConfigError(_key(section, first["loc"]), first["input"], why)


def _key(section: str, location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in (section, *location) if part != "") or "settings"


def _read(file: Path | None) -> dict[str, Any]:
    if file is None and not DEFAULT_FILE.exists():
        return {}
    path = file or DEFAULT_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("file", str(path), str(error)) from None


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings laid over each other, section by section; None leaves what is below."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, Mapping):
                result[key] = _merged(_section_below(key, result.get(key, {})), value)
            elif value is not None:
                result[key] = value
    return result


def _section_below(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "is a section, not a value")
    return value


def _check_environment(settings: type[BaseSettings]) -> None:
    """Refuses a variable that misses a setting only by its underscores; foreign `KEDGE_*` variables are let be."""
    near = {name.replace("__", "_"): name for name in _variables(settings, ENV_PREFIX)}
    for name, value in os.environ.items():
        right = near.get(name.upper().replace("__", "_"))
        if right and name.upper() != right:
            raise ConfigError(name, value, f"sections are set apart by two underscores: {right}")


def _variables(model: type[BaseModel], prefix: str) -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, _Section):
            names += _variables(inner, f"{prefix}{name.upper()}__")
        else:
            names.append(f"{prefix}{name.upper()}")
    return names
