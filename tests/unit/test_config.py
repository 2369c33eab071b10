"""mxprobe.toml: precedence, sources, words for mistakes; `config show` and the defaults of `attach`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mxprobe.attribution import Thresholds
from mxprobe.cli import main
from mxprobe.config import DEFAULT, SECTIONS, keys_of, load
from mxprobe.errors import UsageError
from mxprobe.protocol import AgentConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def source_of(path: str, **options: object) -> tuple[object, str]:
    settings = load(**options)  # type: ignore[arg-type]
    return next((each.value, each.source) for each in settings.settings if each.key.path == path)


def test_defaults_are_those_of_the_code_they_configure(tmp_path: Path) -> None:
    settings = load(start=tmp_path, environ={})
    assert settings.thresholds() == Thresholds()
    agent = AgentConfig()
    attach = settings.section("attach")
    assert attach == {
        "every": agent.every,
        "weights_every": agent.weights_every,
        "sensitivity_every": agent.sensitivity_every,
        "replay_every": agent.replay_every,
        "layers": agent.layers,
        "rollout_in": agent.rollout_in,
        "rule": agent.rule,
        "max_overhead": None,
        "max_gpu_memory": agent.max_gpu_memory,
        "step_timeout": agent.step_timeout_s,
    }
    assert {each.source for each in settings.settings} == {DEFAULT}
    assert settings.command_defaults("attach") == {}


def test_every_layer_overrides_the_one_below_it(tmp_path: Path) -> None:
    options: dict[str, object] = {"start": tmp_path, "environ": {}}
    assert source_of("check.max_nmse", **options) == (None, DEFAULT)
    pyproject = write(tmp_path / "pyproject.toml", "[tool.mxprobe.check]\nmax_nmse = 0.01\nmax_zero_frac = 0.5\n")
    assert source_of("check.max_nmse", **options) == (0.01, str(pyproject))
    toml = write(tmp_path / "mxprobe.toml", "[check]\nmax_nmse = 0.02\n")
    assert source_of("check.max_nmse", **options) == (0.02, str(toml))
    assert source_of("check.max_zero_frac", **options) == (0.5, str(pyproject))
    options["environ"] = {"MXPROBE_CHECK_MAX_NMSE": "0.03"}
    assert source_of("check.max_nmse", **options) == (0.03, "environment MXPROBE_CHECK_MAX_NMSE")
    options["assignments"] = ["max_nmse=0.04"]
    assert source_of("check.max_nmse", **options) == (0.04, "command line")


def test_the_nearest_directory_with_settings_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path / "mxprobe.toml", "[check]\nmax_nmse = 1\n")
    write(inner.parent / "pyproject.toml", "[project]\nname = 'x'\n")  # says nothing of mxprobe: looked through
    assert source_of("check.max_nmse", start=inner, environ={}) == (1.0, str(tmp_path / "mxprobe.toml"))
    nearer = write(inner.parent / "mxprobe.toml", "[check]\nmax_nmse = 2\n")
    assert source_of("check.max_nmse", start=inner, environ={}) == (2.0, str(nearer))
    named = write(tmp_path / "other.toml", "[check]\nmax_nmse = 3\n")
    assert source_of("check.max_nmse", start=inner, environ={}, config=named) == (3.0, str(named))


def test_overrides_per_module_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path / "mxprobe.toml", '[check.layers."*"]\nmax_nmse = 0.1\n[check.layers."*.down"]\nmax_nmse = 0.3\n')
    overrides = load(start=tmp_path, environ={}).overrides
    assert [(each.glob, each.limits) for each in overrides] == [("*", {"max_nmse": 0.1}), ("*.down", {"max_nmse": 0.3})]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[check]\nmax_nsme = 1\n", "unknown key 'max_nsme' in [check]; did you mean 'max_nmse'?"),
        ("[chek]\nmax_nmse = 1\n", "unknown section [chek]; did you mean 'check'?"),
        ("max_nmse = 1\n", "unknown section [max_nmse]"),
        ("[check]\nmax_nmse = 'much'\n", "check.max_nmse = 'much' is not a number of 0 or more"),
        ("[check]\nmax_nmse = nan\n", "check.max_nmse = nan is not a number"),
        ("[check]\nmax_nmse = -1\n", "is not a number of 0 or more"),
        ("[check]\nmin_steps = 1.5\n", "check.min_steps = 1.5 is not a whole number"),
        ("[check]\nmin_steps = true\n", "check.min_steps = True is not a whole number"),
        ("[check]\nallow_verdicts = ['none']\n", "does not know 'none'; did you mean 'none_needed'?"),
        ("[check]\nroles = 'x_fdw'\n", "does not know 'x_fdw'; did you mean 'x_fwd'?"),
        ("[check.layers]\nmax_nmse = 1\n", "check.layers does not map globs to limits"),
        ("[check.layers.'*']\nmax_overhead = 1\n", "unknown key 'max_overhead'"),
        ("check = 3\n", "check is not a table"),
        ("[check\n", "is not TOML"),
        ("[attach]\nrule = 'rceill'\n", "did you mean 'rceil'?"),
        ("[verdict]\nmin_stepz = 3\n", "did you mean 'min_steps'?"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path / "mxprobe.toml", text)
    with pytest.raises(UsageError) as caught:
        load(start=tmp_path, environ={})
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_mistakes_in_environment_and_assignments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"environment MXPROBE_CHECK_MAX_NMSEE.*did you mean 'max_nmse'"):
        load(start=tmp_path, environ={"MXPROBE_CHECK_MAX_NMSEE": "1"})
    with pytest.raises(UsageError, match="is not an assignment"):
        load(start=tmp_path, environ={}, assignments=["max_nmse"])
    with pytest.raises(UsageError, match=r"command line: unknown key 'max_nsme' in \[check\]"):
        load(start=tmp_path, environ={}, assignments=["check.max_nsme=1"])
    with pytest.raises(UsageError, match="no section 'chek' here; did you mean 'check'"):
        load(start=tmp_path, environ={}, assignments=["chek.max_nmse=1"])
    with pytest.raises(UsageError, match="cannot read"):
        load(config=tmp_path / "missing.toml")


def test_variables_of_other_purposes_are_left_alone(tmp_path: Path) -> None:
    load(start=tmp_path, environ={"MXPROBE_LISTEN": "1"})


def test_config_show_prints_values_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mxprobe.toml", '[attach]\nlayers = ["*.mlp.*"]\n[check.layers."*.down"]\nmax_nmse = 0.03\n')
    shown = CliRunner().invoke(main, ["config", "show"], env={"MXPROBE_VERDICT_MIN_STEPS": "4"})
    assert shown.exit_code == 0
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.stdout.splitlines()}
    assert lines["attach.layers"] == ["*.mlp.*", str(tmp_path / "mxprobe.toml")]
    assert lines["verdict.min_steps"] == ["4", "environment MXPROBE_VERDICT_MIN_STEPS"]
    assert lines["check.layers[*.down].max_nmse"] == ["0.03", str(tmp_path / "mxprobe.toml")]
    assert {f"{section}.{key.name}" for section in SECTIONS for key in keys_of(section)} <= lines.keys()

    data = json.loads(CliRunner().invoke(main, ["config", "show", "attach", "--json"]).stdout)
    assert {each["key"] for each in data["settings"]} == {f"attach.{key.name}" for key in keys_of("attach")}
    wrong = CliRunner().invoke(main, ["config", "show", "chek"])
    assert wrong.exit_code == 2
    assert "attach, verdict, check" in wrong.stderr


def test_attach_takes_its_defaults_from_the_file_and_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mxprobe.toml", '[attach]\nevery = 7\nlayers = ["*.mlp.*"]\nstep_timeout = 5\n')
    with main.make_context("mxprobe", ["attach", "1"], resilient_parsing=False) as context:
        from mxprobe.cli import _ConfiguredDefaults  # pyright: ignore[reportPrivateUsage]

        context.default_map = _ConfiguredDefaults()
        attach = main.get_command(context, "attach")
        assert isinstance(attach, click.Command)
        parsed = attach.make_context("attach", ["1", "--every", "9"], parent=context).params
    assert (parsed["every"], parsed["layers"], parsed["step_timeout"]) == (9, ("*.mlp.*",), 5.0)


def test_a_broken_file_does_not_stop_commands_that_do_not_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mxprobe.toml", "[attach\n")
    assert CliRunner().invoke(main, ["status"]).exit_code == 0
    refused = CliRunner().invoke(main, ["attach", "1"])
    assert refused.exit_code == 2
    assert "is not TOML" in refused.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_prints_the_script_that_the_page_names(shell: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands" / "config.md").read_text(encoding="utf-8")
    assert f"_MXPROBE_COMPLETE={shell}_source mxprobe" in page
    program = Path(sys.executable).with_name("mxprobe")
    environment = {**os.environ, "_MXPROBE_COMPLETE": f"{shell}_source"}
    script = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout
    assert f"_MXPROBE_COMPLETE={shell}_complete" in script
    assert "mxprobe" in script


def test_shell_completion_knows_commands_and_options() -> None:
    program = Path(sys.executable).with_name("mxprobe")

    def complete(*words: str) -> list[str]:
        asked = {"_MXPROBE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert complete("mxprobe", "comp") == ["compare"]
    assert "--follow" in complete("mxprobe", "export", "x", "--f")
    assert complete("mxprobe", "export", "x", "--to", "tr") == ["trackio"]
