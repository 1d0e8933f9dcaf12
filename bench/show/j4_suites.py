"""J4: conformance suites that others wrote, against the real server with scripted text.

The server is bench/show/scripted_server.py, whose model calls any tool by the tool's own schema. None of the suites'
code is in this repository:

    openresponses   the compliance test of Open Responses: --openresponses DIR, a checkout with bin/compliance-test.ts
    llmprobe        npm's package; only its MUSTs count
    vllm            tests/entrypoints of vLLM's source archive, from the Python registry
    llama.cpp       tools/server/tests in the source archive of llama-cpp-python, from the Python registry
    smg             e2e_test of SGLang's gateway: --smg DIR, a checkout

The two directories can also be given as ROOTSTOCK_OPENRESPONSES and ROOTSTOCK_SMG. suites/remote_server.py replaces
the start of a server in the Python suites. suites/known_cases.py has the cases that do not pass, each with the
reason and its number of cases: any other failure fails the line, and so does a suite that is not at hand. A number
that has changed is told. Packages and archives stay in --folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import argument_parser, conclude, could_not, exactly
from peers import PeerProcess, PeerUnavailable, free_port
from suites.known_cases import KNOWN, Known, known

SHOW = "J4"
HERE = Path(__file__).parent
INSTALL_S, RUN_S, CASE_S = 1800, 3600, 60
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
PACKAGES = (
    "pytest", "pytest-asyncio", "pytest-timeout", "pytest-rerunfailures", "anthropic", "openai", "requests", "httpx",
    "regex", "jsonschema", "aiohttp", "wget", "filelock", "numpy", "prometheus-client", "pillow", "huggingface_hub",
    "transformers", "mcp>=1.2,<2", "uvicorn", "websockets", "jinja2",
)  # fmt: skip
# Downloads an archive with pip's own finder: `pip download` would run the build of it, which needs torch.
FETCH = """
import sys
from pip._internal.commands import create_command
from pip._internal.req.constructors import install_req_from_line
requirement, folder = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", requirement])
with command.main_context():
    session = command.get_default_session(options)
    wanted = install_req_from_line(requirement).req
    finder = command._build_package_finder(options, session)
    link = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate.link
    answer = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"})
    answer.raise_for_status()
    open(f"{folder}/{link.filename}", "wb").write(answer.content)
