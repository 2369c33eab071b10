"""`mxprobe set PID... --recipe RECIPE`."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from mxprobe.cli import targets
from mxprobe.errors import AttachError, UsageError

_STATUS_S = 10.0
_AHEAD_STEPS, _AHEAD_S = 3, 3.0  # how far off the step lies at which several ranks switch together

_REASONS = {
    "busy": ("another switch waits", "wait for it, or detach"),
    "compiled": (
        "torch.compile has traced the model, and would not see another forward",
        "start it with `mxprobe run --emulate none`, or call mxprobe.emulate before torch.compile; then it can switch",
    ),
    "fused": ("its product is not made by a Linear's own forward", "leave that model in high precision"),
    "no_fit": ("include, exclude, keep_first and keep_last leave nothing", "widen the recipe"),
    "no_steps": ("it serves, or only logs", "name the process that trains"),
    "ranks": (
        "one rank alone must not train under another recipe than the others",
        "use --job, or attach to all ranks and name all their PIDs: they switch at the same step",
    ),
    "late": (
        "steps went by until it was asked; if other ranks were asked in time, they now differ from it",
        "set the recipe again at once, with a larger --at-step or without",
    ),
    "unreadable": ("an agent of another version, or a torch too old to emulate in", "attach again with this mxprobe"),
    "left": ("the probe left before the step came", "attach again, and set again"),
    "not_recording": ("it waits for a first step, or is leaving", "wait until `mxprobe status` says recording"),
}


@click.command("set")
@targets.argument
@click.option(
    "--recipe", required=True, metavar="RECIPE", help="A recipe's name, a line, or a .toml file; `none` for nothing."
)
@click.option("--job", is_flag=True, help="Every attached rank, on this machine, of the job of PID.")
@click.option("--at-step", type=click.IntRange(min=1), help="Completed optimizer steps after which to switch.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    help="Seconds to wait for the step.",
)
def command(pids: tuple[int, ...], recipe: str, job: bool, at_step: int | None, timeout_s: float) -> None:
    """Switch attached processes to a recipe, between two optimizer steps. This changes their training.

    \b
      mxprobe set 12345 --recipe "paper x_fwd=mxfp4/rceil+of:0.5"
      mxprobe set 12345 --recipe mine.toml
      mxprobe set 12345 --recipe none

    A model that is not emulated yet is emulated from that step on; `none` computes what the untouched model does,
    bit for bit. The switch is an event of the trace, with the recipe's line and step, and it stays when the probe is
    detached. Several ranks switch at the same step, a few ahead.
    """
    from mxprobe.attach.rundir import control_socket_of
    from mxprobe.emulation.recipe import Recipe

    targets.required(pids)
    line = str(Recipe.parse(recipe))
    named = list(pids) if not job else targets.look_up_all(pids, job=True).pids
    sockets = {pid: path for pid in named if (path := control_socket_of(pid)) is not None}
    missing = [pid for pid in named if pid not in sockets]
    if missing:
        raise AttachError(
            "not_attached",
            f"Process {missing[0]} is not attached; nothing was switched.",
            cause="it never was, it was detached already, or another user attached to it",
            remedy=f"`mxprobe attach {missing[0]}` first; `mxprobe status` lists what is attached",
        )
    if at_step is None and len(sockets) > 1:
        at_step = _common_step(list(sockets.values()))
    click.echo(f"switching to {line} after {f'step {at_step}' if at_step else 'the next optimizer step'}", err=True)
    with ThreadPoolExecutor(len(sockets)) as pool:
        answers = pool.map(lambda path: _set(path, line, at_step, timeout_s), sockets.values())
    refused = [text for pid, answer in zip(sockets, answers, strict=True) if (text := _tell(pid, answer))]
    if refused:
        raise AttachError("not_switched", "\n".join(refused))


def _set(control_socket: Path, line: str, at_step: int | None, timeout_s: float) -> dict[str, Any] | None:
    from mxprobe.attach.client import ask

    try:
        return ask(control_socket, "set", timeout_s=timeout_s, recipe=line, at_step=at_step or 0)
    except AttachError as error:
        if error.reason != "no_answer":
            raise
        raise AttachError(
            "no_boundary",
            f"The step at which to switch did not come within {timeout_s:g} s.",
            cause="a long step or generation, a step far ahead, or the job hangs",
            remedy="the switch is still asked for and comes with that step; `mxprobe detach` takes the request back",
        ) from None


def _tell(pid: int, answer: dict[str, Any] | None) -> str:
    """Print what was done; what was refused, in words."""
    if answer is None:
        answer = {"ok": False, "reason": "left", "detail": "the attach ended"}
    if not answer["ok"]:
        cause, remedy = _REASONS.get(str(answer["reason"]), ("", ""))
        detail = str(answer["detail"]).splitlines()[0]
        return str(UsageError(f"Process {pid} was not switched: {detail}.", cause=cause, remedy=remedy))
    for model in answer["models"]:
        what = f"{model['was'] or 'not emulated'} -> {model['now']}"
        if not model["now"]:
            what = f"not switched: {str(model['detail']).splitlines()[0]}"
        click.echo(f"{pid}  from step {answer['step'] + 1} on  {model['model']}: {what}")
    return ""


def _common_step(control_sockets: list[Path]) -> int:
    """A step that none of them has completed, far enough ahead for all to be asked. UsageError where one is unknown."""
    from mxprobe.attach.client import ask

    reached = 0
    for path in control_sockets:
        agent = (ask(path, "status", timeout_s=_STATUS_S) or {}).get("agent") or {}
        if not agent.get("steps"):
            raise UsageError(
                "one of these processes has not told at which step it is",
                remedy="wait for a few steps, or use --at-step",
            )
        step_s = agent["step_ns"] / agent["steps"] / 1e9
        reached = max(reached, agent["step"] + max(_AHEAD_STEPS, math.ceil(_AHEAD_S / step_s)))
    return reached
