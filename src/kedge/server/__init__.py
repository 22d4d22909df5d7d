"""The HTTP server: OpenAI's API, workflows, tenants and a dashboard. `kedge.server.app.create_app` is its entry point.

Each line imports only from the lines below it:

    app, shutdown            the application, its start and its end
    dashboard/, openai/      what people see; what OpenAI's clients call
    workflows/               registered workflows, and runs that clients or the server drive
    service                  admission: the engine, meters and calls in flight
    calls, receipts          generations of one call, and what their answers report
    telemetry/, meters       metrics, traces and logs; rate limits
    hints, tenancy           what callers send besides the prompt, and who they are
    threads, snapshots       threads around the engine, and saving its state
    http/                    HTTP without engines: bodies, errors, hosts, event streams

It needs the extra `server` (FastAPI, uvicorn, prometheus-client). Other packages do not import it, except the CLI.
"""
