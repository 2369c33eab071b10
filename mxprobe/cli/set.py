"""`mxprobe set PID... --recipe RECIPE`."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from mxprobe.cli import targets
from mxprobe.errors import AttachError, UsageError

_STATUS_S = 10.0
_AHEAD_STEPS, _AHEAD_S = 3, 3.0  # how far off the step lies at which several ranks switch together


@click.command("set")
@targets.argument
@click.option(
    "--recipe", required=True, metavar="RECIPE", help="A recipe's name, a line, or a .toml file; `none` for nothing."
)
@targets.job_option
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

    targets.require(pids)
    line = str(Recipe.parse(recipe))
    named = list(dict.fromkeys(targets.named(pids, job=job)))
    missing = [pid for pid in named if control_socket_of(pid) is None]
    if missing:
        raise targets.not_attached(
            f"Process {missing[0]} is not attached; nothing was switched.",
            remedy=f"`mxprobe attach {missing[0]}` first; `mxprobe status` lists what is attached",
        )
    if at_step is None and len(named) > 1:
        at_step = _common_step(named)
    click.echo(f"switching to {line} after {f'step {at_step}' if at_step else 'the next optimizer step'}", err=True)
    with ThreadPoolExecutor(len(named)) as pool:
        answers = pool.map(lambda pid: _set(pid, line, at_step, timeout_s), named)
    refused = [text for pid, answer in zip(named, answers, strict=True) if (text := _tell(pid, answer))]
    if refused:
        raise AttachError("not_switched", "\n".join(refused))


def _set(pid: int, line: str, at_step: int | None, timeout_s: float) -> dict[str, Any] | None:
    try:
        return targets.ask(pid, "set", timeout_s=timeout_s, recipe=line, at_step=at_step or 0)
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
    """Print what was done; return in words what was refused."""
    from mxprobe.attach.refusals import SWITCH_REFUSALS

    if answer is None:
        answer = {"ok": False, "reason": "left", "detail": "the attach ended"}
    if not answer["ok"]:
        words = SWITCH_REFUSALS.get(str(answer["reason"]), {})
        detail = str(answer["detail"]).splitlines()[0]
        return str(UsageError(f"Process {pid} was not switched: {detail}.", **words))
    for model in answer["models"]:
        what = f"{model['was'] or 'not emulated'} -> {model['now']}"
        if not model["now"]:
            what = f"not switched: {str(model['detail']).splitlines()[0]}"
        click.echo(f"{pid}  from step {answer['step'] + 1} on  {model['model']}: {what}")
    return ""


def _common_step(pids: list[int]) -> int:
    """Return a step that none of them has completed, far enough ahead to ask all. UsageError where one is unknown."""
    reached = 0
    for pid in pids:
        agent = (targets.ask(pid, "status", timeout_s=_STATUS_S) or {}).get("agent") or {}
        if not agent.get("steps"):
            raise UsageError(
                "one of these processes has not told at which step it is",
                remedy="wait for a few steps, or use --at-step",
            )
        step_s = agent["step_ns"] / agent["steps"] / 1e9
        reached = max(reached, agent["step"] + max(_AHEAD_STEPS, math.ceil(_AHEAD_S / step_s)))
    return reached
