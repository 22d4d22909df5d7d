"""The HTTP server: OpenAI's protocol, workflows, tenants. `kedge.server.app.create_app` puts it together.

It needs the extra `server` (FastAPI, uvicorn, prometheus-client); nothing outside of this room imports it.
"""
