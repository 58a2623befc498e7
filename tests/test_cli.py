"""The command line: exit codes, one sentence on stderr, and nothing left running."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)

from outrider.cluster.errors import UnavailableError
from outrider.deploy.cli import main
from outrider.deploy.launch import check_port, find_failure
from outrider.deploy.terminal import only_own_lines

SERVE_FILE = """
applications:
  - name: outrider
    route_prefix: /
    import_path: outrider.deploy.app:build
    args:
      model_name: tiny
      target: {{model: /models/none, num_cpus: 0.5, num_gpus: {num_gpus}}}
      timeouts: {{load_s: {load_s}}}
"""
# The command line around a small application, which starts as `mode` says.
SCRIPT = textwrap.dedent("""
    import sys
    import threading

    from ray import serve

    from outrider.cluster.errors import ConfigError
    from outrider.deploy.cli import main

    mode = sys.argv.pop(1)


    class Application:
        def __init__(self):
            if mode == "broken":
                raise ConfigError("/models/none is not there: name a folder that is")
            if mode == "stuck":
                threading.Event().wait()

        async def __call__(self, request):
            return "well"


    def build(settings):
        return serve.deployment(ray_actor_options={"num_cpus": 0})(Application).bind()


    sys.exit(main(build=build))
""")


def serve(folder: Path, mode: str, num_gpus: int = 0, load_s: float = 120) -> subprocess.Popen[str]:
    """Start `outrider serve` in a process group of its own, as a terminal does."""
    file = folder / "file.yaml"
    file.write_text(SERVE_FILE.format(num_gpus=num_gpus, load_s=load_s))
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), mode, "serve", str(file), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"it ended without {words!r}: {process.communicate()}")


def assert_nothing_is_left(processes: Sequence[psutil.Process]) -> None:
    assert processes, "this proves something only while there was something"
    _, left = psutil.wait_procs(processes, timeout=1)
    assert left == []


def test_a_signal_while_serving_ends_everything_and_is_no_failure(tmp_path: Path) -> None:
    process = serve(tmp_path, "well")
    line = read_until(process, "Outrider serves")
    assert re.fullmatch(r"Outrider serves tiny at http://127\.0\.0\.1:\d+/v1\n", line)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert_nothing_is_left(processes)
    assert process.communicate() == ("", "")


def test_ctrl_c_while_it_starts_ends_everything(tmp_path: Path) -> None:
    process = serve(tmp_path, "stuck")
    read_until(process, "deploying")
    processes = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the whole group
    assert process.wait(30) == 130
    assert_nothing_is_left(processes)
    assert process.communicate() == ("", "")


def test_what_cannot_be_loaded_ends_in_its_own_sentence(tmp_path: Path) -> None:
    process = serve(tmp_path, "broken")
    _, errors = process.communicate(timeout=120)
    assert errors == "outrider: /models/none is not there: name a folder that is\n"
    assert process.returncode == 1


def test_what_cannot_be_placed_is_not_even_deployed(tmp_path: Path) -> None:
    process = serve(tmp_path, "well", num_gpus=1)
    output, errors = process.communicate(timeout=120)
    assert errors.startswith("outrider: target rank 0 cannot be placed: it asks for 0.5 CPUs and 1")
    assert errors.count("\n") == 1
    assert process.returncode == 1
    assert "deploying" not in output


def test_a_start_that_takes_too_long_ends_with_the_limit_and_its_name(tmp_path: Path) -> None:
    process = serve(tmp_path, "stuck", load_s=1)
    _, errors = process.communicate(timeout=120)
    assert errors.startswith("outrider: not ready within 1 s (timeouts.load_s): ")
    assert process.returncode == 1


def test_a_port_in_use_is_found_out_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(SERVE_FILE.format(num_gpus=0, load_s=1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(file), "--port", str(port)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"outrider: cannot listen at 127.0.0.1:{port}: Address already in use: "
        "choose another with --host and --port\n"
    )


def test_a_metrics_port_in_use_is_found_out_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = SERVE_FILE.format(num_gpus=0, load_s=60)
        file.write_text(f"{text}      metrics: {{port: {port}}}\n")
        assert main(["serve", str(file), "--port", "0"]) == 1
    assert "metrics.host and metrics.port" in capsys.readouterr().err


def test_ports_are_tried_in_the_family_of_their_host() -> None:
    check_port("::1", 0)
    check_port("127.0.0.1", 0)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match="cannot listen at ::1"):
            check_port("::1", port)
    with pytest.raises(UnavailableError, match=r"cannot listen at a\.\.b"):
        check_port("a..b", 0)


def test_a_cluster_that_is_not_there_is_found_out_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(SERVE_FILE.format(num_gpus=0, load_s=60))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert main(["serve", str(file), "--address", f"127.0.0.1:{port}"]) == 1
    assert f"cannot connect to the Ray cluster at 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--sequences", "0"],
        ["--sequences", "1,x"],
        ["--tokens", "-1"],
        ["--acceptance", "1.5"],
        ["--target-ms", "1"],
        ["--draft-ms", "1:fast"],
    ],
)
def test_wrong_options_of_the_simulation_are_exit_code_2(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "loop", *options])
    assert end.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_host_of_somebody_else_is_refused() -> None:
    with pytest.raises(UnavailableError, match=r"cannot listen at 192\.0\.2\.77:8000: "):
        check_port("192.0.2.77", 8000)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_wrong_file_is_one_sentence_and_exit_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("applications: [{args: {target: {modle: x}}}]")
    assert main([command, str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"outrider: {file}: applications[0].args: target.model: is required")
    assert said.err.count("\n") == 1
    assert main([command, str(tmp_path / "none.yaml")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_messages_of_several_lines_become_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("a: [1\nb: 2")
    assert main(["check", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["serve"], ["fly"], ["serve", "a", "--port", "70000"], ["bench", "fly"]]
)
def test_a_wrong_command_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: outrider" in capsys.readouterr().err


def test_help_and_version_import_nothing_heavy() -> None:
    program = (
        "import sys\nfrom outrider.deploy.cli import main\n"
        "try:\n    main([sys.argv[1]])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'ray', 'torch', 'transformers', 'rich', 'httpx'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    for argument, words in (("--help", "COMMAND"), ("--version", "outrider 0.")):
        done = subprocess.run(
            [sys.executable, "-c", program, argument], capture_output=True, text=True, check=True
        )
        assert words in done.stdout


def overview(status: ApplicationStatus, message: str) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        DeploymentStatus.UPDATING,
        DeploymentStatusTrigger.CONFIG_UPDATE_STARTED,
        {},
        message,
    )
    return ApplicationStatusOverview(status, "", 0.0, {"Coordinator": deployment})


def test_our_own_error_is_found_in_the_traceback_of_serve() -> None:
    traceback = (
        "The deployment failed to start 1 times in a row. Error:\n"
        "ray.exceptions.RayTaskError(ConfigError): ray::TargetWorker.load() (pid=1)\n"
        '  File "model.py", line 3, in load\n'
        "outrider.cluster.errors.ConfigError: heads (9) cannot be shared by 2 ranks\n\n"
        "The above exception was the direct cause of the following exception:\n"
        "outrider.cluster.errors.ConfigError: heads (9) cannot be shared by 2 ranks\n"
    )
    said = find_failure(overview(ApplicationStatus.DEPLOYING, traceback))
    assert said == "heads (9) cannot be shared by 2 ranks"


def test_there_is_hope_until_serve_gives_up() -> None:
    message = "Replica failed:\nKeyError: 'x'\n"
    assert find_failure(overview(ApplicationStatus.DEPLOYING, message)) is None
    said = find_failure(overview(ApplicationStatus.DEPLOY_FAILED, message))
    assert said is not None
    assert "KeyError: 'x'" in said


def test_of_ray_only_our_lines_reach_the_terminal() -> None:
    out, err, progress = io.StringIO(), io.StringIO(), io.StringIO()
    with only_own_lines(out, err, progress):
        print("\x1b[36m(TargetWorker pid=7)\x1b[0m outrider: target rank 0: loading")
        print("(Serve:x:Y pid=7, ip=10.0.0.1) outrider: draft lost", file=sys.stderr)
        print("\x1b[36m(ServeController pid=7)\x1b[0m Traceback:", file=sys.stderr)
        print("(raylet) a worker died", file=sys.stderr)
        print("(a remark of ours)")
        print("half a ", end="")
        print("line")
    assert progress.getvalue() == "target rank 0: loading\ndraft lost\n"
    assert out.getvalue() == "(a remark of ours)\nhalf a line\n"
    assert err.getvalue() == ""


def test_signal_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
