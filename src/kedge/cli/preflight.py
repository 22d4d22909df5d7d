"""Checks of paths, ports and packages that need no heavy import, so that a mistake is reported at once."""

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from kedge.engine.common.converted import known_copies
from kedge.engine.common.folder_lock import lock_folder
from kedge.errors import ConfigError
from kedge.models import find_model, require_gguf


def require_file(option: str, file: Path | None) -> None:
    """Raise `ConfigError` for a file that does not exist; None is an option that was not given."""
    if file is not None and not file.is_file():
        raise ConfigError(option, str(file), "is a folder, not a file" if file.is_dir() else "no such file")


def require_parent(option: str, file: Path | None) -> None:
    """Raise `ConfigError` for a file that cannot be written, such as one with no parent folder, or for a folder."""
    if file is not None and file.is_dir():
        raise ConfigError(option, str(file), "is a folder, not a file")
    if file is not None and (partial := partial_of(file)):
        try:
            partial.touch()
            partial.unlink()
        except OSError as error:
            raise ConfigError(option, str(file), f"cannot be written: {error.strerror}") from error


def partial_of(file: Path) -> Path | None:
    """Return the file that replaces another once it is whole; None for a pipe or a device, which cannot be replaced."""
    if file.exists() and not file.is_file():
        return None
    target = file.resolve()
    return target.with_name(f"{target.name}.part")


def require_model(model: Path | None) -> None:
    """Raise `ModelNotFound` where there is no such model, `UnsupportedModel` for a part of a GGUF file, and
    `ConfigError` where a package is missing to convert one. None is the bundled model.
    """
    path = find_model(model)
    if path.is_file() and not known_copies(path):
        require_gguf(path)


def require_packages(what: str, packages: Sequence[str], extra: str) -> None:
    """Raise `ConfigError` for the first of the packages that is not installed; `what` names the feature that
    needs it.
    """
    for package in packages:
        if not _is_installed(package):
            why = f"{what} needs it, and it is not installed: pip install 'kedge[{extra}]'"
            raise ConfigError("package", package, why)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing; `sys.modules` has None or a stand-in without a spec
        return sys.modules.get(package) is not None


def require_free_port(host: str, port: int) -> None:
    """Raise `ConfigError` if a server cannot listen at `host` and `port`; port 0 takes any that is free."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # of which the second is for a part of a name that is empty or too long
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError("server.host", host, f"is not an address of this machine: {why}") from error
    for family, *_, address in addresses:
        try:
            socket.create_server(address, family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE or address is addresses[0][-1]:  # IPv6 may be missing
                why = f"cannot listen on {host}: {os.strerror(error.errno or 0)}"
                raise ConfigError("server.port", port, why) from error


def require_state(folder: Path | None) -> None:
    """Raise `ConfigError` for a folder of saved state that cannot be used, or that another process uses, it or the
    folder of a rank in it. None is for no state.
    """
    try:
        for held in {folder, *(lock.parent for lock in folder.rglob("lock"))} if folder else ():
            os.close(lock_folder(held, "server.state"))
    except OSError as error:
        raise ConfigError("server.state", str(folder), f"cannot be used: {error}") from error
