#!/usr/bin/env bash
# install_plugin.sh FOLDER: installs Kedge's wheel from a folder beside a vLLM that is there, whose packages stay as they
# are: what Kedge needs beyond them is small and pure Python.
set -euo pipefail
python="$(command -v python3 || command -v python)"
install() { "$python" -m pip install --no-cache-dir --disable-pip-version-check "$@"; }
install --no-deps "$1"/kedge-*.whl
"$python" -c 'from importlib.metadata import requires
print(*(one for one in requires("kedge") if one.startswith(("pydantic-settings", "rich", "typer"))), sep="\n")' \
    | install -r /dev/stdin
"$python" -c 'import vllm; from kedge.integrations.vllm.entry_point import register; register()'