"""
VLLM, VLLM_ROOT = "vllm==0.33.0", "tests/entrypoints"
VLLM_CASES = (
    "openai/chat_completion/test_chat.py", "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_chat_completion.py", "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py", "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py", "openai/responses/test_simple.py", "openai/responses/test_basic.py",
    "openai/responses/test_stateful.py", "openai/responses/test_structured_output.py",
    "openai/responses/test_function_call.py", "anthropic/test_messages.py",
    "serve/tokenize/test_tokenization.py", "serve/instrumentator/test_basic.py",
    "openai/test_return_tokens_as_ids.py", "openai/test_chunked_prompt.py",
)  # fmt: skip
LLAMA, LLAMA_ROOT = "llama-cpp-python==0.3.36", "vendor/llama.cpp/tools/server/tests"
LLAMA_CASES = (
    "unit/test_chat_completion.py", "unit/test_compat_anthropic.py", "unit/test_compat_oai_responses.py",
    "unit/test_completion.py", "unit/test_tool_call.py",
)  # fmt: skip
SMG_CASES = (
    "chat_completions", "completions", "messages", "responses",
    "--ignore=chat_completions/test_epd_multimodal.py", "--ignore=chat_completions/test_multimodal.py",
)  # fmt: skip


class NotAtHand(Exception):
    """A suite that is not on this machine and cannot be installed."""


@dataclass
class Outcomes:
    """The cases of one suite."""

    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # messages, by case

    def add(self, case: str, outcome: str, message: str = "") -> None:
        if outcome == FAILED:
            self.failed[case] = " ".join(message.split())
        else:
            self.passed += outcome == PASSED
            self.skipped += outcome == SKIPPED


@dataclass(frozen=True)
class Run:
    """Requirements of a suite's run."""

    url: str
    folder: Path  # for packages and files of this suite, used again by later runs
    given: Mapping[str, Path | None]  # directories, by suite

    def directory(self, suite: str, file: str) -> Path:
        """Returns the given directory of a suite. Raises NotAtHand."""
        found = self.given[suite]
        if found is None:
            raise NotAtHand(f"its directory is not given: --{suite} DIR")
        if not (found / file).exists():
            raise NotAtHand(f"{found} has no {file}")
        return found.resolve()

    def execute(
        self, command: Sequence[str], within_s: float, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command, timeout=within_s, capture_output=True, text=True, errors="replace", **more
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotAtHand(f"{command[0]}: {error}") from error

    def install(self, command: Sequence[str], result: Path, **more: Any) -> None:
        """Runs a command that makes a file, unless it is there. Raises NotAtHand."""
        if result.exists():
            return
        done = self.execute(command, INSTALL_S, **more)
        if done.returncode != 0 or not result.exists():
            raise NotAtHand(f"{' '.join(command[:3])} failed: {(done.stderr or done.stdout)[-300:]}")

    def npm(self, *packages: str) -> Path:
        """Installs npm's packages, and returns their folder. Raises NotAtHand."""
        self.folder.mkdir(parents=True, exist_ok=True)
        result = self.folder / "node_modules" / packages[0].partition("@")[0]
        self.install(["npm", "install", "--no-save", "--prefix", str(self.folder), *packages], result)
        return self.folder


def openresponses(run: Run) -> Outcomes:
    source = run.directory("openresponses", "bin/compliance-test.ts")
    folder = run.npm("tsx", "zod@3")
    for part in ("bin", "src"):
        shutil.copytree(source / part, folder / part, dirs_exist_ok=True)
    command = ["npx", "tsx", "bin/compliance-test.ts", "--base-url", f"{run.url}/v1", "--api-key", "none"]
    done = run.execute([*command, "--model", "scripted", "--json"], RUN_S, cwd=folder)
    try:
        results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    except (ValueError, KeyError) as error:
        raise NotAtHand(f"its result cannot be read: {done.stdout[-300:]} {done.stderr[-300:]}") from error
    found = Outcomes()
    for result in results:
        found.add(result["id"], result["status"], " | ".join(result.get("errors") or ()))
    return found


def llmprobe(run: Run) -> Outcomes:
    folder = run.npm("llmprobe@0.6.12")
    command = ["npx", "llmprobe", f"{run.url}/v1", "-m", "scripted", "--no-bench", "--no-save", "--json"]
    done = run.execute(command, RUN_S, cwd=folder)
    try:
        results = json.loads(done.stdout)["conformance"]["results"]
    except (ValueError, KeyError) as error:
        raise NotAtHand(f"its result cannot be read: {done.stdout[-300:]} {done.stderr[-300:]}") from error
    found = Outcomes()
    for result in results:
        musts = [one for one in result["failures"] if one["severity"] == "MUST"]
        outcome = FAILED if musts else PASSED if result["outcome"] == "pass" else SKIPPED
        found.add(result["id"], outcome, " | ".join(f"{one['id']}: {one['message']}" for one in musts))
    return found


def vllm(run: Run) -> Outcomes:
    folder = run.folder / "tests"
    if not folder.exists():
        _extract(run, VLLM, VLLM_ROOT, folder / "entrypoints")
        (folder / "__init__.py").touch()
    cases = [f"{VLLM_ROOT}/{case}" for case in VLLM_CASES]
    return _pytest(run, "vllm", run.folder, [*cases, "-o", "asyncio_mode=auto"])


def llama_cpp(run: Run) -> Outcomes:
    folder = run.folder / "tests"
    if not folder.exists():
        _extract(run, LLAMA, LLAMA_ROOT, folder)
    return _pytest(run, "llama.cpp", folder, [*LLAMA_CASES, "-m", "not slow"])


def smg(run: Run) -> Outcomes:
    source = run.directory("smg", "e2e_test/conftest.py")
    return _pytest(run, "smg", source / "e2e_test", SMG_CASES, [source / "clients" / "python"])


SUITES: Mapping[str, Callable[[Run], Outcomes]] = {
    "openresponses": openresponses,
    "llmprobe": llmprobe,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "smg": smg,
}


def _extract(run: Run, requirement: str, root: str, folder: Path) -> None:
    """Gets a folder of a source archive from the Python registry. Raises NotAtHand."""
    with tempfile.TemporaryDirectory() as temporary:
        done = run.execute([sys.executable, "-c", FETCH, requirement, temporary], INSTALL_S)
        archives = list(Path(temporary).glob("*.tar.gz"))
        if not archives:
            raise NotAtHand(f"the archive of {requirement} cannot be had: {done.stderr[-300:]}")
        with tarfile.open(archives[0]) as archive:
            members = [one for one in archive if one.name.partition("/")[2].startswith(f"{root}/")]
            archive.extractall(temporary, members, filter="data")
        [top] = {one.name.partition("/")[0] for one in members}
        shutil.copytree(Path(temporary, top, root), folder)


def _pytest(
    run: Run, suite: str, folder: Path, arguments: Sequence[str], paths: Sequence[Path] = ()
) -> Outcomes:
    venv = run.folder.parent / "venv"
    python = venv / "bin" / "python"
    run.install([sys.executable, "-m", "venv", str(venv)], python)
    marker = venv / "installed"
    run.install(
        ["sh", "-c", '"$0" -m pip install -q "$@" && touch "$MARKER"', str(python), *PACKAGES],
        marker,
        env=os.environ | {"MARKER": str(marker)},
    )
    report = run.folder / "report.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([".", str(HERE / "suites"), *map(str, paths)])
    own = {"ROOTSTOCK_SUITE": suite, "ROOTSTOCK_URL": run.url, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-m", "pytest", "-p", "remote_server", "-p", "no:cacheprovider", "-q"]
    command += [f"--timeout={CASE_S}", f"--junitxml={report}", *arguments]
    done = run.execute(command, RUN_S, cwd=folder, env=os.environ | own)
    if not report.exists():
        raise NotAtHand(f"pytest made no report: {done.stdout[-300:]} {done.stderr[-300:]}")
    found = Outcomes()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failure = next((one for kind in ("failure", "error") if (one := case.find(kind)) is not None), None)
        if failure is not None:
            found.add(name, FAILED, failure.get("message") or "")
        else:
            found.add(name, PASSED if case.find("skipped") is None else SKIPPED)
    return found


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument(
        "--folder", type=Path, help="for suites and packages; a temporary folder if left out"
    )
    options.add_argument("--only", nargs="+", choices=[*SUITES], default=[*SUITES])
    for name in ("openresponses", "smg"):
        options.add_argument(f"--{name}", type=Path, default=os.environ.get(f"ROOTSTOCK_{name.upper()}"))
    given = options.parse_args()
    directories = {"openresponses": given.openresponses, "smg": given.smg}
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        command = [sys.executable, str(HERE / "scripted_server.py"), "--any-tool", "--port", str(port)]
        try:
            server = stack.enter_context(PeerProcess(command, port, ready_within_s=600))
        except PeerUnavailable as error:
            could_not(SHOW, str(error))
        figures: dict[str, Any] = {}
        for name in given.only:
            place = folder.resolve() / name
            place.mkdir(parents=True, exist_ok=True)
            paths = {key: None if path is None else Path(path) for key, path in directories.items()}
            figures |= measure(name, Run(server.url, place, paths))
    if all(f"{name}: could not" in figures for name in given.only):
        could_not(SHOW, "; ".join(f"{name}: {figures[f'{name}: could not']}" for name in given.only))
    conclude(SHOW, figures, {f"{name}: unexpected": exactly(0) for name in given.only})


def measure(name: str, run: Run) -> dict[str, Any]:
    """Runs a suite, prints the cases that do not pass by their reason, and returns its figures."""
    print(f"{name}: …", flush=True)
    try:
        found = SUITES[name](run)
    except NotAtHand as error:
        print(f"{name}: could not: {error}", flush=True)
        return {f"{name}: could not": str(error)[:300]}
    reasons: Counter[Known] = Counter()
    unexpected = 0
    for case, message in found.failed.items():
        reason = known(name, case, message)
        if reason is None:
            unexpected += 1
            print(f"  UNEXPECTED {case}: {message[:300]}", flush=True)
        else:
            reasons[reason] += 1
    kinds = Counter[str]()
    for reason, count in sorted(reasons.items(), key=lambda each: (each[0].kind, each[0].why)):
        print(f"  {count:>4} {reason.kind}: {reason.why}", flush=True)
        kinds[reason.kind] += count
    changed = [one for one in KNOWN[name] if reasons[one] != one.cases]
    for one in changed:
        print(f"  CHANGED from {one.cases} to {reasons[one]} cases: {one.why}", flush=True)
    total = found.passed + found.skipped + len(found.failed)
    print(f"{name}: {total} cases, {found.passed} passed, {found.skipped} skipped, {dict(kinds)}", flush=True)
    figures = {"passed": found.passed, "skipped": found.skipped, **kinds, "unexpected": unexpected}
    figures["changed"] = len(changed)
    return {f"{name}: {key}": value for key, value in figures.items()}


if __name__ == "__main__":
    main()
