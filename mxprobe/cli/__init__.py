"""The command line: one module per command, imported when it is called; errors become words and exit codes here.

Exit codes: 0 ok, 1 a checked threshold is breached, 2 usage, 3 no or bad trace, 4 could not attach,
130 interrupted (Ctrl-C), 141 whoever read the output has left (`| head -1`).
"""

import contextlib
import errno
import importlib
import os
import sys
from typing import Any

import click

from mxprobe._version import __version__
from mxprobe.errors import EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USAGE, MxprobeError

# Name -> what `--help` says, so that listing the commands imports none of them.
COMMANDS: dict[str, str] = {
    "attach": "Attach to a running training process and record a trace.",
    "detach": "Take the probe off a process; its trace is closed.",
    "status": "Show what is attached, and how it is doing.",
    "trigger": "Go to full statistics now; with --record, keep what came before.",
    "set": "Switch the recipe of a live run at a step boundary. Changes the training.",
    "run": "Start a job that can be attached without ptrace, or under emulation.",
    "report": "Write a trace as one offline HTML page.",
    "recommend": "Give the verdict, its evidence and a correction.",
    "replay": "Say what replayed microbatches show: policy and gradient under each rounding.",
    "compare": "Say what changed from one run to another, and whether the correction helped.",
    "audit": "Say which modules are quantized on which side, by which rule, and what goes wrong.",
    "check": "Hold a trace against limits; exit 1 when one is breached.",
    "export": "Write all rows as CSV, JSON or Parquet, or hand them to an experiment tracker.",
    "live": "Watch a run that is being recorded, in this terminal.",
    "scan": "Decompose the weights of a checkpoint, before there is a run.",
    "config": "Show the effective settings and where each came from.",
    "demo": "Attach to a real GRPO run on this machine, start to end.",
    "doctor": "Say which ways of attaching work here, and why not.",
    "selftest": "Measure here whether mxprobe is right and leaves a run as it was.",
}


class _ConfiguredDefaults(dict[str, Any]):
    """click's `default_map` from mxprobe.toml and MXPROBE_*, read for the one command that has defaults there.

    No other command can fail by a mistake in a file that it does not use.
    """

    def get(self, key: str, default: Any = None) -> Any:
        if key != "attach":
            return default
        from mxprobe.config import load

        return load(sections=(key,)).command_defaults(key)


class LazyGroup(click.Group):
    """Loads `mxprobe.cli.NAME.command` on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"mxprobe.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise _interrupted() from None

    def invoke(self, ctx: click.Context) -> Any:
        ctx.default_map = _ConfiguredDefaults()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise _interrupted() from None
        except MxprobeError as error:
            click.echo(f"mxprobe: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC):
                raise
            raise _not_written(error) from None
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):  # how rich ends
                raise _not_written(error.__context__) from None
            raise


def _interrupted() -> click.exceptions.Exit:
    """Return the end by an interrupt. click's own exit code for it is 1, which here means a breached threshold."""
    click.echo("\nmxprobe: interrupted", err=True)
    return click.exceptions.Exit(EXIT_INTERRUPTED)


def _not_written(error: OSError) -> click.exceptions.Exit:
    """Return the end where standard output takes no more. Drop what is in its buffer, so that Python ends quietly."""
    if error.errno == errno.ENOSPC:
        click.echo(f"mxprobe: {error.strerror}: what was to be written is not there in full", err=True)
    with contextlib.suppress(OSError, ValueError):  # standard output may be no file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return click.exceptions.Exit(EXIT_USAGE if error.errno == errno.ENOSPC else EXIT_PIPE)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mxprobe")
def main() -> None:
    """Find out why MXFP4 hurts a live RL run, and which correction to switch on.

    Attach to the training process by its PID, let it run for a while, detach, and ask for the verdict:

    \b
      mxprobe attach 12345 -o run.mxprobe
      mxprobe detach 12345
      mxprobe recommend run.mxprobe
    """
