"""The command line: quick, lazy, its surface frozen, its errors in words with their exit codes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mxprobe.cli import COMMANDS, main
from mxprobe.cli.param_types import Duration, Experts, Kept, Share, Size

OPTIONS = {
    "attach": {
        "output",
        "every",
        "keep",
        "max_trace",
        "weights_every",
        "sensitivity_every",
        "replay_every",
        "layers",
        "experts",
        "rule",
        "duration",
        "step_timeout",
        "wait",
        "background",
        "job",
        "via",
        "ray",
        "record",
        "max_overhead",
        "max_gpu_memory",
        "eager_probe_steps",
    },
    "trigger": {"job"},
    "detach": {"job"},
    "status": {"as_json", "job"},
    "run": {"output", "record", "emulate", "plant_probes"},
    "set": {"recipe", "job", "at_step", "timeout_s"},
    "doctor": {"as_json", "install_listener", "remove_listener"},
    "selftest": {"as_json"},
}


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mxprobe.cli import main\n"
        "try:\n main(['--help'])\nexcept SystemExit as e:\n assert e.code == 0\n"
        "heavy = {'torch', 'pandas', 'pyarrow', 'plotly', 'numpy', 'rich', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = os.times()
    # Processor time: what a person waits for on a machine that has nothing else to do.
    assert after.children_user - before.children_user + after.children_system - before.children_system < 0.3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_and_explains_itself(name: str) -> None:
    command = importlib.import_module(f"mxprobe.cli.{name}").command
    assert isinstance(command, click.Command)
    assert command.name == name
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert (command.help or "").splitlines()[0][:40] in result.output


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_the_documented_ones(name: str) -> None:
    command = importlib.import_module(f"mxprobe.cli.{name}").command
    options = {parameter.name for parameter in command.params if isinstance(parameter, click.Option)}
    assert options == OPTIONS[name]


def test_attach_loads_no_torch_before_it_knows_the_process() -> None:
    code = (
        "import sys\nfrom mxprobe.cli import main\ntry:\n main(['attach', '4194304'])\nexcept SystemExit as e:\n"
        " assert e.code == 4\nassert not {'torch', 'pandas', 'pyarrow'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("mxprobe: There is no process 4194304.\n  likely cause: ")
    assert "what to do:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], 2),
        (["attach"], 2),
        (["attach", "0"], 2),
        (["attach", "self"], 2),
        (["attach", "1", "--ray", "auto"], 2),
        (["attach", "1", "--every", "0"], 2),
        (["attach", "1", "--rule", "round"], 2),
        (["attach", "1", "--duration", "soon"], 2),
        (["attach", "4194304"], 4),
        (["detach", "4194304"], 4),
        (["status", "4194304"], 4),
        (["run"], 2),
        (["run", "--", "no-such-program-anywhere"], 2),
        (["doctor", "--install-listener", "--remove-listener"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr != ""


@pytest.mark.parametrize("place", ["mxprobe.cli.status", "mxprobe.attach.rundir"])
def test_ctrl_c_is_not_a_breached_threshold(place: str) -> None:
    """While a command's module is imported, and while it runs."""
    code = (
        "import signal, sys\nfrom mxprobe.cli import main\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *rest):\n"
        f"        if name == {place!r}:\n            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\nmain(['status'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "mxprobe: interrupted"


def test_nothing_attached_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: str) -> None:
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    result = CliRunner().invoke(main, ["status", "--json"])
    assert result.exit_code == 0


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5H", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "0", "inf", "nan", "ten"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


def test_numbers_of_experts() -> None:
    assert [Experts().convert(text, None, None) for text in ("8", "0", "all")] == [8, 0, -1]
    for text in ("-2", "many", "1.5"):
        with pytest.raises(click.BadParameter):
            Experts().convert(text, None, None)


def test_shares() -> None:
    assert [Share().convert(text, None, None) for text in ("3%", "0.03", "0", "100%")] == [0.03, 0.03, 0.0, 1.0]
    for text in ("three", "300%", "-1"):
        with pytest.raises(click.BadParameter):
            Share().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("1000000", 10**6), ("0", 0), ("500mb", 5 * 10**8)]
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GB", "two", "-1GB", "1kb", "2XB", "nanGB", "infGB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("5000", (5000, None)), ("90s", (None, 90.0)), ("24h", (None, 86400.0)), ("7d", (None, 604800.0))],
)
def test_what_to_keep_is_steps_or_a_time(text: str, kept: tuple[int | None, float | None]) -> None:
    assert Kept().convert(text, None, None) == kept


@pytest.mark.parametrize("text", ["", "0", "-5", "d", "xd", "0h", "5 steps"])
def test_what_is_nothing_to_keep(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Kept().convert(text, None, None)
