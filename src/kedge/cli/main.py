"""`kedge`: the commands and what they share: the version, and errors as one clean line."""

import signal
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kedge import __version__
from kedge.cli.bench import bench
from kedge.cli.demo import demo
from kedge.cli.inspect import inspect
from kedge.cli.output import terminal
from kedge.cli.run import run
from kedge.cli.serve import end_by_signal, serve
from kedge.errors import KedgeError

EXIT_BAD_INPUT = typer.BadParameter.exit_code


class _Commands(TyperGroup):
    """The group of commands. It prints errors of Kedge without a traceback; any other error is a bug and keeps it."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # typer's contexts are the only ones here
        try:
            return super().invoke(ctx)
        except KedgeError as error:
            notes = getattr(error, "__notes__", [])
            line = " ".join((f"error: {error}" + (f" ({'; '.join(notes)})" if notes else "")).split())
            terminal(stderr=True).print(line, style="red", soft_wrap=True)
            raise typer.Exit(EXIT_BAD_INPUT) from error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kedge {__version__}")
        raise typer.Exit


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def kedge(
    version: Annotated[  # noqa: ARG001 (its callback does the work)
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Kedge moves KV caches between the prompts of cooperating LLM agents."""
    signal.signal(signal.SIGTERM, end_by_signal)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # and not ignored, as under nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


# A command imports torch and models in its body, so that `kedge --help` is quick.
app.command()(run)
app.command()(serve)
app.command()(inspect)
app.command()(demo)
app.add_typer(bench, name="bench")
