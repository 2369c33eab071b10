"""`mxprobe status [PID...]`."""

import json
from typing import Any

import click

from mxprobe.cli import targets
from mxprobe.printable import printable

_TIMEOUT_S = 10.0


@click.command("status")
@targets.argument
@targets.job_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead.")
def command(pids: tuple[int, ...], job: bool, as_json: bool) -> None:
    """Show what is attached: where the trace goes, at which step it is, what it costs, what was lost."""
    from mxprobe.attach.rundir import attached

    named = targets.named(pids, job=job) if pids else [pid for pid, _ in attached()]
    answers = [answer for pid in named if (answer := targets.ask(pid, "status", timeout_s=_TIMEOUT_S)) is not None]
    if pids and not answers:
        raise targets.not_attached(
            f"Process {pids[0]} is not attached." if len(pids) == 1 else "None of these processes is attached.",
            remedy="`mxprobe status` lists what is attached; `mxprobe attach` attaches",
        )
    if as_json:
        click.echo(json.dumps(answers, indent=2))
    elif not answers:
        click.echo("nothing is attached", err=True)
    for answer in [] if as_json else answers:
        click.echo(_lines(answer))
    for line in [] if as_json else where_ranks_stand(answers):
        click.echo(line)


def where_ranks_stand(answers: list[dict[str, Any]]) -> list[str]:
    """Return a line per trace whose ranks are not at the same step. Processes that only log are no ranks."""
    traces: dict[str, dict[int, int]] = {}
    for answer in answers:
        if answer["last_step"] is not None and answer["role"] != "metrics":
            traces.setdefault(answer["directory"], {})[answer["rank"]] = answer["last_step"]
    found: list[str] = []
    for directory, steps in traces.items():
        first, last = min(steps.values()), max(steps.values())
        if first < last:
            behind = ", ".join(str(rank) for rank, step in sorted(steps.items()) if step == first)
            found.append(f"ranks of {directory} are at steps {first} (rank {behind}) to {last}")
    return found


def _lines(status: dict[str, Any]) -> str:
    agent = status["agent"]
    rank = f"  rank {status['rank']}" if status["rank"] else ""
    lines = [f"{status['pid']}  {status['name']}{rank}  {status['phase']}"]
    if status["attached_s"] is not None:
        role = status["role"] or "unknown"
        lines.append(f"  attached   {status['attached_s']:.0f} s by {status['mechanism']}, role {role}")
    lines += _pause(status)
    lines += [f"  recipe     {printable(str(recipe))}" for recipe in agent.get("recipes") or []]
    if agent.get("eager_probe_steps"):
        lines.append(
            "  eager      probed steps run the compiled model eagerly: not bit for bit the run without mxprobe"
        )
    if agent.get("planted_probes"):
        lines.append("  planted    operators in the compiled model: not bit for bit the run without them")
    lines.append(f"  trace      {status['directory']}")
    if status["last_step"] is not None:
        lines.append(f"  recorded   up to step {status['last_step']}, {status['n_rows']} rows")
    lines += _overhead(agent) if agent.get("step_ns") else []
    lines += [f"  lost       {words}" for words in status.get("lost_ranks", [])]
    if agent:
        lines.append(f"  lost       {agent.get('n_dropped', 0)} rows dropped, {agent.get('n_errors', 0)} errors")
    return "\n".join(lines)


def _pause(status: dict[str, Any]) -> list[str]:
    """Return for how long the run stood still, and how long it took until it could be probed."""
    if status.get("pause_ms") is None:
        return []
    stopped, entered = status["pause_ms"], status["attach_latency_ms"]
    words = f"  pause      stopped for {stopped:.1f} ms; the agent was in after {entered:.0f} ms"
    kernels = status["agent"].get("kernels")
    return [f"{words}, kernels {kernels}" if kernels else words]


def _overhead(agent: dict[str, Any]) -> list[str]:
    """Return what attaching costs, and what was thinned to keep it below the limit."""
    in_hooks, contention, beside = (
        agent[name] / agent["step_ns"] for name in ("probe_ns", "contention_ns", "measure_ns")
    )
    limit = f", limit {agent['max_overhead']:.1%}" if agent["max_overhead"] else ""
    lines = [
        f"  overhead   {in_hooks:.2%} of the step time in our hooks, {contention:.2%} lost to our own thread{limit}",
        f"             {beside:.1%} of the time our own thread measures, beside the run",
    ]
    if agent["steps_put_off"] and agent["probed_steps"]:
        interval = agent["steps"] / agent["probed_steps"]
        lines.append(f"  thinned    a probe every {interval:.0f} steps in place of {agent['every']}")
    if agent["module_share"] < 1:
        lines.append(f"  thinned    each probe measures {agent['module_share']:.1%} of the modules, in turn")
    lines += [
        f"  {name:10} {agent[key]}"
        for name, key in (("device", "device_steps"), ("memory", "memory"))
        if agent.get(key)
    ]
    return lines
