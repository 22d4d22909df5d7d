"""The HTTP server: OpenAI's protocol, workflows, tenants. `kedge.server.app.create_app` puts it together.

`docs/architecture.md` draws its modules by what they import. It needs the extra `server` (FastAPI, uvicorn,
prometheus-client); only the CLI and the benchmarks import it.
"""
