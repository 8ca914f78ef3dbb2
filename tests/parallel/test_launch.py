"""Starting ranks and ending them: small programs in place of the command, and then the command itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worlds import environment

import lookahead
from lookahead.parallel import launch as launching
from lookahead.parallel.launch import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is tested on Linux")


def program(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{text}"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(launching, "END_SECONDS", 0.5)
    return []


def test_all_is_well(said: list[str], tmp_path: Path) -> None:
    keep = "open(sys.argv[1] + f'/{rank}', 'w').write(os.environ['WORLD_SIZE'] + sys.stdin.read())"
    assert launch([*program(keep), str(tmp_path)], 3, "hello", said.append) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3hello", "3", "3"]
    assert not said


def test_only_rank_0_speaks(said: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(program("print(rank); print(rank, file=sys.stderr)"), 2, None, said.append) == 0
    assert capfd.readouterr() == ("0\n", "0\n")


def test_rank_0_has_said_why(said: list[str]) -> None:
    assert launch(program("sys.exit(2) if rank == 0 else time.sleep(100)"), 3, None, said.append) == 2
    assert not said


def test_a_rank_that_was_killed_is_named(said: list[str]) -> None:
    dies = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(100)"
    assert launch(program(dies), 3, None, said.append) == 1
    assert said == ["error: rank 1 was ended by SIGKILL; the other ranks were ended"]


def test_a_rank_that_failed_is_quoted(said: list[str]) -> None:
    fails = "sys.exit('error: no such file') if rank == 2 else time.sleep(100)"
    assert launch(program(fails), 3, None, said.append) == 1
    assert said == ["error: rank 2 ended with exit code 1: no such file; the other ranks were ended"]


def test_none_is_left(said: list[str], tmp_path: Path) -> None:
    """Those that do not hear, and those that are stopped, are killed."""
    deaf = (
        "open(sys.argv[1] + f'/{rank}', 'w').write(str(os.getpid()))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "sys.exit(3) if rank == 0 else os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else time.sleep(100)"
    )
    assert launch([*program(deaf), str(tmp_path)], 3, None, said.append) == 3
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert not any(map(alive, pids))


LAUNCHER = """
import signal, sys
from lookahead.parallel.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started the tests in the background ignores it
code = '''
import os, sys, time
open(sys.argv[1] + "/" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(100)
'''
sys.exit(launch([sys.executable, "-c", code, sys.argv[1]], 3, None, print))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)])
@pytest.mark.thinned(1, most=1)
def test_ranks_end_with_their_launcher(number: int, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 3 or not all(path.read_text() for path in tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.02)
        pids = [int(path.read_text()) for path in tmp_path.iterdir()]
        assert all(map(alive, pids))
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert gone(pids)
    assert out == ("interrupted\n" if number == signal.SIGINT else "")


# The command


def run(*arguments: str, stdin: str = "", cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lookahead", "generate", *arguments],
        env=environment(LOOKAHEAD_CACHE=str(cache)),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_generate_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    """The prompt from stdin reaches every rank through rank 0; the tokens are those of one process."""
    settings = ["--window", "3", "--ngram", "4", "--budget", "30", "--temperature", "0.7", "--seed", "4"]
    common = ["--model", str(folder), *settings, "--max-tokens", "20", "--json"]
    done = run(*common, "--ranks", "2", "--check-ranks", stdin="the quick fox\n", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = lookahead.load(folder, config=lookahead.LookaheadConfig(3, 4, 8, 30))
    expected = model.generate("the quick fox", max_tokens=20, temperature=0.7, seed=4)
    assert found["token_ids"] == expected.token_ids
    assert found["steps"] == expected.stats.steps
    assert "2 ranks: " in done.stderr
    assert " 2.00 collectives and " in done.stderr  # one is the check


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: give at least 1"),
        (["--ranks", "2", "--rank-timeout", "1"], "--rank-timeout 1: give at least 2 seconds"),
        (["--ranks", "2", "--window", "-1"], "window=-1 must be a whole number of at least 0"),
    ],
)
@pytest.mark.thinned(1, most=1)
def test_mistakes_are_told_before_a_rank_starts(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run("-p", "x", *arguments, cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {message}\n"


@pytest.mark.slow
def test_the_wrong_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    """As under torchrun with another number than --ranks says."""
    variables = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lookahead", "generate", "-p", "x", "--model", str(folder), "--ranks", "2"],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: 2 ranks were requested and 3 ranks were started; make the two numbers equal"
    )
