#!/usr/bin/env bash
# vllm_serve.sh MODEL [FLAGS OF vllm serve]: vLLM with everything that Kedge's plug-in has, and a host tier of
# KEDGE_HOST_MEMORY. A flag that is given again replaces the one here.
set -euo pipefail
config='{"kv_connector": "KedgeConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"tiers": {"host_memory": "'"${KEDGE_HOST_MEMORY:-8GiB}"'"}}}'
exec vllm serve "$1" \
  --kv-transfer-config "$config" \
  --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler \
  --middleware kedge.integrations.vllm.middleware.KedgeMiddleware \
  "${@:2}"
