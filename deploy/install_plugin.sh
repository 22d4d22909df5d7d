#!/usr/bin/env bash
# install_plugin.sh FOLDER: installs Kedge's wheel from a folder beside a vLLM that is there, whose packages stay as they
# are: what Kedge needs beyond them is small and pure Python.
set -euo pipefail
python="$(command -v python3 || command -v python)"
install() { "$python" -m pip install --no-cache-dir --disable-pip-version-check "$@"; }
install --no-deps "$1"/kedge-*.whl
install 'pydantic-settings>=2.8' 'typer>=0.15' 'rich>=13.9'
"$python" -c 'import vllm; from kedge.integrations.vllm.entry_point import register; register()'
